"""Advantages from returns: rewards summed to the end of the response, with or without a critic."""

from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.groups import group_stats
from proxpo.ops.masked import is_packed, last_valid, moments, packing, suffix_sum
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import AllSum, Batch, Context, PerToken, local

Baseline = Literal["none", "batch", "group", "leave_one_out"]
Holes = Literal["skip", "reset"]


def token_rewards(batch: Batch) -> Float[Tensor, "seq tok"]:
    """ρ_it: the token rewards there are, plus the response's reward on its last valid token."""
    outcome = torch.zeros_like(batch.logp)
    if batch.rewards is not None:
        score = torch.nan_to_num(batch.rewards, nan=0.0).to(outcome.dtype)
        outcome = torch.where(last_valid(batch.mask), score[:, None], 0.0)
    if batch.token_rewards is None:
        return outcome
    return outcome + torch.where(batch.mask, batch.token_rewards, 0.0).to(outcome.dtype)


def rewarded(batch: Batch) -> Bool[Tensor, "seq tok"]:
    """Valid tokens of responses that have a reward: the others get no advantage."""
    if batch.rewards is None:
        return batch.mask
    return batch.mask & ~batch.rewards.isnan()[:, None]


def whiten(
    x: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    unbiased: bool = True,
    eps: float = 1e-8,
    all_sum: AllSum = local,
) -> Float[Tensor, "seq tok"]:
    """(x - μ)/√(σ² + eps) over all valid tokens of the batch.

    unbiased=True: variance over N-1 (verl); False: over N and √max(σ², eps) (OpenRLHF).
    """
    mean, variance, n = moments(x, mask, unbiased=unbiased, all_sum=all_sum)
    if 0 < n <= 1:
        raise ProxpoError("whitening needs at least two valid tokens in the batch, got 1")
    scale = (variance + eps if unbiased else variance.clamp(min=eps)).rsqrt()
    return torch.where(mask, (x - mean) * scale, 0.0)


@stage("advantage")
def discounted_return(
    *,
    gamma: float = 1.0,
    baseline: Baseline = "none",
    whitening: bool = False,
    whiten_unbiased: bool = True,
    singleton: Literal["raw", "zero"] = "raw",
):
    """A_it = Σ_{s≥t} γ^{s-t} ρ_is - b, then optionally whitened over all tokens.

    b = 0 ("none"), the mean reward of the batch, of the group, or of the group's other responses.
    A group of one has b = 0 (singleton="raw", as verl) or A = 0 ("zero"). A response without a
    reward gets 0 and is no part of what is whitened.

    gamma: discount from token to token
    baseline: mean reward that is subtracted: "none", of the batch, group or others
    whitening: centre and scale advantages over all tokens of the step
    whiten_unbiased: variance over N-1 (true) or N
    singleton: "raw": a response alone in its group keeps its reward; "zero": it gets 0
    """
    check_numbers("discounted_return", "[0, 1]", gamma=gamma)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        total = suffix_sum(token_rewards(batch), batch.mask, discount=gamma)
        offset = _baseline(batch, ctx, baseline, singleton).to(total.dtype)[:, None]
        out = torch.where(batch.mask & offset.isfinite(), total - offset, 0.0)
        if whitening:
            out = whiten(out, rewarded(batch), unbiased=whiten_unbiased, all_sum=ctx.all_sum)
        return out, {}

    return Parts(
        apply=advantage,
        needs=("rewards", "group") if baseline in ("group", "leave_one_out") else ("rewards",),
        instead={"rewards": "token_rewards"} if baseline == "none" else {},
        idle=(() if whitening else ("whiten_unbiased",))
        + (("singleton",) if baseline in ("none", "batch") else ()),
    )


def _baseline(batch: Batch, ctx: Context, baseline: str, singleton: str) -> Float[Tensor, " seq"]:
    """b for each response; NaN for one that gets no advantage: unscored, or alone with "zero"."""
    if batch.rewards is None:  # token rewards alone, which want no baseline
        return batch.logp.new_zeros(len(batch.logp))
    rewards, scored = batch.rewards, ~batch.rewards.isnan()
    if baseline == "none":
        return torch.where(scored, 0.0, rewards)
    if baseline == "batch":
        filled = torch.where(scored, rewards, 0.0)[:, None]
        mean, _, _ = moments(filled, scored[:, None], all_sum=ctx.all_sum)
        return torch.where(scored, mean, rewards)
    group = batch.require("group", by=f"advantage=discounted_return(baseline={baseline})")
    stats = group_stats(rewards, group)
    others = (stats.size * stats.mean - rewards) / (stats.size - 1).clamp(min=1)
    mean = torch.where(scored, stats.mean if baseline == "group" else others, torch.nan)
    return torch.where(scored & (stats.size == 1), 0.0 if singleton == "raw" else torch.nan, mean)


