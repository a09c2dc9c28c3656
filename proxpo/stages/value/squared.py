"""Squared error of the critic, with returns computed once per rollout."""

import torch

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage.returns import Holes, raw_gae, rollout_values
from proxpo.types import Batch, Context, PerToken


@stage("value", needs=("values", "returns"))
def value_loss(
    *,
    coef: float = 1.0,
    clip: float | None = 0.5,
    gamma: float = 1.0,
    lam: float = 1.0,
    holes: Holes = "skip",
):
    """coef·½·max((V - R)², (V_clip - R)²), V_clip = clip(V, V_old ± clip), R = A_raw + V_old.

    clip=None: ½(V - R)². R uses the advantages before whitening, with their γ, λ and
    holes; R = V_old for a response without a reward. verl: clip 0.5; TRL: 0.2 with coefficient 0.1.

    coef: weight of the critic's loss
    clip: largest change of a value; none: unclipped
    gamma: discount from token to token
    lam: GAE's λ, the discount of later TD errors
    holes: masked positions inside a response: "skip" them, or "reset" the sum there
    """
    check_numbers("value_loss", "[0, inf)", coef=coef)
    check_numbers("value_loss", "[0, inf]", clip=clip)
    check_numbers("value_loss", "[0, 1]", gamma=gamma, lam=lam)

    def prepare(batch: Batch) -> dict[str, Tensor]:
        """R = A_raw + V_old, once per rollout; nothing without a critic or when given."""
        if batch.returns is not None or (batch.values is None and batch.old_values is None):
            return {}
        if batch.token_rewards is None:
            batch.require("rewards", by="value=value_loss")
        raw = raw_gae(batch, gamma=gamma, lam=lam, holes=holes)
        return {"returns": raw + rollout_values(batch, by="value=value_loss")}

    def loss(batch: Batch, ctx: Context) -> PerToken:
        old = rollout_values(batch, by="value=value_loss")
        error = (batch.values - batch.returns).square()
        if clip is None:
            return coef * error / 2, {}
        held = torch.clamp(batch.values, old - clip, old + clip)
        bound = (held - batch.returns).square()
        share = masked_mean((bound > error).detach(), batch.mask)
        return coef * torch.maximum(error, bound) / 2, {"value/clipped": share}

    return Parts(apply=loss, prepare=prepare)
