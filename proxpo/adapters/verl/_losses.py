"""Loss modes: a recipe's policy loss on verl's tensors, averaged by verl's global counts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from proxpo.adapters.verl._host import tell
from proxpo.adapters.verl._recipes import LOSS_KINDS, NO_CLOCK, loss_recipe, verl_name
from proxpo.adapters.verl._settings import changed, tell_own_numbers
from proxpo.compose import policy_loss
from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
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
SHARDED = ("fsdp", "fsdp2")  # engines in which every rank computes a loss for every micro-batch


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What proxpo's engine adds to the arguments of a policy loss.

    rest: the policy term has a backward of its own, so the loss is the recipe's other terms.
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    rest: bool = False


_CUT: set[str] = set()  # recipes whose first micro-batch has been looked at
_SUMMED: set[str] = set()  # recipes whose first batch statistic has been looked at
_OFFER: ContextVar[Offer | None] = ContextVar("proxpo_verl_offer", default=None)


@contextmanager
def offering(offer: Offer) -> Iterator[None]:
    token = _OFFER.set(offer)
    try:
        yield
    finally:
        _OFFER.reset(token)


def register() -> None:
    """Every method of the catalogue as `policy_loss.loss_mode=proxpo_<slug>`."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    for slug in methods():
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
        recipe, offer = recipe_for(slug, config), _OFFER.get()
        if recipe.gradient is not None and (offer is None or not offer.rest):
            raise ProxpoError(
                f"verl: {slug}: gradient={recipe.gradient.name} needs proxpo's engine, and "
                "actor.strategy has chosen another: use fsdp2 with VERL_ENGINE_VENDOR=proxpo"
            )
        batch = make_batch(
            recipe, old_log_prob, log_prob, advantages, response_mask, offer.fields if offer else {}
        )
        with full_precision(log_prob):
            step = Step.of(recipe, batch, loss_agg_mode, config, rollout_is_weights)
            found = step.rest(batch) if recipe.gradient is not None else step.loss(batch)
        return found.value, report(found, batch)

    loss.__name__ = loss.__qualname__ = verl_name(slug)
    return loss


def recipe_for(slug: str, config: Any) -> Recipe:
    """The recipe of a loss mode under an actor config: its options and verl's own settings."""
    recipe = loss_recipe(slug, loss_options(config), changed(config))
    tell_own_numbers(recipe, config)
    kl = getattr(config, "kl_loss_coef", 0.0) if getattr(config, "use_kl_loss", False) else 0.0
    if kl and any("ref_logp" in stage.needs for _, stage in recipe.stages()):
        tell(
            f"{recipe.name} reads the reference policy, and verl adds a KL term of its own: "
            f"actor.kl_loss_coef={kl}; 0 leaves the method alone"
        )
    return recipe


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """verl calls losses under autocast, which would run a stage's matrix products in bfloat16."""
    return torch.autocast(like.device.type, enabled=False)


def make_batch(
    recipe: Recipe,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    fields: Mapping[str, Tensor],
) -> Batch:
    """verl's tensors under our names.

    verl's old policy is the learner at the start of the step. A recipe with a proximal policy
    takes it as that, and the sampler's numbers as those of the behaviour policy.
    """
    known = {"old_logp": old_log_prob, **fields}
    if any("prox_logp" in stage.needs for _, stage in recipe.stages()) and "rollout_logp" in fields:
        known |= {"old_logp": fields["rollout_logp"], "prox_logp": old_log_prob}
    mask = response_mask.bool()
    return Batch(logp=log_prob, mask=mask, advantages=advantages, **known).clean()


@dataclass(frozen=True, kw_only=True)
class Step:
    """One micro-batch of a step: the recipe with verl's average, and the counts of the step."""

    recipe: Recipe
    counts: Denominators
    all_sum: AllSum
    ranks: int

    @classmethod
    def of(
        cls, recipe: Recipe, batch: Batch, mode: str, config: Any, weights: Tensor | None
    ) -> "Step":
        info = dict(getattr(config, "global_batch_info", None) or {})
        ranks = int(info.get("dp_size") or 1)
        recipe = averaged(recipe, mode, length(recipe, info, batch.mask.shape[1]))
        if weights is not None:
            recipe = recipe.replace(weights=(*recipe.weights, given_weights(weights)))
        counts = denominators(batch.mask, info, mode)
        tell_of_cuts(recipe, batch.mask, counts)
        strategy = str(getattr(config, "strategy", "") or "")
        all_sum = sums(recipe, batch.mask, counts, ranks=ranks, strategy=strategy)
        return cls(recipe=recipe, counts=counts, all_sum=all_sum, ranks=ranks)

    def loss(self, batch: Batch) -> Loss:
        """The share of this micro-batch, times the ranks verl averages gradients over."""
        ctx = Context(denominators=self.counts, states={}, all_sum=self.all_sum, clock=NO_CLOCK)
        found = policy_loss(self.recipe, batch, ctx)
        return Loss(found.value * self.ranks, found.metrics)

    def rest(self, batch: Batch) -> Loss:
        """What the recipe adds to its policy term."""
        if not self.recipe.regularisers:
            return Loss(0.0 * batch.logp.sum(), {})
        bare = replace(self, recipe=self.recipe.replace(regularisers=()))
        whole = self.loss(batch)
        return Loss(whole.value - bare.loss(batch).value, whole.metrics)


