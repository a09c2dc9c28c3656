"""Rewards scaled by the novelty of a response's gradient among those to the same prompt."""

from typing import Literal

import torch

from proxpo.ops.groups import group_range
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics

Reading = Literal["printed", "described", "signed"]


def novelty(
    features: Float[Tensor, "seq dim"],
    rewards: Float[Tensor, " seq"],
    group: Int[Tensor, " seq"],
) -> Float[Tensor, " seq"]:
    """ν_i = max(1 - Σ_{j≠i} w_ij cos²(Φ_i, Φ_j), 0),  w_ij ∝ e^{r_j} over the others of the group.

    1 for a response alone or with Φ = 0, 0 if all Φ are parallel. Responses without a reward (NaN)
    are nobody's other.
    """
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    others = (group[:, None] == group) & ~rewards.isnan()
    others = others & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    score = torch.where(others, rewards.double(), -torch.inf)
    weight = torch.where(others, score - score.logsumexp(dim=1, keepdim=True), -torch.inf).exp()
    return (1 - (weight * (unit @ unit.T).square()).sum(dim=1)).clamp(min=0.0)


def within_group(
    x: Float[Tensor, " seq"],
    group: Int[Tensor, " seq"],
    counted: Bool[Tensor, " seq"],
    *,
    min_spread: float,
) -> tuple[Float[Tensor, " seq"], Bool[Tensor, " seq"]]:
    """(x - min)/(max - min) of the counted rows of the group, and where they differ at all."""
    bottom, top = group_range(x, group, counted)
    differ = counted & (top - bottom > min_spread)
    return torch.where(differ, (x - bottom) / (top - bottom), 0.0), differ


@stage("reward", needs=("rewards", "group", "features"))
def gradient_novelty(
    *,
    strength: float = 1.0,
    reading: Reading = "described",
    clip: float = 3.0,
    min_spread: float = 1e-6,
):
    """r_i -> clip(r_i f_i, ±clip), f_i from the novelty ν̄_i in [0, 1]. G2RL, arXiv:2512.15687.

    "printed" (eq. 12): f = 1 + λ r ν̄; for r = ±1 that adds λν̄ to both. "described" (the prose):
    f = 1 + λ ν̄, which enlarges rewards and penalties alike. "signed": f = 1 + λ(2ν̄ - 1), so that
    what is not new counts less. ν̄ is ν scaled to [0, 1] within the group; where novelties differ by
    no more than `min_spread`, as in groups of one or two, f = 1.

    strength: λ, the weight of the novelty
    reading: formula of the factor: "described", "printed" or "signed"
    clip: bound on the shaped reward
    min_spread: novelties closer than this change no reward
    """
    check_numbers("gradient_novelty", "[0, inf)", strength=strength, min_spread=min_spread)
    check_numbers("gradient_novelty", "(0, inf]", clip=clip)

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        r = batch.rewards.double()
        scored = ~r.isnan()
        new = novelty(batch.features, r, batch.group)
        share, differ = within_group(new, batch.group, scored, min_spread=min_spread)
        factor = {
            "printed": lambda: strength * r * share,
            "described": lambda: strength * share,
            "signed": lambda: strength * (2 * share - 1),
        }[reading]()
        shaped = torch.where(differ, r * (1 + factor), r).clamp(-clip, clip)
        total, n = ctx.all_sum(torch.stack([new[scored].sum(), scored.sum().double()]))
        metrics = {"reward/novelty": total / n.clamp(min=1)}
        return batch.replace(rewards=shaped.to(batch.rewards.dtype)), metrics

    return Parts(apply=shape, idle=() if strength else ("reading", "min_spread"))
