"""Policies over environment steps: networks, their distributions, and a recurrent one (S2PG).

A policy sees x = [observation, memory] and draws a vector: the action, and with a recurrent policy
the next internal state behind it. `memory` = [z, previous action] is data, so that every step is a
row of its own: no gradient flows from one step to the next.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from proxpo.control.environments import Actions, Environments
from proxpo.errors import ProxpoError, resolve
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive
from proxpo.stages._options import bind
from proxpo.train.config import Config

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
}
Activation = Literal["tanh", "relu", "leaky_relu"]
Distribution = Literal["auto", "gaussian", "tanh"]
Module = TypeVar("Module", bound=nn.Module)
LOG_STD = (-20.0, 2.0)


class Scored(NamedTuple):
    """log π of the actions drawn and the entropy of the distribution, which tanh does not have."""

    logp: Float[Tensor, "*row"]
    entropy: Float[Tensor, "*row"] | None


def mlp(inputs: int, hidden: int, layers: int, outputs: int, activation: str, gain: float):
    """Linear layers with orthogonal weights (gain √2, `gain` for the last) and biases of 0."""
    sizes = [inputs, *[hidden] * layers]
    parts: list[nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        parts += [orthogonal(nn.Linear(width, following), math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, orthogonal(nn.Linear(sizes[-1], outputs), gain))


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def gaussian_logp(
    x: Float[Tensor, "*row dim"],
    mean: Float[Tensor, "*row dim"],
    log_std: Float[Tensor, "*#row dim"],
) -> Float[Tensor, "*row"]:
    """log N(x; μ, σ²), summed over the components."""
    terms = -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return terms.sum(-1)


def gaussian_entropy(log_std: Float[Tensor, "*row dim"]) -> Float[Tensor, "*row"]:
    """Σ log σ + ½ log 2πe."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def tanh_correction(u: Float[Tensor, "*row dim"]) -> Float[Tensor, "*row"]:
    """Σ log(1 - tanh² u) = Σ 2(log 2 - u - softplus(-2u))."""
    return (2 * (math.log(2) - u - nn.functional.softplus(-2 * u))).sum(-1)


