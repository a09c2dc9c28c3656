"""Panels of what acts around a loss: gradient transforms, schedules, budgets; and of procedures."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from proxpo.ops.shapes import Tensor
from proxpo.pictures._svg import Axes, Line, Note, Number, Point
from proxpo.stages.budget.allocation import allocate
from proxpo.stages.regularisers.convex import base_share
from proxpo.stages.schedule import Updates
from proxpo.stages.schedule.clipping_bias import clipping_bias_of
from proxpo.types import Batch, Budget, Context, Recipe

Options = Mapping[str, Any]


def own_panel(recipe: Recipe) -> Axes | None:
    """The panel of the recipe's gradient transform, schedule or budget; None without one."""
    stages = (recipe.gradient, *recipe.budget, recipe.schedule)
    for stage in stages:
        if stage is not None and stage.name in RECIPES:
            return RECIPES[stage.name](recipe)
    return None


def procedure_panel(name: str, options: Options) -> Axes | None:
    """The panel of a method that is no composition of stages; None for one that has none."""
    return PROCEDURES[name](options) if name in PROCEDURES else None


def _range(low: Number, high: Number, count: int = 61) -> list[float]:
    return [low + i * (high - low) / (count - 1) for i in range(count)]


# Gradient transforms


def _length_panel(recipe: Recipe) -> Axes:
    """Contribution of each response to the update over the length of its gradient."""
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
    return Axes(
        title="share of a response in the update",
        x="length of its gradient |V|, mean 1",
        x_range=(0, 3),
        y_range=(0, 3),
        x_ticks=(0, 1, 2, 3),
        y_ticks=(0, 1, 2, 3),
        lines=(
            Line(points=[(0, 0), (3, 3)], style="soft", dashed=True),
            Line(points=dots, dots=True),
        ),
        notes=(Note(at=(1.95, 2.2), text="REINFORCE", anchor="end"),),
        caption="length of the update of one layer where only this response has an advantage, "
        "over the length of its gradient, both relative to their means; 16 responses of 1 to 16 "
        "tokens. Dashed: without the transform.",
    )


def _accumulation_panel(recipe: Recipe) -> Axes:
    """Share of a second micro-batch in the sum, over its angle to the first."""

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

    cosines = _range(-1, 1, 41)
    return Axes(
        title="sum of two micro-batches",
        x="cosine of the two gradients",
        x_range=(-1, 1),
        y_range=(0, 2),
        x_ticks=(-1, -0.5, 0, 0.5, 1),
        y_ticks=(0, 0.5, 1, 1.5, 2),
        lines=(
            Line(points=[(-1, 0), (1, 2)], style="soft", dashed=True),
            Line(points=[(c, kept(c)) for c in cosines]),
        ),
        notes=(Note(at=(0.35, 1.75), text="plain sum", anchor="end"),),
        caption="part of the accumulated gradient along the later of two micro-batches of one "
        "response each, gradients of length 1. Dashed: plain accumulation.",
    )


# Schedules


class _Recorder(Updates):
    """`Updates` without a model: every step moves one unit away from the policy that sampled."""

    def __init__(self, recipe: Recipe, *, count: int = 2, parts: int = 1) -> None:
        self.recipe, self.count, self.parts = recipe, count, parts
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
        lines=[Line(points=track, style=style) for style, track in recorder.tracks],
        caption="distance from the policy that made the rollout, in steps, over the optimizer "
        f"steps of three rollouts. {kinds.get(stage.name, '')}".strip(),
    )


def _clipping_panel(recipe: Recipe) -> Axes:
    bias = clipping_bias_of(recipe)
    assert bias is not None
    return Axes(
        title="factor on the gradient",
        x="norm of the clipped part ‖C‖",
        x_range=(0, 4),
        y_range=(0, 4),
        x_ticks=(0, 1, 2, 3, 4),
        y_ticks=(0, 1, 2, 3, 4),
        lines=(Line(points=[(x, bias.factor(x)) for x in _range(0.02, 4)]),),
        zero=1.0,
        caption="factor on the policy's gradient over the norm of the part that was clipped; 1 "
        "where nothing is clipped.",
    )


