"""Small jobs and runs that the tests of the trainer share."""

import json
from pathlib import Path

from proxpo.train.config import load_config
from proxpo.train.job import Job, build

SMALL = [
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "rollout.max_tokens=8",
    "evaluate.size=4",
    "evaluate.k=0",
    "evaluate.every=0",
    "checkpoint.every=0",
    "train.steps=4",
]


def config_of(out: Path, *sets: str, **overrides):
    return load_config(None, [*SMALL, *sets], overrides={"out": str(out), **overrides})


def job_of(out: Path, *sets: str, **overrides) -> Job:
    return build(config_of(out, *sets, **overrides))


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def sample(job: Job):
    """A rollout of the job's next step."""
    from proxpo.train.loop import _sample

    return _sample(job, job.step, lambda *_: None)
