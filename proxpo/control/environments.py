"""Gymnasium environments: made by name, stepped together, and brought back to a saved step.

An episode is the seed of its reset and the actions since then, so that a checkpoint holds these and
`load` plays them again: exact for every environment whose randomness follows its seed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from proxpo.errors import ProxpoError, imported, nearest
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages._options import bind, brief


class Actions(NamedTuple):
    """The actions of an environment: `size` of them to choose from, or a box of `size` numbers."""

    discrete: bool
    size: int
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Options of a task gym:NAME.

    hide: components of the observation that the policy does not see
    normalise: observations less their running mean, over their running standard deviation
    make: further options of gymnasium.make
    """

    hide: tuple[int, ...] = ()
    normalise: bool = False
    make: Mapping[str, Any] = field(default_factory=dict)


def environment_options(
    *, hide: list | str | int | None = None, normalise: bool = False, make: dict | None = None
) -> EnvironmentOptions:
    """The options of a task gym:NAME; see `EnvironmentOptions`."""
    return EnvironmentOptions(hide=_components(hide), normalise=normalise, make=make or {})


def _components(hide: list | str | int | None) -> tuple[int, ...]:
    """Numbers of components, from a list or from the text `[1,3]` of --set."""
    text = "" if hide is None else str(hide).strip("[]")
    try:
        return tuple(int(number) for number in text.split(",") if text)
    except ValueError:
        raise ProxpoError(
            f"task.options.hide takes numbers of components, such as [1,3], got {brief(hide)}"
        ) from None


def read_options(name: str, options: Mapping[str, Any]) -> EnvironmentOptions:
    """The options of the task gym:`name`, checked."""
    return environment_options(**bind(environment_options, dict(options), what=f"task gym:{name}"))


def make_environment(name: str, options: Mapping[str, Any]) -> Any:
    """One environment with flat observations, or one line on the reason why there is none."""
    if not name:
        raise ProxpoError("task gym needs an environment: gym:NAME, such as gym:CartPole-v1")
    gym = imported("gymnasium", f"task gym:{name} needs gymnasium: pip install 'proxpo[control]'")
    try:
        environment = gym.make(name, **options)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise ProxpoError(f"task gym:{name} needs another package: {error}") from None
    except gym.error.UnregisteredEnv:
        hint = nearest(name, [each for each in gym.registry if "/" not in each])
        close = hint if "did you mean" in hint else "; gymnasium.pprint_registry() lists them"
        raise ProxpoError(f"unknown environment '{name}' of task gym:NAME{close}") from None
    except gym.error.Error as error:
        raise ProxpoError(f"task gym:{name}: {error}") from None
    except TypeError as error:
        raise ProxpoError(f"task gym:{name}: task.options.make does not fit: {error}") from None
    space = environment.observation_space
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
        environment = gym.wrappers.FlattenObservation(environment)
    return environment


def actions_of(environment: Any, name: str) -> Actions:
    """The actions of an environment; refuses kinds that no policy here has."""
    import gymnasium as gym

    space = environment.action_space
    if isinstance(space, gym.spaces.Discrete):
        if int(space.start):
            raise ProxpoError(f"task gym:{name}: actions that count from {space.start} are unknown")
        return Actions(discrete=True, size=int(space.n))
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return Actions(False, int(space.shape[0]), space.low, space.high)
    raise ProxpoError(
        f"task gym:{name} has actions of the kind {type(space).__name__}, and policies choose from "
        "a list (Discrete) or give a vector of numbers (Box)"
    )


class Outcomes(NamedTuple):
    """One step of some environments; `over`: their episode has ended, by itself or at a limit."""

    reward: list[float]
    terminated: list[bool]
    over: list[bool]