class Actor(nn.Module):
    """A policy without memory: categorical, Gaussian with a learned width, or its tanh.

    A tanh policy draws u and acts with tanh(u), stretched to the box of the environment.
    """

    memory = 0
    state = 0

    def __init__(
        self,
        observation: int,
        actions: Actions,
        *,
        hidden: int = 64,
        layers: int = 2,
        activation: str = "tanh",
        distribution: Distribution = "auto",
        log_std: float = 0.0,
    ) -> None:
        super().__init__()
        if actions.discrete and distribution != "auto":
            raise ProxpoError(
                f"model.options.distribution={distribution} is for actions that are numbers, and "
                f"this environment has {actions.size} to choose from"
            )
        self.actions, self.squashed = actions, distribution == "tanh"
        if self.squashed and not _bounded(actions):
            raise ProxpoError("model.options.distribution=tanh needs actions with finite bounds")
        self.net = mlp(observation, hidden, layers, actions.size, activation, 0.01)
        if not actions.discrete:
            self.log_std = nn.Parameter(torch.full((actions.size,), log_std))

    def logits(self, x: Float[Tensor, "*row obs"]) -> Float[Tensor, "*row action"]:
        """log π of every action, up to a constant."""
        return self.net(x)

    def score(self, x: Float[Tensor, "*row obs"], drawn: Float[Tensor, "*row out"]) -> Scored:
        """log π(drawn | x) and the entropy."""
        out = self.net(x)
        if self.actions.discrete:
            logp = out.log_softmax(-1)
            chosen = logp.gather(-1, drawn[..., :1].long())[..., 0]
            return Scored(chosen, -(logp.exp() * logp).sum(-1))
        width = self.log_std.clamp(*LOG_STD)
        logp = gaussian_logp(drawn, out, width)
        if self.squashed:
            return Scored(logp - tanh_correction(drawn), None)
        return Scored(logp, gaussian_entropy(width).expand(logp.shape))

    @torch.no_grad()
    def draw(
        self, x: Float[Tensor, "row obs"], generator: torch.Generator | None
    ) -> Float[Tensor, "row out"]:
        """A draw for every row; without a generator the likeliest action (the mean)."""
        out = self.net(x)
        if self.actions.discrete:
            return choose(out, generator)
        return out + noise(out, generator) * self.log_std.clamp(*LOG_STD).exp()

    def action(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row action"]:
        """The part of a draw that the environment is given, stretched to its box if it is tanh."""
        return in_box(drawn.tanh(), self.actions) if self.squashed else drawn

    def start(self, rows: int) -> Float[Tensor, "row memory"]:
        return torch.zeros(rows, 0)

    def remember(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row memory"]:
        return drawn[:, :0]


class RecurrentActor(nn.Module):
    """S2PG's policy p(a_t, z_{t+1} | s_t, z_t, a_{t-1}): the internal state is part of the draw.

    A GRU cell is applied once, with z_t as its hidden input; its output is the mean of z_{t+1} and
    feeds the head of the action. One log-std for each component of [a, z], the same at the start.
    Actions to choose from are categorical; then the Gaussian is over z alone.
    """

    def __init__(
        self,
        observation: int,
        actions: Actions,
        *,
        state: int = 8,
        hidden: int = 64,
        activation: str = "tanh",
        std: float = 0.5,
    ) -> None:
        super().__init__()
        self.actions, self.state, self.seen = actions, state, observation
        self.memory = state + actions.size
        inputs = observation + actions.size
        layer = orthogonal(nn.Linear(inputs, hidden), math.sqrt(2))
        self.features = nn.Sequential(layer, ACTIVATIONS[activation]())
        self.cell = nn.GRUCell(hidden, state) if state else None
        self.head = orthogonal(nn.Linear(hidden + state, actions.size), 0.01)
        wide = state if actions.discrete else actions.size + state
        self.log_std = nn.Parameter(torch.full((wide,), math.log(std)))

    def means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits or mean of the action, and the mean of the next internal state."""
        parts = x.split([self.seen, self.state, self.actions.size], dim=-1)
        features = self.features(torch.cat([parts[0], parts[2]], dim=-1))
        z = parts[1]
        if self.cell is not None:
            flat = self.cell(features.flatten(0, -2), z.flatten(0, -2))
            z = flat.view(*features.shape[:-1], self.state)
        return self.head(torch.cat([features, z], dim=-1)), z

    def logits(self, x: Float[Tensor, "*row obs"]) -> Float[Tensor, "*row action"]:
        return self.means(x)[0]

    def score(self, x: Float[Tensor, "*row obs"], drawn: Float[Tensor, "*row out"]) -> Scored:
        """log p(a) + log p(z'), and the sum of their entropies."""
        out, z = self.means(x)
        width = self.log_std.clamp(*LOG_STD)
        if not self.actions.discrete:
            logp = gaussian_logp(drawn, torch.cat([out, z], dim=-1), width)
            return Scored(logp, gaussian_entropy(width).expand(logp.shape))
        logp = out.log_softmax(-1)
        chosen = logp.gather(-1, drawn[..., :1].long())[..., 0]
        spread = gaussian_entropy(width) - (logp.exp() * logp).sum(-1)
        return Scored(chosen + gaussian_logp(drawn[..., 1:], z, width), spread)

    @torch.no_grad()
    def draw(
        self, x: Float[Tensor, "row obs"], generator: torch.Generator | None
    ) -> Float[Tensor, "row out"]:
        out, z = self.means(x)
        width = self.log_std.clamp(*LOG_STD).exp()
        if not self.actions.discrete:
            mean = torch.cat([out, z], dim=-1)
            return mean + noise(mean, generator) * width
        return torch.cat([choose(out, generator), z + noise(z, generator) * width], dim=-1)

    def action(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row action"]:
        return drawn[:, :1] if self.actions.discrete else drawn[:, : self.actions.size]

    def start(self, rows: int) -> Float[Tensor, "row memory"]:
        return torch.zeros(rows, self.memory)

    def remember(self, drawn: Float[Tensor, "row out"]) -> Float[Tensor, "row memory"]:
        """[z', a]: the memory of the next step."""
        a = self.action(drawn)
        if self.actions.discrete:
            a = nn.functional.one_hot(a[:, 0].long(), self.actions.size).to(drawn.dtype)
        return torch.cat([drawn[:, drawn.shape[1] - self.state :], a], dim=-1)


def make_actor(config: Config, environments: Environments) -> "Actor | RecurrentActor":
    """The policy that `model.name` and `model.options` ask for; its weights follow the seed."""
    name, options = model_options(config)
    actions, width = environments.actions, "log_std" if name == "mlp" else "std"
    has_width = not actions.discrete or options.get("state")
    if not has_width and options[width] != OPTIONS[name]()[width]:
        raise ProxpoError(
            f"model.options.{width}={options[width]:g} has no effect: this environment has "
            f"{actions.size} actions to choose from, and their distribution has no width"
        )
    return seeded(config, "actor", lambda: ACTORS[name](environments.width, actions, **options))


def make_critic(
    config: Config, environments: Environments, actor: "Actor | RecurrentActor"
) -> nn.Module:
    """A value network over [observation, memory], of the size of the policy."""
    inputs = environments.width + actor.memory
    _, options = model_options(config)
    hidden, layers, activation = options["hidden"], options.get("layers", 2), options["activation"]
    return seeded(config, "critic", lambda: mlp(inputs, hidden, layers, 1, activation, 1.0))


def mlp_options(
    *,
    hidden: int = 64,
    layers: int = 2,
    activation: Activation = "tanh",
    distribution: Distribution = "auto",
    log_std: float = 0.0,
) -> dict[str, Any]:
    """Options of the model `mlp`."""
    return locals()


def gru_options(
    *, state: int = 8, hidden: int = 64, activation: Activation = "tanh", std: float = 0.5
) -> dict[str, Any]:
    """Options of the model `gru`."""
    return locals()


ACTORS: dict[str, Any] = {"mlp": Actor, "gru": RecurrentActor}
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {"mlp": mlp_options, "gru": gru_options}


def model_options(config: Config) -> tuple[str, dict[str, Any]]:
    """The name of the network and its options, checked."""
    name = resolve(config.model.name, OPTIONS, what="model of control")
    options = bind(OPTIONS[name], config.model.options, what=f"model {name}")
    for option, least in (("hidden", 1), ("layers", 0), ("state", 0)):
        if option in options and options[option] < least:
            raise ProxpoError(f"model.options.{option} is at least {least}, got {options[option]}")
    if not options.get("std", 1) > 0:
        raise ProxpoError(f"model.options.std is above 0, got {options['std']:g}")
    return name, options


def seeded(config: Config, name: str, make: Callable[[], Module]) -> Module:
    """A network whose weights follow from the run's seed and its name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init", name))
        network = make()
    return network.double() if config.model.dtype == "float64" else network


def choose(logits: Tensor, generator: torch.Generator | None) -> Float[Tensor, "row 1"]:
    """An action for each row of logits, as a number; the likeliest without a generator."""
    if generator is None:
        return logits.argmax(-1, keepdim=True).to(logits.dtype)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).to(logits.dtype)


def noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws; 0 without a generator."""
    if generator is None:
        return torch.zeros_like(like)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def in_box(a: Tensor, actions: Actions) -> Tensor:
    """Numbers in [-1, 1] stretched to the box of the actions."""
    low, high = (torch.as_tensor(x, dtype=a.dtype) for x in (actions.low, actions.high))
    return low + (a + 1) / 2 * (high - low)


def _bounded(actions: Actions) -> bool:
    bounds = (actions.low, actions.high)
    return all(b is not None and bool(torch.as_tensor(b).isfinite().all()) for b in bounds)


__all__ = [
    "ACTIVATIONS",
    "Actor",
    "RecurrentActor",
    "gaussian_logp",
    "in_box",
    "make_actor",
    "make_critic",
    "mlp",
    "model_options",
    "seeded",
    "tanh_correction",
]
