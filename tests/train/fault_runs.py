"""Runs of a few steps that tests interrupt, resume and compare."""

import json
from pathlib import Path

import torch

from proxpo.runs.checkpoint import read_checkpoint
from proxpo.train.config import load_config
from proxpo.train.observer import Observer

SMALL = [
    "prompts_per_step=2",
    "samples_per_prompt=4",
    "rollout.max_tokens=5",
    "evaluate.size=4",
    "evaluate.k=2",
    "evaluate.every=0",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "log.pictures=false",  # drawing takes longer than these runs
]


def command(out: Path, *more: str, small: bool = True) -> list[str]:
    sets = [word for one in (SMALL if small else []) for word in ("--set", one)]
    return ["train", *sets, "--method", "grpo", "--out", str(out), *more]


def config_of(out: Path, *sets: str, method: str = "grpo"):
    return load_config(None, [*SMALL, *sets], overrides={"out": str(out), "method": method})


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows_of(out)]


def weights_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    return read_checkpoint(out / f"checkpoints/step-{step}").parts["weights"]


def same_run(a: Path, b: Path, step: int) -> bool:
    one, other = weights_of(a, step), weights_of(b, step)
    return curve(a) == curve(b) and all(torch.equal(other[name], one[name]) for name in one)


def at_phase(wanted: str, act, *, step: int) -> Observer:
    """An observer that calls `act` once, in a phase of the step after `step`."""
    done, acted = [step == 0], []

    def on_progress(phase: str, *_: int) -> None:
        if phase == wanted and done[-1] and not acted:
            acted.append(True)
            act()

    return Observer(on_progress=on_progress, on_step=lambda number, _: done.append(number >= step))
