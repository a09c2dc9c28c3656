"""Prompts that are neither too easy nor too hard."""

from proxpo.errors import ProxpoError
from proxpo.ops.groups import group_stats, group_sum
from proxpo.ops.outcomes import solved
from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.filter.filters import check_redrawing
from proxpo.types import Batch, Context, Metrics


@stage("prompts", needs=("group", "rewards"))
def within_reach(
    *,
    low: float = 0.1,
    high: float = 0.9,
    min_std: float = 1e-3,
    min_responses: int = 4,
    generation_factor: int = 1,
    max_rounds: int = 10,
):
    """Keeps a prompt iff low ≤ share solved ≤ high and its rewards' std is at least min_std.

    min_responses: how many responses with tokens and a reward it needs. generation_factor and
    max_rounds as in prompts=informative. SimpleTIR's released recipe, which draws 3 times as many.

    low, high: smallest and largest share of right responses
    min_std: smallest std of the rewards
    generation_factor: prompts drawn in a round, in multiples of those still missing
    max_rounds: rounds of drawing at most
    """
    check_redrawing("within_reach", generation_factor, max_rounds)
    check_numbers("within_reach", "[0, inf)", min_std=min_std, min_responses=min_responses)
    if not 0 <= low <= high <= 1:
        raise ProxpoError(f"within_reach: need 0 ≤ low ≤ high ≤ 1, got {low}, {high}")

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, " seq"], Metrics]:
        usable = batch.mask.any(dim=1) & ~batch.rewards.isnan()
        stats = group_stats(batch.rewards.masked_fill(~usable, float("nan")), batch.group)
        right = solved(batch, by="prompts=within_reach") & usable
        share = group_sum(right.double(), batch.group) / stats.size.double().clamp(min=1)
        kept = (share >= low) & (share <= high) & (stats.std >= min_std)
        kept = kept & (stats.size >= min_responses)
        return kept, {"prompts/kept": kept.to(batch.logp.dtype).mean()}

    return keep
