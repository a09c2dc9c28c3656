"""Prompts whose responses are neither all right nor all wrong."""

from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import stage
from proxpo.stages.filter.filters import check_redrawing, informative_rows
from proxpo.types import Batch, Context, Metrics


@stage("prompts", needs=("group",), name="informative")
def informative_prompts(*, generation_factor: int = 1, max_rounds: int = 10):
    """Keeps a prompt iff its responses are neither all right nor all wrong; others are sampled.

    DAPO's dynamic sampling, arXiv:2503.14476 eq. 11. Each round a trainer draws `generation_factor`
    times the prompts it still needs, keeps the first good ones and drops the surplus, in at most
    `max_rounds` rounds. verl's script has generation_factor=3: fewer rounds, more samples.

    generation_factor: prompts drawn in a round, in multiples of those still missing
    max_rounds: rounds of drawing at most
    """
    check_redrawing("informative", generation_factor, max_rounds)

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, " seq"], Metrics]:
        kept = informative_rows(batch)
        return kept, {"prompts/kept": kept.to(batch.logp.dtype).mean()}

    return keep


__all__ = ["informative_prompts"]