def _two_anchors_panel(recipe: Recipe) -> Axes:
    options = next(s.options for s in recipe.regularisers if s.name == "kl_convex")
    at = recipe.schedule.options["at"]  # type: ignore[union-attr]
    names = ("hold", "every", "floor")
    share = [(t, base_share(t, **{k: options[k] for k in names})) for t in range(0, 121)]
    return Axes(
        title="share of two anchors in the KL",
        x="optimizer steps",
        x_range=(0, 120),
        y_range=(0, 1.05),
        x_ticks=(0, 30, 60, 90, 120),
        y_ticks=(0, 0.5, 1),
        lines=(
            Line(points=share),
            Line(points=[(t, 1 - y) for t, y in share], style="down"),
        ),
        notes=(
            Note(at=(3, 0.88), text="base", style="up"),
            Note(at=(3, 0.06), text="policy before", style="down"),
        ),
        mark=at,
        caption="shares of the two anchors of the KL over the optimizer steps. Dashed: from there "
        "on fresh data alone, and the present policy as the new base.",
    )


def _multiplier_panel(recipe: Recipe) -> Axes:
    penalty = next(s for s in recipe.regularisers if s.name == "kl_dual")
    assert penalty.init is not None
    assert penalty.step is not None
    radius = penalty.options["radius"]
    state = penalty.init()
    blank = Batch(logp=torch.zeros(1, 1), mask=torch.ones(1, 1, dtype=torch.bool))
    beta, kl = [], []
    for t in range(200):
        size = radius * (1 + math.sin(t / 32))  # a KL that leaves the region and returns
        state = penalty.step(
            blank,
            {"kl/old": torch.tensor(size), "kl/old_max": torch.tensor(size)},
            Context(state=state),
        )
        beta.append((float(t), float(state["coef"])))
        kl.append((float(t), size / radius))
    return Axes(
        title="multiplier β of the KL",
        x="optimizer steps",
        x_range=(0, 200),
        y_range=(0, 2.6),
        x_ticks=(0, 50, 100, 150, 200),
        y_ticks=(0, 1, 2),
        lines=(
            Line(points=kl[::4], style="soft", dashed=True),
            Line(points=beta[::2]),
        ),
        notes=(
            Note(at=(4, 2.35), text="β", style="up"),
            Note(at=(196, 2.35), text="KL / radius", anchor="end"),
        ),
        zero=1.0,
        caption="β over optimizer steps while the KL (dashed, in units of the region's radius) "
        "leaves the region and returns.",
    )


# Budgets


def _allocation_panel(recipe: Recipe) -> Axes:
    stage = next(s for s in recipe.budget if s.name == "knapsack")
    rates = torch.linspace(0, 1, 17, dtype=torch.float64)
    o = stage.options
    samples = allocate(
        rates,
        torch.ones(17, dtype=torch.bool),
        torch.full((17,), 8),
        official=o["code_compat"],
        **{k: o[k] for k in ("low", "high", "positive", "negative", "confidence")},
        **{k: o[k] for k in ("cost", "fallback")},
    )
    points = list(zip(rates.tolist(), map(float, samples.tolist())))
    most = max(y for _, y in points)
    return Axes(
        title="responses to a prompt",
        x="share of right responses before",
        x_range=(0, 1),
        y_range=(0, most + 2),
        x_ticks=(0, 0.25, 0.5, 0.75, 1),
        y_ticks=tuple(range(0, int(most) + 2, 8)),
        lines=(
            Line(points=[(0, 8), (1, 8)], style="soft", dashed=True),
            Line(points=points),
            Line(points=points, dots=True),
        ),
        notes=(Note(at=(0.98, 9), text="even", anchor="end"),),
        caption="responses that each of 17 prompts gets out of 8 on average, over the share of "
        "right ones at its last visit. Dashed: the even share.",
    )


def _length_budget_panel(recipe: Recipe) -> Axes:
    stage = next(s for s in recipe.budget if s.name == "length_budget")
    assert stage.init is not None
    assert stage.update is not None
    target = stage.options["target"]
    longest = 1000
    asked = Budget(
        prompt_id=torch.zeros(1, dtype=torch.int64),
        samples=torch.tensor([10]),
        max_tokens=torch.tensor([longest]),
    )
    state, limits = stage.init(), []
    share = [1.0, 1.0, 0.9, 1.0, 0.9, 0.5, 1.0, 0.9, 0.9, 1.0, 0.8, 0.7]  # right at each visit
    for visit, rate in enumerate(share):
        budget, _ = stage.apply(asked, Context(state=state))
        limit = int(budget.max_tokens[0])
        limits += [(float(visit), float(limit)), (visit + 0.98, float(limit))]
        lengths = (torch.linspace(0.5, 1.0, 10) * min(limit, 600)).long()
        mask = torch.arange(longest) < lengths[:, None]
        right = torch.arange(10) < round(10 * rate)
        batch = Batch(
            logp=torch.zeros(10, longest),
            mask=mask,
            rewards=right.double(),
            correct=right,
            group=torch.zeros(10, dtype=torch.int64),
            prompt_id=torch.zeros(10, dtype=torch.int64),
        )
        state = stage.update(state, batch, {})
    marks = [(v + 0.5, 1000.0 * r) for v, r in enumerate(share)]
    return Axes(
        title="length budget of one prompt",
        x="visits of the prompt",
        x_range=(0, len(share)),
        y_range=(0, 1080),
        x_ticks=(0, 3, 6, 9, 12),
        y_ticks=(0, 500, 1000),
        lines=(
            Line(
                points=[(0, 1000 * target), (len(share), 1000 * target)], style="soft", dashed=True
            ),
            Line(points=limits),
            Line(points=marks, style="down", dots=True),
        ),
        notes=(
            Note(at=(0.1, 130), text="limit", style="up"),
            Note(at=(0.1, 40), text="right, ‰", style="down"),
        ),
        caption="longest response allowed at each visit (line) and right responses among 1,000 "
        "(dots); a pass rate at or above the dashed line shortens the next limit.",
    )


