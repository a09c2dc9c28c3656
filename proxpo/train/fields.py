"""The recipe's view of a rollout: who brings which field of the batch."""

from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.kl import kl_exact
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.train.config import Config
from proxpo.train.experience import Experience
from proxpo.train.job import Job
from proxpo.train.learner import (
    Learner,
    Pass,
    cuts,
    features,
    score,
    vocabulary,
    widened,
)
from proxpo.types import FIELDS, Batch, Recipe

ONLY_FRESH = ("old_vocab_logp", "ref_kl")  # nobody keeps the sampling policy's vocabulary

# What a pass of the policy, of the critic or of the reference brings, before the first update.
SCORED = {
    name
    for name, field in FIELDS.items()
    if field.source in ("policy", "start", "reference", "schedule") and name != "logp"
}


# Of these, what takes a pass of its own.
SEPARATE = {"old_logp", "features"} | {
    name for name, field in FIELDS.items() if field.source in ("reference", "schedule")
}


def batch_of(job: Job, rows: Experience, *, late: bool = False) -> Batch:
    """The recipe's view of a rollout: what was sampled, and what every policy says to it.

    late: where the data are the current policy's own, `old_logp` is left to the update itself.
    """
    return Batch(mask=rows.mask, **sampled(job, rows), **scored(job, rows, late=late))


def sampled(job: Job, rows: Experience) -> dict[str, Any]:
    """The fields that the rollout has left behind, without the mask."""
    age = job.learner.version - rows.version
    shared = {name: value for name, value in rows.tensors().items() if name in FIELDS}
    del shared["mask"]
    return shared | {
        "lag": age[:, None].expand_as(rows.mask),
        "tokens": rows.input_ids[:, -rows.mask.shape[1] :],
    }


def scored(job: Job, rows: Experience, *, late: bool = False) -> dict[str, Any]:
    """The fields that the models have to be run for."""
    learner, how = job.learner, pass_of(job.config, len(rows.mask))
    wanted = learner.recipe.needs()
    stale = is_stale(job, rows)
    late = late and not stale
    if stale:
        _refuse_stale(learner.recipe, wanted)
    current = (
        score(learner, rows, how=how)
        if _needs_scores(wanted - {"old_logp"} if late else wanted, stale)
        else {}
    )
    logp = current.get("logp", rows.rollout_logp)
    # The behaviour policy: the sampler's own numbers where it was another policy than the trainer's
    # of this moment; the trainer's otherwise, which are free of the sampler's rounding.
    known: dict[str, Any] = {
        "logp": logp,
        "prox_logp": logp,
        "old_logp": rows.rollout_logp if stale or "prox_logp" in wanted else logp,
    }
    if late and not current:
        known["old_logp"] = None
    known |= {name: current[name] for name in ("entropy", "hidden") if name in current}
    if "values" in current:
        known["old_values"] = known["values"] = current["values"]
    if "vocab_logp" in current:
        known["vocab_logp"] = known["old_vocab_logp"] = current["vocab_logp"]
    if "ref_kl" in wanted:
        known["ref_kl"] = reference_kl(learner, rows, how=how)
    if "ref_logp" in wanted:
        known["ref_logp"] = score(learner, rows, how=how, model=learner.reference)["logp"]
    if "features" in wanted:
        known["features"] = features(learner, rows, how=how)
    return known


def _refuse_stale(recipe: Recipe, wanted: set[str]) -> None:
    for name in ONLY_FRESH:
        if name in wanted:
            raise ProxpoError(
                f"{recipe.name} needs the batch field '{name}' ({FIELDS[name].doc}), which is "
                "known for fresh data only: no replay, no lag, and training at the temperature of "
                "sampling with top_p=1"
            )


@torch.no_grad()
def reference_kl(learner: Learner, rows: Experience, *, how: Pass) -> Float[Tensor, "seq tok"]:
    """KL(π‖π_ref) at each token over the whole vocabulary, a micro-batch at a time."""
    parts = []
    for index in cuts(len(rows.mask), how.micro_batch, rows.mask.device):
        some = rows.rows(index)
        with learner.policy.autocast():
            own, other = (
                vocabulary(model, some, None, how)
                for model in (learner.policy.model, learner.reference)
            )
        parts.append(widened(kl_exact(own, other), rows.mask.shape[1]))
    return torch.cat(parts)


def scored_where(
    job: Job, rows: Experience, index: Int[Tensor, " row"], *, late: bool = False
) -> dict[str, Any]:
    """`scored` of some rows, in the places of all; 0 elsewhere."""
    width, count = rows.mask.shape[1], len(rows.mask)

    def spread(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        value = value if value.dim() == 1 or value.shape[1] == width else widened(value, width)
        return value.new_zeros(count, *value.shape[1:]).index_copy(0, index, value)

    found = scored(job, rows.rows(index), late=late)
    return {name: spread(value) for name, value in found.items()}


def pass_of(config: Config, rows: int) -> Pass:
    return Pass(
        temperature=config.train_temperature, micro_batch=config.train.micro_batch or max(rows, 1)
    )


def is_stale(job: Job, rows: Experience) -> bool:
    """Whether another policy than the present one has sampled some of these rows."""
    config = job.config
    other = config.train_temperature != config.rollout.temperature or config.rollout.top_p != 1.0
    return other or bool((rows.version != job.learner.version).any())


def _needs_scores(wanted: set[str], stale: bool) -> bool:
    fresh_old = "old_logp" in wanted and not stale
    return fresh_old or bool(wanted & (SCORED - SEPARATE))


def scores_late(recipe: Recipe) -> bool:
    """Whether nothing reads `old_logp` before the update: no reward, filter or advantage does."""
    return not any("old_logp" in one.needs for one in _early(recipe))


def judges_first(recipe: Recipe) -> bool:
    """Whether the rows that leave are known before any model has run, so that they cost nothing."""
    early = _early(recipe)
    return (
        bool(recipe.prune or recipe.filter)
        and not any(SCORED & set(one.needs) for one in early)
        and not any(one.prepare or one.live for _, one in recipe.stages())
    )


def _early(recipe: Recipe) -> list[Any]:
    """The stages that run once per rollout, before the first update."""
    found = [*recipe.reward, *recipe.filter, recipe.advantage, *recipe.prune]
    return [one for one in found if one is not None]


__all__ = [
    "batch_of",
    "is_stale",
    "judges_first",
    "pass_of",
    "sampled",
    "scored",
    "scored_where",
    "scores_late",
]
