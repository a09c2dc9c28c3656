"""`proxpo adapt`: a line for every problem while the run lasts, its table at the end."""

import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from proxpo.adapt.run import adapt, finding
from proxpo.adapt.settings import load_settings, resumed_settings
from proxpo.report.terminal import console
from proxpo.report.text import plural

LINE_EVERY = 10.0  # seconds at least between lines


def run_adaptation(
    method: str, settings: list[str], *, out: str | None, resume: bool, **common: Any
) -> None:
    """Adapts to problem after problem and prints every arm at equal tokens."""
    screen = console()
    if resume and out is not None:
        chosen = resumed_settings(Path(out), method, settings, **common)
    else:
        chosen = load_settings(method, settings, **common)
    last = time.monotonic()

    def on_row(done: int, total: int, row: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            screen.print(f"{done}/{total} problems")

    summary = adapt(
        chosen,
        out=out,
        resume=resume,
        on_row=on_row,
        on_notice=lambda line: screen.print(line, style="dim"),
    )
    _show(screen, summary)


def _show(screen: Any, summary: dict[str, Any]) -> None:
    own, problems = summary["method"], plural(summary["steps"], "problem")
    before, after = (_percent(summary[f"accuracy_{when}"]) for when in ("before", "after"))
    screen.print(
        f"{own} on {summary['task']}, model {summary['model']}: {problems}, "
        f"accuracy {before} -> {after}"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    early = f"in {plural(summary['most_attempts'], 'attempt')}"
    for heading in ("arm", "accuracy", early, "attempts", "tokens", "seconds"):
        table.add_column(heading)
    table.add_row("first answer", before, before, "1", "", "")
    for name, arm in summary["arms"].items():
        table.add_row(
            name,
            _percent(arm["accuracy"]),
            _percent(arm["early"]),
            f"{arm['attempts']:.2f}",
            f"{arm['tokens']:,.1f}",
            f"{arm['seconds']:.2f}",
        )
    screen.print(table)
    for baseline in summary["against"]:
        screen.print(finding(summary, baseline), soft_wrap=True)
    screen.print(
        "attempts, tokens and seconds are means over problems; budget of each arm: "
        f"{summary['arms'][own]['tokens'] * summary['steps']:,.0f} passes of a token through the "
        f"model; report: {summary['out']}/report.html",
        soft_wrap=True,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


__all__ = ["run_adaptation"]
