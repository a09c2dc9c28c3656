"""Weight that a recipe's gradient gives a token: over its ratio, and over the tokens of a batch.

The weight is -∂loss/∂log π by autograd through the recipe, in float64: what one step of plain
gradient descent adds to log π of the token.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from proxpo.batch_file import load_batch
from proxpo.inspection import token_gradient
from proxpo.ops.shapes import Tensor
from proxpo.pictures._svg import Axes, Line, Point, Strip
from proxpo.types import Batch, Context, Recipe

LENGTH, SHORT = 1000, 8  # tokens of a response; SHORT where other tokens make no difference
PROBABILITY = 0.3  # of every token under the old policy
RATIOS, POINTS = (0.0, 2.5), 46
JUMP, HALVINGS = 0.25, 11  # a step of the curve larger than this is an edge, found by halving
ANCHORS = ("old_logp", "ref_logp", "rollout_logp", "prox_logp", "prev_logp", "full_logp")
Case = tuple[float, float]  # sign of the advantage, ratio
Weigher = Callable[[Sequence[Case]], list[float]]
ON_POLICY: tuple[Case, ...] = ((1.0, 1.0), (-1.0, 1.0))
TRIED: tuple[Case, ...] = tuple((s, r) for s in (1.0, -1.0) for r in (0.31, 0.92, 1.34, 2.23))


def ratio_panel(recipe: Recipe) -> Axes:
    """Weight of one token over π/π_old: alone among 1,000 (solid), or with its response (dashed).

    Two responses to one prompt, with advantages ±1. The other response stays at ratio 1. Weights
    are relative to that of the token at ratio 1.
    """
    every = (*ON_POLICY, *TRIED)
    alone, moved = (_weights(recipe, every, LENGTH, whole=whole) for whole in (False, True))
    together = any(abs(a - b) > 0.02 * max(map(abs, alone[:2])) for a, b in zip(alone, moved))
    width = _window(recipe)
    span = RATIOS if width is None else (1 - 20 * width, 1 + 20 * width)
    ticks = (0, 0.5, 1, 1.5, 2, 2.5) if width is None else (1 - 10 * width, 1, 1 + 10 * width)
    length = LENGTH if together else SHORT
    lines = [
        line
        for whole in ((True, False) if together else (False,))
        for line in _curves(_weigher(recipe, length, whole=whole), whole, span)
    ]
    with_response = (
        f" Dashed: all {LENGTH:,} tokens of its response move together." if together else ""
    )
    response = f" of a response of {LENGTH:,}" if together else ""
    return Axes(
        title="weight over the ratio",
        x="π/π_old of the token",
        x_range=span,
        y_range=(-2.6, 2.6),
        x_ticks=ticks,
        y_ticks=(-2, -1, 0, 1, 2),
        lines=lines,
        legend=(("A > 0", "up"), ("A < 0", "down")),
        mark=1.0,
        caption=f"weight of one token{response} in the gradient against its ratio, relative "
        f"to ratio 1; above 0 a step makes it likelier.{with_response}",
    )


def _weigher(recipe: Recipe, length: int, *, whole: bool) -> Weigher:
    """The function from cases to relative weights: in one batch, if that makes no difference."""

    def relative(cases: Sequence[Case]) -> list[float]:
        every = _weights(recipe, (*ON_POLICY, *cases), length, whole=whole)
        unit = max(map(abs, every[:2]))
        return [w / unit if unit > 0 else 0.0 for w in every[2:]]

    @functools.cache
    def weight(case: Case) -> float:
        return _weights(recipe, (case,), length, whole=whole)[0]

    def one_by_one(cases: Sequence[Case]) -> list[float]:
        unit = max(abs(weight(case)) for case in ON_POLICY)
        return [weight(case) / unit if unit > 0 else 0.0 for case in cases]

    pooled, single = relative(TRIED), one_by_one(TRIED[1::2])
    agree = all(abs(a - b) < 1e-6 for a, b in zip(pooled[1::2], single))
    return relative if agree else one_by_one


def _weights(recipe: Recipe, cases: Sequence[Case], length: int, *, whole: bool) -> list[float]:
    """Weight of the last token of a response for each case; the case's other response rests."""
    count = len(cases)
    signs, ratios = torch.tensor(cases, dtype=torch.float64).unbind(1)
    old = torch.full((2 * count, length), math.log(PROBABILITY), dtype=torch.float64)
    moved = torch.zeros_like(old)
    moved[::2, slice(None) if whole else slice(-1, None)] = ratios.log()[:, None]
    advantages = torch.stack([signs, -signs], dim=1).flatten()
    steps = torch.arange(length, dtype=torch.float64).expand_as(old)
    batch = Batch(
        logp=old + moved,
        mask=torch.ones_like(old, dtype=torch.bool),
        advantages=advantages,
        rewards=(advantages > 0).double(),
        group=torch.arange(count).repeat_interleave(2),
        correct=advantages > 0,
        entropy=steps / length,  # the last token is the least certain
        turn=(4 * steps / length).long(),
        **dict.fromkeys(ANCHORS, old),
    )
    return (-_gradient(recipe, batch)[::2, -1]).tolist()


