"""Writes the report of a comparison: report.html, figures/, summary.json and summary.csv."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.compare.plan import PLAN, RESULTS, Arm
from proxpo.errors import ProxpoError
from proxpo.report.analysis import Analysis, analyse
from proxpo.report.comparability import affects_numbers
from proxpo.report.read_runs import read_comparison, read_run
from proxpo.report.run_data import Comparison, Run
from proxpo.report.text import one_line, setting_text
from proxpo.runs.files import write_whole

SEED_SETTINGS = ("seed", "out")  # differ between seeds of one arm


def write_comparison(folder: str | Path) -> Path:
    """Writes the report of the comparison in `folder` there; the page's path."""
    return write_report(analyse(read_comparison(folder)), Path(folder))


def write_report(analysis: Analysis, out: Path) -> Path:
    """Writes every file whole or not at all; the page comes last, when all it names is there."""
    from proxpo.report.comparison_page import comparison_page
    from proxpo.report.figure_images import draw_figure
    from proxpo.report.figure_list import all_figures
    from proxpo.report.html_tables import arm_names
    from proxpo.report.summary import summary, summary_csv

    drawn = all_figures(analysis)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    wanted = {f"{figure.key}.{kind}" for figure in drawn for kind in ("png", "svg")}
    for old in (out / "figures").iterdir():
        if old.suffix in (".png", ".svg") and old.name not in wanted:
            old.unlink()
    for figure in drawn:
        for kind, image in draw_figure(figure, arm_names(analysis)).items():
            write_whole(out / "figures" / f"{figure.key}.{kind}", image)
    text = json.dumps(summary(analysis), indent=1, ensure_ascii=False, allow_nan=False)
    pages = {
        RESULTS: text,
        "summary.csv": summary_csv(analysis),
        "report.html": comparison_page(analysis, drawn),
    }
    for name, content in pages.items():
        write_whole(out / name, content.encode(errors="replace"))
    return out / "report.html"


def gather_runs(paths: Sequence[str], out: Path) -> Comparison:
    """A comparison of runs at `PATH` or `ARM=PATH`; a comparison's folder adds all of its runs.

    Runs of proxpo whose arm is not given are told apart by method and by what differs in their
    configs; runs made elsewhere by the name of their folder.
    """
    comparisons: list[Comparison] = []
    runs: list[Run] = []
    arm_names: list[str] = []  # "" where none is given
    for text in paths:
        name, path = _named(text)
        if (path / PLAN).is_file():
            comparisons.append(read_comparison(path))
            runs += [replace(r, folder=str(path / r.folder)) for r in comparisons[-1].runs]
            arm_names += [r.name for r in comparisons[-1].runs]
        else:
            runs.append(read_run(path))
            arm_names.append(name)
    if len(comparisons) == 1 and len(paths) == 1:
        return comparisons[0]
    differing = [
        {} if name else _differing(run, runs, arm_names) for run, name in zip(runs, arm_names)
    ]
    named = [
        replace(run, name=name or _label(run, values), settings=values or run.settings)
        for run, name, values in zip(runs, arm_names, differing)
    ]
    _refuse_twins(named)
    arms = {a.name: a for comparison in comparisons for a in comparison.arms}
    for run, values in zip(named, differing):
        arm = Arm(name=run.name, method=run.method, family=run.method, varied=values)
        arms.setdefault(run.name, arm)
    return Comparison(
        folder=out,
        title=" against ".join(arms) if len(arms) <= 4 else f"{len(arms)} arms",
        arms=tuple(arms.values()),
        runs=tuple(named),
        chosen=tuple(choice for comparison in comparisons for choice in comparison.chosen),
        notes=tuple(
            [note for comparison in comparisons for note in comparison.notes]
            + [note for run in named for note in run.notes]
        ),
    )


def _named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if separator and not Path(text).exists():
        return name.strip(), Path(path)
    return "", Path(text)


def _differing(run: Run, runs: Sequence[Run], arm_names: Sequence[str]) -> dict[str, Any]:
    """The settings in which a run of proxpo differs from unnamed others of its method."""
    if run.source != "proxpo":
        return {}
    siblings = [
        _flat(other.config)
        for other, name in zip(runs, arm_names)
        if not name and other.source == "proxpo" and other.method == run.method
    ]
    apart = {
        key: value
        for key, value in _flat(run.config).items()
        if affects_numbers(key) and len({str(other.get(key)) for other in siblings}) > 1
    }
    last = Counter(key.rsplit(".", 1)[-1] for key in apart)
    short = {key: key.rsplit(".", 1)[-1] for key in apart}
    return {
        short[key] if last[short[key]] == 1 else key: value  # task.name and model.name are two
        for key, value in apart.items()
    }


def _label(run: Run, differing: Mapping[str, Any]) -> str:
    differing_texts = (f"{key}={setting_text(value)}" for key, value in differing.items())
    return one_line(" ".join([run.name, *differing_texts]))


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix.rstrip("."): config}
    return {
        key: value
        for name, inner in config.items()
        if prefix or name not in SEED_SETTINGS
        for key, value in _flat(inner, f"{prefix}{name}.").items()
    }


def _refuse_twins(runs: Sequence[Run]) -> None:
    folders: dict[tuple[str, int, str], str] = {}
    for run in runs:
        if run.seed is None or run.role == "tune":
            continue
        key = (run.name, run.seed, run.role)
        if key in folders:
            raise ProxpoError(
                f"{folders[key]} and {run.folder} are both '{run.name}' with seed {run.seed}: tell "
                "them apart with NAME=PATH"
            )
        folders[key] = run.folder


__all__ = ["gather_runs", "write_comparison", "write_report"]
