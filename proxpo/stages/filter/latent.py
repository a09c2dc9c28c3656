"""Filter of latent thoughts."""

from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics


@stage("filter", needs=("latent",))
def without_thoughts():
    """Masks out latent thoughts: the policy reads them and is not trained on them."""

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, "seq tok"], Metrics]:
        return ~batch.latent, {}

    return keep
