"""The proximal term of mirror descent: a KL to the previous policy over an annealed step size."""

from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.ops.kl import kl_estimate, kl_exact
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Clock, Context, PerToken

MirrorEstimator = Literal["sampled", "k3", "exact"]
Anneal = Literal["linear", "code", "constant"]


def mirror_step_size(
    clock: Clock, *, start: float = 1.0, floor: float = 0.05, anneal: Anneal = "linear"
) -> float:
    """t_k = start·(1 - k/K), never below `floor`; start where the run's length K is not known.

    anneal="code": 1 - (k-1)/K, above `start` in the first iteration.
    """
    if anneal == "constant" or not clock.steps:
        return start
    k = clock.step - 1 if anneal == "code" else clock.step
    return max(floor, start * (1 - k / clock.steps))


@stage("regularisers")
def mirror_kl(
    *,
    estimator: MirrorEstimator = "sampled",
    tsallis: float | None = None,
    start: float = 1.0,
    floor: float = 0.05,
    anneal: Anneal = "linear",
):
    """(1/t_k)·KL(π‖π_old), t_k falling over the run. MDPO, arXiv:2005.09814.

    "sampled": r log r - r + 1, unbiased on tokens of π_old, gradient r log r; "k3":
    log r + 1/r - 1, biased there; "exact": Σ_a π (log π - log π_old) over the vocabulary.
    tsallis=q ≠ 1 takes instead log_{2-q} π - log_{2-q} π_old of the sampled token, with
    log_q x = (x^{1-q} - 1)/(1-q).

    estimator: "sampled", "k3", or "exact" over the vocabulary
    tsallis: q of a Tsallis divergence in place of the KL; none: the KL
    start: t_0, the step size at the start
    floor: smallest step size
    anneal: course of t_k: "linear", as the released "code", or "constant"
    """
    check_numbers("mirror_kl", "(0, inf)", start=start, floor=floor)
    check_numbers("mirror_kl", "(-inf, inf)", tsallis=tsallis)
    if tsallis == 1.0:
        raise ProxpoError("mirror_kl: tsallis must differ from 1, where it is the plain logarithm")

    def divergence(batch: Batch) -> Float[Tensor, "seq tok"]:
        if tsallis is not None:
            power = tsallis - 1  # log_{2-q} x = (x^{q-1} - 1)/(q - 1)
            return ((power * batch.logp).exp() - (power * batch.old_logp.detach()).exp()) / power
        if estimator == "exact":
            return kl_exact(batch.vocab_logp, batch.old_vocab_logp.detach())
        if estimator == "k3":
            return kl_estimate(batch.logp, batch.old_logp.detach())
        d = batch.logp - batch.old_logp.detach()
        return d * d.exp() - d.expm1()

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        t = mirror_step_size(ctx.clock, start=start, floor=floor, anneal=anneal)
        kl = divergence(batch)
        metrics = {
            "kl/old": masked_mean(kl.detach(), batch.mask),
            "trust/step_size": kl.new_full((), t),
        }
        return kl / t, metrics

    exact = estimator == "exact" and tsallis is None
    return Parts(
        apply=penalty,
        needs=("vocab_logp", "old_vocab_logp") if exact else ("old_logp",),
        idle=(() if tsallis is None else ("estimator",))
        + (("floor",) if anneal == "constant" else ()),
    )
