"""`proxpo adapt`: a line for every problem while the run lasts, its table at the end."""

import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from proxpo.adapt.run import adapt, finding
from proxpo.adapt.seeds import adapt_seeds, seed_folder
from proxpo.adapt.settings import load_settings, resumed_settings
from proxpo.cli.libraries import silence_libraries
from proxpo.errors import ProxpoError
from proxpo.report.terminal import console
from proxpo.report.text import plural
from proxpo.settings import parse_setting

LINE_EVERY = 10.0  # seconds at least between lines


def run_adaptation(
    method: str,
    settings: list[str],
    *,
    out: str | None,
    resume: bool,
    seeds: int | None = None,
    **common: Any,
) -> None:
    """Adapts to problem after problem and prints every arm at equal tokens."""
    screen = console()
    given = {parse_setting(setting)[0] for setting in settings}
    if seeds is not None and (common.get("seed") is not None or "seed" in given):
        raise ProxpoError("adapt: --seeds K runs seeds 0 to K-1; leave --seed out")
    if resume and out is not None:
        folder = Path(out) if seeds is None else seed_folder(Path(out), 0)
        chosen = resumed_settings(folder, method, settings, **common)
    else:
        chosen = load_settings(method, settings, **common)
    silence_libraries()
    last = time.monotonic()

    def on_row(done: int, total: int, row: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            screen.print(f"{done}/{total} problems")

    options: dict[str, Any] = {
        "out": out,
        "resume": resume,
        "on_row": on_row,
        "on_notice": lambda line: screen.print(line, style="dim"),
    }
    if seeds is None:
        _show(screen, adapt(chosen, **options))
    else:
        _show(screen, adapt_seeds(chosen, seeds, **options))


def _show(screen: Any, summary: dict[str, Any]) -> None:
    """Prints the table of a run, or of several seeds with the spread between them."""
    own, problems = summary["method"], plural(summary["steps"], "problem")
    several = "seeds" in summary
    before, after = (_percent(summary[f"accuracy_{when}"]) for when in ("before", "after"))
    screen.print(
        f"{own} on {summary['task']}, model {summary['model']}: {problems}, "
        + (f"{summary['seeds']} seeds, " if several else "")
        + f"accuracy {before} -> {after}"
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
            _number(arm["attempts"], 2),
            _number(arm["tokens"], 1),
            _number(arm["seconds"], 2),
        )
    screen.print(table)
    for baseline in summary["against"]:
        screen.print(finding(summary, baseline), soft_wrap=True)
    tokens = _mean(summary["arms"][own]["tokens"]) * summary["steps"]
    spread = "; ± is the standard deviation between seeds" if several else ""
    report = f"{summary['out']}/{'seed*/' if several else ''}report.html"
    screen.print(
        f"attempts, tokens and seconds are means over problems{spread}; budget of each arm: "
        f"{tokens:,.0f} passes of a token through the model; report: {report}",
        soft_wrap=True,
    )


def _mean(value: float | dict[str, float]) -> float:
    return value["mean"] if isinstance(value, dict) else value


def _number(value: float | dict[str, float], digits: int, factor: float = 1.0) -> str:
    """A number, with the spread between seeds where there are several."""
    text = f"{factor * _mean(value):,.{digits}f}"
    return f"{text} ± {factor * value['sd']:,.{digits}f}" if isinstance(value, dict) else text


def _percent(share: float | dict[str, float]) -> str:
    return f"{_number(share, 1, 100.0)} %"


__all__ = ["run_adaptation"]
