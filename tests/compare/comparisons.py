"""Comparisons small enough to run in a test: the included model, a few rows, a few steps."""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from proxpo.cli import main
from proxpo.compare.local import PRELOAD
from proxpo.compare.plan import read_plan

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([*PRELOAD, "proxpo.cli.app"])

SMALL = (
    "steps=3",
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "max_prompt=16",
    "max_tokens=6",
    "evaluate.every=3",
    "evaluate.size=8",
    "k=2",
    "checkpoint.every=1",
    "reward_workers=1",
    "log.pictures=false",
)
TIMES = ("time", "step_time", "seconds", "tokens_per_second")  # differ between equal runs


def arguments(
    out: Path, *methods: str, small: tuple[str, ...] = SMALL, **options: str
) -> list[str]:
    """The command line of a small comparison."""
    sets = [word for one in small for word in ("--set", one)]
    given = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    return ["compare", *methods, *sets, *given, "--out", str(out)]


class Started:
    """A command in a process of its own, forked from a server that has imported torch already."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.stdout, self.errors = folder / "stdout.txt", folder / "stderr.txt"
        self.process = SERVER.Process(target=_command, args=(argv, self.stdout, self.errors))
        self.process.start()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 120) -> tuple[int | None, str, str]:
        """Its exit code, stdout and stderr."""
        self.process.join(timeout)
        return self.process.exitcode, self.stdout.read_text(), self.errors.read_text()


def _command(argv: list[str], stdout: Path, errors: Path) -> None:
    for stream, path in ((1, stdout), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.exit(main(argv))


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """The run folder that the plan gives an arm and a seed."""
    return out / next(r.folder for r in read_plan(out).runs if (r.arm, r.seed) == (arm, seed))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [_timeless(json.loads(line)) for line in lines]


def data_of(folder: Path) -> dict[str, Any]:
    """All that a report is drawn from, by run, without times."""
    found = {}
    for run in sorted((folder / "runs").iterdir()):
        summary = json.loads((run / "summary.json").read_text())
        summary = {k: v for k, v in _timeless(summary).items() if k not in ("out", "config")}
        found[run.name] = (rows_of(run), summary, (run / "samples.jsonl").read_text())
    return found


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in row.items() if name not in TIMES and "/time/" not in name}
