"""Small jobs and runs that the tests of the trainer share."""

import json
from pathlib import Path

import torch

from proxpo.runs.checkpoint import read_checkpoint
from proxpo.train.batch import UpdatePlan, sampled_fields, start_fields
from proxpo.train.config import load_config
from proxpo.train.experience import Experience
from proxpo.train.language import LanguageJob as Job
from proxpo.train.language import build_language_job
from proxpo.train.scoring import LogpOptions
from proxpo.types import Batch

SMALL = [
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "rollout.max_tokens=8",
    "evaluate.size=4",
    "evaluate.k=0",
    "evaluate.every=0",
    "checkpoint.every=0",
    "train.steps=4",
    "log.pictures=false",  # drawing takes longer than these runs
]


def config_of(out: Path, *sets: str, **overrides):
    return load_config(None, [*SMALL, *sets], overrides={"out": str(out), **overrides})


def job_of(out: Path, *sets: str, **overrides) -> Job:
    """On the CPU, also on a machine with a GPU."""
    return build_language_job(config_of(out, "model.device=cpu", *sets, **overrides))


def options_of(job: Job, *, micro_batch: int) -> LogpOptions:
    fields = frozenset(job.learner.recipe.needs())
    return LogpOptions(temperature=1.0, micro_batch=micro_batch, fields=fields)


def batch_of(job: Job, experience: Experience) -> Batch:
    """All fields of a rollout, before `prepare`."""
    plan = UpdatePlan.of(job.learner.recipe, job.config, rows=len(experience.mask))
    fields = sampled_fields(job.learner, experience) | start_fields(job.learner, experience, plan)
    return Batch(mask=experience.mask, **fields)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict]:
    """The rows of a run without times."""
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows_of(out)]


def weights_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    return read_checkpoint(out / f"checkpoints/step-{step}").parts["weights"]


def sample(job: Job):
    """A rollout of the job's next step."""
    return job.collect(job.step)
