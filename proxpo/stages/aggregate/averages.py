"""Averages of per-token losses, and the pairwise loss of DPO."""

from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.groups import group_sum_over_cuts
from proxpo.ops.masked import masked_mean, masked_sum, row_mean, row_sum
from proxpo.ops.pairs import roles
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.token import bounded_exp
from proxpo.types import Batch, Context, Metrics

Scalar = tuple[Float[Tensor, ""], Metrics]
DR_GRPO_LENGTH = 3000.0  # generation budget of Dr. GRPO's runs
PAIRED = "aggregate=pairwise_logistic"


@stage("aggregate", takes=("loss",))
def token_mean():
    """Σ m x / N: every token of the step weighs the same."""

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return masked_sum(x, batch.mask) / _count(ctx.counts.tokens, x), {}

    return aggregate


@stage("aggregate", takes=("loss",), needs=("old_logp",))
def guarded_token_mean(*, max_ratio: float = 10.0):
    """Σ m x / N, or 0 where the mean ratio π/π_old of the step is above `max_ratio`.

    As TRL's first PPO trainer has it: such a step teaches neither policy nor critic.

    max_ratio: largest mean ratio of a step that is made
    """
    check_numbers("guarded_token_mean", "(0, inf]", max_ratio=max_ratio)

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        ratio = bounded_exp(batch.logp.detach() - batch.old_logp, 20.0)
        mean = masked_mean(ratio, batch.mask, all_sum=ctx.all_sum)
        value = masked_sum(x, batch.mask) / _count(ctx.counts.tokens, x)
        return value * (mean <= max_ratio), {"ratio/mean": mean}

    return aggregate


@stage("aggregate", takes=("loss",))
def token_sum():
    """Σ m x."""

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return masked_sum(x, batch.mask), {}

    return aggregate


@stage("aggregate", takes=("loss",))
def seq_mean_token_sum(*, count_empty: bool = False):
    """(1/B⁺) Σ_i Σ_t m x: the derivation-faithful REINFORCE average.

    count_empty: count responses without tokens in the divisor
    """

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return masked_sum(x, batch.mask) / _rows(ctx, x, count_empty), {}

    return aggregate


@stage("aggregate", takes=("loss",))
def seq_mean_token_mean(*, count_empty: bool = False):
    """(1/B⁺) Σ_i (1/L_i) Σ_t m x: GRPO's average; long responses weigh less per token.

    count_empty=True divides by all rows instead, as TRL's "grpo" does.

    count_empty: count responses without tokens in the divisor
    """

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return row_mean(x, batch.mask).sum() / _rows(ctx, x, count_empty), {}

    return aggregate


@stage("aggregate", takes=("loss",))
def seq_sum_token_mean():
    """Σ_i (1/L_i) Σ_t m x: DCPO's only-token-mean; more responses make a larger step."""

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return row_mean(x, batch.mask).sum(), {}

    return aggregate


@stage("aggregate", takes=("loss",), length=DR_GRPO_LENGTH)
def constant_length(*, max_tokens: float | None, count_empty: bool = False):
    """(1/B⁺) Σ_i Σ_t m x / K with a constant K = max_tokens: Dr. GRPO's unbiased average.

    max_tokens=None: the longest response that the host allows; 3000 without a host. K must not be
    the padded width of the batch, which would move the step size with the longest response of the
    moment. verl calls this seq-mean-token-sum-norm.

    max_tokens: K, the divisor; none: the host's longest response
    count_empty: count responses without tokens in the divisor
    """
    longest = DR_GRPO_LENGTH if max_tokens is None else max_tokens
    check_numbers("constant_length", "(0, inf)", max_tokens=max_tokens)

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        return masked_sum(x, batch.mask) / (_rows(ctx, x, count_empty) * longest), {}

    return aggregate


