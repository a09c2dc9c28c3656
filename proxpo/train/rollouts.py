"""`RolloutJob`: each step samples a rollout and trains a recipe on it, in whatever domain."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from proxpo.optimizers import state_size
from proxpo.train.collect import Collected
from proxpo.train.experience import Experience
from proxpo.train.job import Job, StepWatch
from proxpo.train.learning_signal import LearningSignal
from proxpo.train.observer import SILENT, Observer
from proxpo.train.scoring import Learner
from proxpo.train.update import update
from proxpo.types import Clock, Recipe


@dataclass(kw_only=True)
class RolloutJob(Job):
    """A learner, the rollouts it waits for and those it may replay.

    tokens: sampled so far; skipped: updates in a row without a finite gradient
    waiting: sampled, not yet trained on; past: trained on, may be replayed
    signal: whether the steps had gradients
    """

    learner: Learner
    tokens: int = 0
    skipped: int = 0
    waiting: list[Experience] = field(default_factory=list)
    past: list[Experience] = field(default_factory=list)
    signal: LearningSignal = field(default_factory=LearningSignal)

    @abstractmethod
    def collect(self, number: int, observer: Observer = SILENT) -> Collected:
        """Samples and scores rollout `number` with the job's settings.

        An error that the observer raises leaves the job as it was.
        """

    @property
    def fault(self) -> str:
        return self.learner.fault

    def sync(self) -> None:
        """Brings the weights of the learner to whatever samples with a copy of them."""

    @property
    def clock(self) -> Clock:
        """Progress of training, for stages that follow it."""
        learner = self.learner
        rate = learner.optimizer.param_groups[0]["lr"]
        return Clock(
            step=self.step,
            steps=self.config.train.steps,
            updates=learner.version,
            learning_rate=float(rate),
        )

    @property
    def most_parts(self) -> int:
        """Mini-batches that a rollout can be cut into."""
        return self.config.rollout.prompts_per_step

    @property
    def sampled(self) -> int:
        return self.step + len(self.waiting)

    def make_step(self, watch: StepWatch) -> dict[str, float]:
        """One rollout (of this policy or, with a lag, of an earlier one) and its updates."""
        if self.config.train.on_no_signal == "stop":
            self.signal.check()
        before = self.learner.version
        watch.enter("rollout")
        metrics = self._rollouts(watch)
        watch.lap("rollout")
        watch.enter("update")
        metrics |= self.update(self.waiting.pop(0))
        watch.lap("update")
        self.sync()
        watch.lap("sync")
        self.step += 1
        for line in self.signal.see(self.step, metrics, self.config, self.learner.recipe):
            watch.observer.on_notice(line)
        return {
            **metrics,
            "learning_rate": self.learner.optimizer.param_groups[0]["lr"],
            "num_tokens": self.tokens,
            "proxpo/updates": self.learner.version - before,
            "proxpo/skipped": self.skipped,
        }

    @property
    def trained_recipe(self) -> Recipe:
        return self.learner.recipe

    def update(self, rollout: Experience) -> dict[str, float]:
        """Makes the optimizer steps of a rollout; their metrics."""
        return update(self, rollout)

    def _rollouts(self, watch: StepWatch) -> dict[str, float]:
        """Samples until a rollout waits for training; metrics of the last one.

        There are none while a lag that was lowered is worked off.
        """
        metrics: dict[str, float] = {}
        while len(self.waiting) <= self.config.train.off_policy_lag:
            watch.observer.on_progress("sampling", 0, 1)
            number = self.sampled
            collected = self.collect(number, watch.observer)
            self.waiting.append(collected.experience)
            self.tokens += int(collected.metrics["proxpo/tokens"])
            metrics = collected.metrics
            for line in collected.lines[: self.config.log.samples]:
                watch.sample({"step": number + 1, **line})  # the step that trains on it
        return metrics

    def parts(self) -> dict[str, Any]:
        learner = self.learner
        trained = {n: p for n, p in learner.policy.model.named_parameters() if p.requires_grad}
        parts: dict[str, Any] = {
            "weights": trained,
            "optimizer": learner.optimizer.state_dict(),
            "recipe": learner.state,
            "waiting": [experience.tensors() for experience in self.waiting],
            "past": [experience.tensors() for experience in self.past],
        }
        if learner.transform is not None:
            parts["transform"] = learner.transform.state_dict()
        if learner.critic is not None:
            parts["critic"] = learner.critic.state_dict()
        if learner.critic_optimizer is not None:
            parts["critic_optimizer"] = learner.critic_optimizer.state_dict()
        return parts

    @property
    def state_to_come(self) -> int:
        optimizer = self.learner.optimizer
        return 0 if optimizer.state else state_size(optimizer)

    def info(self) -> dict[str, Any]:
        budget = self.learner.budget
        return {
            "version": self.learner.version,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "budget": {"tokens": budget.tokens, "most": budget.most},
            "signal": asdict(self.signal),
        }

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        learner, device = self.learner, self.learner.policy.device
        fill_weights(learner.policy.model, parts["weights"])
        restore_optimizer(learner.optimizer, parts["optimizer"])
        learner.state = parts["recipe"]
        if learner.transform is not None:
            learner.transform.load_state_dict(parts["transform"])
        if learner.critic is not None:
            learner.critic.load_state_dict(parts["critic"])
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.load_state_dict(parts["critic_optimizer"])
        self.waiting = [self.experience(saved).to(device) for saved in parts["waiting"]]
        self.past = [self.experience(saved).to(device) for saved in parts["past"]]
        learner.version, self.tokens, self.skipped = (
            info[name] for name in ("version", "tokens", "skipped")
        )
        # Checkpoints of earlier versions have neither.
        self.signal = LearningSignal(**info.get("signal", {"learnt": self.step > 0}))
        if "budget" in info:
            learner.budget.tokens, learner.budget.most = (
                info["budget"][name] for name in ("tokens", "most")
            )
        self.sync()

    def experience(self, tensors: Mapping[str, Any]) -> Experience:
        """A rollout from the tensors of a checkpoint."""
        return Experience(**tensors)


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads the optimizer's state; its rate and decay stay those of the settings.

    Groups come as last scheduled, `lr` = `base_lr` x factor; a new rate takes the factor over
    until the next step sets its own.
    """
    own = [
        {name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(saved)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group["weight_decay"], base = settings["weight_decay"], group.get("base_lr", group["lr"])
        if settings["lr"] != base:
            factor = group["lr"] / base if base else 1.0
            group["lr"], group["base_lr"] = settings["lr"] * factor, settings["lr"]


def fill_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads the trained weights of the checkpoint, which must have these and no others."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if own.keys() != weights.keys():
        raise ValueError(f"it holds {len(weights)} trained weights, this model has {len(own)}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(own[name].shape)}")
        with torch.no_grad():
            own[name].copy_(value)


__all__ = ["RolloutJob"]
