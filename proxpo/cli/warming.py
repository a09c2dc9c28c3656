"""`proxpo warmup`: the loss while the warm start lasts, its folder at the end."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from proxpo.cli.libraries import silence_libraries
from proxpo.report.text import plural
from proxpo.train.observer import Observer
from proxpo.train.warmup import load_warmup, warm_up

LINE_EVERY = 5.0  # seconds at least between lines


def run_warmup(task: str, settings: list[str], *, out: str, **common: Any) -> None:
    """Trains on worked solutions and prints the losses."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    chosen = load_warmup(settings, task=task, **common)
    silence_libraries()
    console.print(
        f"warm start of {escape(chosen.model)} on {escape(chosen.task)} -> {escape(out)}",
        emoji=False,
    )
    start = last = time.monotonic()

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > LINE_EVERY:
            last = now
            line = (
                f"step {step}/{metrics['steps']}  {now - start:.0f} s  loss {metrics['loss']:.3f}"
            )
            console.print(line, markup=False)

    def on_notice(line: str) -> None:
        console.print(line, style="dim", markup=False)

    summary = warm_up(chosen, Path(out), Observer(on_step=on_step, on_notice=on_notice))
    if "stopped" in summary:
        on_notice(f"stopped after step {summary['steps']}; the same command continues")
        raise typer.Exit(128 + signal.Signals[summary["stopped"]])
    console.print(
        f"{plural(summary['solutions'], 'solution')}, {plural(summary['steps'], 'step')}, "
        f"{time.monotonic() - start:.0f} s: loss {summary['loss_first']:.3f} -> "
        f"{summary['loss_last']:.3f} nats a token; proxpo train --model {out} --task {task}",
        markup=False,
    )


__all__ = ["run_warmup"]