def length(recipe: Recipe, info: Mapping[str, Any], width: int) -> float:
    """The constant that stands for a response's length: the recipe's, verl's, the padded width."""
    own, factor = recipe.aggregate.options.get("max_tokens"), info.get("loss_scale_factor")
    if own is not None and factor and float(own) != float(factor):
        raise ProxpoError(
            f"verl: {recipe.name} has max_tokens={own:g} and actor.loss_scale_factor is {factor}: "
            "both are the constant a response's sum is divided by; set one of them"
        )
    return float(own or factor or width)


def averaged(recipe: Recipe, mode: str, width: int | float) -> Recipe:
    """The recipe under actor.loss_agg_mode, as every loss and penalty of verl is averaged."""
    if mode not in AVERAGES:
        raise ProxpoError(f"verl: unknown loss_agg_mode '{mode}'; valid: {', '.join(AVERAGES)}")
    if recipe.aggregate.name != AVERAGES[mode]:
        own = {name: key for key, name in AVERAGES.items()}.get(recipe.aggregate.name)
        advice = f"; its own is actor.loss_agg_mode={own}" if own else ""
        tell(f"{recipe.name} is averaged by verl's loss_agg_mode={mode}{advice}")
    options = {"max_tokens": float(width)} if mode == "seq-mean-token-sum-norm" else {}
    return recipe.replace(aggregate=getattr(aggregate, AVERAGES[mode])(**options))


def denominators(mask: Bool[Tensor, "seq tok"], info: Mapping[str, Any], mode: str) -> Denominators:
    """verl's counts of the whole mini-batch; those of this micro-batch where verl gives none."""
    tokens, rows = info.get("batch_num_tokens"), info.get("global_batch_size")
    needed = {"token-mean": tokens, "token-sum": 0}.get(mode, rows)
    if needed is None and int(info.get("dp_size") or 1) > 1:
        raise ProxpoError(
            f"verl: loss_agg_mode={mode} over several ranks needs the counts of the global batch"
        )
    local_rows = mask.any(dim=1).sum()
    found = [mask.sum() if tokens is None else tokens, local_rows if rows is None else rows]
    counts = [torch.as_tensor(x, dtype=torch.float64, device=mask.device) for x in found]
    return Denominators(tokens=counts[0], sequences=counts[1], rows=counts[1])


def tell_of_cuts(recipe: Recipe, mask: Bool[Tensor, "seq tok"], counts: Denominators) -> None:
    """One line for a loss that depends on how verl cuts a mini-batch."""
    if recipe.name in _CUT:
        return
    _CUT.add(recipe.name)
    stages = [stage for _, stage in recipe.stages() if stage.kind in LOSS_KINDS]
    alone = [stage for stage in stages if not stage.whole_batch]
    if alone and bool(mask.sum() < counts.tokens):
        names = ", ".join(f"{stage.kind}={stage.name}" for stage in alone)
        tell(
            f"{recipe.name} looks at each micro-batch of a rank by itself ({names}), so its loss "
            "depends on actor.ppo_micro_batch_size_per_gpu"
        )


def sums(
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
                tell(
                    f"{recipe.name} wants statistics of the whole batch and gets those of each "
                    "micro-batch over the ranks; one micro-batch per mini-batch gives the former"
                )
        return reduce(x)

    return all_sum


def given_weights(weights: Float[Tensor, "seq tok"]) -> Stage:
    """verl's rollout correction as a stage: factors on the policy term."""

    def apply(batch: Batch, ctx: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return weights.detach().to(batch.logp.dtype).masked_fill(~batch.mask, 0.0), {}

    return Stage(kind="weights", name="rollout_is_weights", apply=apply)


def report(loss: Loss, batch: Batch) -> dict[str, float]:
    """Metrics as verl wants them: numbers, under `actor/`, and under verl's names where it has any.

    pg_clipfrac is the share of tokens on which the clip acts, in verl as here.
    """
    seen = {f"actor/{name}": float(value) for name, value in loss.metrics.items()}
    if "actor/trust/clipped" in seen:
        seen["actor/pg_clipfrac"] = seen["actor/trust/clipped"]
    if batch.old_logp is not None:
        drift = masked_mean((batch.old_logp - batch.logp).detach(), batch.mask)
        seen["actor/ppo_kl"] = float(drift)
    return seen


def loss_options(config: Any) -> Mapping[str, Any]:
    """`policy_loss.options` of an actor config; none where verl's own PolicyLossConfig is used."""
    chosen = getattr(config, "policy_loss", None)
    return (getattr(chosen, "options", None) or {}) if chosen is not None else {}


__all__ = [
    "AVERAGES",
    "Offer",
    "Step",
    "full_precision",
    "loss_mode",
    "loss_options",
    "make_batch",
    "offering",
    "recipe_for",
    "register",
    "report",
]
