"""The numbers of a comparison for programs: summary.json and summary.csv."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from proxpo.report.analysis import Analysis, ArmResult, Measured
from proxpo.report.findings import caveats, claims, ranking_lines, settings_text, warnings
from proxpo.runs.page import json_ready

MEASURES = ("final", "area", "kl", "step_seconds")


def summary(analysis: Analysis) -> dict[str, Any]:
    """Everything the page says in numbers, and its statements."""
    comparison = analysis.comparison
    return json_ready(
        {
            "title": comparison.title,
            "question": comparison.question,
            "score": analysis.variant.label,
            "end_step": analysis.end,
            "targets": analysis.targets,
            "interpolated": analysis.interpolated,
            "warnings": warnings(analysis),
            "statements": claims(analysis),
            "caveats": [*caveats(analysis), *analysis.notes],
            "ranking": ranking_lines(analysis),
            "arms": [_arm(one) for one in analysis.arms],
            "pairs": [
                {
                    "a": one.a,
                    "b": one.b,
                    "measure": one.measure,
                    **asdict(one.difference),
                    "p_holm": one.p_holm,
                    "winner": one.winner,
                    "barred": one.barred,
                }
                for one in analysis.pairs
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
    """One line an arm, the best first; an interval is two columns."""
    lines = [_flat(_arm(one)) for one in analysis.arms]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _arm(one: ArmResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arm": one.arm.name,
        "method": one.arm.method,
        "settings": dict(one.arm.settings),
        "chosen": dict(one.settings),
        "finished": len(one.runs),
        "failed": one.failed,
        "unfinished": one.unfinished,
    }
    for name in MEASURES:
        student, boot = one.student(name), one.bootstrap(name)
        found[name] = {
            "mean": student.mean,
            "iqm": one.iqm(name),
            "student": [student.low, student.high],
            "bootstrap": [boot.low, boot.high],
        }
    found["reach"] = [
        {**asdict(one.reach(i)), "arrived": one.arrived(i)} for i in range(_targets(one))
    ]
    found["seeds"] = [_measured(each) for each in one.runs]
    return found


def _targets(one: ArmResult) -> int:
    return len(one.runs[0].reach) if one.runs else 0


def _measured(one: Measured) -> dict[str, Any]:
    return {"seed": one.run.seed, "start": one.start} | {n: getattr(one, n) for n in MEASURES}


def _flat(arm: Mapping[str, Any]) -> dict[str, Any]:
    line = {key: arm[key] for key in ("arm", "method", "finished", "failed", "unfinished")}
    line |= {key: settings_text(arm[key]) for key in ("settings", "chosen")}
    for name in MEASURES:
        found = arm[name]
        line |= {name: found["mean"], f"{name}_iqm": found["iqm"]}
        for kind in ("student", "bootstrap"):
            line[f"{name}_{kind}_low"], line[f"{name}_{kind}_high"] = found[kind]
    for cost in arm["reach"]:
        for key in ("steps", "samples", "seconds", "kl", "arrived"):
            line[f"reach_{cost['target']:g}_{key}"] = cost[key]
    return {key: json_ready(value) if value == value else "" for key, value in line.items()}


__all__ = ["summary", "summary_csv"]
