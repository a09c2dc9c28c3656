"""A smooth gate instead of a hard clip."""

import torch

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


@stage("trust", takes=("ratio",), gives="loss")
def soft_gate(*, tau_pos: float = 1.0, tau_neg: float = 1.05):
    """x = -(4/τ)·σ(τ(r-1))·A, τ = τ_pos if A > 0 else τ_neg. SAPO, arXiv:2511.20347.

    The gradient weight is sech²(τ(r-1)/2)·r: 1 at r = 1, falling smoothly on both sides.

    tau_pos, tau_neg: sharpness of the gate for A > 0 and for A < 0
    """
    check_numbers("soft_gate", "(0, inf)", tau_pos=tau_pos, tau_neg=tau_neg)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        # A tensor among the choices: two plain numbers would be rounded to float32.
        tau = torch.where(batch.advantages > 0, ratio.new_full((), tau_pos), tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1))
        open_share = masked_mean(4 * (gate * (1 - gate)).detach(), batch.mask)
        return -(4 / tau) * gate * batch.advantages, {"trust/gate": open_share}

    return surrogate
