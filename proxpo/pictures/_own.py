"""Panels of what acts around a loss: gradient transforms, schedules, budgets."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from proxpo.ops.shapes import Tensor
from proxpo.pictures._panel import FOUR, THREE, UNIT, Fields, curve, panel, soft, spaced
from proxpo.pictures._svg import Axes, Line, Note, Point
from proxpo.stages.budget.allocation import allocate
from proxpo.stages.regularisers.convex import base_share
from proxpo.stages.schedule import Updates
from proxpo.stages.schedule.clipping_bias import clipping_bias_of
from proxpo.types import Batch, Budget, Context, Recipe


def own_panel(recipe: Recipe) -> Axes | None:
    """The panel of the recipe's gradient transform, schedule or budget; None without one."""
    stages = (recipe.gradient, *recipe.budget, recipe.schedule)
    for stage in stages:
        if stage is not None and stage.name in RECIPES:
            return RECIPES[stage.name](recipe)
    return None


# Gradient transforms


@panel("share of a response in the update", "length of its gradient |V|, mean 1", THREE, THREE)
def _length_panel(recipe: Recipe) -> Fields:
    """Length of the update of one layer where only this response has an advantage, over the length
    of its gradient, both relative to their means; 16 responses of 1 to 16 tokens. Dashed:
    without the transform.
    """
    draw = random.Random(3)
    lengths = range(1, 17)
    x = [[draw.gauss(0, 1) for _ in range(6)] for _ in range(sum(lengths))]
    sharp = [draw.choice((0.3, 1.0, 3.0)) for _ in lengths]  # the surer, the shorter its gradient
    sequences = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    inputs = torch.tensor([x], dtype=torch.float64)
    heat = torch.tensor(sharp, dtype=torch.float64)[sequences][..., None]

    def contribution(i: int, transform: Any) -> float:
        model = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        model.weight.data += torch.eye(5, 6, dtype=torch.float64)
        advantages = torch.eye(len(lengths), dtype=torch.float64)[i]

        def loss() -> Tensor:
            logp = (heat * model(inputs)).log_softmax(-1)
            own = logp.max(dim=-1).values
            return -(own if transform else own * advantages[sequences]).sum()

        if transform is None:
            loss().backward()
        else:
            with transform.applied(model, sequences=sequences, advantages=advantages):
                loss().backward()
        return float(model.weight.grad.norm())  # type: ignore[union-attr]

    make = recipe.gradient.apply  # type: ignore[union-attr]
    plain = [contribution(i, None) for i in range(len(lengths))]
    scaled = [contribution(i, make()) for i in range(len(lengths))]
    mean, mean_scaled = (sum(values) / len(values) for values in (plain, scaled))
    dots = sorted((a / mean, b / mean_scaled) for a, b in zip(plain, scaled))
    return {
        "lines": [soft([(0, 0), (3, 3)]), Line(dots, dots=True)],
        "notes": [Note((1.95, 2.2), "REINFORCE", anchor="end")],
    }


@panel(
    "sum of two micro-batches",
    "cosine of the two gradients",
    (-1, -0.5, 0, 0.5, 1),
    (0, 0.5, 1, 1.5, 2),
)
def _accumulation_panel(recipe: Recipe) -> Fields:
    """Part of the accumulated gradient along the later of two micro-batches of one response each,
    gradients of length 1. Dashed: plain accumulation.
    """

    def kept(cosine: float) -> float:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        transform = recipe.gradient.apply()  # type: ignore[union-attr]
        second = (cosine, math.sqrt(max(1 - cosine**2, 0.0)))
        for direction in ((1.0, 0.0), second):
            inputs = torch.tensor([[direction]], dtype=torch.float64)
            one = torch.ones(1, dtype=torch.float64)
            with transform.applied(
                model, sequences=torch.zeros(1, 1, dtype=torch.int64), advantages=one
            ):
                model(inputs).sum().backward()
        return float(model.weight.grad[0] @ torch.tensor(second, dtype=torch.float64))  # type: ignore

    return {
        "lines": [soft([(-1, 0), (1, 2)]), curve(kept, spaced(-1, 1, 41))],
        "notes": [Note((0.35, 1.75), "plain sum", anchor="end")],
    }


# Schedules