def _window(recipe: Recipe) -> float | None:
    """A distance from ratio 1 within which tokens have a weight; None if they have it far beyond.

    The panel of a clip too narrow to be seen shows its surroundings alone.
    """
    weigh = _weigher(recipe, SHORT, whole=False)
    for width in (None, 2e-2, 2e-3, 2e-4, 2e-5, 2e-6):
        cases = (
            TRIED if width is None else [(s, 1 + d) for s in (1.0, -1.0) for d in (-width, width)]
        )
        if any(abs(w) > 1e-9 for w in weigh(cases)):
            return width
    return None


def _curves(weigh: Weigher, dashed: bool, span: Point) -> list[Line]:
    """Both curves, traced at equal distances and at both ends of every edge."""
    low, high = span
    # Half a step aside of round numbers, where clip ranges end.
    xs = [low + (i + 0.5) * (high - low) / POINTS for i in range(POINTS)]
    signs = {1.0: "up", -1.0: "down"}
    every = weigh([(sign, x) for sign in signs for x in xs])
    traces = {s: list(zip(xs, every[i * POINTS :])) for i, s in enumerate(signs)}
    edges = [
        (sign, pair)
        for sign, trace in traces.items()
        for pair in itertools.pairwise(trace)
        if abs(pair[1][1] - pair[0][1]) > JUMP
    ]
    for _ in range(HALVINGS if edges else 0):
        middles = [(sign, (a[0] + b[0]) / 2) for sign, (a, b) in edges]
        values = weigh(middles)
        edges = [
            (sign, (m, b) if abs(m[1] - a[1]) < abs(m[1] - b[1]) else (a, m))
            for (sign, (a, b)), m in zip(edges, zip((x for _, x in middles), values))
        ]
    for sign, pair in edges:
        traces[sign] += pair
    ends = {s: sorted(t) for s, t in traces.items()}
    return [
        Line(points=[(low, t[0][1]), *t, (high, t[-1][1])], style=signs[s], dashed=dashed)
        for s, t in ends.items()
    ]


def strip_panel(recipe: Recipe, batch: Batch | None = None) -> Strip:
    """Weight of every token of a batch; without one, of the sample batch."""
    sampled = load_batch("sample") if batch is None else batch
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in sampled.items()}
    weights = -_gradient(recipe, Batch(**doubled))
    mask, group = sampled.mask, sampled.group
    rows = [
        [float(w) if m else None for w, m in zip(row, valid)]
        for row, valid in zip(weights.tolist(), mask.tolist())
    ]
    gaps = [] if group is None else [i for i in range(1, len(group)) if group[i] != group[i - 1]]
    rewards = sampled.rewards
    labels = [""] * len(rows) if rewards is None else [f"{r:g}" for r in rewards.tolist()]
    return Strip(
        title="weights in a batch",
        rows=rows,
        labels=labels,
        gaps=gaps,
        x="tokens; left: the response's reward",
        caption=f"weight of every token of {len(rows)} responses, reward at the left; blue: "
        "made likelier, orange: less likely, darkest the largest, grey: 0.",
    )


