"""From an `Experience` to a prepared `Batch`: the plan of the updates, the source of each field."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from proxpo.compose import prepare
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.stages.ratio.gaussian import GAUSSIAN
from proxpo.train.config import Config
from proxpo.train.experience import Experience
from proxpo.train.scoring import (
    Learner,
    LogpOptions,
    features,
    other_fields,
    other_logp,
    reference_kl,
    score,
    widened,
)
from proxpo.types import FIELDS, Batch, Context, Metrics, Recipe, Stage

ONLY_FRESH = ("old_vocab_logp", "ref_kl")  # nobody keeps the sampling policy's vocabulary

# Fields from a pass of the policy, of the critic or of the reference, before the first update.
SCORED = {
    name
    for name, field in FIELDS.items()
    if field.source in ("policy", "start", "reference", "schedule") and name != "logp"
}
# Those of them that take a pass of their own, or may wait for the update.
SEPARATE = {"old_logp", "features", "full_logp", "mean"} | {
    name for name, field in FIELDS.items() if field.source in ("reference", "schedule")
}
# Fields of the policy's pass before the first update that are taken as they are.
PASSED_ON = (
    *("entropy", "hidden"),
    *(field.name for field in GAUSSIAN if field.source == "policy"),
)
# Fields ref_X that are X of the frozen policy's pass.
REFERENCE = {"ref_logp"} | {field.name for field in GAUSSIAN if field.source == "reference"}


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Decisions on the updates of a rollout, made once from the recipe and the settings.

    fields: batch fields that the recipe or a variant of it reads
    options: of every forward pass
    policy_pass: the policy runs once before the first update, for more than `old_logp`
    own_distribution: the sampler draws from the distribution that is trained: one temperature, no
        top_p
    prune_first: filters and prunes need no model, so that the responses they drop cost no pass
    defer_old: no stage reads `old_logp` before the update, so that a single update can bring it
    """

    fields: frozenset[str]
    options: LogpOptions
    policy_pass: bool
    own_distribution: bool
    prune_first: bool
    defer_old: bool

    @classmethod
    def of(
        cls, recipe: Recipe, config: Config, *, rows: int, fields: set[str] | None = None
    ) -> "UpdatePlan":
        """The plan for `rows` sequences. fields: those of all variants; default: the recipe's."""
        wanted = frozenset(recipe.needs() if fields is None else fields)
        once, size = _once_per_rollout(recipe), config.train.micro_batch
        scored = any(SCORED & set(stage.needs) for stage in once)
        follows = any(stage.prepare or stage.live for _, stage in recipe.stages())
        return cls(
            fields=wanted,
            options=LogpOptions(
                temperature=config.train_temperature,
                micro_batch=None if size == "auto" else size or max(rows, 1),
                fields=wanted,
            ),
            policy_pass=bool(wanted & (SCORED - SEPARATE)),
            own_distribution=config.train_temperature == config.rollout.temperature
            and config.rollout.top_p == 1.0,
            prune_first=bool(recipe.prune or recipe.filter) and not scored and not follows,
            defer_old=not any("old_logp" in stage.needs for stage in once),
        )


class TrainingBatch(NamedTuple):
    """Sequences and the recipe's prepared view of them, row by row."""

    experience: Experience
    batch: Batch

    def rows(self, index: Int[Tensor, " row"]) -> "TrainingBatch":
        """A mini-batch or micro-batch: the rows `index`, cut to the columns they use."""
        experience, batch = self.experience.rows(index), self.batch.rows(index)
        tokens = experience.mask.shape[1]
        wide = [(name, value) for name, value in batch.items() if value.dim() > 1]
        narrow = {name: value[:, :tokens] for name, value in wide if FIELDS[name].per_token}
        return TrainingBatch(experience, batch.replace(**narrow))

    def steps(self) -> "TrainingBatch":
        """Every valid token as a row, and a group, of its own."""
        mask = self.batch.mask
        row, column = mask.nonzero(as_tuple=True)
        number = torch.arange(len(row), device=mask.device)

        def single(value: Tensor, per_token: bool) -> Tensor:
            return value[row, column][:, None] if per_token else value[row]

        tensors = {
            name: single(value, value.dim() > 1)
            for name, value in self.experience.tensors().items()
        }
        fields = {
            name: single(value, value.dim() > 1 and FIELDS[name].per_token)
            for name, value in self.batch.items()
            if name != "group_tokens"
        }
        if "group" in fields:
            fields["group"] = number
        return TrainingBatch(Experience(**tensors | {"group": number}), Batch(**fields))


class PreparedRollout(NamedTuple):
    """A rollout ready for updates: data, metrics of the preparation, options of forward passes."""

    data: TrainingBatch
    metrics: Metrics
    options: LogpOptions


def prepare_rollout(
    learner: Learner,
    recipe: Recipe,
    experience: Experience,
    plan: UpdatePlan,
    ctx: Context,
    *,
    single_update: bool,
    extra: dict[str, Tensor],
) -> PreparedRollout:
    """Brings the fields that the recipe reads and runs its stages up to the advantages.

    single_update: one update follows, which may bring `old_logp` itself. extra: further fields.
    """
    defer_old = single_update and plan.defer_old
    known = sampled_fields(learner, experience)
    if plan.prune_first:
        bare = Batch(logp=experience.rollout_logp, mask=experience.mask, **known)
        batch, _, metrics = prepare(recipe, bare, ctx)
        index = batch.mask.any(dim=1).nonzero()[:, 0]
        if len(index):
            kept = start_fields(learner, experience.rows(index), plan, defer_old=defer_old)
            fields = _in_place(kept, index, experience) | extra
            batch = batch.replace(**fields).clean(*fields)
    else:
        known |= start_fields(learner, experience, plan, defer_old=defer_old)
        batch = Batch(mask=experience.mask, **known).replace(**extra)
    options = replace(plan.options, old_is_current=batch.old_logp is None)
    if batch.old_logp is None:
        batch = batch.replace(old_logp=batch.logp)
    if not plan.prune_first:
        batch, _, metrics = prepare(recipe, batch, ctx)
    data = TrainingBatch(experience, batch)
    return PreparedRollout(data.steps() if learner.by_step else data, metrics, options)