@stage("aggregate", takes=("loss",), needs=("group",))
def prompt_mean():
    """(1/P) Σ_g [Σ_{i∈g} Σ_t m x / N_g]: token mean inside a prompt, then the mean over prompts."""

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        tokens = batch.require("group_tokens", by="aggregate=prompt_mean").clamp(min=1)
        prompts = ctx.counts.prompts
        if prompts is None:
            raise ProxpoError("aggregate=prompt_mean: the denominators hold no count of prompts")
        rows = row_sum(x, batch.mask) / tokens.to(x.dtype)
        return rows.sum() / _count(prompts, x), {}

    return aggregate


@stage(
    "aggregate",
    takes=("log_ratio",),
    needs=("rewards", "group"),
    adds=("pairs/accuracy", "pairs/margin"),
)
def pairwise_logistic(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    form: Literal["sigmoid", "robust", "ipo"] = "sigmoid",
    ipo_mean: bool = True,
):
    """Mean over pairs of -log σ(β h), h = Σ_t log-ratio of the best minus of the worst response.

    form="sigmoid": (1-ε)(-log σ(βh)) + ε(-log σ(-βh)), ε the label smoothing (DPO, cDPO);
    form="robust": [(1-ε)(-log σ(βh)) - ε(-log σ(-βh))] / (1-2ε);
    form="ipo": (h̄ - 1/(2β))², h̄ from length-averaged log-ratios, or sums with ipo_mean=False.

    The two responses of a pair may lie in different micro-batches: the other one's sum then comes
    from `all_sum`, and each response carries the gradient of the loss to itself.

    beta: β, the strength of the tie to the reference
    label_smoothing: ε, the share of pairs that are taken as swapped
    form: "sigmoid" (DPO), "robust" or "ipo"
    ipo_mean: length-averaged log-ratios in form="ipo"
    """
    check_numbers("pairwise_logistic", "(0, inf)", beta=beta)
    check_numbers("pairwise_logistic", "[0, 0.5]", label_smoothing=label_smoothing)
    if form == "robust" and not label_smoothing < 0.5:
        raise ProxpoError("pairwise_logistic: the robust form needs label_smoothing below 0.5")

    def prepare(batch: Batch) -> dict[str, Tensor]:
        return {} if batch.rewards is None or batch.group is None else roles(batch)

    def per_pair(h: Tensor) -> Tensor:
        agree = -torch.nn.functional.logsigmoid(beta * h)
        oppose = -torch.nn.functional.logsigmoid(-beta * h)
        if form == "ipo":
            return (h - 1 / (2 * beta)).square()
        if form == "robust":
            return ((1 - label_smoothing) * agree - label_smoothing * oppose) / (
                1 - 2 * label_smoothing
            )
        return (1 - label_smoothing) * agree + label_smoothing * oppose

    def aggregate(x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> Scalar:
        if ctx.counts.pairs is None:
            raise ProxpoError(f"{PAIRED}: the denominators hold no count of pairs")
        pairs = _count(ctx.counts.pairs, x)
        role = batch.require("pair", by=PAIRED)
        group = batch.require("group", by=PAIRED)
        score = (row_mean if form == "ipo" and ipo_mean else row_sum)(x, batch.mask)
        sides = torch.stack([score * (role > 0), score * (role < 0)], dim=1).detach()
        best, worst = group_sum_over_cuts(sides, group, all_sum=ctx.all_sum).unbind(1)
        order = group.argsort(stable=True)
        chosen, rejected = (order[role[order] == side] for side in (1, -1))
        h = score[chosen] - worst[chosen]
        mirrored = per_pair(best[rejected] - score[rejected])
        metrics = {
            "pairs/accuracy": (h > 0).to(x.dtype).sum() / pairs,
            "pairs/margin": beta * h.sum() / pairs,
        }
        value = per_pair(h).sum() + (mirrored - mirrored.detach()).sum()  # its gradient alone
        return value / pairs, metrics

    idle = ("label_smoothing",) if form == "ipo" else ("ipo_mean",)
    return Parts(apply=aggregate, prepare=prepare, idle=idle)


def _count(n: Tensor, like: Tensor) -> Tensor:
    return n.clamp(min=1).to(like.dtype)


def _rows(ctx: Context, like: Tensor, count_empty: bool) -> Tensor:
    return _count(ctx.counts.rows if count_empty else ctx.counts.sequences, like)
