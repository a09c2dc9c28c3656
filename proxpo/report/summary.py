"""summary.json and summary.csv: the results of a comparison for programs."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from proxpo.report.analysis import Analysis, ArmResult, MeasuredRun
from proxpo.report.caveats import caveats, setting_warnings
from proxpo.report.confirmed import confirmed_lines
from proxpo.report.findings import claims, ranking_lines, settings_text
from proxpo.runs.page import json_ready

MEASURES = ("final", "area", "kl", "step_seconds")
OTHER = "final_other"


def summary(analysis: Analysis) -> dict[str, Any]:
    """The content of summary.json: all numbers and findings of the page."""
    comparison = analysis.comparison
    return json_ready(
        {
            "title": comparison.title,
            "question": comparison.question,
            "score": analysis.variant.label,
            "end_step": analysis.end,
            "targets": analysis.targets,
            "interpolated": analysis.interpolated,
            "warnings": setting_warnings(analysis),
            "statements": claims(analysis),
            "confirmed": confirmed_lines(analysis),
            "caveats": [*caveats(analysis), *analysis.notes],
            "ranking": ranking_lines(analysis),
            "other_score": analysis.other.variant.label if analysis.other else None,
            "arms": [_arm(result, analysis) for result in analysis.arms],
            "pairs": [
                {
                    "a": pair.a,
                    "b": pair.b,
                    "measure": pair.measure,
                    **asdict(pair.difference),
                    "p_holm": pair.p_holm,
                    "winner": pair.winner,
                    "barred": pair.barred,
                }
                for pair in analysis.pairs
            ],
            "runs": [
                {
                    "arm": run.name,
                    "seed": run.seed,
                    "role": run.role,
                    "settings": run.settings,
                    "status": run.status,
                    "reason": run.reason,
                    "folder": run.folder,
                    "command": run.command,
                }
                for run in comparison.runs
            ],
        }
    )


def summary_csv(analysis: Analysis) -> str:
    """The content of summary.csv: one line an arm, the best first; an interval is two columns."""
    lines = [_flat(_arm(result, analysis)) for result in analysis.arms]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _arm(result: ArmResult, analysis: Analysis) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "arm": result.arm.name,
        "method": result.arm.method,
        "settings": dict(result.arm.settings),
        "chosen": dict(result.settings),
        "finished": len(result.runs),
        "failed": result.failed,
        "unfinished": result.unfinished,
    }
    for name in MEASURES:
        student, boot = result.student(name), result.bootstrap(name)
        numbers[name] = {
            "mean": student.mean,
            "iqm": result.iqm(name),
            "student": [student.low, student.high],
            "bootstrap": [boot.low, boot.high],
        }
    numbers["reach"] = [
        {**asdict(result.reach(i)), "arrived": result.arrived(i)} for i in range(_targets(result))
    ]
    numbers["seeds"] = [_measured(each) for each in result.runs]
    if analysis.other is not None:  # the accuracy that does not rank, greedy or sampled
        other = analysis.other.result(result.arm.name)
        student = other.student("final")
        numbers[OTHER] = {"mean": student.mean, "student": [student.low, student.high]}
        finals = {each.run.folder: each.final for each in other.runs}
        numbers["seeds"] = [
            _measured(each) | {OTHER: finals[each.run.folder]} for each in result.runs
        ]
    return numbers


def _targets(result: ArmResult) -> int:
    return len(result.runs[0].reach) if result.runs else 0


def _measured(measured: MeasuredRun) -> dict[str, Any]:
    return {"seed": measured.run.seed, "start": measured.start} | {
        n: getattr(measured, n) for n in MEASURES
    }


def _flat(arm: Mapping[str, Any]) -> dict[str, Any]:
    line = {key: arm[key] for key in ("arm", "method", "finished", "failed", "unfinished")}
    line |= {key: settings_text(arm[key]) for key in ("settings", "chosen")}
    for name in MEASURES:
        measure = arm[name]
        line |= {name: measure["mean"], f"{name}_iqm": measure["iqm"]}
        for kind in ("student", "bootstrap"):
            line[f"{name}_{kind}_low"], line[f"{name}_{kind}_high"] = measure[kind]
    for cost in arm["reach"]:
        for key in ("steps", "samples", "seconds", "kl", "arrived"):
            line[f"reach_{cost['target']:g}_{key}"] = cost[key]
    if OTHER in arm:
        line[OTHER] = arm[OTHER]["mean"]
    return {key: json_ready(value) if value == value else "" for key, value in line.items()}


__all__ = ["summary", "summary_csv"]
