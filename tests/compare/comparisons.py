"""Comparisons small enough to run in a test: the model in the box, a few rows, a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = (
    "steps=3",
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "max_prompt=16",
    "max_tokens=6",
    "evaluate.every=1",
    "evaluate.size=8",
    "k=2",
    "checkpoint.every=1",
    "reward_workers=1",
)
TIMES = ("time", "step_time", "seconds", "tokens_per_second")  # what no two runs share


def arguments(
    out: Path, *methods: str, small: tuple[str, ...] = SMALL, **options: str
) -> list[str]:
    """The command line of a small comparison."""
    sets = [word for one in small for word in ("--set", one)]
    given = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    return ["compare", *methods, *sets, *given, "--out", str(out)]


def start(argv: list[str], **options: Any) -> subprocess.Popen:
    """The real command, in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "proxpo.cli", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **options,
    )


def run(argv: list[str], timeout: float = 120) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    process = start(argv)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [_timeless(json.loads(line)) for line in lines]


def data_of(folder: Path) -> dict[str, Any]:
    """All that a report is drawn from, by run, without what depends on the clock."""
    found = {}
    for run in sorted((folder / "runs").iterdir()):
        summary = json.loads((run / "summary.json").read_text())
        summary = {k: v for k, v in _timeless(summary).items() if k not in ("out", "config")}
        found[run.name] = (rows_of(run), summary, (run / "samples.jsonl").read_text())
    return found


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in row.items() if name not in TIMES and "/time/" not in name}
