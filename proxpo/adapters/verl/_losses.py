"""verl's loss modes from recipes: policy losses on verl's tensors, averaged by its counts."""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from proxpo.adapters.verl._environment import notify
from proxpo.adapters.verl._recipes import NO_CLOCK, loss_recipe, verl_name
from proxpo.adapters.verl._settings import (
    ACTOR,
    changed_settings,
    default_average,
    notify_of_differences,
)
from proxpo.backward import without_policy_term
from proxpo.batch_file import save_step
from proxpo.compose import local_stages, policy_loss
from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.metering import logged
from proxpo.ops.shapes import Bool, Float, Shaped, Tensor
from proxpo.recipes import methods
from proxpo.stages import aggregate
from proxpo.types import AllSum, Batch, Context, Denominators, Loss, Recipe, Stage

AVERAGES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
# Averages that need no counts but those which verl gives: tokens and sequences.
OWN_AVERAGES = (*AVERAGES.values(), "seq_sum_token_mean", "guarded_token_mean")
SHARDED = ("fsdp", "fsdp2")  # engines in which every rank computes a loss for every micro-batch


@dataclass(frozen=True, kw_only=True)
class EngineInputs:
    """Inputs of a policy loss that only proxpo's engine provides.

    fields: batch fields beyond verl's arguments
    rest: the policy term has a backward of its own, so the loss is the recipe's other terms
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    rest: bool = False


_CUT: set[str] = set()  # recipes whose first micro-batch has been checked
_SEEN = itertools.count(1)  # micro-batches that losses have seen, where some are saved
_SUMMED: set[str] = set()  # recipes whose first batch statistic has been checked
_ENGINE_INPUTS: ContextVar[EngineInputs | None] = ContextVar("proxpo_engine_inputs", default=None)


@contextmanager
def engine_inputs(inputs: EngineInputs) -> Iterator[None]:
    """Gives the inputs to loss modes that verl calls inside the block."""
    token = _ENGINE_INPUTS.set(inputs)
    try:
        yield
    finally:
        _ENGINE_INPUTS.reset(token)


def register_losses() -> None:
    """Registers every method of the catalogue as `policy_loss.loss_mode=proxpo_<slug>`."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    for slug in methods("language"):
        register_policy_loss(verl_name(slug))(loss_mode(slug))


