"""GAE over episodes whose turns are rows of their own."""

import torch

from proxpo.ops.masked import last_valid, suffix_sum
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage.attempts import numbers
from proxpo.stages.advantage.returns import next_valid, rollout_values, whiten
from proxpo.types import Batch, Context, PerToken


@stage("advantage", needs=("group", "episode", "step", "step_rewards"))
def episode_gae(*, gamma: float = 1.0, lam: float = 1.0, whitening: bool = True):
    """A_t = δ_t + γλ A_next, δ_t = ρ_t + γ V_next - V_t, over the valid tokens of an episode.

    The token after the last one of a turn is the first of the next turn; ρ is a turn's reward on
    its last token. Values are those at rollout time (`old_values`, else `values`).

    gamma: discount from token to token
    lam: GAE's λ, the discount of later TD errors
    whitening: centre and scale advantages over all tokens of the step
    """
    check_numbers("episode_gae", "[0, 1]", gamma=gamma, lam=lam)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        out = raw_episode_gae(batch, gamma=gamma, lam=lam)
        return whiten(out, batch.mask, all_sum=ctx.all_sum) if whitening else out, {}

    return advantage


def raw_episode_gae(batch: Batch, *, gamma: float, lam: float) -> Float[Tensor, "seq tok"]:
    """GAE over episodes before whitening."""
    values = rollout_values(batch, by="advantage=episode_gae")
    rows, columns = places(batch)
    if not len(rows):
        return torch.zeros_like(values)
    shape = (int(rows.max()) + 1, int(columns.max()) + 1)
    inside = batch.mask.new_zeros(shape).index_put((rows, columns), batch.mask.new_ones(()))
    rewards = torch.where(last_valid(batch.mask), batch.step_rewards[:, None], 0.0)
    v, rho = (
        values.new_zeros(shape).index_put((rows, columns), x.to(values.dtype)[batch.mask])
        for x in (values, rewards)
    )
    total = suffix_sum(rho + gamma * next_valid(v, inside) - v, inside, discount=gamma * lam)
    return torch.zeros_like(values).masked_scatter(batch.mask, total[rows, columns])


def places(batch: Batch) -> tuple[Int[Tensor, " valid"], Int[Tensor, " valid"]]:
    """Number of the episode, and place in it, of every valid token in the order of the batch."""
    episode, lengths = numbers(batch.group, batch.episode), batch.mask.sum(dim=1)
    order = batch.step.argsort(stable=True)
    order = order[episode[order].argsort(stable=True)]
    before = lengths[order].cumsum(0) - lengths[order]  # valid tokens of all rows ahead
    ahead = torch.empty_like(before).index_put((order,), before)
    first = torch.full_like(ahead, int(lengths.sum())).scatter_reduce(0, episode, ahead, "amin")
    column = (ahead - first[episode])[:, None] + batch.mask.long().cumsum(dim=1) - 1
    return episode[:, None].expand_as(batch.mask)[batch.mask], column[batch.mask]


__all__ = ["episode_gae", "places", "raw_episode_gae"]