# Procedures


def _props_panel(options: Options) -> Axes:
    from proxpo.control.props import props_loss

    def push(ratio: float) -> float:
        logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        loss = props_loss(logp, torch.zeros(1, dtype=torch.float64), clip=options["behaviour_clip"])
        loss.backward()
        return -float(logp.grad)  # type: ignore[arg-type]

    xs = _range(0.013, 2.49, 62)
    clip = options["behaviour_clip"]
    edge = [] if clip is None else [1 - clip - 1e-4, 1 - clip + 1e-4]
    return Axes(
        title="push on a sampled action",
        x="behaviour over target π_φ/π_θ",
        x_range=(0, 2.5),
        y_range=(-2.6, 1),
        x_ticks=(0, 0.5, 1, 1.5, 2, 2.5),
        y_ticks=(-2, -1, 0, 1),
        lines=(Line(points=[(x, push(x)) for x in sorted([*xs, *edge])], style="down"),),
        mark=1.0,
        caption="push on the probability that the behaviour policy gives an action of the buffer, "
        "over its ratio to the target policy, without the KL term.",
    )


def _rosa_panel(options: Options) -> Axes:
    from proxpo.adapt.rosa import target_gap

    def after(p: float, reward: float) -> float:
        probs = torch.tensor([[p, 1 - p]], dtype=torch.float64)
        gap = target_gap(probs, torch.tensor([0]), reward=reward, beta=options["beta"])
        return p + float(gap[0, 0])

    xs = _range(0, 1, 41)
    return Axes(
        title="aim for a token of a wrong answer",
        x="probability of the token before",
        x_range=(0, 1),
        y_range=(0, 1),
        x_ticks=(0, 0.5, 1),
        y_ticks=(0, 0.5, 1),
        lines=(
            Line(points=[(0, 0), (1, 1)], style="soft", dashed=True),
            Line(points=[(p, after(p, -1.0)) for p in xs], style="down"),
        ),
        notes=(Note(at=(0.62, 0.78), text="unchanged", anchor="end"),),
        caption="probability p* that the step aims at for a token of a wrong answer, over its "
        "probability before.",
    )


def _latentseek_panel(options: Options) -> Axes:
    from proxpo.adapt.latentseek import latent_loss

    class Logits:
        def logits(self, z: Tensor) -> Tensor:
            return z

    def push(p: float) -> float:
        z = torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64, requires_grad=True)
        latent_loss(Logits(), z, torch.tensor([0]), -1.0).backward()  # type: ignore[arg-type]
        return -float(z.grad[0, 0])  # type: ignore[index]

    return Axes(
        title="push on the state of a token",
        x="probability of the token",
        x_range=(0, 1),
        y_range=(-1.1, 0.3),
        x_ticks=(0, 0.5, 1),
        y_ticks=(-1, -0.5, 0),
        lines=(Line(points=[(p, push(p)) for p in _range(0.005, 0.995)], style="down"),),
        caption="push of a step on the logit of the present token, for an answer of reward -1: a "
        f"token that the state is sure of is left alone. The first {100 * options['fraction']:g} % "
        f"of the answer's tokens, {options['most']} at most, have such steps.",
    )