def _gradient(recipe: Recipe, batch: Batch) -> Tensor:
    logp = batch.logp.detach().clone().requires_grad_()
    ctx = Context(generator=torch.Generator().manual_seed(0), states=recipe.init_state())
    full = _completed(recipe, batch.replace(logp=logp))
    return token_gradient(recipe, full, ctx).gradient.detach()


def _completed(recipe: Recipe, batch: Batch) -> Batch:
    """The batch with neutral values for the fields it lacks of those that the recipe reads."""
    rows, tokens = batch.logp.shape
    place = torch.arange(rows)

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pair(logp: Tensor) -> Tensor:
        """A vocabulary of two: the token that was drawn, and all others."""
        logp = logp.clamp(max=-1e-9)
        return torch.stack([logp, torch.log(-torch.expm1(logp))], dim=-1)

    old = batch.logp.detach() if batch.old_logp is None else batch.old_logp
    angle = place[:, None] * torch.tensor([0.6, 0.0]) + torch.tensor([0.0, math.pi / 2])
    neutral: dict[str, Callable[[], Tensor]] = {
        "vocab_logp": lambda: pair(batch.logp),
        "old_vocab_logp": lambda: pair(old),
        "tokens": lambda: zeros(rows, tokens, dtype=torch.int64),
        "hidden": lambda: torch.ones(rows, tokens, 2, dtype=torch.float64),
        "features": lambda: angle.double().cos(),
        "mean": lambda: zeros(rows, tokens, 2),
        "old_mean": lambda: zeros(rows, tokens, 2),
        "ref_mean": lambda: zeros(rows, tokens, 2),
        "thought": lambda: zeros(rows, tokens, 2),
        "predicted_noise": lambda: zeros(rows, tokens, 2),
        "ref_predicted_noise": lambda: zeros(rows, tokens, 2),
        "latent": lambda: zeros(rows, tokens, dtype=torch.bool),
        "noise": lambda: torch.ones(rows, tokens, dtype=torch.float64),
        "step_size": lambda: torch.ones(rows, tokens, dtype=torch.float64),
        "values": lambda: zeros(rows, tokens),
        "old_values": lambda: zeros(rows, tokens),
        "greedy_rewards": lambda: zeros(rows),
        "prompt_id": lambda: batch.require("group", by=recipe.name),
        "duration": lambda: torch.ones(rows, dtype=torch.float64),
        "void": lambda: zeros(rows, dtype=torch.bool),
        "truncated": lambda: zeros(rows, dtype=torch.bool),
        "span_rewards": lambda: zeros(rows, tokens),
        "ref_kl": lambda: zeros(rows, tokens),
        "episode": lambda: place,
        "step": lambda: zeros(rows, dtype=torch.int64),
        "attempt": lambda: zeros(rows, dtype=torch.int64),
        "state": lambda: zeros(rows, dtype=torch.int64),
        "reflect": lambda: zeros(rows, dtype=torch.bool),
        "step_rewards": lambda: batch.require("rewards", by=recipe.name).double(),
        "summary": lambda: (torch.arange(tokens) < tokens // 4).expand(rows, tokens),
        "full_logp": lambda: old,
        # Every other turn is left out, but never the first.
        "segment_draw": lambda: torch.where(place % 2 == 0, 0.75, 0.25).double(),
    }
    wanted = recipe.needs() & neutral.keys()
    return batch.replace(**{k: neutral[k]() for k in wanted if getattr(batch, k) is None})


__all__ = ["ratio_panel", "strip_panel"]
