"""PROPS: a behaviour policy that is pushed away from what the buffer holds too often.

Every m steps φ restarts at θ and descends mean max(r, clip(r, 1±ε)) + λ KL on the buffer, with
r = π_φ(a|s)/π_θ(a|s); the next steps are drawn from π_φ. The learner is PPO on the last batches.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from proxpo.control.networks import LOG_STD, Actor, RecurrentActor
from proxpo.control.recipe_job import ControlJob, Steps, build_recipe_job
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.recipes.ppo import ppo
from proxpo.train.collect import Collected
from proxpo.train.config import Config
from proxpo.train.experience import Experience, join
from proxpo.train.observer import SILENT, Observer


def props_loss(
    logp: Float[Tensor, " row"], target_logp: Float[Tensor, " row"], *, clip: float | None
) -> Float[Tensor, ""]:
    """mean max(r, clip(r, 1-ε, 1+ε)), r = π_φ/π_θ; without a clip mean r.

    Its gradient in log π_φ is r where r > 1-ε, and 0 below.
    """
    ratio = (logp - target_logp.detach()).exp()
    if clip is None:
        return ratio.mean()
    return torch.maximum(ratio, ratio.clamp(1 - clip, 1 + clip)).mean()


def kl_divergence(actor: Any, other: Any, x: Float[Tensor, "row obs"]) -> Float[Tensor, " row"]:
    """KL(actor‖other) in every state, exact: of categorical or of diagonal Gaussian policies."""
    if actor.actions.discrete:
        logp, logq = (policy.logits(x).log_softmax(-1) for policy in (actor, other))
        return (logp.exp() * (logp - logq)).sum(-1)
    mean, mean_other = actor.logits(x), other.logits(x)
    width, width_other = (policy.log_std.clamp(*LOG_STD) for policy in (actor, other))
    square = (width.exp().square() + (mean - mean_other).square()) / width_other.exp().square()
    return (width_other - width + 0.5 * (square - 1)).sum(-1)


def behaviour_policy(
    target: Any,
    x: Float[Tensor, "row obs"],
    drawn: Float[Tensor, "row out"],
    options: Mapping[str, Any],
    draws: torch.Generator,
) -> tuple[Any, float]:
    """φ after its epochs on the buffer, from φ = θ; and the last mean of (r-1) - log r."""
    policy, moved = copy.deepcopy(target), 0.0
    rate, clip, coef = options["behaviour_lr"], options["behaviour_clip"], options["kl_coef"]
    if not rate or not len(x):
        return policy, moved
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    with torch.no_grad():
        target_logp = target.score(x, drawn).logp
    for _ in range(options["behaviour_epochs"]):
        order = torch.randperm(len(x), generator=draws)
        for part in order.chunk(min(options["behaviour_parts"], len(x))):
            logp = policy.score(x[part], drawn[part]).logp
            with torch.no_grad():
                change = logp - target_logp[part]
                moved = float((change.exp() - 1 - change).mean())
            if moved > options["kl_stop"]:
                return policy, moved
            loss = props_loss(logp, target_logp[part], clip=clip)
            if coef:
                pair = (target, policy) if options["kl"] == "target_behaviour" else (policy, target)
                loss = loss + coef * kl_divergence(*pair, x[part]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return policy, moved


@dataclass(kw_only=True)
class PropsJob(ControlJob):
    """PPO on the last batches, sampled by a corrected behaviour policy.

    buffer: the batches before the present one
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    buffer: list[Experience] = field(default_factory=list)
    behaviour: Actor | RecurrentActor | None = None
    moved: float = 0.0

    def collect(self, number: int, observer: Observer = SILENT) -> Collected:
        experience, metrics, lines = super().collect(number, observer)
        self.behaviour = None
        kept = self.options["buffer_batches"] - 1
        # Learnt from as if on-policy: old log-probabilities are those of the present policy.
        present = torch.full_like
        data = [
            replace(part, version=present(part.version, self.learner.version))
            for part in (*self.buffer, experience)
        ]
        self.buffer = [*self.buffer, experience][-kept:] if kept else []
        metrics |= {"proxpo/props/moved": self.moved}
        return Collected(join(data), metrics, lines)

    def _sampling_policy(self, done: Steps, draws: torch.Generator, t: int) -> Any:
        """π_φ, anew every `period` steps of all environments together."""
        period = max(1, round(self.options["period"] / len(self.play.environments)))
        if self.behaviour is None or t % period == 0:
            x, drawn = self._held(done)
            self.behaviour, self.moved = behaviour_policy(
                self.learner.policy.model, x, drawn, self.options, draws
            )
        return self.behaviour

    def _held(self, done: Steps) -> tuple[Tensor, Tensor]:
        """Inputs and draws of the buffer and of the batch that is being collected."""
        earlier = [
            (part.observations[part.mask], part.actions[part.mask])
            for part in self.buffer
            if part.observations is not None and part.actions is not None
        ]
        both = [*earlier, *zip(done.x, done.drawn)]
        if not both:
            return torch.zeros(0, 1), torch.zeros(0, 1)
        return torch.cat([x for x, _ in both]), torch.cat([drawn for _, drawn in both])

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "buffer": [part.tensors() for part in self.buffer]}

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        super().load(parts, info)
        self.buffer = [Experience(**tensors) for tensors in parts["buffer"]]


def build_props_job(config: Config, options: Mapping[str, Any]) -> PropsJob:
    """The job of method props."""
    if config.model.name != "mlp" or config.model.options.get("distribution") == "tanh":
        raise ProxpoError("props compares policies of model.name=mlp without distribution=tanh")
    recipe = ppo(
        clip_low=options["clip_low"],
        clip_high=options["clip_high"],
        gamma=options["gamma"],
        lam=options["lam"],
        value_clip=None,
        entropy_coef=options["entropy_coef"],
    )
    job = build_recipe_job(config, recipe, PropsJob)
    assert isinstance(job, PropsJob)
    job.options = options
    return job


__all__ = ["PropsJob", "behaviour_policy", "build_props_job", "kl_divergence", "props_loss"]