def _tabnas_panel(options: Options) -> Axes:
    from proxpo.control.architecture import log_feasible

    def push(p: float, correction: str) -> float:
        """∂/∂θ of log P(y) - log P(V): y, another feasible choice, and infeasible ones of 0.5."""
        share = torch.tensor([p, 0.5 - p, 0.5], dtype=torch.float64)
        logits = share.log().requires_grad_()
        logp = logits.log_softmax(0)
        inside = torch.tensor([True, True, False])
        aim = logp[0] - log_feasible(logp, inside, correction=correction)
        return float(torch.autograd.grad(aim, logits)[0][0])

    xs = _range(0.005, 0.495)
    chosen = options["correction"]
    corrected = "none" if chosen == "none" else "exact"
    return Axes(
        title="push on a feasible choice",
        x="its probability; half is infeasible",
        x_range=(0, 0.5),
        y_range=(0, 1.05),
        x_ticks=(0, 0.25, 0.5),
        y_ticks=(0, 0.5, 1),
        lines=(
            Line(points=[(p, push(p, "none")) for p in xs], style="soft", dashed=True),
            Line(points=[(p, push(p, corrected)) for p in xs]),
        ),
        notes=(Note(at=(0.49, 0.75), text="REINFORCE", anchor="end"),),
        caption="push on the logit of a sampled feasible choice of quality 1 above the mean, over "
        "its probability, with P(V) exact; infeasible choices have probability 0.5. Dashed: "
        "without the correction.",
    )


def _ac_flow_panel(options: Options) -> Axes:
    from proxpo.generative.flow import advantages, sample_weights

    xs = _range(-2.5, 2.5)
    gaps = torch.tensor(xs, dtype=torch.float64)
    a = advantages(torch.zeros_like(gaps), -gaps, advantage_of="difference", bound=options["bound"])
    w = sample_weights(a, weighting=options["weighting"], tau=options["tau"])
    return Axes(
        title="weight of a sample",
        x="reward less the critic's value",
        x_range=(-2.5, 2.5),
        y_range=(0, 3),
        x_ticks=(-2, -1, 0, 1, 2),
        y_ticks=(0, 1, 2, 3),
        lines=(Line(points=list(zip(xs, w.tolist()))),),
        mark=0.0,
        caption="weight of a sample in the flow-matching loss over its advantage.",
    )


def _adjoint_panel(options: Options) -> Axes:
    from proxpo.generative.adjoint import NoiseSchedule

    schedule = NoiseSchedule(options["noise"], options["sigma_min"], options["sigma_max"])
    t = torch.tensor(_range(0, 1), dtype=torch.float64)
    lines = [
        Line(points=list(zip(t.tolist(), (f(t) / f(t).max()).tolist())), style=style)
        for f, style in ((schedule.g, "up"), (schedule.nu, "down"))
    ]
    return Axes(
        title="noise of the base process",
        x="time t",
        x_range=(0, 1),
        y_range=(0, 1.05),
        x_ticks=(0, 0.5, 1),
        y_ticks=(0, 0.5, 1),
        lines=lines,
        notes=(
            Note(at=(0.3, 0.2), text="g(t)", style="up"),
            Note(at=(0.3, 0.85), text="ν(t)", style="down"),
        ),
        caption="noise g(t) and accumulated variance ν(t) of the process that the control steers, "
        "relative to their largest values.",
    )


def _avg_panel(options: Options) -> Axes:
    from proxpo.control.avg import TdScale

    scale, raw, scaled = TdScale(), [], []
    for t in range(400):
        error = (0.5 if t < 200 else 5.0) * (1 + 0.5 * math.sin(t)) * (-1) ** t
        scale.push(error, options["gamma"], terminated=t % 20 == 19)
        sigma = scale.sigma if options["scale_td"] else 1.0
        raw.append((float(t), abs(error)))
        scaled.append((float(t), abs(error) / sigma))
    return Axes(
        title="TD errors as rewards grow tenfold",
        x="transitions",
        x_range=(0, 400),
        y_range=(0, 8),
        x_ticks=(0, 100, 200, 300, 400),
        y_ticks=(0, 2, 4, 6, 8),
        lines=(
            Line(points=raw[::5], style="soft", dashed=True),
            Line(points=scaled[::5]),
        ),
        notes=(
            Note(at=(8, 7.2), text="divided by σ", style="up"),
            Note(at=(8, 6.3), text="as they are"),
        ),
        caption="size of TD errors before (dashed) and after the division by σ, as rewards become "
        "ten times larger.",
    )


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
PROCEDURES: dict[str, Callable[[Options], Axes]] = {
    "ac-flow": _ac_flow_panel,
    "adjoint-sampling": _adjoint_panel,
    "avg": _avg_panel,
    "latentseek": _latentseek_panel,
    "props": _props_panel,
    "rosa": _rosa_panel,
    "tabnas": _tabnas_panel,
}

__all__ = ["own_panel", "procedure_panel"]
