"""Log-ratios smoothed along the response by a causal filter with precomputed gains."""

from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.ratio._scan import check_variances, filter_fixed, filter_log_ratio
from proxpo.stages.ratio.token import check_limit
from proxpo.types import Batch, Context, PerToken

MaskMode = Literal["zero", "skip"]


def own_token_ratio(
    filtered: Float[Tensor, "seq tok"], batch: Batch, limit: float
) -> Float[Tensor, "seq tok"]:
    """r̂_t = exp(min(log π - sg[log π] + sg[x̂_t], limit)): only the token's own gradient."""
    return (batch.logp - batch.logp.detach() + filtered.detach()).clamp(max=limit).exp()


@stage("ratio", needs=("old_logp",), gives="ratio")
def kalman(
    *,
    q: float = 1e-6,
    v: float = 1.0,
    p0: float = 0.0,
    mask_mode: MaskMode = "zero",
    clamp: bool = True,
    limit: float = 10.0,
):
    """x̂_t = (1-K_t) x̂_{t-1} + K_t z_t, z = log π - log π_old; r̂ = exp(x̂). KPO, arXiv:2602.10609.

    K_t = P⁻_t/(P⁻_t + V), P⁻_t = P_{t-1} + Q, P_t = V K_t, from P_{-1} = p0 (released: 0).
    No gradient flows through the filter. mask_mode="zero": a masked position before a token of the
    response, also one of a prompt, counts as an observation of 0 and uses up a gain (released code,
    whose rows begin with the response); "skip": it is passed over. clamp holds the gains within
    [1e-6, 1-1e-6].

    q: variance by which the true log-ratio moves from token to token
    v: variance of an observed log-ratio
    p0: variance before the first token
    mask_mode: a masked position, of a prompt too, counts as an observation of 0 ("zero") or is
        passed over ("skip")
    clamp: hold the gains within [1e-6, 1-1e-6]
    limit: upper bound on the log-ratio
    """
    check_variances(q=q, v=v, p0=p0)
    check_limit(limit, stage="kalman")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        z = (batch.logp - batch.old_logp).detach()
        x = filter_log_ratio(z, batch.mask, q=q, v=v, p0=p0, mask_mode=mask_mode, clamp=clamp)
        return own_token_ratio(x, batch, limit), {}

    return ratio


@stage("ratio", needs=("old_logp",), gives="ratio")
def ema(
    *,
    mode: Literal["scheduled", "fixed"] = "scheduled",
    alpha: float = 0.01,
    q: float = 1e-6,
    v: float = 1.0,
    p0: float = 1.0,
    mask_mode: MaskMode = "zero",
    limit: float = 10.0,
):
    """ρ_t = (1-α_t) ρ_{t-1} + α_t z_t; r̂ = exp(ρ). EMA-KPO.

    mode="scheduled": α_t = K_t(q, v, p0), the Kalman gains from P_{-1} = p0 = 1; p0 = 0 gives KPO.
    mode="fixed": the constant `alpha`.

    mode: gains of the Kalman filter ("scheduled"), or a constant ("fixed")
    alpha: the constant gain
    q: variance by which the true log-ratio moves from token to token
    v: variance of an observed log-ratio
    p0: variance before the first token
    mask_mode: a masked position, of a prompt too, counts as an observation of 0 ("zero") or is
        passed over ("skip")
    limit: upper bound on the log-ratio
    """
    check_variances(q=q, v=v, p0=p0)
    if not 0 <= alpha <= 1:
        raise ProxpoError(f"ema: alpha must be in [0, 1], got {alpha:g}")
    check_limit(limit, stage="ema")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        z = (batch.logp - batch.old_logp).detach()
        if mode == "fixed":
            rho = filter_fixed(z, batch.mask, alpha=alpha, mask_mode=mask_mode)
        else:
            rho = filter_log_ratio(z, batch.mask, q=q, v=v, p0=p0, mask_mode=mask_mode, clamp=False)
        return own_token_ratio(rho, batch, limit), {}

    return Parts(apply=ratio, idle=("q", "v", "p0") if mode == "fixed" else ("alpha",))