def sampled_fields(learner: Learner, experience: Experience) -> dict[str, Any]:
    """The fields that sampling and rewards bring, without the mask."""
    fields = {name: value for name, value in experience.tensors().items() if name in FIELDS}
    del fields["mask"]
    lag = learner.version - experience.version
    if "latent" in learner.recipe.needs():
        fields |= thought_fields(experience)
    elif "old_mean" in fields:
        fields["mean"] = fields["old_mean"]  # until the policy's own pass
    return fields | {
        "lag": lag[:, None].expand_as(experience.mask),
        "tokens": experience.input_ids[:, -experience.mask.shape[1] :],
    }


def thought_fields(experience: Experience) -> dict[str, Tensor]:
    """The fields of latent thoughts; as `mean` stands that of the sampler."""
    thoughts, means, width = experience.thoughts, experience.thought_means, experience.mask.shape[1]
    assert thoughts is not None
    assert means is not None
    mean = widened(means, width)
    return {
        "latent": experience.mask & ~experience.token_mask,
        "thought": widened(thoughts, width),
        "mean": mean,
        "old_mean": mean,
    }


def start_fields(
    learner: Learner, experience: Experience, plan: UpdatePlan, *, defer_old: bool = False
) -> dict[str, Any]:
    """The fields that models bring before the first update.

    defer_old: leaves `old_logp` of the current policy's own data to the update, as None.
    """
    stale, wanted, options = is_stale(learner, experience, plan), plan.fields, plan.options
    if stale:
        _refuse_stale(learner.recipe, wanted)
    old_pass = "old_logp" in wanted and not stale and not defer_old
    current = score(learner, experience, options) if plan.policy_pass or old_pass else {}
    logp = current.get("logp", experience.rollout_logp)
    # The behaviour policy: the sampler's own numbers where it was another policy than the trainer's
    # of this moment; the trainer's otherwise, which are free of the sampler's rounding.
    fields: dict[str, Any] = {
        "logp": logp,
        "prox_logp": logp,
        "old_logp": experience.rollout_logp if stale or "prox_logp" in wanted else logp,
    }
    if defer_old and not stale and not current:
        fields["old_logp"] = None
    fields |= {name: current[name] for name in PASSED_ON if name in current}
    if "mean" in current and experience.thoughts is not None and not stale:
        fields["old_mean"] = current["mean"]
    if "values" in current:
        fields["old_values"] = fields["values"] = current["values"]
    if "vocab_logp" in current:
        fields["vocab_logp"] = fields["old_vocab_logp"] = current["vocab_logp"]
    if "ref_kl" in wanted:
        fields["ref_kl"] = reference_kl(learner, experience, options)
    if names := {name.removeprefix("ref_") for name in wanted & REFERENCE}:
        frozen = other_fields(learner, learner.reference, experience, options, names)
        fields |= {f"ref_{name}": frozen[name] for name in names}
    if "full_logp" in wanted:
        fields["full_logp"] = _full_logp(learner, experience, options)
    if "features" in wanted:
        fields["features"] = features(learner, experience, options)
    return fields


def _full_logp(
    learner: Learner, experience: Experience, options: LogpOptions
) -> Float[Tensor, "seq tok"]:
    """log π after the whole history; 0 where it does not fit the context."""
    assert experience.history_mask is not None
    logp = other_logp(learner, learner.policy.model, experience.unfolded(), options)
    return logp.masked_fill(~experience.history_mask.any(dim=1, keepdim=True), 0.0)


def is_stale(learner: Learner, experience: Experience, plan: UpdatePlan) -> bool:
    """True if another policy than the present one has sampled some of these rows."""
    return not plan.own_distribution or bool((experience.version != learner.version).any())


def _refuse_stale(recipe: Recipe, wanted: frozenset[str]) -> None:
    for name in ONLY_FRESH:
        if name in wanted:
            raise ProxpoError(
                f"{recipe.name} needs the batch field '{name}' ({FIELDS[name].doc}), which is "
                "known for fresh data only: no replay, no lag, and training at the temperature of "
                "sampling with top_p=1"
            )


def _in_place(
    fields: dict[str, Any], index: Int[Tensor, " row"], experience: Experience
) -> dict[str, Any]:
    """Fields of the rows `index` in the places of all rows; 0 elsewhere."""
    rows, width = experience.mask.shape

    def spread(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        value = value if value.dim() == 1 or value.shape[1] == width else widened(value, width)
        return value.new_zeros(rows, *value.shape[1:]).index_copy(0, index, value)

    return {name: spread(value) for name, value in fields.items()}


def _once_per_rollout(recipe: Recipe) -> list[Stage]:
    """The stages that run once per rollout, before the first update."""
    stages = [*recipe.reward, *recipe.filter, recipe.advantage, *recipe.prune]
    return [stage for stage in stages if stage is not None]


__all__ = [
    "PreparedRollout",
    "TrainingBatch",
    "UpdatePlan",
    "is_stale",
    "prepare_rollout",
    "sampled_fields",
    "start_fields",
]
