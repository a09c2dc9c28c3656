from typing import Any

import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, per_row

from methods._case import Case
from methods.loops import (
    clipped,
    entropies,
    everywhere,
    groups,
    mean,
    number,
    plus,
    ratio,
    std,
    token_mean,
)
from proxpo import Batch, ProxpoError
from proxpo.stages.advantage import cross_episode_returns

SLUG = "lamer"


def returns_of(b: Batch, gamma_step: float, gamma_traj: float) -> dict[int, float]:
    """Backwards over the turns of each episode, as the paper's rollout does."""
    out: dict[int, float] = {}
    for members in groups(b).values():
        for episode in {int(b.episode[i]) for i in members}:
            own = [i for i in members if int(b.episode[i]) == episode]
            total, following = 0.0, None
            for i in sorted(own, key=lambda i: -int(b.step[i])):
                if not b.reflect[i]:
                    same = following is None or following == int(b.attempt[i])
                    gamma = gamma_step if same else gamma_traj
                    total = number(b.step_rewards[i]) + gamma * total
                    following = int(b.attempt[i])
                out[i] = total
    return out


def earned_of(b: Batch, invalid: float) -> dict[int, float]:
    """Rewards of the turn's own attempt; 0 for a reflection; less for a void turn."""
    out = {}
    for members in groups(b).values():
        for i in members:
            own = [
                number(b.step_rewards[j])
                for j in members
                if (b.episode[j], b.attempt[j]) == (b.episode[i], b.attempt[i]) and not b.reflect[j]
            ]
            out[i] = (0.0 if b.reflect[i] else sum(own)) - invalid * bool(b.void[i])
    return out


def cluster(b: Batch, i: int) -> str:
    """The state of a turn; all reflections of a group share one, whatever their `state`."""
    return "reflection" if b.reflect[i] else str(int(b.state[i]))


def gigpo(b: Batch, *, gammas: tuple[float, float], weight: float, scale: bool, invalid: float):
    g, e, out = returns_of(b, *gammas), earned_of(b, invalid), {}
    for members in groups(b).values():
        for i in members:
            of_group = [e[j] for j in members]
            alike = [g[j] for j in members if cluster(b, j) == cluster(b, i)]
            first = e[i] - (mean(of_group) if len(of_group) > 1 else 0.0)
            second = g[i] - mean(alike)
            if scale:
                first /= (std(of_group) if len(of_group) > 1 else 1.0) + 1e-6
                second /= (std(alike) if len(alike) > 1 else 1.0) + 1e-6
            out[i] = first + weight * second
    return out


def lamer(b: Batch, *, gammas=(0.95, 0.6), weight=1.0, scale=False, invalid=0.5, entropy=0.001):
    a = everywhere(gigpo(b, gammas=gammas, weight=weight, scale=scale, invalid=invalid), b)
    x = clipped(ratio(b), a, 0.2, 0.2, dual=3.0)
    return token_mean(plus(x, (-entropy, entropies(b))) if entropy else x, b)


def scaled(b: Batch) -> Any:
    return lamer(b, gammas=(0.8, 0.9), weight=0.5, scale=True, invalid=0.1, entropy=0.0)


CASES = {
    SLUG: Case(SLUG, {}, lamer),
    "lamer-scaled": Case(
        SLUG,
        {
            "gamma_step": 0.8,
            "gamma_traj": 0.9,
            "step_weight": 0.5,
            "scale": True,
            "invalid": 0.1,
            "entropy_coef": 0.0,
        },
        scaled,
    ),
}


def played(*turns: tuple[int, float | None], gamma_step: float, gamma_traj: float) -> torch.Tensor:
    """Returns of one episode of (attempt, reward), None for the reward of a reflection."""
    order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(3))
    reflect = torch.tensor([reward is None for _, reward in turns])
    made = cross_episode_returns(
        f64([reward or 0.0 for _, reward in turns])[order],
        torch.zeros(len(turns), dtype=torch.long),
        torch.arange(len(turns))[order],
        torch.tensor([attempt for attempt, _ in turns])[order],
        reflect[order],
        gamma_step=gamma_step,
        gamma_traj=gamma_traj,
    )
    return torch.empty_like(made).index_put((order,), made)


