"""`OnlineJob`: learns after every step of one environment; AVG and SAC are such jobs."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from proxpo.control.environments import Environments, Normaliser
from proxpo.control.play import Play, examine, result
from proxpo.ops.streams import derive, generator
from proxpo.train.job import Examined, Job, StepWatch
from proxpo.train.observer import Observer


@dataclass(kw_only=True)
class OnlineJob(Job):
    """One environment and an actor; a step of the run is many of the environment's.

    networks, memories: further parts of a checkpoint: modules, and objects with `state` and `load`
    """

    options: Mapping[str, Any]
    play: Play
    exam: Environments
    actor: Any
    normaliser: Normaliser | None = None
    networks: dict[str, nn.Module] = field(default_factory=dict)
    memories: dict[str, Any] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps: int = 0

    STREAM: ClassVar[str]  # name of the random numbers

    def __post_init__(self) -> None:
        self.memories["play"] = self.play
        if self.normaliser is not None:
            self.memories["normaliser"] = self.normaliser

    @abstractmethod
    def learn(self, count: int, draws: torch.Generator) -> dict[str, float]:
        """Makes `count` steps of the environment, and updates on the way."""

    def make_step(self, watch: StepWatch) -> dict[str, float]:
        watch.observer.on_progress("sampling", 0, 1)
        watch.enter("update")
        draws = generator(self.config.seed, self.STREAM, self.step)
        metrics = self.learn(self.config.rollout.max_tokens, draws)
        watch.lap("update")
        self.step += 1
        return {**self.play.metrics(), **metrics, "num_tokens": self.steps}

    def begin(self) -> None:
        """Begins the next episode."""
        seed = derive(self.config.seed, "episode", 0, self.play.begun[0])
        self.play.begin(0, seed % 2**31)

    def examine(self, observer: Observer) -> Examined:
        return examine(self.actor, self.normaliser, self.exam, self.config.evaluate.size, observer)

    def parts(self) -> dict[str, Any]:
        return {
            "weights": dict(self.actor.named_parameters()),
            **{name: network.state_dict() for name, network in self.networks.items()},
            **{name: memory.state() for name, memory in self.memories.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def info(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        self.actor.load_state_dict(parts["weights"])
        for name, network in self.networks.items():
            network.load_state_dict(parts[name])
        for name, memory in self.memories.items():
            memory.load(parts[name])
        for optimizer, state in zip(self.optimizers, parts["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.steps = info["steps"]

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return result(before, after, steps=self.steps, seconds=self.seconds)

    def close(self) -> None:
        self.play.environments.close()
        self.exam.close()


__all__ = ["OnlineJob"]
