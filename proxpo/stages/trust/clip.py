"""The clipped surrogate and its variants."""

from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import declare_field
from proxpo.ops.extremes import top_share
from proxpo.ops.masked import count, masked_mean
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.ops.streams import drawn_numbers
from proxpo.stages import stage
from proxpo.stages.trust.covariance import covariance
from proxpo.types import Batch, Context, PerToken, Scope, local

DRAW = declare_field(
    "token_draw",
    "seq tok",
    doc="number in [0, 1) drawn for each token, by which some are chosen, from prepare",
)
TURN = 0.6180339887498949  # golden ratio: the order of the draws turns evenly

Pair = tuple[Float[Tensor, "seq tok"], Bool[Tensor, "seq tok"]]


@stage("trust", takes=("ratio",), gives="loss")
def unclipped():
    """x = -A r: the importance-sampled policy gradient, no trust region."""

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        return -batch.advantages * ratio, {}

    return surrogate


@stage("trust", takes=("ratio",), gives="loss")
def ppo_clip(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float | None = None,
    cap: float | None = None,
):
    """x = max(-A r, -A clip(r, 1-clip_low, 1+clip_high)). PPO, arXiv:1707.06347 eq. 7.

    dual=c > 1: where A < 0, x is held below c|A| (arXiv:1912.09729). cap=δ: the unclipped branch
    uses min(r, δ) (two-sided clip of INTELLECT-2). trust/clipped is the share of tokens
    with the clipped branch; those at the ceiling of `dual`, without a gradient too, are not in it.

    clip_low: clip range below 1
    clip_high: clip range above 1
    dual: ceiling on the loss of tokens with A < 0, in units of |A|; none: no ceiling
    cap: largest ratio of the unclipped branch; none: no bound
    """
    clipped_loss = clipper(low=clip_low, high=clip_high, dual=dual, cap=cap)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        x, clipped = clipped_loss(ratio, batch.advantages)
        return x, {"trust/clipped": masked_mean(clipped, batch.mask)}

    return surrogate


def clipper(*, low: float, high: float, dual: float | None = None, cap: float | None = None):
    """(ratio, A) -> (x, where the clipped branch is the larger loss)."""
    if cap is not None and cap <= 1:
        raise ProxpoError(f"ppo_clip: cap must be above 1, got {cap}")
    if low < 0 or high < 0:
        raise ProxpoError(f"ppo_clip: the clip range must not be negative, got {low} and {high}")
    check_dual(dual, by="ppo_clip")

    def clipped_loss(ratio: Float[Tensor, "seq tok"], adv: Float[Tensor, "seq tok"]) -> Pair:
        return clip_between(ratio, adv, 1 - low, 1 + high, dual=dual, cap=cap)

    return clipped_loss


def check_dual(dual: float | None, *, by: str) -> None:
    if dual is not None and dual <= 1:
        raise ProxpoError(f"{by}: dual must be above 1, got {dual}")


def clip_between(
    ratio: Float[Tensor, "seq tok"],
    adv: Float[Tensor, "seq tok"],
    lower: Any,
    upper: Any,
    *,
    dual: float | None = None,
    cap: float | None = None,
) -> Pair:
    """max(-A min(r, cap), -A clip(r, lower, upper)) and where the clip acts.

    The bounds are numbers or tensors. Where a cap below the upper bound holds the free branch, the
    other one leads inside the range, with its gradient: there the clip does not act.
    """
    gain = -adv
    free = gain * (ratio if cap is None else ratio.clamp(max=cap))
    # Without a cap the bound leads only where the clamp is constant: no gradient flows through it.
    held = (ratio.detach() if cap is None else ratio).clamp(lower, upper)
    bound = gain * held
    leads = bound.detach() > free.detach()
    x = torch.where(leads, bound, free)
    clipped = leads if cap is None else leads & (held != ratio).detach()
    if dual is not None:
        ceiling = gain * dual
        x = torch.where((gain > 0) & (x.detach() > ceiling), ceiling, x)
    return x, clipped


@stage("trust", takes=("ratio",), gives="loss")
def hard_clip(*, clip_low: float = 1e-4, clip_high: float = 1e-4):
    """x = -A clip(r, 1-clip_low, 1+clip_high), without the minimum of PPO. DPOK, arXiv:2305.16381.

    Outside the range the gradient is 0 for either sign of A, where a step back would help too.

    clip_low: clip range below 1
    clip_high: clip range above 1
    """
    low, high = clip_low, clip_high
    if low < 0 or high < 0:
        raise ProxpoError(f"hard_clip: the clip range must not be negative, got {low} and {high}")

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        outside = (ratio < 1 - low) | (ratio > 1 + high)
        x = -batch.advantages * ratio.clamp(1 - low, 1 + high)
        return x, {"trust/clipped": masked_mean(outside, batch.mask)}

    return surrogate


@stage("trust", takes=("ratio",), gives="loss", draws=DRAW.name)
def clip_cov(
    *,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    keep_value: bool = False,
    scope: Scope = "batch",
):
    """PPO clip, then max(1, ⌊share·N⌋) random tokens of high covariance lose their gradient.

    Eligible: not clipped, and cov_low < (A - Ā)(log π - mean log π) < cov_high over N valid tokens.
    Their loss is 0 (official code); keep_value=True keeps its value and only detaches it, as
    arXiv:2505.22617 eq. 12 writes. `prepare` draws a number for each token from `ctx.generator`;
    tokens are taken in their order, which turns with every optimizer step.

    share: share of the tokens that loses its gradient
    cov_low, cov_high: covariances between which a token is eligible
    clip_low: clip range below 1
    clip_high: clip range above 1
    keep_value: detach the loss of these tokens in place of zeroing it
    scope: "batch": N tokens of the whole optimizer step; "microbatch": of each micro-batch
    """
    if not 0 <= share <= 1:
        raise ProxpoError(f"clip_cov: share must be between 0 and 1, got {share}")
    if not cov_low < cov_high:
        raise ProxpoError(f"clip_cov: cov_low must be below cov_high, got {cov_low}, {cov_high}")
    clipped_loss = clipper(low=clip_low, high=clip_high)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        x, clipped = clipped_loss(ratio, batch.advantages)
        all_sum = ctx.all_sum if scope == "batch" else local
        cov = covariance(batch, all_sum=all_sum)
        eligible = batch.mask & ~clipped & (cov > cov_low) & (cov < cov_high)
        n, candidates = all_sum(torch.stack([count(batch.mask), count(eligible)])).tolist()
        most = min(max(1, int(share * n)), int(candidates))
        drawn = batch.token_draw
        if drawn is None:  # a batch that `prepare` has not seen
            drawn = drawn_numbers(batch.mask, ctx.generator)
        order = (drawn + TURN * ctx.clock.updates) % 1.0
        removed = top_share(order.to(x.dtype), eligible, most, all_sum=all_sum)
        rest = x.detach() if keep_value else torch.zeros_like(x)
        x = torch.where(removed > 0, torch.lerp(x, rest, removed), x)
        return x, {
            "trust/clipped": masked_mean(clipped, batch.mask),
            "trust/removed": masked_mean(removed, batch.mask),
        }

    return surrogate
