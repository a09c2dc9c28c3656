"""`proxpo train`: progress while the run lasts, its result at the end."""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from proxpo.cli.libraries import silence_libraries
from proxpo.report.text import plural, setting_text

WIDE = 110  # columns that a table of settings takes
LINE_EVERY = 30.0  # seconds at most between lines in a log
SCORES = {
    "reward": "reward",
    "proxpo/eval/accuracy": "accuracy",
    "proxpo/eval/reward": "held-out reward",
    "proxpo/eval/kl": "KL",
}
BLOCKS, COURSE = "▁▂▃▄▅▆▇█", 20
ON_RESUME = {"fixed": "refused", "next": "next step", "now": "at once"}


def run_training(
    source: str | None, settings: list[str], overrides: dict[str, Any], *, resume: bool
) -> None:
    """Trains and prints the result; refuses mistakes in the settings before writing anything."""
    from proxpo.train.config import left_out, load_config
    from proxpo.train.resume import own_config

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    on_notice = partial(_print_notice, console)
    if resume:
        source, overrides = own_config(source, overrides, on_notice=on_notice)
    config = load_config(source, settings, overrides=overrides)
    silence_libraries()
    console.print(
        f"[bold]{config.method}[/bold] on {escape(config.task.name)}, model "
        f"{escape(config.model.name)}, {plural(config.train.steps, 'step')} -> "
        f"{escape(str(config.folder))}",
        emoji=False,
    )
    for line in left_out(source, config):
        on_notice(line)
    with console.status("loading"):
        from proxpo.train.loop import train
        from proxpo.train.observer import Observer
    display = _bar if console.is_terminal else _log
    with display(console, config.train.steps) as (on_progress, on_step):
        observer = Observer(on_progress=on_progress, on_notice=on_notice, on_step=on_step)
        summary = train(config, resume=resume, observer=observer)
    if "stopped" in summary:
        raise typer.Exit(128 + signal.Signals[summary["stopped"]])
    _show(console, summary)


def _print_notice(console: Console, line: str) -> None:
    console.print(line, style="dim", markup=False, emoji=False)
    console.file.flush()


def explain_settings(source: str | None, settings: list[str], overrides: dict[str, Any]) -> None:
    """Prints every setting: default (or value and its origin, if a run is described), effect of a
    change on resuming, meaning.

    Below the settings stand remarks on the settings of that run.
    """
    from proxpo.train.config import explain, left_out, load_explained

    described = bool(source or settings or overrides)
    config = origins = None
    if described:
        config, origins = load_explained(source, settings, overrides)
    console = Console(highlight=False)
    wide = console.width >= WIDE
    known = explain(config, origins)
    console.print(_settings_table(known, described) if wide else _settings_lines(known))
    if config is not None:
        from proxpo.train.build import settings_remarks

        for line in [*left_out(source, config), *settings_remarks(config)]:
            console.print(Text(line))