@stage("advantage", needs=("rewards", "greedy_rewards"))
def greedy_baseline(
    *,
    form: Literal["framework", "official"] = "framework",
    gamma: float = 0.99,
    reward_clip: float = 5.0,
    kl_coef: float = 0.05,
):
    """A_it = Σ_{s≥t} ρ_is - b, b the reward of the greedy response. ReMax, arXiv:2310.10505.

    form="official" is the repository's: A_it = γ^{L_i-t}·clip(r_i - b, ±reward_clip)
    - kl_coef·(log π_old - log π_ref)_t with t = 0..L_i-1 and a KL that is not accumulated.

    form: "framework": as verl; "official": as the repository
    gamma: discount of form="official", counted from the end
    reward_clip: bound on the advantage of form="official"
    kl_coef: weight of the KL of form="official"
    """
    check_numbers("greedy_baseline", "[0, 1]", gamma=gamma)
    check_numbers("greedy_baseline", "(0, inf]", reward_clip=reward_clip)
    check_numbers("greedy_baseline", "[0, inf)", kl_coef=kl_coef)

    def framework(batch: Batch, ctx: Context) -> PerToken:
        total = suffix_sum(token_rewards(batch), batch.mask)
        return torch.where(scored(batch), total - batch.greedy_rewards[:, None], 0.0), {}

    def official(batch: Batch, ctx: Context) -> PerToken:
        gain = (batch.rewards - batch.greedy_rewards).clamp(-reward_clip, reward_clip)
        left = batch.mask.flip(1).cumsum(1).flip(1).to(gain.dtype)  # L - t on valid tokens
        out = gamma**left * gain[:, None]
        if kl_coef:
            out = out - kl_coef * (batch.old_logp - batch.ref_logp)
        return torch.where(scored(batch), out, 0.0), {}

    def scored(batch: Batch) -> Bool[Tensor, "seq tok"]:
        missing = batch.greedy_rewards.isnan() & batch.mask.any(dim=1)
        if missing.any():
            row = int(missing.nonzero()[0])
            raise ProxpoError(
                f"advantage=greedy_baseline: greedy_rewards of response {row} is missing (NaN); "
                "every prompt needs the reward of one greedy response"
            )
        return rewarded(batch)

    if form == "framework":
        return Parts(apply=framework, idle=("gamma", "reward_clip", "kl_coef"))
    anchors = ("old_logp", "ref_logp") if kl_coef else ()
    return Parts(apply=official, needs=("rewards", "greedy_rewards", *anchors))


@stage("advantage", needs=("rewards",), instead={"rewards": "token_rewards"})
def gae(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitening: bool = True,
    whiten_unbiased: bool = True,
    holes: Holes = "skip",
):
    """A_t = δ_t + γλ A_next, δ_t = ρ_t + γ V_next - V_t, over valid tokens. GAE, 1506.02438.

    Masked tokens are skipped: V_next and A_next are those of the next valid token, 0 after the
    last. holes="reset": a masked token ends the recursion, so that no credit crosses it. Values are
    those at rollout time (`old_values`, else `values`). A response without a reward gets 0 and is
    no part of what is whitened.

    gamma: discount from token to token
    lam: GAE's λ, the discount of later TD errors
    whitening: centre and scale advantages over all tokens of the step
    whiten_unbiased: variance over N-1 (true) or N
    holes: masked positions inside a response: "skip" them, or "reset" the sum there
    """
    check_numbers("gae", "[0, 1]", gamma=gamma, lam=lam)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        raw = raw_gae(batch, gamma=gamma, lam=lam, holes=holes)
        if not whitening:
            return raw, {}
        return whiten(raw, rewarded(batch), unbiased=whiten_unbiased, all_sum=ctx.all_sum), {}

    return Parts(apply=advantage, idle=() if whitening else ("whiten_unbiased",))


def raw_gae(
    batch: Batch, *, gamma: float, lam: float, holes: Holes = "skip"
) -> Float[Tensor, "seq tok"]:
    """GAE before whitening; returns are this plus the values."""
    values, mask = rollout_values(batch, by="advantage=gae"), batch.mask
    if holes == "skip" or is_packed(mask):
        delta = token_rewards(batch) + gamma * next_valid(values, mask) - values
        total = suffix_sum(delta, mask, discount=gamma * lam)
    else:
        following = torch.nn.functional.pad(values, (0, 1))[:, 1:]  # 0 where masked
        delta = token_rewards(batch) + gamma * following - values
        total = _sum_to_hole(delta, mask, gamma * lam)
    return torch.where(rewarded(batch), total, 0.0)


def _sum_to_hole(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], discount: float
) -> Float[Tensor, "seq tok"]:
    """Σ discount^{s-t} x_s up to the next masked column: the sum to the end less what is behind."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    hole = torch.where(mask, mask.shape[1], columns).flip(1).cummin(dim=1).values.flip(1)
    whole = suffix_sum(x.masked_fill(~mask, 0.0), torch.ones_like(mask), discount=discount)
    behind = torch.nn.functional.pad(whole, (0, 1)).gather(1, hole)
    return torch.where(mask, whole - discount ** (hole - columns).to(x.dtype) * behind, 0.0)


def next_valid(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"]
) -> Float[Tensor, "seq tok"]:
    """x, 0 where masked, at the next valid entry of the row; 0 after the last."""
    if is_packed(mask):
        return torch.nn.functional.pad(x, (0, 1))[:, 1:]
    order = packing(mask)
    following = torch.nn.functional.pad(x.gather(1, order), (0, 1))[:, 1:]
    return torch.empty_like(x).scatter(1, order, following)


def rollout_values(batch: Batch, *, by: str) -> Float[Tensor, "seq tok"]:
    if batch.old_values is not None:
        return torch.where(batch.mask, batch.old_values, 0.0)
    return torch.where(batch.mask, batch.require("values", by=by).detach(), 0.0)
