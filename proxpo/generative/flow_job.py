"""The job of AC-Flow: own samples, updates of the critic on them, then of the flow."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from proxpo.generative.flow import (
    Velocity,
    actor_loss,
    advantages,
    draw,
    interpolate,
    sample_weights,
    shaped,
)
from proxpo.generative.networks import HIDDEN, TimeField, descend, in_the_box, zero_at_start
from proxpo.generative.results import answers, diversity, result, samples_figure
from proxpo.generative.tasks import SampleTask, make_sample_task
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.train.config import Config
from proxpo.train.job import Examined, Job, StepWatch
from proxpo.train.observer import Observer


@dataclass(kw_only=True)
class FlowJob(Job):
    """A flow and its critic, trained on its own samples."""

    options: Mapping[str, Any]
    task: SampleTask
    velocity: TimeField
    reference: TimeField
    critic: TimeField

    def __post_init__(self) -> None:
        self.actor_optimizer = torch.optim.AdamW(
            self.velocity.parameters(), lr=self.options["actor_lr"], weight_decay=0.0
        )
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=self.options["critic_lr"], weight_decay=0.0
        )

    def make_step(self, watch: StepWatch) -> dict[str, float]:
        """Samples of the present flow, updates of the critic on them, then of the flow."""
        watch.enter("rollout")
        options, draws = self.options, generator(self.config.seed, "flow", self.step)
        end = self._draw(
            self.velocity,
            options["samples_per_step"],
            draws,
            lambda done, total: watch.observer.on_progress("sampling", done, total),
        )
        rewards = self.task.reward(end)
        watch.lap("rollout")
        watch.enter("update")
        metrics = self._fit_critic(end, rewards, draws)
        metrics |= self._fit_actor(end, rewards, draws, warm=self.step < options["warmup"])
        watch.lap("update")
        self.step += 1
        return {
            **metrics,
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "diversity": diversity(end),
            "num_tokens": self.step * options["samples_per_step"],
        }

    def _fit_critic(self, end: Tensor, rewards: Tensor, draws: torch.Generator) -> dict[str, float]:
        """(V(x_t, t) - r̃)² at random t."""
        goal, error = shaped(rewards), 0.0
        for _ in range(self.options["updates"]):
            points = interpolate(end, draws)
            loss = (self.critic(points.x, points.t)[:, 0] - goal).square().mean()
            descend(self.critic_optimizer, loss)
            error = float(loss.detach())
        return {"proxpo/flow/value_error": error}

    def _fit_actor(
        self, end: Tensor, rewards: Tensor, draws: torch.Generator, *, warm: bool
    ) -> dict[str, float]:
        metrics = {"loss": 0.0, "grad_norm": 0.0, "proxpo/flow/gap": 0.0}
        if warm:
            return metrics
        options = self.options
        for _ in range(options["updates"]):
            points = interpolate(end, draws)
            a = advantages(
                rewards,
                self.critic(points.x, points.t)[:, 0],
                advantage_of=options["advantage_of"],
                bound=options["bound"],
            )
            w = sample_weights(a, weighting=options["weighting"], tau=options["tau"])
            loss, gap = actor_loss(self.velocity, self.reference, points, w, beta=options["beta"])
            norm = descend(self.actor_optimizer, loss)
            metrics = {
                "loss": float(loss.detach()),
                "grad_norm": norm,
                "proxpo/flow/gap": float(gap),
                "proxpo/flow/weight_max": float(w.max()),
            }
        return metrics

    def _draw(
        self,
        velocity: Velocity,
        rows: int,
        draws: torch.Generator,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Float[Tensor, "row size"]:
        return draw(
            velocity,
            rows=rows,
            size=self.task.size,
            steps=self.config.rollout.max_tokens,
            draws=draws,
            dtype=self.velocity.leave.weight.dtype,
            progress=progress,
        )

    # --- evaluation and checkpoints

    def _exam(self, velocity: Velocity) -> Float[Tensor, "row size"]:
        return self._draw(velocity, self.config.evaluate.size, generator(0, "exam"))

    def examine(self, observer: Observer) -> Examined:
        """Mean reward and spread of samples, and mean ‖v - v_ref‖² between them and noise."""
        observer.on_progress("evaluating", 0, 1)
        x = self._exam(self.velocity)
        rewards, points = self.task.reward(x), interpolate(x, generator(0, "exam points"))
        with torch.no_grad():
            gap = self.velocity(points.x, points.t) - self.reference(points.x, points.t)
        metrics = {
            "eval/reward": float(rewards.mean()),
            "eval/reward_std": float(rewards.std(correction=0)),
            "eval/diversity": diversity(x),
            "eval/velocity_gap": float(gap.square().sum(dim=1).mean()),
        }
        return metrics, answers(rewards)

    def figure(self) -> Any:
        flows = (("before", self.reference), ("after", self.velocity))
        return samples_figure([(title, self._exam(flow)) for title, flow in flows])

    def parts(self) -> dict[str, Any]:
        return {
            "weights": dict(self.velocity.named_parameters()),
            "critic": self.critic.state_dict(),
            "optimizers": [o.state_dict() for o in (self.actor_optimizer, self.critic_optimizer)],
        }

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        self.velocity.load_state_dict(parts["weights"])
        self.critic.load_state_dict(parts["critic"])
        optimizers = (self.actor_optimizer, self.critic_optimizer)
        for optimizer, state in zip(optimizers, parts["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return result(
            before,
            after,
            score="mean reward",
            unit="samples",
            count=self.step * self.options["samples_per_step"],
            seconds=self.seconds,
        )


def build_flow_job(config: Config, options: Mapping[str, Any], dtype: torch.dtype) -> FlowJob:
    """The job of method ac-flow: the flow in the box and a critic that starts at 0."""
    task = make_sample_task(config.task.name)
    size, hidden = task.size, HIDDEN[task.model]
    velocity = in_the_box(TimeField(size, size, hidden=hidden), f"{task.model}_flow", dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "critic"))
        critic = zero_at_start(TimeField(size, 1, hidden=hidden)).to(dtype)
    return FlowJob(
        config=config,
        options=options,
        task=task,
        velocity=velocity,
        reference=copy.deepcopy(velocity).requires_grad_(False),
        critic=critic,
    )


__all__ = ["FlowJob", "build_flow_job"]