def _settings_table(settings: Sequence[Any], described: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    values = ("value", "from") if described else ("default",)
    for column in ("setting", *values, "on resume", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column in ("setting", "on resume"))
    for setting in settings:
        shown = [Text(setting_text(setting.value))]
        shown += [Text(setting.origin)] if described else []
        table.add_row(setting.path, *shown, ON_RESUME[setting.resume], Text(setting.doc))
    return table


def _settings_lines(settings: Sequence[Any]) -> Group:
    """The settings for a narrow terminal: each with its value, its meaning below."""
    lines: list[RenderableType] = []
    for setting in settings:
        effect = f"  on resume: {ON_RESUME[setting.resume]}"
        origin = f" ({setting.origin})" if setting.origin else ""
        value = f" = {setting_text(setting.value)}{origin}"
        lines.append(Text.assemble((setting.path, "bold"), value, (effect, "dim")))
        lines.append(Padding(Text(setting.doc), (0, 0, 0, 4)))
    return Group(*lines)


def show_presets() -> None:
    """Prints the presets with the text that opens each file."""
    from proxpo.train.config import presets

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("preset", "what it is"):
        table.add_column(column, no_wrap=column == "preset")
    for name, path in presets().items():
        table.add_row(Text(name, "bold"), Text(opening(path.read_text(encoding="utf-8"))))
    console = Console(highlight=False)
    console.print(table)
    console.print("proxpo train PRESET runs one; --explain with it lists every setting.")


def opening(text: str) -> str:
    """The comment at the head of a file, up to its commands."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


@contextmanager
def _bar(console: Console, steps: int) -> Iterator[tuple[Any, Any]]:
    """Shows a bar over the steps with its phase and the time left, and the scores below it."""
    columns = (
        TextColumn("[bold]{task.description:<11}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    scores = _Scores(drawn=True)
    progress = Progress(*columns, console=console)
    bar = progress.add_task("starting", total=steps)
    with Live(progress, console=console, refresh_per_second=4) as live:

        def on_progress(phase: str, done: int, total: int) -> None:
            progress.update(bar, description=phase)

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            progress.update(
                bar, completed=step, description="done" if step == steps else "stepping"
            )
            live.update(Group(progress, Text(scores.text(metrics))))

        yield on_progress, on_step


@contextmanager
def _log(console: Console, steps: int) -> Iterator[tuple[Any, Any]]:
    """Prints a plain line at every evaluation and after half a minute, for files and pipes.

    What lasts longer than that, such as an evaluation, has lines of its own.
    """
    scores = _Scores()
    start = last = time.monotonic()

    def on_progress(phase: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            console.print(f"{phase} {done}/{total}  {last - start:.0f} s", markup=False)
            console.file.flush()

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        nonlocal last
        text, now = scores.text(metrics), time.monotonic()
        if step == steps or "proxpo/eval/reward" in metrics or now - last > LINE_EVERY:
            console.print(f"step {step}/{steps}  {now - start:.0f} s  {text}", markup=False)
            console.file.flush()
            last = now

    yield on_progress, on_step


class _Scores:
    """The latest value of each score, the course of the reward, and tokens per second."""

    def __init__(self, *, drawn: bool = False) -> None:
        self._drawn = drawn
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._spent: list[tuple[float, float]] = []  # tokens so far, seconds of the step

    def text(self, metrics: dict[str, Any]) -> str:
        course = self._course(metrics) if self._drawn else ""
        return "  ".join(filter(None, [self._values(metrics), course, self._speed(metrics)]))

    def _course(self, metrics: dict[str, Any]) -> str:
        """The last training rewards as a line of blocks."""
        reward = metrics.get("reward")
        if reward is not None and math.isfinite(reward):
            self._rewards = [*self._rewards, float(reward)][-COURSE:]
        low, high = min(self._rewards, default=0.0), max(self._rewards, default=0.0)
        if len(self._rewards) < 2 or low == high:
            return ""
        places = (int((r - low) / (high - low) * (len(BLOCKS) - 1)) for r in self._rewards)
        return "".join(BLOCKS[place] for place in places)

    def _speed(self, metrics: dict[str, Any]) -> str:
        """Tokens per second over the last steps."""
        tokens, seconds = metrics.get("num_tokens"), metrics.get("step_time")
        if tokens is None or not seconds:
            return ""
        self._spent = [*self._spent, (float(tokens), float(seconds))][-COURSE:]
        if len(self._spent) < 2:
            return ""
        spent = self._spent[-1][0] - self._spent[0][0]
        return f"{spent / sum(seconds for _, seconds in self._spent[1:]):,.0f} tokens/s"

    def _values(self, metrics: dict[str, Any]) -> str:
        for name, label in SCORES.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._latest[label] = float(value)
        if "accuracy" in self._latest:
            self._latest.pop("held-out reward", None)
        return "  ".join(f"{label} {value:z.3f}" for label, value in self._latest.items())


def _show(console: Console, summary: dict[str, Any]) -> None:
    """Prints the result in one line, a few answers before and after, and the files' names."""
    kl = "" if summary["kl"] is None else f", KL to the start {summary['kl']:z.2f} nats a response"
    speed = f"{summary['tokens_per_second']:,.0f} {summary.get('unit', 'tokens')}/s"
    console.print(
        f"{_result(summary)}{kl}; {plural(summary['steps'], 'step')} in "
        f"{summary['seconds']:.0f} s without evaluations, {speed}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("prompt", "before", "after", "answer"):
        table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=28)
    for row in summary["samples"][:5]:
        table.add_row(*(_plain(row[name]) for name in ("prompt", "before", "after", "answer")))
    console.print(table)
    out = Path(summary["out"])
    files = {"curves": out / "curves.png", "report": out / "report.html"}
    asked = summary["config"]["log"]["pictures"]
    if not asked or not all(path.exists() for path in files.values()):  # without matplotlib
        files = {"metrics": out / "metrics.jsonl"}
    lines = "   ".join(f"{name}: {path}" for name, path in files.items())
    console.print(lines, markup=False, emoji=False)


def _result(summary: dict[str, Any]) -> str:
    """Accuracies before and after; scores of a domain, or rewards of a task, without accuracies."""
    before, after = summary["reward_before"], summary["reward_after"]
    if "score" in summary:
        return f"[bold]{summary['score']} {before:.3f} -> {after:.3f}[/bold]"
    if summary["accuracy_after"] is None:
        return (
            f"[bold]held-out reward {before:.3f} -> {after:.3f}[/bold] greedy (no accuracy: the "
            "reward function does not say what is right, see task.correct_above)"
        )
    greedy, sampled = (
        f"{_percent(summary[f'{kind}_before'])} -> {_percent(summary[f'{kind}_after'])}"
        for kind in ("accuracy", "sampled")
    )
    drawn = "" if summary["sampled_after"] is None else f", {sampled} sampled"  # evaluate.k=0
    return f"[bold]accuracy {greedy}[/bold] greedy{drawn}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _plain(value: Any) -> Text:
    text = value[-1]["content"] if isinstance(value, list) and value else value
    return Text(str(text).replace("\n", " "))


__all__ = ["explain_settings", "opening", "run_training", "show_presets"]
