"""AVG: a soft actor-critic that learns from each transition once (arXiv:2411.15370).

    δ = (r + (1-d) γ (Q(s',a') - α log π(a'|s')) - Q(s,a)) / σ,   critic loss δ²
    actor loss α log π(a|s) - Q(s,a), through the reparametrised action that was executed

All at the weights before the update; no replay, no target network, no batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from proxpo.control.environments import Actions, Environments, Normaliser, read_options
from proxpo.control.networks import LOG_STD, in_box, orthogonal, seeded, tanh_correction
from proxpo.control.online import OnlineJob
from proxpo.control.play import Play, policy_inputs
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.train.config import Config

SMALLEST = 1e-8  # of a feature vector's norm


class Features(nn.Module):
    """Two LeakyReLU layers; the output divided by its norm, unless switched off."""

    def __init__(self, inputs: int, hidden: int, *, normalise: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [orthogonal(nn.Linear(inputs, hidden), 1.0), orthogonal(nn.Linear(hidden, hidden), 1.0)]
        )
        self.normalise = normalise

    def forward(self, x: Float[Tensor, "*row in"]) -> Float[Tensor, "*row hidden"]:
        for layer in self.layers:
            x = nn.functional.leaky_relu(layer(x), 0.01)
        if not self.normalise:
            return x
        return x / x.norm(dim=-1, keepdim=True).clamp(min=SMALLEST)


class Drawn(NamedTuple):
    """A reparametrised action tanh(u) and its log-probability, both with gradient."""

    action: Float[Tensor, "*row action"]
    logp: Float[Tensor, "*row"]


class AvgActor(nn.Module):
    """μ(s) and ℓ(s); u = μ + std·ξ, a = tanh(u).

    width="covariance": exp(ℓ) is the variance, std = exp(ℓ/2), as released; "std": std = exp(ℓ).
    """

    def __init__(
        self,
        inputs: int,
        actions: Actions,
        *,
        hidden: int,
        normalise: bool,
        width: str,
        stretch: bool = False,
    ) -> None:
        super().__init__()
        self.features = Features(inputs, hidden, normalise=normalise)
        self.mean = orthogonal(nn.Linear(hidden, actions.size), 1.0)
        self.log_width = orthogonal(nn.Linear(hidden, actions.size), 1.0)
        self.halved = 0.5 if width == "covariance" else 1.0
        self.actions, self.stretch = actions, stretch

    def forward(self, x: Float[Tensor, "*row in"], xi: Float[Tensor, "*row action"]) -> Drawn:
        """The action for the standard normal draw ξ."""
        features = self.features(x)
        log_std = self.halved * self.log_width(features).clamp(*LOG_STD)
        u = self.mean(features) + log_std.exp() * xi
        logp = -0.5 * xi.square() - log_std - 0.5 * math.log(2 * math.pi)
        return Drawn(u.tanh(), logp.sum(-1) - tanh_correction(u))

    def noise(self, generator: torch.Generator) -> Float[Tensor, " action"]:
        """ξ for one action."""
        weight = self.mean.weight
        return torch.randn(self.actions.size, generator=generator, dtype=weight.dtype)

    # As of the policies in networks.py, for evaluations.

    @torch.no_grad()
    def draw(self, x: Float[Tensor, "row obs"], generator: None) -> Float[Tensor, "row action"]:
        """The action without noise."""
        return self(x, x.new_zeros(len(x), self.actions.size)).action

    def action(self, drawn: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
        """The action in the environment's units: stretched to its box, or left to be clipped."""
        return in_box(drawn, self.actions) if self.stretch else drawn

    def start(self, rows: int) -> Float[Tensor, "row memory"]:
        return torch.zeros(rows, 0)

    def remember(self, drawn: Float[Tensor, "row action"]) -> Float[Tensor, "row memory"]:
        return drawn[:, :0]


