"""S2PG with updates of its own: REINFORCE with a component-wise baseline, and SAC."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from proxpo.control.environments import Environments, read_options
from proxpo.control.networks import (
    LOG_STD,
    RecurrentActor,
    gaussian_logp,
    in_box,
    make_actor,
    mlp,
    noise,
    seeded,
    tanh_correction,
)
from proxpo.control.online import OnlineJob
from proxpo.control.play import Play, policy_inputs
from proxpo.control.recipe_job import ControlJob, build_recipe_job
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.recipes.reinforce import reinforce
from proxpo.train.config import Config
from proxpo.train.experience import Experience
from proxpo.train.job import Job
from proxpo.train.update import optimizer_step, set_learning_rate


def optimal_baseline(
    scores: Float[Tensor, "episode weight"], returns: Float[Tensor, " episode"]
) -> Float[Tensor, " weight"]:
    """b = Σ_i g_i² J_i / Σ_i g_i² for each weight, g_i = ∇ log p of episode i; 0 where 0/0."""
    squares = scores.square()
    total = squares.sum(0)
    return torch.where(total > 0, (squares * returns[:, None]).sum(0) / total, 0.0)


def reinforce_gradient(
    scores: Float[Tensor, "episode weight"], returns: Float[Tensor, " episode"]
) -> Float[Tensor, " weight"]:
    """-(1/n) Σ_i g_i (J_i - b): the gradient of the loss."""
    advantage = returns[:, None] - optimal_baseline(scores, returns)
    return -(scores * advantage).mean(0)


class ReinforceJob(ControlJob):
    """A policy of an environment, trained by REINFORCE on whole episodes."""

    def update(self, rollout: Experience) -> dict[str, float]:
        """One optimizer step on the episodes of a rollout."""
        learner = self.learner
        assert rollout.observations is not None
        assert rollout.actions is not None
        assert rollout.token_rewards is not None
        parameters = learner.trainable()
        scores = []
        for x, drawn, mask in zip(rollout.observations, rollout.actions, rollout.mask):
            logp = self.actor.score(x[mask], drawn[mask]).logp.sum()
            grads = torch.autograd.grad(logp, parameters)
            scores.append(torch.cat([g.flatten() for g in grads]))
        gamma = self.config.make_method().options["gamma"]
        discounts = gamma ** torch.arange(rollout.mask.shape[1])
        returns = (rollout.token_rewards * rollout.mask * discounts).sum(1)
        gradient = reinforce_gradient(torch.stack(scores), returns.to(scores[0].dtype))
        set_learning_rate(learner.optimizer, self.config.rate_factor(self.step))
        for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p).clone()
        return {"loss": -float(returns.mean()), "grad_norm": optimizer_step(self)}


class StateActor(nn.Module):
    """SAC's policy: tanh of a Gaussian action and a Gaussian next state, with learned widths.

    The trunk and the means are those of `RecurrentActor`; the log-widths are linear in the inputs.
    """

    def __init__(self, trunk: RecurrentActor) -> None:
        super().__init__()
        self.trunk, self.actions, self.memory = trunk, trunk.actions, trunk.memory
        self.sizes = [trunk.actions.size, trunk.state]
        self.widths = nn.Linear(trunk.seen + trunk.memory, sum(self.sizes))
        nn.init.zeros_(self.widths.weight)
        nn.init.constant_(self.widths.bias, float(trunk.log_std[0].detach()))
        del trunk.log_std

    def forward(self, x: Float[Tensor, "row obs"], xi: Float[Tensor, "row out"]) -> "StateDraw":
        """The action and the next state for standard normal draws, with gradient."""
        mean, z = self.trunk.means(x)
        width = self.widths(x).clamp(*LOG_STD)
        (wide_a, wide_z), (xi_a, xi_z) = width.split(self.sizes, -1), xi.split(self.sizes, -1)
        u, z = mean + wide_a.exp() * xi_a, z + wide_z.exp() * xi_z
        logp_a = gaussian_logp(u, mean, wide_a) - tanh_correction(u)
        return StateDraw(u.tanh(), z, logp_a, gaussian_logp(z, z - wide_z.exp() * xi_z, wide_z))

    # As of the policies in networks.py, for evaluations.

    @torch.no_grad()
    def draw(self, x: Tensor, generator: torch.Generator | None) -> Float[Tensor, "row out"]:
        drawn = self(x, noise(x.new_zeros(len(x), sum(self.sizes)), generator))
        return torch.cat([drawn.action, drawn.state], dim=-1)

    def action(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row action"]:
        return in_box(drawn[:, : self.actions.size], self.actions)

    def start(self, rows: int) -> Float[Tensor, "row memory"]:
        return torch.zeros(rows, self.memory)

    def remember(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row memory"]:
        return torch.cat([drawn[:, self.actions.size :], drawn[:, : self.actions.size]], dim=-1)


class StateDraw(NamedTuple):
    """An action in [-1, 1], a next state, and the log-probability of each."""

    action: Float[Tensor, "row action"]
    state: Float[Tensor, "row state"]
    logp_action: Float[Tensor, " row"]
    logp_state: Float[Tensor, " row"]


class Transitions:
    """A replay buffer: the last `size` steps."""

    def __init__(self, size: int) -> None:
        self.size, self.rows = size, dict[str, Tensor]()
        self.begun = 0

    def add(self, **row: Tensor) -> None:
        if not self.rows:
            self.rows = {name: x.new_zeros(self.size, *x.shape) for name, x in row.items()}
        for name, x in row.items():
            self.rows[name][self.begun % self.size] = x
        self.begun += 1

    def sample(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        index = torch.randint(min(self.begun, self.size), (count,), generator=generator)
        return {name: x[index] for name, x in self.rows.items()}

    def state(self) -> dict[str, Any]:
        return {"rows": {k: x[: self.begun] for k, x in self.rows.items()}, "begun": self.begun}

    def load(self, state: Mapping[str, Any]) -> None:
        self.begun = int(state["begun"])
        self.rows = {}
        for name, x in state["rows"].items():
            self.rows[name] = x.new_zeros(self.size, *x.shape[1:])
            self.rows[name][: len(x)] = x


@dataclass(kw_only=True)
class SacJob(OnlineJob):
    """One environment, a stateful actor, two critics with targets, and a temperature each.

    Critics have two layers of `model.options.hidden` units (64 by default, the paper's networks
    128), as wide as the actor's.
    """

    critics: nn.ModuleList
    buffer: Transitions

    STREAM = "sac"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(2))  # of the action, of the state
        trained = (self.actor.parameters(), self.critics.parameters(), [self.log_alpha])
        self.optimizers = [torch.optim.Adam(list(p), lr=self.options["sac_lr"]) for p in trained]
        self.networks |= {
            "critics": self.critics,
            "targets": self.targets,
            "log_alpha": nn.ParameterList([self.log_alpha]),
        }
        self.memories["buffer"] = self.buffer

    def learn(self, count: int, draws: torch.Generator) -> dict[str, float]:
        metrics = {"loss": 0.0, "grad_norm": 0.0}
        for _ in range(count):
            self._act(draws)
            if self.steps >= self.options["sac_start"]:
                metrics = self._update(draws)
        return metrics

    def _act(self, draws: torch.Generator) -> None:
        play, environments = self.play, self.play.environments
        if play.over[0]:
            self.begin()
        x = policy_inputs(self.actor, None, environments.observations, play.memory)
        drawn = self.actor.draw(x, draws)
        outcome = environments.step(self.actor.action(drawn).double().numpy())
        play.memory = self.actor.remember(drawn)
        after = policy_inputs(self.actor, None, environments.observations, play.memory)
        play.count(0, outcome.reward[0], over=outcome.over[0])
        self.buffer.add(
            x=x[0],
            drawn=drawn[0],
            reward=x.new_tensor(outcome.reward[0]),
            after=after[0],
            going=x.new_tensor(not outcome.terminated[0]),
        )
        self.steps += 1

    def _update(self, draws: torch.Generator) -> dict[str, float]:
        rows = self.buffer.sample(self.options["sac_batch"], draws)
        width = rows["drawn"].shape[1]
        xi, xi_next = (torch.randn(len(rows["x"]), width, generator=draws) for _ in range(2))
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            following = self.actor(rows["after"], xi_next)
            target = rows["reward"] + self.options["gamma"] * rows["going"] * (
                smallest(self.targets, rows["after"], following) - soft_penalty(alpha, following)
            )
        taken = torch.cat([rows["x"], rows["drawn"]], dim=-1)
        critic_loss = sum((q(taken)[:, 0] - target).square().mean() for q in self.critics)
        self._descend(self.optimizers[1], critic_loss)
        drawn = self.actor(rows["x"], xi)
        value = smallest(self.critics, rows["x"], drawn)
        actor_loss = (soft_penalty(alpha, drawn) - value).mean()
        norm = self._descend(self.optimizers[0], actor_loss)
        logp = torch.stack([drawn.logp_action, drawn.logp_state]).detach()
        wanted = -torch.tensor(self.actor.sizes, dtype=logp.dtype)
        self._descend(self.optimizers[2], -(self.log_alpha * (logp.mean(1) + wanted)).sum())
        with torch.no_grad():
            for old, new in zip(self.targets.parameters(), self.critics.parameters()):
                old.lerp_(new, self.options["sac_tau"])
        return {
            "loss": float(critic_loss.detach()),
            "grad_norm": norm,
            "proxpo/sac/alpha_action": float(alpha[0]),
            "proxpo/sac/alpha_state": float(alpha[1]),
        }

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Any) -> float:
        parameters = optimizer.param_groups[0]["params"]
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = grad
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        optimizer.step()
        return norm


def smallest(
    critics: nn.ModuleList, x: Float[Tensor, "row obs"], drawn: StateDraw
) -> Float[Tensor, " row"]:
    """min over the critics of Q(s, z, a_prev, a, z')."""
    inputs = torch.cat([x, drawn.action, drawn.state], dim=-1)
    return torch.stack([q(inputs)[:, 0] for q in critics]).amin(0)


def soft_penalty(alpha: Float[Tensor, "2"], drawn: StateDraw) -> Float[Tensor, " row"]:
    """α log π_a + α_z log π_z."""
    return alpha[0] * drawn.logp_action + alpha[1] * drawn.logp_state


def build_stateful_job(config: Config, options: Mapping[str, Any]) -> Job:
    """The job of the REINFORCE or the SAC variant."""
    if options["variant"] == "reinforce":
        recipe = reinforce(baseline="none", gamma=options["gamma"])
        return build_recipe_job(config, recipe, ReinforceJob)
    name = config.task.name.partition(":")[2]
    task = read_options(name, config.task.options)
    if task.normalise:
        raise ProxpoError(
            "stateful-policies: variant=sac does not scale observations: leave out "
            "task.options.normalise"
        )
    environments = Environments(name, 1, task)
    if environments.actions.discrete:
        raise ProxpoError(
            f"stateful-policies: variant=sac takes actions that are numbers, and task gym:{name} "
            f"has {environments.actions.size} to choose from: variant=ppo or reinforce"
        )
    trunk = make_actor(config, environments)
    if not isinstance(trunk, RecurrentActor):
        raise ProxpoError("stateful-policies: variant=sac needs model.name=gru")
    hidden = trunk.head.in_features - trunk.state
    actor = seeded(config, "widths", lambda: StateActor(trunk))
    inputs = environments.width + actor.memory + sum(actor.sizes)
    critics = seeded(
        config,
        "critic",
        lambda: nn.ModuleList(mlp(inputs, hidden, 2, 1, "relu", 1.0) for _ in range(2)),
    )
    return SacJob(
        config=config,
        options=options,
        play=Play(environments=environments, memory=actor.start(1)),
        exam=Environments(name, min(config.evaluate.size, 10), task),
        actor=actor,
        critics=critics,
        buffer=Transitions(options["sac_buffer"]),
    )


__all__ = ["SacJob", "build_stateful_job", "optimal_baseline", "reinforce_gradient"]