def loss_mode(slug: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """The method as a function with the arguments and results of verl's policy losses."""

    def loss(
        old_log_prob: Float[Tensor, "seq tok"],
        log_prob: Float[Tensor, "seq tok"],
        advantages: Float[Tensor, "seq tok"],
        response_mask: Shaped[Tensor, "seq tok"],
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Float[Tensor, "seq tok"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        recipe, inputs = recipe_for(slug, config), _ENGINE_INPUTS.get() or EngineInputs()
        if recipe.gradient is not None and not inputs.rest:
            raise ProxpoError(
                f"verl: {slug}: gradient={recipe.gradient.name} needs proxpo's engine, and "
                "actor.strategy has chosen another: use fsdp2 with VERL_ENGINE_VENDOR=proxpo"
            )
        batch = loss_batch(recipe, old_log_prob, log_prob, advantages, response_mask, inputs.fields)
        if recipe.gradient is None:  # else the engine saves it
            save_due_batch(config, batch)
        actor = ActorLoss.of(recipe, batch.mask, loss_agg_mode, config, rollout_is_weights)
        result = actor.rest(batch) if recipe.gradient is not None else actor.whole(batch)
        return result.value, verl_metrics(result, batch)

    loss.__name__ = loss.__qualname__ = verl_name(slug)
    return loss


def recipe_for(slug: str, config: Any) -> Recipe:
    """The recipe of a loss mode under an actor config: its options and verl's own settings."""
    recipe = loss_recipe(slug, loss_options(config), changed_settings(config))
    notify_of_differences(recipe, config)
    kl = getattr(config, "kl_loss_coef", 0.0) if getattr(config, "use_kl_loss", False) else 0.0
    if kl and "ref_logp" in recipe.needs():
        notify(
            f"{recipe.name} reads the reference policy, and verl adds a KL term of its own: "
            f"actor.kl_loss_coef={kl}; 0 leaves the method alone"
        )
    return recipe


def loss_batch(
    recipe: Recipe,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    fields: Mapping[str, Tensor],
) -> Batch:
    """Batch of verl's tensors.

    verl's old policy is the learner at the start of the step. A recipe with a proximal policy
    takes it as that, and the sampler's numbers as those of the behaviour policy.
    """
    known = {"old_logp": old_log_prob, **fields}
    if "prox_logp" in recipe.needs() and "rollout_logp" in fields:
        known |= {"old_logp": fields["rollout_logp"], "prox_logp": old_log_prob}
    mask = response_mask.bool()
    return Batch(logp=log_prob, mask=mask, advantages=advantages, **known).clean()


@dataclass(frozen=True, kw_only=True)
class ActorLoss:
    """A recipe's loss on a micro-batch under verl's actor config.

    recipe: with the average in force and verl's rollout correction
    ctx: verl's counts of the mini-batch, and sums over ranks
    ranks: data-parallel ranks over which verl averages gradients
    """

    recipe: Recipe
    ctx: Context
    ranks: int

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        mask: Bool[Tensor, "seq tok"],
        mode: str,
        config: Any,
        weights: Tensor | None,
    ) -> "ActorLoss":
        info = dict(getattr(config, "global_batch_info", None) or {})
        ranks = int(info.get("dp_size") or 1)
        recipe = reporting_caps(with_average(recipe, mode, info, mask.shape[1]))
        if weights is not None:
            recipe = with_correction(recipe, weights, config)
        counts = denominators(mask, info, mode)
        notify_of_cuts(recipe, mask, counts)
        strategy = str(getattr(config, "strategy", "") or "")
        all_sum = sums_over_ranks(recipe, mask, counts, ranks=ranks, strategy=strategy)
        ctx = Context(all_sum=all_sum, denominators=counts, states={}, clock=NO_CLOCK)
        return cls(recipe=recipe, ctx=ctx, ranks=ranks)

    def whole(self, batch: Batch) -> Loss:
        """The share of this micro-batch, times the ranks verl averages gradients over."""
        loss = policy_loss(self.recipe, batch, self.ctx)
        return Loss(loss.value * self.ranks, loss.metrics)

    def rest(self, batch: Batch) -> Loss:
        """The recipe's terms besides its policy term."""
        if not self.recipe.regularisers:
            return Loss(0.0 * batch.logp.sum(), {})
        whole, rest = without_policy_term(self.recipe, batch, self.ctx)
        return Loss(rest * self.ranks, whole.metrics)


def save_due_batch(config: Any, batch: Batch) -> None:
    """Writes every `batch_every`-th micro-batch that the first rank's losses have seen."""
    loss = getattr(config, "policy_loss", None)
    every = getattr(loss, "batch_every", 0)
    if not every or os.environ.get("RANK", "0") != "0":
        return
    number = next(_SEEN)
    if number % every == 0:
        save_step(getattr(loss, "batch_folder", "."), number, dict(batch.items()), on_notice=notify)


def with_average(recipe: Recipe, mode: str, info: Mapping[str, Any], width: int) -> Recipe:
    """The recipe under its own average, or under actor.loss_agg_mode where the user has set that.

    width: padded length of the responses, which verl's own losses take for the longest one
    """
    if mode not in AVERAGES:
        raise ProxpoError(f"verl: unknown loss_agg_mode '{mode}'; valid: {', '.join(AVERAGES)}")
    name = average_of(recipe, mode)
    if name != AVERAGES[mode]:
        notify(
            f"{recipe.name} is averaged by its own {name}, not by verl's default loss_agg_mode="
            f"{mode}, which verl's own KL and entropy terms keep; policy_loss.options.aggregate="
            f"{AVERAGES[mode]} gives verl's"
        )
    elif recipe.aggregate.name != name:
        own = {name: key for key, name in AVERAGES.items()}.get(recipe.aggregate.name)
        advice = f"; its own is actor.loss_agg_mode={own}" if own else ""
        notify(f"{recipe.name} is averaged by verl's loss_agg_mode={mode}{advice}")
    if recipe.aggregate.name != name:
        recipe = recipe.replace(aggregate=_average(name))
    if name == "constant_length":
        count_empty = recipe.aggregate.options["count_empty"]
        length = response_length(recipe, info, width if mode != default_average() else None)
        average = aggregate.constant_length(max_tokens=length, count_empty=count_empty)
        recipe = recipe.replace(aggregate=average)
    return recipe


def average_of(recipe: Recipe, mode: str) -> str:
    """The average in force: the recipe's own beside verl's default, else that of loss_agg_mode."""
    own = recipe.aggregate.name
    return own if mode == default_average() and own in OWN_AVERAGES else AVERAGES.get(mode, "")


def _average(name: str) -> Stage:
    options = {"max_tokens": None} if name == "constant_length" else {}
    stage: Stage = getattr(aggregate, name)(**options)
    return stage


def response_length(recipe: Recipe, info: Mapping[str, Any], width: int | None) -> float:
    """The constant that stands for a response's length: the recipe's, else verl's.

    width: the padded width of the micro-batch, which verl takes where neither is set; None for a
        recipe whose own average has the constant: the longest response allowed is not that width
    """
    own, factor = recipe.aggregate.options.get("max_tokens"), info.get("loss_scale_factor")
    if own is not None and factor and float(own) != float(factor):
        raise ProxpoError(
            f"verl: {recipe.name} has max_tokens={own:g} and actor.loss_scale_factor is {factor}: "
            "both are the constant a response's sum is divided by; set one of them"
        )
    length = own or factor or width
    if length is None:
        raise ProxpoError(
            f"verl: {recipe.name} divides by the longest response allowed, and verl pads to the "
            f"longest of a batch: set {ACTOR}.loss_scale_factor to data.max_response_length"
        )
    return float(length)


def check_average(recipe: Recipe, mode: str, *, written: bool = False) -> None:
    """Refuses an average that is not the recipe's: its scale would enter a transform's lengths.

    written: by the user, so that it decides even where it is verl's default
    """
    name = AVERAGES.get(mode) if written else average_of(recipe, mode)
    if name != recipe.aggregate.name:
        own = {name: mode for mode, name in AVERAGES.items()}.get(recipe.aggregate.name)
        raise ProxpoError(
            f"verl: {recipe.name} with gradient={recipe.gradient and recipe.gradient.name} needs "
            f"actor.loss_agg_mode={own}, got '{mode}'"
        )


def denominators(mask: Bool[Tensor, "seq tok"], info: Mapping[str, Any], mode: str) -> Denominators:
    """verl's counts of the whole mini-batch; those of this micro-batch where verl gives none."""
    tokens, rows = info.get("batch_num_tokens"), info.get("global_batch_size")
    needed = {"token-mean": tokens, "token-sum": 0}.get(mode, rows)
    if needed is None and int(info.get("dp_size") or 1) > 1:
        raise ProxpoError(
            f"verl: loss_agg_mode={mode} over several ranks needs the counts of the global batch"
        )
    local_rows = mask.any(dim=1).sum()
    numbers = [mask.sum() if tokens is None else tokens, local_rows if rows is None else rows]
    counts = [torch.as_tensor(x, dtype=torch.float64, device=mask.device) for x in numbers]
    return Denominators(tokens=counts[0], sequences=counts[1], rows=counts[1])


def notify_of_cuts(recipe: Recipe, mask: Bool[Tensor, "seq tok"], counts: Denominators) -> None:
    """Prints one line for a loss that depends on how verl cuts a mini-batch."""
    if recipe.name in _CUT:
        return
    _CUT.add(recipe.name)
    local = local_stages(recipe)
    if local and bool(mask.sum() < counts.tokens):
        names = ", ".join(local)
        notify(
            f"{recipe.name} looks at each micro-batch of a rank by itself ({names}), so its loss "
            "depends on actor.ppo_micro_batch_size_per_gpu"
        )


def sums_over_ranks(
    recipe: Recipe,
    mask: Bool[Tensor, "seq tok"],
    counts: Denominators,
    *,
    ranks: int,
    strategy: str,
) -> AllSum:
    """Sums over verl's data-parallel ranks, for statistics of the batch such as ESS.

    The other ranks of the world (sequence parallel) hold copies, hence the division.
    """

    def reduce(x: Tensor) -> Tensor:
        if ranks == 1:
            return x
        if strategy not in SHARDED:
            raise ProxpoError(
                f"verl: {recipe.name} sums over the batch, which works with actor.strategy=fsdp or "
                f"fsdp2, got '{strategy}'"
            )
        total = x.detach().clone()
        dist.all_reduce(total)
        return total * (ranks / dist.get_world_size())

    def all_sum(x: Tensor, scope: Literal["batch", "microbatch", "rank"] = "batch") -> Tensor:
        if scope == "rank":  # groups, which a rank holds whole
            return x
        if scope == "batch" and recipe.name not in _SUMMED:
            _SUMMED.add(recipe.name)
            if bool(reduce(mask.sum().double()) < counts.tokens):
                notify(
                    f"{recipe.name} wants statistics of the whole batch and gets those of each "
                    "micro-batch over the ranks; one micro-batch per mini-batch gives the former"
                )
        return reduce(x)

    return all_sum


def with_correction(recipe: Recipe, weights: Float[Tensor, "seq tok"], config: Any) -> Recipe:
    """The recipe with verl's rollout weights on its policy term, or on its whole token loss.

    `policy_loss.weighted_terms=all` is the latter, as in verl's kl_cov and dro.
    """
    every = getattr(getattr(config, "policy_loss", None), "weighted_terms", "policy") == "all"
    factors = rollout_correction(weights, kind="select" if every else "weights")
    ratio, regularisers = recipe.ratio, recipe.regularisers
    if regularisers and not every:
        names = ", ".join(stage.name for stage in regularisers)
        notify(
            f"{recipe.name}: algorithm.rollout_correction weighs the policy term, not "
            f"regularisers={names}; policy_loss.weighted_terms=all weighs both, as verl's kl_cov "
            "and dro do"
        )
    if (
        ratio.name == "sequence"
        and ratio.options["normalise"]
        and not ratio.options["own_gradient"]
    ):
        notify(
            f"{recipe.name}: ratio=sequence has one gradient for a response, so that the rollout "
            "weight of a token acts on all of them; ratio.own_gradient=true is the form of verl's "
            "gspo"
        )
    if every:
        return recipe.replace(select=(*recipe.select, factors))
    return recipe.replace(weights=(*recipe.weights, factors))


def rollout_correction(
    weights: Float[Tensor, "seq tok"], *, kind: Literal["weights", "select"] = "weights"
) -> Stage:
    """verl's rollout correction as a stage: factors on the policy term, or on the token loss."""

    def apply(batch: Batch, ctx: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return weights.detach().to(batch.logp.dtype).masked_fill(~batch.mask, 0.0), {}

    return Stage(kind=kind, name="rollout_is_weights", apply=apply)


def reporting_caps(recipe: Recipe) -> Recipe:
    """The recipe whose trust stage also reports the tokens at its cap: verl's pg_clipfrac_lower.

    The cap is a ceiling on the loss where A < 0 (`dual`), or on the weight of a token that the
    trust region lets through (`weight_cap`).
    """
    trust = recipe.trust
    dual, most = trust.options.get("dual"), trust.options.get("weight_cap", math.inf)
    if dual is None and math.isinf(most):
        return recipe

    def apply(ratio: Tensor, batch: Batch, *rest: Any) -> Any:
        x, metrics = trust.apply(ratio, batch, *rest)
        adv, r = batch.require("advantages", by="verl"), ratio.detach()
        if dual is not None:
            bound = trust.options.get("cap")
            at_cap = (adv < 0) & ((r if bound is None else r.clamp(max=bound)) > dual)
        else:
            at_cap = (r > most) & ((x.detach() != 0) | (adv == 0))
        return x, {**metrics, "trust/capped": masked_mean(at_cap, batch.mask)}

    return recipe.replace(trust=replace(trust, apply=apply))


def verl_metrics(loss: Loss, batch: Batch) -> dict[str, float]:
    """Metrics for verl: numbers, under `actor/`, and under verl's names where it has any.

    pg_clipfrac is the share of tokens on which the clip acts, in verl as here; pg_clipfrac_lower
    of those at a cap, for losses that have one.
    """
    metrics = {f"actor/{name}": float(value) for name, value in logged(loss.metrics).items()}
    for name, theirs in (("clipped", "pg_clipfrac"), ("capped", "pg_clipfrac_lower")):
        if f"actor/trust/{name}" in metrics:
            metrics[f"actor/{theirs}"] = metrics[f"actor/trust/{name}"]
    if batch.old_logp is not None:
        drift = masked_mean((batch.old_logp - batch.logp).detach(), batch.mask)
        metrics["actor/ppo_kl"] = float(drift)
    return metrics


def loss_options(config: Any) -> Mapping[str, Any]:
    """`policy_loss.options` of an actor config; none where verl's own PolicyLossConfig is used."""
    loss = getattr(config, "policy_loss", None)
    return getattr(loss, "options", None) or {}


__all__ = [
    "AVERAGES",
    "OWN_AVERAGES",
    "ActorLoss",
    "EngineInputs",
    "average_of",
    "check_average",
    "engine_inputs",
    "loss_batch",
    "loss_mode",
    "loss_options",
    "recipe_for",
    "register_losses",
    "save_due_batch",
    "verl_metrics",
]
