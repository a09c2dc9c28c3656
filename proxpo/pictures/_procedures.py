"""Panels of methods that are no composition of stages."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from proxpo.ops.shapes import Tensor
from proxpo.pictures._panel import THREE, UNIT, Fields, curve, panel, soft, spaced
from proxpo.pictures._svg import Axes, Line, Note

Options = Mapping[str, Any]


def procedure_panel(name: str, options: Options) -> Axes | None:
    """The panel of the method; None for one that has none."""
    return PROCEDURES[name](options) if name in PROCEDURES else None


@panel(
    "push on a sampled action",
    "behaviour over target π_φ/π_θ",
    (0, 0.5, 1, 1.5, 2, 2.5),
    range(-2, 2),
    y_range=(-2.6, 1),
    mark=1,
)
def _props_panel(options: Options) -> Fields:
    """Push on the probability that the behaviour policy gives an action of the buffer, over its
    ratio to the target policy, without the KL term.
    """
    from proxpo.control.props import props_loss

    def push(ratio: float) -> float:
        logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        loss = props_loss(logp, torch.zeros(1, dtype=torch.float64), clip=options["behaviour_clip"])
        loss.backward()
        return -float(logp.grad)  # type: ignore[arg-type]

    xs = spaced(0.013, 2.49, 62)
    clip = options["behaviour_clip"]
    edge = [] if clip is None else [1 - clip - 1e-4, 1 - clip + 1e-4]
    return {"lines": [curve(push, sorted([*xs, *edge]), "down")]}


@panel("aim for a token of a wrong answer", "probability of the token before", UNIT, UNIT)
def _rosa_panel(options: Options) -> Fields:
    """Probability p* that the step aims at for a token of a wrong answer, over its probability
    before.
    """
    from proxpo.adapt.rosa import target_gap

    def after(p: float) -> float:
        probs = torch.tensor([[p, 1 - p]], dtype=torch.float64)
        gap = target_gap(probs, torch.tensor([0]), reward=-1.0, beta=options["beta"])
        return p + float(gap[0, 0])

    return {
        "lines": [soft([(0, 0), (1, 1)]), curve(after, spaced(0, 1, 41), "down")],
        "notes": [Note((0.62, 0.78), "unchanged", anchor="end")],
    }


@panel(
    "push on the state of a token",
    "probability of the token",
    UNIT,
    (-1, -0.5, 0),
    y_range=(-1.1, 0.3),
)
def _latentseek_panel(options: Options) -> Fields:
    from proxpo.adapt.latentseek import latent_loss

    class Logits:
        def logits(self, z: Tensor) -> Tensor:
            return z

    def push(p: float) -> float:
        z = torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64, requires_grad=True)
        latent_loss(Logits(), z, torch.tensor([0]), -1.0).backward()  # type: ignore[arg-type]
        return -float(z.grad[0, 0])  # type: ignore[index]

    return {
        "lines": [curve(push, spaced(0.005, 0.995), "down")],
        "caption": "push of a step on the logit of the present token, for an answer of reward -1: "
        "a token that the state is sure of is left alone. The first "
        f"{100 * options['fraction']:g} % of the answer's tokens, {options['most']} at most, have "
        "such steps.",
    }


@panel(
    "push on a feasible choice",
    "its probability; half is infeasible",
    (0, 0.25, 0.5),
    UNIT,
    y_range=(0, 1.05),
)
def _tabnas_panel(options: Options) -> Fields:
    """Push on the logit of a sampled feasible choice of quality 1 above the mean, over its
    probability, with P(V) exact; infeasible choices have probability 0.5. Dashed: without the
    correction.
    """
    from proxpo.control.architecture import log_feasible

    def push(correction: str, p: float) -> float:
        """∂/∂θ of log P(y) - log P(V): y, another feasible choice, and infeasible ones of 0.5."""
        share = torch.tensor([p, 0.5 - p, 0.5], dtype=torch.float64)
        logits = share.log().requires_grad_()
        logp = logits.log_softmax(0)
        inside = torch.tensor([True, True, False])
        aim = logp[0] - log_feasible(logp, inside, correction=correction)
        return float(torch.autograd.grad(aim, logits)[0][0])

    xs = spaced(0.005, 0.495)
    corrected = "none" if options["correction"] == "none" else "exact"
    return {
        "lines": [soft([(p, push("none", p)) for p in xs]), curve(partial(push, corrected), xs)],
        "notes": [Note((0.49, 0.75), "REINFORCE", anchor="end")],
    }


@panel(
    "weight of a sample",
    "reward less the critic's value",
    range(-2, 3),
    THREE,
    x_range=(-2.5, 2.5),
    mark=0,
)
def _ac_flow_panel(options: Options) -> Fields:
    """Weight of a sample in the flow-matching loss over its advantage."""
    from proxpo.generative.flow import advantages, sample_weights

    xs = spaced(-2.5, 2.5)
    gaps = torch.tensor(xs, dtype=torch.float64)
    a = advantages(torch.zeros_like(gaps), -gaps, advantage_of="difference", bound=options["bound"])
    w = sample_weights(a, weighting=options["weighting"], tau=options["tau"])
    return {"lines": [Line(list(zip(xs, w.tolist())))]}


@panel("noise of the base process", "time t", UNIT, UNIT, y_range=(0, 1.05))
def _adjoint_panel(options: Options) -> Fields:
    """Noise g(t) and accumulated variance ν(t) of the process that the control steers, relative to
    their largest values.
    """
    from proxpo.generative.adjoint import NoiseSchedule

    schedule = NoiseSchedule(options["noise"], options["sigma_min"], options["sigma_max"])
    t = torch.tensor(spaced(0, 1), dtype=torch.float64)
    lines = [
        Line(list(zip(t.tolist(), (f(t) / f(t).max()).tolist())), style=style)
        for f, style in ((schedule.g, "up"), (schedule.nu, "down"))
    ]
    return {
        "lines": lines,
        "notes": [Note((0.3, 0.2), "g(t)", "up"), Note((0.3, 0.85), "ν(t)", "down")],
    }


@panel("TD errors as rewards grow tenfold", "transitions", range(0, 401, 100), range(0, 9, 2))
def _avg_panel(options: Options) -> Fields:
    """Size of TD errors before (dashed) and after the division by σ, as rewards become ten times
    larger.
    """
    from proxpo.control.avg import TdScale

    scale, raw, scaled = TdScale(), [], []
    for t in range(400):
        error = (0.5 if t < 200 else 5.0) * (1 + 0.5 * math.sin(t)) * (-1) ** t
        scale.push(error, options["gamma"], terminated=t % 20 == 19)
        sigma = scale.sigma if options["scale_td"] else 1.0
        raw.append((float(t), abs(error)))
        scaled.append((float(t), abs(error) / sigma))
    return {
        "lines": [soft(raw[::5]), Line(scaled[::5])],
        "notes": [Note((8, 7.2), "divided by σ", "up"), Note((8, 6.3), "as they are")],
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


__all__ = ["procedure_panel"]