class AvgCritic(nn.Module):
    """Q(s, a), linear in unit features: |Q| ≤ ‖w‖ + |b|."""

    def __init__(self, inputs: int, *, hidden: int, normalise: bool) -> None:
        super().__init__()
        self.features = Features(inputs, hidden, normalise=normalise)
        self.head = orthogonal(nn.Linear(hidden, 1), 1.0)

    def forward(
        self, x: Float[Tensor, "*row obs"], action: Float[Tensor, "*row action"]
    ) -> Float[Tensor, "*row"]:
        return self.head(self.features(torch.cat([x, action], dim=-1)))[..., 0]


class Moments:
    """Running mean and population variance of numbers."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def push(self, x: float) -> None:
        self.count += 1
        shift = x - self.mean
        self.mean += shift / self.count
        self.squares += shift * (x - self.mean)

    @property
    def variance(self) -> float:
        return self.squares / self.count if self.count else 0.0


class TdScale:
    """σ of TD errors: σ² = max(Var(r_ent) + Var(γ_t)·mean(G²), 1e-4).

    r_ent = r - α log π; γ_t = γ(1-d); G the undiscounted sum of r_ent over an episode. σ is 1 while
    σ² ≤ 0.01 and no episode has ended. As released, only termination ends an episode: after a time
    limit G goes on into the next one.
    """

    def __init__(self) -> None:
        self.reward, self.discount, self.squared_return = Moments(), Moments(), Moments()
        self.running = 0.0

    def push(self, reward: float, discount: float, *, terminated: bool) -> None:
        self.reward.push(reward)
        self.discount.push(discount)
        self.running += reward
        if terminated:
            self.squared_return.push(self.running**2)
            self.running = 0.0

    @property
    def sigma(self) -> float:
        spread = self.discount.variance * self.squared_return.mean
        variance = max(self.reward.variance + spread, 1e-4)
        if variance <= 0.01 and not self.squared_return.count:
            return 1.0
        return math.sqrt(variance)

    def state(self) -> dict[str, Any]:
        moments = (self.reward, self.discount, self.squared_return)
        return {
            "moments": [[m.count, m.mean, m.squares] for m in moments],
            "running": self.running,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        for moments, saved in zip(
            (self.reward, self.discount, self.squared_return), state["moments"], strict=True
        ):
            moments.count, moments.mean, moments.squares = int(saved[0]), saved[1], saved[2]
        self.running = state["running"]


def avg_losses(
    critic: nn.Module,
    x: Float[Tensor, " obs"],
    drawn: Drawn,
    following: Float[Tensor, " obs"],
    drawn_next: Drawn,
    *,
    reward: float,
    terminated: bool,
    sigma: float,
    alpha: float,
    gamma: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Losses of critic and actor for one transition, from one value Q(s, a).

    Each has gradients in the other network too, which are not to be taken.
    """
    with torch.no_grad():
        value = critic(following, drawn_next.action) - alpha * drawn_next.logp
        target = reward + (0.0 if terminated else gamma) * value
    q = critic(x, drawn.action)
    return ((target - q) / sigma).square(), alpha * drawn.logp - q


