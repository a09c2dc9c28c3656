"""Targets of the critic in episodes whose turns are rows of their own."""

from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage.episode import raw_episode_gae
from proxpo.stages.advantage.returns import rollout_values
from proxpo.types import Batch, Context, Metrics


@stage("reward", needs=("group", "episode", "step", "step_rewards"))
def episode_targets(*, gamma: float = 1.0, lam: float = 1.0):
    """Leaves the rewards; adds the critic's target R = A + V_old, A of advantage=episode_gae.

    Before turns are pruned, whose rewards belong to the turns ahead of them.

    gamma: discount from token to token
    lam: GAE's λ, the discount of later TD errors
    """
    check_numbers("episode_targets", "[0, 1]", gamma=gamma, lam=lam)

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        if batch.returns is not None or (batch.values is None and batch.old_values is None):
            return batch, {}
        raw = raw_episode_gae(batch, gamma=gamma, lam=lam)
        return batch.replace(returns=raw + rollout_values(batch, by="reward=episode_targets")), {}

    return shape
