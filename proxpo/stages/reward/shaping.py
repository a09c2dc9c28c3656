"""Terms added to the reward: a KL penalty, a length penalty, a clip."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.kl import Clamp, Estimator, kl_estimate
from proxpo.ops.masked import row_mean, row_sum
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage.returns import token_rewards
from proxpo.types import Batch, Context, Metrics, State

ShapedBatch = tuple[Batch, Metrics]
DAPO_LENGTH = 20480.0  # of DAPO's runs, with a soft zone of a fifth of it


@stage("reward", needs=("rewards",))
def clip_reward(*, low: float, high: float):
    """r_i -> clip(r_i, low, high).

    low, high: bounds on the reward
    """
    if not low <= high or low == math.inf or high == -math.inf:
        raise ProxpoError(f"clip_reward: low must not be above high, got {low} and {high}")

    def shape(batch: Batch, ctx: Context) -> ShapedBatch:
        return batch.replace(rewards=batch.rewards.clamp(low, high)), {}

    return shape


@stage("reward", needs=("rewards",), length=DAPO_LENGTH)
def overlong_penalty(
    *,
    max_tokens: float | None = None,
    cache: float | None = None,
    factor: float = 1.0,
    floor: bool = True,
):
    """Soft overlong punishment, n the response length. DAPO, arXiv:2503.14476 eq. 13.

    0 if n ≤ L_max - L_c;  ((L_max - L_c) - n)/L_c up to n = L_max;  -1 beyond (floor=False: linear
    without the floor, as verl). L_c = 0 means no soft zone. max_tokens=None: L_max is the longest
    response that the host allows, 20480 without a host; cache=None: L_c is a fifth of L_max.

    max_tokens: L_max, the longest response; none: the host's limit
    cache: L_c, length of the soft zone; none: a fifth of L_max
    factor: weight of the penalty
    floor: hold the penalty at -1 beyond L_max
    """
    check_numbers("overlong_penalty", "[0, inf)", factor=factor)
    longest = DAPO_LENGTH if max_tokens is None else max_tokens
    zone = longest / 5 if cache is None else cache
    if not 0 <= zone <= longest or not longest > 0 or math.isinf(zone):
        raise ProxpoError(
            f"overlong_penalty: need 0 ≤ cache ≤ max_tokens, got {zone:g}, {longest:g}"
        )

    def shape(batch: Batch, ctx: Context) -> ShapedBatch:
        length = batch.mask.sum(dim=1).to(batch.rewards.dtype)
        if zone == 0:
            penalty = -(length > longest).to(length.dtype)
        else:
            penalty = ((longest - zone - length) / zone).clamp(max=0.0)
            penalty = penalty.clamp(min=-1.0) if floor else penalty
        share = (penalty < 0).to(length.dtype).mean()
        return batch.replace(rewards=batch.rewards + factor * penalty), {"reward/overlong": share}

    return shape


@stage("reward")
def kl_in_reward(
    *,
    coef: float = 0.001,
    estimator: Estimator | Literal["full"] = "k1",
    per: Literal["token", "sequence"] = "token",
    clamp: Clamp = "none",
    controller: Literal["fixed", "horizon", "doubling"] = "fixed",
    target: float = 0.1,
    horizon: float = 10000.0,
):
    """ρ_t = score_t - β·k(log π_old - log π_ref)_t, detached.

    estimator="full": KL(π_old‖π_ref) over the whole vocabulary, the batch field `ref_kl`.
    per="token" leaves it on the tokens (PPO, REINFORCE++); "sequence" subtracts its sum from the
    response's reward (RLOO). controller="horizon": β ← β(1 + clip(KL/target - 1, ±0.2)·n/horizon)
    with n responses (Ziegler et al., arXiv:1909.08593); "doubling": halved below target/1.5,
    doubled above 1.5·target (arXiv:1707.06347 section 4). KL is the mean over responses of their
    token means.

    coef: β, the weight of the KL at the start
    estimator: estimator of the KL, or "full" over the whole vocabulary
    per: "token": on each token; "sequence": its sum off the response's reward
    clamp: bounds on the estimate: "none", or those of a released code, by its name
    controller: rule that changes β: "fixed", "horizon" or "doubling"
    target: KL at which a controller leaves β alone
    horizon: responses over which controller="horizon" acts
    """
    check_numbers("kl_in_reward", "[0, inf)", coef=coef)
    check_numbers("kl_in_reward", "(0, inf)", target=target, horizon=horizon)
    if estimator == "full" and clamp != "none":
        raise ProxpoError(f"kl_in_reward: clamp={clamp} bounds an estimate, not estimator=full")

    def init() -> State:
        return {"coef": torch.tensor(float(coef), dtype=torch.float64)}

    def update(state: State, batch: Batch, metrics: Metrics) -> State:
        """The coefficient after a batch whose mean KL was `reward/kl`."""
        if "reward/kl" not in metrics:
            return state
        kl = metrics["reward/kl"].double().cpu()
        if controller == "horizon":
            error = (kl / target - 1).clamp(-0.2, 0.2)
            n = metrics["reward/responses"].double().cpu()
            return {"coef": state["coef"] * (1 + error * n / horizon)}
        if kl < target / 1.5:
            return {"coef": state["coef"] / 2}
        return {"coef": state["coef"] * 2 if kl > 1.5 * target else state["coef"]}

    def divergence(batch: Batch) -> Float[Tensor, "seq tok"]:
        if estimator == "full":
            return batch.ref_kl.detach()
        return kl_estimate(
            batch.old_logp, batch.ref_logp, estimator=estimator, clamp=clamp
        ).detach()

    def shape(batch: Batch, ctx: Context) -> ShapedBatch:
        if not coef:
            return batch, {}
        beta = ctx.state.get("coef", torch.tensor(coef, dtype=torch.float64)).to(batch.logp)
        kl = divergence(batch)
        rows = torch.stack([row_mean(kl, batch.mask).sum(), batch.mask.any(dim=1).sum().to(kl)])
        total, n = ctx.all_sum(rows)  # so that every rank adapts to the same KL
        metrics = {
            "reward/kl": total / n.clamp(min=1),
            "reward/kl_coef": beta,
            "reward/responses": n,
        }
        if per == "sequence":
            penalty = (beta * row_sum(kl, batch.mask)).to(batch.rewards.dtype)
            return batch.replace(rewards=batch.rewards - penalty), metrics
        kept = batch.replace(rewards=None)
        return batch.replace(token_rewards=token_rewards(kept) - beta * kl), metrics

    fixed = ("target", "horizon") if controller == "fixed" else ()
    idle = ("horizon",) if controller == "doubling" else fixed
    anchors = ("ref_kl",) if estimator == "full" else ("old_logp", "ref_logp")
    return Parts(
        apply=shape,
        init=init,
        update=update if coef and controller != "fixed" else None,
        needs=("rewards", *anchors) if coef else ("rewards",),
        instead={} if per == "sequence" else {"rewards": "token_rewards"},
        idle=idle if coef else ("estimator", "per", "clamp", "controller", "target", "horizon"),
    )
