"""TabNAS on a space of architectures: a controller of independent categorical choices.

P(y) = Π_l softmax(θ_l)[y_l];  loss = -sg(Q(y) - Q̄) · [log P(y) - log P̂(V)] for feasible y
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError, resolve
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.ops.streams import generator
from proxpo.stages._options import bind
from proxpo.train.config import Config
from proxpo.train.job import Examined, Job, StepWatch
from proxpo.train.observer import Observer

# Validation losses of the toy's networks with two hidden layers, by their sizes.
TOY = {
    **{(2, 2): 0.9, (2, 3): 0.9, (3, 2): 0.9, (2, 4): 0.66, (4, 2): 0.6, (3, 3): 0.66},
    **{(3, 4): 0.3, (4, 3): 0.3, (4, 4): 0.1},
}


@dataclass(frozen=True, kw_only=True)
class Space:
    """Architectures with the quality and the cost of each, and the largest cost that is feasible.

    choices: sizes to choose from, for each layer
    """

    choices: tuple[tuple[int, ...], ...]
    quality: Mapping[tuple[int, ...], float]
    cost: Mapping[tuple[int, ...], int]
    limit: int

    def sizes(self, y: Int[Tensor, " layer"]) -> tuple[int, ...]:
        return tuple(options[int(i)] for options, i in zip(self.choices, y, strict=True))

    def all(self) -> Int[Tensor, "row layer"]:
        """Every architecture, as the places of its choices."""
        return torch.tensor(list(itertools.product(*(range(len(c)) for c in self.choices))))

    def feasible(self, y: Int[Tensor, "row layer"]) -> Bool[Tensor, " row"]:
        return torch.tensor([self.cost[self.sizes(row)] <= self.limit for row in y])

    def qualities(self, y: Int[Tensor, "row layer"]) -> Float[Tensor, " row"]:
        return torch.tensor([self.quality[self.sizes(row)] for row in y], dtype=torch.float64)


def toy_space(*, limit: int = 25) -> Space:
    """The toy of the released notebooks: two hidden layers of 2 to 4 units, input 2, output 1."""
    sizes = (2, 3, 4)

    def parameters(hidden: tuple[int, ...]) -> int:
        widths = (2, *hidden, 1)
        return sum(a * b + b for a, b in itertools.pairwise(widths))

    return Space(
        choices=(sizes, sizes),
        quality={hidden: 1 - loss for hidden, loss in TOY.items()},
        cost={hidden: parameters(hidden) for hidden in TOY},
        limit=limit,
    )


SPACES = {"toy": toy_space}


def log_prob(
    logits: list[Float[Tensor, " choice"]], y: Int[Tensor, "row layer"]
) -> Float[Tensor, " row"]:
    """log P(y) = Σ_l log softmax(θ_l)[y_l]."""
    return sum(theta.log_softmax(0)[column] for theta, column in zip(logits, y.T))  # type: ignore[return-value]


def draw(logits: list[Tensor], count: int, generator: torch.Generator) -> Int[Tensor, "row layer"]:
    """Architectures drawn from P."""
    columns = [
        torch.multinomial(theta.detach().softmax(0), count, replacement=True, generator=generator)
        for theta in logits
    ]
    return torch.stack(columns, dim=1)


def log_feasible(
    logp: Float[Tensor, " row"], feasible: Bool[Tensor, " row"], *, correction: str
) -> Float[Tensor, ""]:
    """log P̂(V) from the log-probabilities of samples z ~ P, or of the whole space ("exact").

    "estimated": P̂ = (1/N) Σ 1{z ∈ V} p(z)/sg(p(z)), whose gradient is (1/N) Σ_V ∇ log p(z).
    "tf2", "pytorch": log Σ_V p(z), with and without a gradient, as in the released notebooks.
    """
    if correction == "none":
        return logp.new_zeros(())
    if correction == "exact":
        return logp[feasible].logsumexp(0)
    if correction == "estimated":
        return (feasible * (logp - logp.detach()).exp()).mean().log()
    total = logp[feasible].logsumexp(0)
    return total if correction == "tf2" else total.detach()


@dataclass(kw_only=True)
class TabnasJob(Job):
    """A controller over a space of architectures; one sampled architecture a step."""

    options: Mapping[str, Any]
    space: Space
    numerator: float = 0.0
    denominator: float = 0.0
    rejected: int = 0

    def __post_init__(self) -> None:
        sizes = [len(choices) for choices in self.space.choices]
        self.logits = nn.ParameterList(torch.zeros(n, dtype=torch.float64) for n in sizes)
        self.optimizer = torch.optim.Adam(
            self.logits.parameters(), lr=self.options["controller_lr"]
        )

    def make_step(self, watch: StepWatch) -> dict[str, float]:
        watch.observer.on_progress("sampling", 0, 1)
        watch.enter("update")
        draws = generator(self.config.seed, "tabnas", self.step)
        self.step += 1
        y = draw(list(self.logits), 1, draws)
        feasible, penalty = bool(self.space.feasible(y)[0]), self.options["penalty"]
        quality = float(self.space.qualities(y)[0])
        if penalty:
            sizes = self.space.sizes(y[0])
            quality -= penalty * abs(self.space.cost[sizes] / self.space.limit - 1)
        metrics = {"reward": quality, "loss": 0.0, "grad_norm": 0.0, "num_tokens": self.step}
        if feasible or penalty:
            metrics |= self._update(y, quality, draws)
        else:
            self.rejected += 1
        watch.lap("update")
        return metrics | {"proxpo/tabnas/rejected": self.rejected}

    def _update(
        self, y: Int[Tensor, "1 layer"], quality: float, draws: torch.Generator
    ) -> dict[str, float]:
        """One step on an accepted sample; none where no other sample is feasible."""
        keep = self.options["momentum"]
        self.numerator = keep * self.numerator + (1 - keep) * quality
        self.denominator = keep * self.denominator + 1 - keep
        advantage = quality - self.numerator / self.denominator
        logits, correction = list(self.logits), self.options["correction"]
        z = (
            self.space.all()
            if correction == "exact"
            else draw(logits, self.options["draws"], draws)
        )
        inside = self.space.feasible(z)
        correction = "none" if self.options["penalty"] else correction
        if correction != "none" and not bool(inside.any()):
            return {}
        share = log_feasible(log_prob(logits, z), inside, correction=correction)
        loss = -advantage * (log_prob(logits, y)[0] - share)
        if correction != "pytorch":
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        norm = math.sqrt(sum(float(theta.grad.square().sum()) for theta in logits))
        return {"loss": float(loss.detach()), "grad_norm": norm}

    @torch.no_grad()
    def examine(self, observer: Observer) -> Examined:
        """E[Q | V] and the chance of the best feasible architecture, exact; the likeliest ones."""
        y = self.space.all()
        inside, quality = self.space.feasible(y), self.space.qualities(y)
        chance = log_prob(list(self.logits), y).exp() * inside
        given = chance / chance.sum()
        best = (quality * inside).argmax()
        metrics = {
            "eval/reward": float((given * quality).sum()),
            "eval/optimum": float(given[best]),
            "eval/feasible": float(chance.sum()),
        }
        order = range(len(y))
        shown = [
            {
                "prompt": "-".join(map(str, self.space.sizes(y[i]))),
                "completion": f"P(y | V) = {float(given[i]):.3f}",
                "answer": f"quality {float(quality[i]):.2f}"
                + ("" if inside[i] else ", infeasible"),
            }
            for i in order
        ]
        return metrics, shown

    def parts(self) -> dict[str, Any]:
        gradients = {str(i): p.grad for i, p in enumerate(self.logits) if p.grad is not None}
        return {
            "weights": dict(self.logits.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "gradients": gradients,
        }

    def info(self) -> dict[str, Any]:
        return {
            "numerator": self.numerator,
            "denominator": self.denominator,
            "rejected": self.rejected,
        }

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        self.logits.load_state_dict(parts["weights"])
        self.optimizer.load_state_dict(parts["optimizer"])
        for index, gradient in parts["gradients"].items():
            self.logits[int(index)].grad = gradient
        self.numerator, self.denominator = info["numerator"], info["denominator"]
        self.rejected = info["rejected"]

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return {
            "score": "mean quality of feasible architectures",
            "unit": "samples",
            "accuracy_before": None,
            "accuracy_after": None,
            "reward_before": before["eval/reward"],
            "reward_after": after["eval/reward"],
            "optimum": after["eval/optimum"],
            "kl": None,
            "tokens": self.step,
            "tokens_per_second": round(self.step / max(self.seconds, 1e-9), 1),
        }


def build_architecture_job(config: Config) -> TabnasJob:
    """The job of a task architecture:NAME."""
    space = make_space(config.task.name.partition(":")[2], config.task.options)
    return TabnasJob(config=config, options=config.make_method().options, space=space)


def make_space(name: str, options: Mapping[str, Any]) -> Space:
    """The space called `name`, its options checked."""
    name = resolve(name or "toy", SPACES, what="architecture space")
    space = SPACES[name](**bind(SPACES[name], dict(options), what=f"task architecture:{name}"))
    if not bool(space.feasible(space.all()).any()):
        raise ProxpoError(f"task architecture:{name}: no architecture is within {space.limit}")
    return space


__all__ = [
    "Space",
    "TabnasJob",
    "build_architecture_job",
    "log_feasible",
    "log_prob",
    "make_space",
    "toy_space",
]