EXAMPLE = ((0, 0.0), (0, -0.1), (0, None), (1, 0.0), (1, 1.0))


@pytest.mark.checks(SLUG, "plays [0, -.1] | reflect | plays [0, 1]: returns .4465 .47 .95 .95 1")
def test_example_of_the_sheet() -> None:
    close(played(*EXAMPLE, gamma_step=0.95, gamma_traj=0.6), [0.4465, 0.47, 0.95, 0.95, 1.0])


@pytest.mark.checks(
    SLUG, "γ_traj = 0: attempts stand alone, a reflection has the next one's return"
)
def test_attempts_stand_alone_without_gamma_traj() -> None:
    close(played(*EXAMPLE, gamma_step=0.95, gamma_traj=0.0), [-0.095, -0.1, 0.95, 0.95, 1.0])


@pytest.mark.checks(SLUG, "γ_traj = γ_step: one long episode in which reflections take no time")
def test_one_long_episode() -> None:
    found = played(*EXAMPLE, gamma_step=0.9, gamma_traj=0.9)
    whole = played(*((0, reward) for _, reward in EXAMPLE if reward is not None),
                   gamma_step=0.9, gamma_traj=0.0)  # fmt: skip
    close(found[[0, 1, 3, 4]], whole)
    close(found[2], found[3])


def single(seed: int = 4) -> Batch:
    """A batch of one attempt without reflections."""
    batch = make_batch(seed, groups=2, size=4)
    return batch.replace(
        attempt=torch.zeros_like(batch.attempt), reflect=torch.zeros_like(batch.reflect)
    )


@pytest.mark.checks(SLUG, "one attempt: ordinary discounted returns and GiGPO")
def test_one_attempt_is_gigpo() -> None:
    batch = single()
    for traj in (0.0, 0.6):  # has no say
        found = per_row(advantages(method(SLUG, gamma_traj=traj), batch), batch)
        g, r = torch.zeros(8).double(), batch.step_rewards
        total = torch.zeros(8).double()
        for i in range(8):
            same = [j for j in range(8) if batch.group[j] == batch.group[i]
                    and batch.episode[j] == batch.episode[i]]  # fmt: skip
            later = [j for j in same if batch.step[j] >= batch.step[i]]
            g[i] = sum(0.95 ** int(batch.step[j] - batch.step[i]) * r[j] for j in later)
            total[i] = r[same].sum() - 0.5 * batch.void[i]
        for i in range(8):
            rows = batch.group == batch.group[i]
            alike = rows & (batch.state == batch.state[i])
            close(found[i], total[i] - total[rows].mean() + g[i] - g[alike].mean())


@pytest.mark.checks(SLUG, "a constant on all E of a group changes nothing; ΣA^E = 0 over a group")
def test_episode_part_is_centred() -> None:
    batch = make_batch(5, size=4)
    plays = batch.replace(reflect=torch.zeros_like(batch.reflect), state=batch.step)
    only = method(SLUG, step_weight=0.0)
    found = per_row(advantages(only, plays), plays)
    for g in range(3):
        close(found[plays.group == g].sum(), 0.0)
    ones = plays.replace(step=torch.arange(12), attempt=torch.arange(12), episode=0 * plays.episode)
    shifted = ones.replace(step_rewards=ones.step_rewards + 3.0)
    close(advantages(only, shifted), advantages(only, ones))


@pytest.mark.checks(SLUG, "ΣA^S = 0 over each cluster of equal states")
def test_step_part_is_centred() -> None:
    batch = make_batch(6, size=4)
    both, first = method(SLUG), method(SLUG, step_weight=0.0)
    part = per_row(advantages(both, batch) - advantages(first, batch), batch)
    for g in range(3):
        for state in range(2):
            inside = (batch.group == g) & (batch.state == state)
            close(part[inside].sum(), 0.0)
    assert part.abs().max() > 0.01


def test_refused() -> None:
    with pytest.raises(ProxpoError, match=r"gamma_traj must be in \[0, 1\], got 1\.5"):
        method(SLUG, gamma_traj=1.5)
