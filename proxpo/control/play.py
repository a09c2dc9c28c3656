"""Episodes as they are played: environments with the policy's memory, and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from proxpo.control.environments import Environments, Normaliser
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive
from proxpo.train.job import Examined
from proxpo.train.observer import Observer

RECENT = 100  # episodes whose mean return is reported
LONGEST = 10_000  # steps of an evaluated episode


@dataclass(kw_only=True)
class Play:
    """Environments with the memory of a recurrent policy and the returns of their episodes.

    begun: episodes begun in each environment; over: those that have ended since
    recent: (return, length) of the last that ended
    """

    environments: Environments
    memory: Float[Tensor, "env memory"]
    begun: list[int] = field(default_factory=list)
    over: list[bool] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    recent: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.environments)
        self.begun, self.over = [0] * count, [True] * count
        self.returns, self.lengths = [0.0] * count, [0] * count

    def begin(self, index: int, seed: int) -> None:
        self.environments.reset(index, seed)
        self.memory[index] = 0.0
        self.begun[index] += 1
        self.over[index] = False
        self.returns[index], self.lengths[index] = 0.0, 0

    def count(self, index: int, reward: float, *, over: bool) -> None:
        """Counts a step of the environment `index`, and its episode where it is over."""
        self.returns[index] += reward
        self.lengths[index] += 1
        if over:
            self.end(index)

    def end(self, index: int) -> None:
        """Counts the episode of the environment `index` as it is."""
        self.over[index] = True
        self.recent = [*self.recent, (self.returns[index], self.lengths[index])][-RECENT:]

    def metrics(self, last: int = RECENT) -> dict[str, float]:
        """Mean and spread of the last returns, and the mean length; none before the first end."""
        if not self.recent:
            return {}
        returns, lengths = (torch.tensor(c).double() for c in zip(*self.recent[-last:]))
        return {
            "reward": float(returns.mean()),
            "reward_std": float(returns.std(correction=0)),
            "completions/mean_length": float(lengths.mean()),
        }

    def state(self) -> dict[str, Any]:
        return {
            "environments": self.environments.state(),
            "memory": self.memory.clone(),
            "begun": list(self.begun),
            "over": list(self.over),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "recent": [list(pair) for pair in self.recent],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.environments.load(state["environments"])
        self.memory = state["memory"].clone()
        self.begun, self.returns = list(state["begun"]), list(state["returns"])
        self.lengths, self.over = list(state["lengths"]), list(state["over"])
        self.recent = [(float(a), int(b)) for a, b in state["recent"]]


def policy_inputs(
    actor: Any,
    normaliser: Normaliser | None,
    observations: np.ndarray,
    memory: Tensor,
) -> Float[Tensor, "env obs"]:
    """[observation, memory] in the dtype of the network."""
    x = torch.from_numpy(observations)
    x = x if normaliser is None else normaliser(x)
    dtype = next(actor.parameters()).dtype
    x = x.to(dtype, copy=True)  # the array is written to at the next step
    return torch.cat([x, memory.to(dtype)], dim=1) if memory.shape[1] else x


def examine(
    actor: Any,
    normaliser: Normaliser | None,
    environments: Environments,
    episodes: int,
    observer: Observer,
) -> Examined:
    """Mean return and length of the deterministic policy, on the same episodes at every call."""
    returns, lengths = [0.0] * episodes, [0] * episodes
    for first in range(0, episodes, len(environments)):
        active = list(range(min(len(environments), episodes - first)))
        for index in active:
            environments.reset(index, exam_seed(first + index))
        memory = actor.start(len(environments))
        for _ in range(LONGEST):
            observer.on_progress("evaluating", first, episodes)
            drawn = actor.draw(
                policy_inputs(actor, normaliser, environments.observations, memory), None
            )
            actions = actor.action(drawn).double().numpy()
            outcomes = environments.step(actions[active], active)
            memory = actor.remember(drawn)
            for index, reward in zip(active, outcomes.reward):
                returns[first + index] += reward
                lengths[first + index] += 1
            active = [index for index, over in zip(active, outcomes.over) if not over]
            if not active:
                break
    scores = torch.tensor(returns)
    metrics = {
        "eval/reward": float(scores.mean()),
        "eval/reward_std": float(scores.std(correction=0)),
        "eval/mean_length": float(torch.tensor(lengths).float().mean()),
    }
    shown = [
        {
            "prompt": f"episode with seed {exam_seed(i)}",
            "completion": f"return {returns[i]:.2f} in {lengths[i]} steps",
            "answer": "",
        }
        for i in range(min(episodes, 8))
    ]
    return metrics, shown


def exam_seed(number: int) -> int:
    """The seed of the reset that begins an evaluated episode."""
    return derive(0, "exam", number) % 2**31


def result(
    before: dict[str, float], after: dict[str, float], *, steps: int, seconds: float
) -> dict[str, Any]:
    """The results of a run in control: mean returns of the deterministic policy."""
    return {
        "score": "mean return",
        "unit": "steps",
        "accuracy_before": None,
        "accuracy_after": None,
        "reward_before": before.get("eval/reward"),
        "reward_after": after["eval/reward"],
        "kl": None,
        "tokens": steps,
        "tokens_per_second": round(steps / max(seconds, 1e-9), 1),
    }


__all__ = ["Play", "exam_seed", "examine", "policy_inputs", "result"]