@dataclass(kw_only=True)
class AvgJob(OnlineJob):
    """One environment, one actor, one critic, and an update after every transition.

    x: the present observation, counted in the running statistics; None after an episode's end
    """

    critic: AvgCritic
    scale: TdScale
    x: Float[Tensor, " obs"] | None = None

    STREAM = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.networks["critic"], self.memories["scale"] = self.critic, self.scale
        rates = (self.options["lr_actor"], self.options["lr_critic"])
        betas = (self.options["beta1"], 0.999)
        self.optimizers = [
            torch.optim.Adam(network.parameters(), lr=rate, betas=betas, fused=True)
            for network, rate in zip((self.actor, self.critic), rates)
        ]

    def learn(self, count: int, draws: torch.Generator) -> dict[str, float]:
        losses = [0.0, 0.0]
        for _ in range(count):
            for i, loss in enumerate(self._transition(draws)):
                losses[i] += loss / count
        return {
            "loss": losses[0],
            "proxpo/avg/actor_loss": losses[1],
            "proxpo/avg/sigma": self.scale.sigma,
            "grad_norm": math.sqrt(sum(self._squares())),
        }

    def _squares(self) -> list[float]:
        """Squared norms of the last transition's gradients."""
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        return [float(p.grad.square().sum()) for p in parameters if p.grad is not None]

    def _transition(self, draws: torch.Generator) -> tuple[float, float]:
        play, options = self.play, self.options
        if self.x is None:
            self.begin()
            self._count()
            self.x = self._seen()
        x = self.x
        drawn = self.actor(x, self.actor.noise(draws))
        executed = self.actor.action(drawn.action.detach()[None])
        outcome = play.environments.step(executed.double().numpy())
        reward, terminated = outcome.reward[0], outcome.terminated[0]
        play.count(0, reward, over=outcome.over[0])
        self.steps += 1
        self._count()
        following = self._seen()
        self.x = None if play.over[0] else following
        with torch.no_grad():
            drawn_next = self.actor(following, self.actor.noise(draws))
        gamma, alpha = options["gamma"], options["alpha"]
        if options["scale_td"]:
            entropic = reward - alpha * float(drawn.logp.detach())
            discount = 0.0 if terminated else gamma
            self.scale.push(entropic, discount, terminated=terminated)
        critic_loss, actor_loss = avg_losses(
            self.critic,
            x,
            drawn,
            following,
            drawn_next,
            reward=reward,
            terminated=terminated,
            sigma=self.scale.sigma if options["scale_td"] else 1.0,
            alpha=alpha,
            gamma=gamma,
        )
        self._descend(critic_loss, actor_loss)
        return float(critic_loss.detach()), float(actor_loss.detach())

    def _descend(self, critic_loss: Tensor, actor_loss: Tensor) -> None:
        """Gradients of both losses at the weights before the update; then actor, then critic."""
        networks = ((self.actor, actor_loss), (self.critic, critic_loss))
        for network, loss in networks:
            parameters = list(network.parameters())
            for p, grad in zip(
                parameters, torch.autograd.grad(loss, parameters, retain_graph=True)
            ):
                p.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()

    def _count(self) -> None:
        """Counts the present observation in the running statistics."""
        if self.normaliser is not None:
            self.normaliser.update(torch.from_numpy(self.play.environments.observations))

    def _seen(self) -> Float[Tensor, " obs"]:
        """The present observation as the networks see it."""
        observations, memory = self.play.environments.observations, self.play.memory
        return policy_inputs(self.actor, self.normaliser, observations, memory)[0]

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        super().load(parts, info)
        self.x = None if self.play.over[0] else self._seen()


def build_avg_job(config: Config, options: Mapping[str, Any]) -> AvgJob:
    """The job of method avg: one environment with actions that are numbers."""
    name = config.task.name.partition(":")[2]
    task = read_options(name, config.task.options)
    if task.normalise:
        raise ProxpoError(
            "avg: task.options.normalise has no effect: its option normalise_observations, on by "
            "default, does the same"
        )
    environments = Environments(name, 1, task)
    if environments.actions.discrete:
        raise ProxpoError(
            f"avg moves along the gradient of Q in the action, and task gym:{name} has "
            f"{environments.actions.size} actions to choose from: take one whose actions are "
            "numbers, such as gym:Pendulum-v1, or a method such as ppo"
        )
    width, actions = environments.width, environments.actions
    sizes = {"hidden": options["hidden"], "normalise": options["normalise_features"]}
    stretch = options["actions"] == "stretch"
    return AvgJob(
        config=config,
        options=options,
        play=Play(environments=environments, memory=torch.zeros(1, 0)),
        exam=Environments(name, min(config.evaluate.size, 10), task),
        actor=seeded(
            config,
            "actor",
            lambda: AvgActor(width, actions, **sizes, width=options["width"], stretch=stretch),
        ),
        critic=seeded(config, "critic", lambda: AvgCritic(width + actions.size, **sizes)),
        normaliser=Normaliser(width) if options["normalise_observations"] else None,
        scale=TdScale(),
    )


__all__ = ["AvgJob", "TdScale", "avg_losses", "build_avg_job"]
