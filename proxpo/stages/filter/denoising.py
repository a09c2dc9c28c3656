"""Filter of denoising steps."""

from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics


@stage("filter", needs=("noise",))
def noisy_steps():
    """Masks out steps without noise, such as the last of a sampler: they have no density."""

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, "seq tok"], Metrics]:
        return batch.noise > 0, {}

    return keep