class Environments:
    """Copies of an environment that step together; `reset` begins an episode with its seed."""

    def __init__(self, name: str, count: int, options: EnvironmentOptions) -> None:
        self.name = name
        self._copies = [make_environment(name, options.make) for _ in range(count)]
        self.actions = actions_of(self._copies[0], name)
        width = int(self._copies[0].observation_space.shape[0])
        for index in options.hide:
            if not 0 <= index < width:
                raise ProxpoError(
                    f"task gym:{name}: task.options.hide={index} is no component of {width}"
                )
        shown = [i for i in range(width) if i not in options.hide]
        self._seen: list[int] | slice = shown if options.hide else slice(None)
        self._dtype = self._copies[0].action_space.dtype
        self.width = len(shown)
        self.observations = np.zeros((count, self.width))
        self._seeds = [0] * count
        self._played: list[list[np.ndarray]] = [[] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._copies)

    def reset(self, index: int, seed: int) -> None:
        """Begins an episode of the environment `index`."""
        seen, _ = self._copies[index].reset(seed=seed)
        self.observations[index] = np.asarray(seen)[self._seen]
        self._seeds[index], self._played[index] = seed, []

    def step(self, actions: np.ndarray, which: Sequence[int] | None = None) -> Outcomes:
        """Steps the environments `which`, by default all, with these actions."""
        chosen = range(len(self)) if which is None else which
        outcomes = Outcomes([], [], [])
        for index, action, executed in zip(chosen, actions, self._executed(actions)):
            self._played[index].append(action)
            reward, terminated, over = self._step(index, executed)
            outcomes.reward.append(reward)
            outcomes.terminated.append(terminated)
            outcomes.over.append(over)
        return outcomes

    def _executed(self, actions: np.ndarray) -> Iterable[Any]:
        """Actions as the environment takes them: whole numbers, or vectors within the box."""
        if self.actions.discrete:
            return actions[:, 0].astype(int).tolist()
        return np.clip(actions, self.actions.low, self.actions.high).astype(self._dtype)

    def _step(self, index: int, executed: Any) -> tuple[float, bool, bool]:
        seen, reward, terminated, truncated, _ = self._copies[index].step(executed)
        reward, terminated = float(reward), bool(terminated)
        if not math.isfinite(reward):
            raise ProxpoError(f"task gym:{self.name} gave the reward {reward}")
        self.observations[index] = np.asarray(seen)[self._seen]
        return reward, terminated, terminated or bool(truncated)

    def state(self) -> dict[str, Any]:
        """Seeds and actions of the episodes that go on."""
        played = [torch.tensor(np.array(actions), dtype=torch.float64) for actions in self._played]
        return {"seeds": list(self._seeds), "played": played}

    def load(self, state: Mapping[str, Any]) -> None:
        """Plays the episodes of a saved state again, up to its step."""
        for index, (seed, played) in enumerate(zip(state["seeds"], state["played"])):
            self.reset(index, seed)
            for action in played.numpy():
                self.step(action[None], [index])

    def close(self) -> None:
        for environment in self._copies:
            environment.close()


class Normaliser:
    """Running mean and variance of observations (Welford's update for batches of any size)."""

    def __init__(self, width: int) -> None:
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)
        self.count = 0

    def update(self, x: Float[Tensor, "row obs"]) -> None:
        rows = x.double()
        total, centre = self.count + len(rows), rows.mean(0)
        shift = centre - self.mean
        self.squares += (rows - centre).square().sum(0)
        self.squares += shift.square() * (self.count * len(rows) / total)
        self.mean = self.mean + shift * (len(rows) / total)
        self.count = total

    def __call__(self, x: Float[Tensor, "*row obs"]) -> Float[Tensor, "*row obs"]:
        """(x - mean)/√(variance + 1e-8), held within ±10; x as it is before the first update."""
        if not self.count:
            return x
        scale = (self.squares / self.count + 1e-8).sqrt()
        return ((x.double() - self.mean) / scale).clamp(-10, 10).to(x.dtype)

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "squares": self.squares, "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self.mean, self.squares, self.count = state["mean"], state["squares"], state["count"]


__all__ = [
    "Actions",
    "EnvironmentOptions",
    "Environments",
    "Normaliser",
    "Outcomes",
    "make_environment",
    "read_options",
]
