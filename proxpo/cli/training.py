"""`proxpo train`: a config, a progress bar on the way, and what was reached at the end."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def run_training(
    source: str | None, settings: list[str], overrides: dict[str, Any], *, resume: bool
) -> None:
    """Train and report; every mistake in the settings is found before anything is written."""
    from proxpo.train.config import load_config

    console = Console(highlight=False)
    config = load_config(source, settings, overrides=overrides)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console.print(
        f"[bold]{config.method}[/bold] on {config.task.name}, model {config.model.name}, "
        f"{config.train.steps} steps -> {config.folder}"
    )
    with console.status("loading"):
        from proxpo.train.loop import train
    with _bar(console, config.train.steps) as (told, every_step):
        summary = train(
            config,
            resume=resume,
            told=told,
            noted=lambda line: console.print(f"[dim]{line}[/dim]"),
            every_step=every_step,
        )
    _show(console, summary)


def explain_settings() -> None:
    """Every setting of a run, its default and what it means."""
    from proxpo.train.config import explain

    table = Table(box=None, pad_edge=False)
    for column in ("setting", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for one in explain():
        table.add_row(one.path, str(one.default), one.doc)
    Console(highlight=False).print(table)


@contextmanager
def _bar(console: Console, steps: int) -> Iterator[tuple[Any, Any]]:
    """A bar over the steps, with the work inside a step and the scores so far beside it."""
    columns = (
        TextColumn("[bold]{task.description:<11}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[scores]}"),
    )
    seen: dict[str, float] = {}
    with Progress(*columns, console=console, transient=False) as progress:
        bar = progress.add_task("starting", total=steps, scores="")

        def told(phase: str, done: int, total: int) -> None:
            progress.update(bar, description=phase)

        def every_step(step: int, metrics: dict[str, Any]) -> None:
            wanted = {
                "reward": "reward",
                "proxpo/eval/accuracy": "accuracy",
                "proxpo/eval/kl": "KL",
            }
            seen.update(
                {label: metrics[name] for name, label in wanted.items() if metrics.get(name)}
            )
            scores = "  ".join(f"{label} {float(value):.3f}" for label, value in seen.items())
            progress.update(bar, completed=step, scores=scores)

        yield told, every_step


def _show(console: Console, summary: dict[str, Any]) -> None:
    """A line of what was reached, a few answers before and after, and where the files are."""
    kl = "" if summary["kl"] is None else f", KL to the start {summary['kl']:.2f} nats a response"
    console.print(
        f"[bold]accuracy {_percent(summary['accuracy_before'])} -> "
        f"{_percent(summary['accuracy_after'])}[/bold] greedy, "
        f"{_percent(summary['sampled_before'])} -> {_percent(summary['sampled_after'])} sampled"
        f"{kl}; {summary['steps']} steps, {summary['seconds']:.0f} s, "
        f"{summary['tokens_per_second']:,.0f} tokens/s"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("prompt", "before", "after", "answer"):
        table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=28)
    for row in summary["samples"][:5]:
        table.add_row(*(_plain(row[name]) for name in ("prompt", "before", "after", "answer")))
    console.print(table)
    console.print(f"curves: {summary['out']}/curves.png   report: {summary['out']}/report.html")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _plain(value: Any) -> str:
    text = value[-1]["content"] if isinstance(value, list) and value else value
    return str(text).replace("\n", " ").replace("[", r"\[")


__all__ = ["explain_settings", "run_training"]
