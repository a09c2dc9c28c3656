"""Advantages of turns in several attempts at one task: returns that cross attempts, by state."""

import torch

from proxpo.fields import declare_field
from proxpo.ops.groups import group_stats, group_sum, over_std
from proxpo.ops.masked import spread
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken

PerTurn = Float[Tensor, " seq"]
_FROM = "from the environment"
ATTEMPTS = (  # fields of an environment whose every turn is a row of its own
    declare_field(
        "episode",
        "seq",
        kind="int",
        source="environment",
        doc=f"number of the episode a turn belongs to, within its group, {_FROM}",
    ),
    declare_field(
        "step",
        "seq",
        kind="int",
        source="environment",
        doc=f"place of a turn in its episode, {_FROM}",
    ),
    declare_field(
        "attempt",
        "seq",
        kind="int",
        source="environment",
        doc=f"number of the attempt a turn belongs to, {_FROM}",
    ),
    declare_field(
        "reflect",
        "seq",
        kind="bool",
        source="environment",
        doc=f"1 for a turn between two attempts, which looks back and does not play, {_FROM}",
    ),
    declare_field(
        "step_rewards",
        "seq",
        source="environment",
        doc=f"reward of each turn by itself, {_FROM}",
        squared=True,
    ),
    declare_field(
        "state",
        "seq",
        kind="int",
        source="environment",
        doc=f"number of the state that a turn was taken in, equal for equal states, {_FROM}",
    ),
)


def cross_episode_returns(
    rewards: PerTurn,
    episode: Int[Tensor, " seq"],
    step: Int[Tensor, " seq"],
    attempt: Int[Tensor, " seq"],
    reflect: Bool[Tensor, " seq"],
    *,
    gamma_step: float,
    gamma_traj: float,
) -> PerTurn:
    """G of every turn, from the last to the first of an episode, with G = 0 after it.

    play:     G = r + γ_step G, or r + γ_traj G where the next turn of play is in another attempt
    reflect:  G of the turn of play that follows, which it leaves as it is
    """
    _, index = episode.unique(return_inverse=True)
    order = step.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    rows = index[order]
    starts = torch.searchsorted(
        rows, torch.arange(int(rows.max()) + 1 if len(rows) else 0, device=rows.device)
    )
    place = torch.arange(len(rows), device=rows.device) - starts[rows]
    shape = (len(starts), int(place.max()) + 1 if len(place) else 0)

    def table(x: Tensor, empty: float) -> Tensor:
        return x.new_full(shape, empty).index_put((rows, place), x[order])

    reward, number = table(rewards, 0.0), table(attempt, 0.0)
    plays = table(~reflect, 0.0)
    total, following = rewards.new_zeros(shape[0]), number.new_zeros(shape[0])
    returns = torch.zeros_like(reward)
    within, between = rewards.new_tensor([gamma_step, gamma_traj])
    for t in reversed(range(shape[1])):
        gamma = torch.where(following == number[:, t], within, between)
        total = torch.where(plays[:, t], reward[:, t] + gamma * total, total)
        following = torch.where(plays[:, t], number[:, t], following)
        returns[:, t] = total
    return torch.empty_like(rewards).index_put((order,), returns[rows, place])


@stage("advantage", needs=("group", "void", *(field.name for field in ATTEMPTS)))
def attempts(
    *,
    gamma_step: float = 0.95,
    gamma_traj: float = 0.6,
    step_weight: float = 1.0,
    scale: bool = False,
    invalid: float = 0.5,
    eps: float = 1e-6,
):
    """A = (E - mean_g E) + step_weight·(G - mean_cluster G), one value per turn. LaMer, 2512.16848.

    E: rewards of the turn's own attempt, less `invalid` for a void turn; 0 for a reflection. Its
    mean is over all turns of the group, 0 for a group of one turn.
    G: cross-episode return; a cluster is the turns of the group in equal states, its reflections
    are one more, and a turn alone has no part here. scale=True divides each part by its (unbiased
    std + eps), 1 + eps if alone.

    gamma_step: discount from turn to turn within an attempt
    gamma_traj: discount from an attempt to the next
    step_weight: weight of the part that compares turns in equal states
    scale: divide each part by its std
    invalid: subtracted for a void turn
    eps: added to the std
    """
    check_numbers("attempts", "[0, 1]", gamma_step=gamma_step, gamma_traj=gamma_traj)
    check_numbers("attempts", "[0, inf)", step_weight=step_weight, invalid=invalid, eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        rewards, group = batch.step_rewards, batch.group
        plays = ~batch.reflect
        episode = numbers(group, batch.episode)
        returns = cross_episode_returns(
            rewards,
            episode,
            batch.step,
            batch.attempt,
            batch.reflect,
            gamma_step=gamma_step,
            gamma_traj=gamma_traj,
        )
        played = torch.where(plays, rewards, 0.0)
        earned = torch.where(plays, group_sum(played, numbers(episode, batch.attempt)), 0.0)
        earned = earned - invalid * batch.void.to(earned.dtype)
        state = numbers(torch.where(plays, batch.state, 0), batch.reflect.long())
        out = _centred(earned, group, scale, eps, alone="raw") + step_weight * _centred(
            returns, numbers(group, state), scale, eps, alone="zero"
        )
        return spread(out, batch.mask), {
            "attempts/return": returns.mean() if len(returns) else returns.sum(),
            "attempts/last": batch.attempt.to(returns.dtype).mean(),
        }

    return Parts(apply=advantage, idle=() if scale else ("eps",))


def numbers(first: Int[Tensor, " seq"], second: Int[Tensor, " seq"]) -> Int[Tensor, " seq"]:
    """A number for each pair of labels, the same for equal pairs."""
    return torch.stack([first, second], dim=1).unique(dim=0, return_inverse=True)[1]


def _centred(x: PerTurn, cluster: Int[Tensor, " seq"], scale: bool, eps: float, *, alone: str):
    """x less the mean of its cluster, over the cluster's std if `scale`; a single one as told."""
    stats = group_stats(x, cluster)
    single = stats.size == 1
    out = torch.where(single, x if alone == "raw" else 0.0, x - stats.mean)
    return over_std(out, torch.where(single, 1.0, stats.std) + eps) if scale else out


__all__ = ["ATTEMPTS", "attempts", "cross_episode_returns", "numbers"]