class _Recorder(Updates):
    """`Updates` without a model: every step moves one unit away from the policy that sampled."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.count, self.parts = recipe, 2, 1
        self.position, self.made = 0.0, 0
        self.tracks: list[tuple[str, list[Point]]] = []
        self.style = "up"

    def rollout(self) -> None:
        """A new rollout by the present policy."""
        self.position = 0.0
        self._start("up")

    def _start(self, style: str) -> None:
        self.style = style
        self.tracks.append((style, [(self.made, self.position)]))

    def step(self, n: int = 1, **unused: Any) -> dict[str, Tensor]:
        for _ in range(n):
            self.made, self.position = self.made + 1, self.position + 1
            self.tracks[-1][1].append((self.made, self.position))
        return {}

    def variant(self, recipe: Recipe) -> "_Recorder":
        if len(self.tracks[-1][1]) > 1:
            self._start("down")
        return self

    def replay(self, **unused: Any) -> bool:
        if self.style != "down":
            self._start("down")
        self.step()
        return True

    def keep(self, **unused: Any) -> None:
        pass

    def batch(self) -> Batch:
        zero = torch.zeros(1, 1, dtype=torch.float64)
        return Batch(logp=zero, mask=zero == 0, entropy=zero)

    def weights(self) -> list[Tensor]:
        return [torch.tensor(self.position, dtype=torch.float64)]

    def load(self, weights: Sequence[Tensor]) -> None:
        self.position = float(weights[0])
        self.tracks[-1][1].append((self.made, self.position))


def _timeline(recipe: Recipe) -> Axes:
    """Distance from the policy that sampled over the optimizer steps of three rollouts."""
    stage, recorder = recipe.schedule, _Recorder(recipe)  # type: ignore[abstract]
    assert stage is not None
    state = stage.init() if stage.init is not None else {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        recorder.rollout()
        ctx = Context(state=state, generator=generator)
        state, _ = stage.apply(recorder, ctx)
    last = recorder.made
    top = max(y for _, track in recorder.tracks for _, y in track)
    step = max(1, math.ceil(last / 6))
    kinds = {
        "split_passes": "Orange: the pass over the tokens of high probability.",
        "poisson_replay": "Orange: steps on replayed data.",
        "fast_slow": "Where the line falls the weights are pulled back.",
    }
    return Axes(
        title="steps on a rollout",
        x="optimizer steps, three rollouts",
        x_range=(0, last),
        y_range=(0, top + 0.5),
        x_ticks=tuple(range(0, last + 1, step)),
        y_ticks=tuple(range(0, int(top) + 1, max(1, math.ceil(top / 5)))),
        lines=[Line(track, style=style) for style, track in recorder.tracks],
        caption="distance from the policy that made the rollout, in steps, over the optimizer "
        f"steps of three rollouts. {kinds.get(stage.name, '')}".strip(),
    )


@panel("factor on the gradient", "norm of the clipped part ‖C‖", FOUR, FOUR, zero=1)
def _clipping_panel(recipe: Recipe) -> Fields:
    """Factor on the policy's gradient over the norm of the part that was clipped; 1 where nothing
    is clipped.
    """
    bias = clipping_bias_of(recipe)
    assert bias is not None
    return {"lines": [curve(bias.factor, spaced(0.02, 4))]}


@panel(
    "share of two anchors in the KL", "optimizer steps", range(0, 121, 30), UNIT, y_range=(0, 1.05)
)
def _two_anchors_panel(recipe: Recipe) -> Fields:
    """Shares of the two anchors of the KL over the optimizer steps. Dashed: from there on fresh
    data alone, and the present policy as the new base.
    """
    options = next(s.options for s in recipe.regularisers if s.name == "kl_convex")
    names = ("hold", "every", "floor")
    share = [(t, base_share(t, **{k: options[k] for k in names})) for t in range(0, 121)]
    return {
        "lines": [Line(share), Line([(t, 1 - y) for t, y in share], "down")],
        "notes": [Note((3, 0.88), "base", "up"), Note((3, 0.06), "policy before", "down")],
        "mark": recipe.schedule.options["at"],  # type: ignore[union-attr]
    }


@panel(
    "multiplier β of the KL",
    "optimizer steps",
    range(0, 201, 50),
    (0, 1, 2),
    y_range=(0, 2.6),
    zero=1,
)
def _multiplier_panel(recipe: Recipe) -> Fields:
    """β over optimizer steps while the KL (dashed, in units of the region's radius) leaves the
    region and returns.
    """
    penalty = next(s for s in recipe.regularisers if s.name == "kl_dual")
    assert penalty.init is not None
    assert penalty.step is not None
    radius = penalty.options["radius"]
    state = penalty.init()
    blank = Batch(logp=torch.zeros(1, 1), mask=torch.ones(1, 1, dtype=torch.bool))
    beta, kl = [], []
    for t in range(200):
        size = radius * (1 + math.sin(t / 32))  # a KL that leaves the region and returns
        seen = dict.fromkeys(("kl/old", "kl/old_max"), torch.tensor(size))
        state = penalty.step(blank, seen, Context(state=state))
        beta.append((float(t), float(state["coef"])))
        kl.append((float(t), size / radius))
    return {
        "lines": [soft(kl[::4]), Line(beta[::2])],
        "notes": [Note((4, 2.35), "β", "up"), Note((196, 2.35), "KL / radius", anchor="end")],
    }


# Budgets


@panel("responses to a prompt", "share of right responses before", (0, 0.25, 0.5, 0.75, 1), (0,))
def _allocation_panel(recipe: Recipe) -> Fields:
    """Responses that each of 17 prompts gets out of 8 on average, over the share of right ones at
    its last visit. Dashed: the even share.
    """
    stage = next(s for s in recipe.budget if s.name == "knapsack")
    rates = torch.linspace(0, 1, 17, dtype=torch.float64)
    names = ("low", "high", "positive", "negative", "confidence", "cost", "fallback")
    options = {"official": stage.options["code_compat"], **{k: stage.options[k] for k in names}}
    known, even = torch.ones(17, dtype=torch.bool), torch.full((17,), 8)
    samples = allocate(rates, known, even, **options)
    points = list(zip(rates.tolist(), map(float, samples.tolist())))
    most = max(y for _, y in points)
    return {
        "y_range": (0, most + 2),
        "y_ticks": tuple(range(0, int(most) + 2, 8)),
        "lines": [soft([(0, 8), (1, 8)]), Line(points), Line(points, dots=True)],
        "notes": [Note((0.98, 9), "even", anchor="end")],
    }


@panel(
    "length budget of one prompt",
    "visits of the prompt",
    range(0, 13, 3),
    (0, 500, 1000),
    y_range=(0, 1080),
)
def _length_budget_panel(recipe: Recipe) -> Fields:
    """Longest response allowed at each visit (line) and right responses among 1,000 (dots); a pass
    rate at or above the dashed line shortens the next limit.
    """
    stage = next(s for s in recipe.budget if s.name == "length_budget")
    assert stage.init is not None
    assert stage.update is not None
    target, prompt = 1000 * stage.options["target"], torch.zeros(10, dtype=torch.int64)
    asked = Budget(
        prompt_id=prompt[:1], samples=torch.tensor([10]), max_tokens=torch.tensor([1000])
    )
    state, limits = stage.init(), []
    share = [1.0, 1.0, 0.9, 1.0, 0.9, 0.5, 1.0, 0.9, 0.9, 1.0, 0.8, 0.7]  # right at each visit
    for visit, rate in enumerate(share):
        budget, _ = stage.apply(asked, Context(state=state))
        limit = int(budget.max_tokens[0])
        limits += [(float(visit), float(limit)), (visit + 0.98, float(limit))]
        lengths = (torch.linspace(0.5, 1.0, 10) * min(limit, 600)).long()
        right = torch.arange(10) < round(10 * rate)
        batch = Batch(
            logp=torch.zeros(10, 1000),
            mask=torch.arange(1000) < lengths[:, None],
            **{"rewards": right.double(), "correct": right, "group": prompt, "prompt_id": prompt},
        )
        state = stage.update(state, batch, {})
    marks = [(v + 0.5, 1000.0 * r) for v, r in enumerate(share)]
    return {
        "lines": [soft([(0, target), (12, target)]), Line(limits), Line(marks, "down", dots=True)],
        "notes": [Note((0.1, 130), "limit", "up"), Note((0.1, 40), "right, ‰", "down")],
    }


RECIPES: dict[str, Callable[[Recipe], Axes]] = {
    "isopo": _length_panel,
    "isopo_ntk": _length_panel,
    "proma": _accumulation_panel,
    "inner_steps": _timeline,
    "split_passes": _timeline,
    "poisson_replay": _timeline,
    "fast_slow": _timeline,
    "clipping_bias": _clipping_panel,
    "reincarnation": _two_anchors_panel,
    "fixup": _multiplier_panel,
    "knapsack": _allocation_panel,
    "length_budget": _length_budget_panel,
}

__all__ = ["own_panel"]
