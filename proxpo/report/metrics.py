"""Quantities that reports draw, and the names of metrics under which trainers log them.

A quantity has variants that must not be mixed: a held-out accuracy is not a training reward, nats
per response are not nats per token. A comparison uses the variant that most of its runs have.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from proxpo.report.run_data import Run


class Variant(NamedTuple):
    """One way a quantity is measured, and the names (patterns) it is logged under."""

    label: str
    names: tuple[str, ...]
    share: bool = False  # between 0 and 1, shown in per cent
    title: str = ""  # where the quantity's own would mislead
    short: str = ""  # the word for it beside a score of another kind


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something to draw over the steps, in all the ways it is measured."""

    key: str
    title: str
    variants: tuple[Variant, ...]
    free: bool = False  # its size depends on the method: drawn on a log scale where arms differ


SCORE = Quantity(
    key="score",
    title="Validation score",
    variants=(
        Variant("greedy accuracy, held out", ("proxpo/eval/accuracy",), True, short="greedy"),
        Variant("greedy reward, held out", ("proxpo/eval/reward",), title="Validation reward"),
        Variant("validation score", ("val-core/*/acc/mean@*", "val-core/*", "eval_reward")),
        Variant(
            "training reward",
            ("reward", "critic/rewards/mean", "critic/score/mean"),
            title="Training reward",
        ),
    ),
)
KL = Quantity(
    key="kl",
    title="KL drift",
    variants=(
        Variant("KL(π‖π₀), nats per response", ("proxpo/eval/kl",)),
        Variant("KL to the reference, nats per token", ("kl", "actor/kl_loss", "actor/kl")),
    ),
)
SECONDS = Quantity(
    key="seconds",
    title="Seconds per step",
    variants=(Variant("s", ("step_time", "perf/time_per_step", "timing_s/step")),),
)
CURVES = (
    Quantity(
        key="sampled",
        title="Validation, sampled answers",
        variants=(
            Variant(
                "accuracy of sampled answers, held out",
                ("proxpo/eval/avg@*",),
                True,
                short="sampled",
            ),
        ),
    ),
    Quantity(
        key="reward",
        title="Training reward",
        variants=(
            Variant("mean of the batch", ("reward", "critic/rewards/mean", "critic/score/mean")),
        ),
    ),
    KL,
    Quantity(
        key="entropy",
        title="Entropy",
        variants=(
            Variant("nats per token, held out", ("proxpo/eval/entropy",)),
            Variant("nats per token, rollouts", ("entropy", "actor/entropy", "actor/entropy_loss")),
        ),
    ),
    Quantity(
        key="ess",
        title="Effective sample size of the ratios",
        variants=(Variant("share of the batch, 1 = on-policy", ("proxpo/ratio/ess",), True),),
    ),
    Quantity(
        key="clipped",
        title="Clipped tokens",
        variants=(
            Variant(
                "share of tokens at the bound of the trust region",
                ("clip_ratio/region_mean", "actor/pg_clipfrac"),
                True,
            ),
        ),
    ),
    Quantity(
        key="cut",
        title="Responses cut at the limit",
        variants=(
            Variant(
                "share of responses",
                ("completions/clipped_ratio", "response_length/clip_ratio"),
                True,
            ),
        ),
    ),
    Quantity(
        key="equal_rewards",
        title="Prompts without a difference in reward",
        variants=(Variant("share of prompts", ("frac_reward_zero_std",), True),),
    ),
    Quantity(
        key="no_gradient",
        title="Updates with gradient 0",
        variants=(Variant("share of updates", ("proxpo/gradient/zero",), True),),
    ),
    Quantity(
        key="kl_old",
        title="Distance to the sampling policy",
        variants=(Variant("KL, nats per token", ("proxpo/kl/old", "actor/ppo_kl")),),
    ),
    Quantity(
        key="grad_norm",
        title="Gradient norm",
        free=True,
        variants=(Variant("after a transform, before clipping", ("grad_norm", "actor/grad_norm")),),
    ),
    Quantity(
        key="cosine",
        title="Gradient against REINFORCE's",
        variants=(Variant("cosine", ("proxpo/gradient/cosine_reinforce",)),),
    ),
    Quantity(
        key="largest_share",
        title="Loudest layer of the update",
        variants=(Variant("share of its square", ("proxpo/gradient/largest_share",), True),),
    ),
    Quantity(
        key="step_kl",
        title="KL of one update",
        free=True,
        variants=(
            Variant("nats", ("proxpo/gradient/kl",)),
            Variant("nats, of a unit step", ("proxpo/gradient/kl_unit_step",)),
        ),
    ),
    Quantity(
        key="length",
        title="Response length",
        variants=(Variant("tokens", ("completions/mean_length", "response_length/mean")),),
    ),
    SECONDS,
)
PHASES = ("proxpo/time/*", "timing_s/*")
TOTALS = ("timing_s/step",)
ACCURACIES = ("proxpo/eval/accuracy", "proxpo/eval/avg@*")  # greedy, sampled


class PickedVariant(NamedTuple):
    """The variant that a comparison uses, and its name in each run."""

    variant: Variant
    names: dict[int, str]  # by position of the run


def pick_variant(
    quantity: Quantity, runs: Sequence[Run], *, wanted: str = ""
) -> PickedVariant | None:
    """The variant that most runs have (the first of equals), or `wanted`, a metric's name."""
    known = [metric_names(run) for run in runs]
    variants = list(quantity.variants)
    if wanted and not any(wanted in variant.names for variant in variants):
        variants.insert(0, _described(wanted))
    usual = Counter(name for names in known for name in names)
    candidates = [
        PickedVariant(
            variant,
            {i: name for i, names in enumerate(known) if (name := _named(variant, names, usual))},
        )
        for variant in variants
    ]
    if wanted:
        exact = [picked for picked in candidates if wanted in picked.variant.names and picked.names]
        candidates = exact or candidates
    best = max(candidates, key=lambda picked: len(picked.names))
    return best if best.names else None


def other_accuracy(name: str, runs: Sequence[Run]) -> str:
    """The accuracy of the other kind, greedy or sampled, that all runs have too; "" for none."""
    if not any(fnmatchcase(name, pattern) for pattern in ACCURACIES):
        return ""
    shared = set.intersection(*map(metric_names, runs)) if runs else set()
    others = [pattern for pattern in ACCURACIES if not fnmatchcase(name, pattern)]
    found = [known for known in sorted(shared) for pattern in others if fnmatchcase(known, pattern)]
    return found[0] if found else ""


def _described(name: str) -> Variant:
    """A metric as a score, in the words and the unit of the curve that shows it, if one does."""
    for variant in (variant for curve in (*CURVES, SECONDS) for variant in curve.variants):
        if any(fnmatchcase(name, pattern) for pattern in variant.names):
            return variant._replace(names=(name,))
    return Variant(name, (name,))


def _named(variant: Variant, known: set[str], usual: Mapping[str, int]) -> str:
    """The name of a variant in one run: of several that fit, the one that most runs have."""
    for pattern in variant.names:
        if pattern in known:
            return pattern
        fitting = [name for name in known if "*" in pattern and fnmatchcase(name, pattern)]
        if fitting:
            return min(fitting, key=lambda name: (-usual.get(name, 0), name))
    return ""


def metric_names(run: Run) -> set[str]:
    """Every metric the run has measured."""
    return set().union(*run.rows)


class Series(NamedTuple):
    """A metric of one run where it was measured."""

    steps: np.ndarray
    values: np.ndarray


def series(run: Run, name: str) -> Series:
    points = [(row["step"], row[name]) for row in run.rows if name in row]
    both = np.array(points, dtype=float).reshape(-1, 2)
    return Series(both[:, 0], both[:, 1])


def seconds_spent(run: Run) -> Series:
    """Seconds spent up to each step."""
    return _summed(run, _named(SECONDS.variants[0], metric_names(run), {}))


def samples_drawn(run: Run) -> Series:
    """Responses drawn up to each step."""
    return _summed(run, "proxpo/samples")


def _summed(run: Run, name: str) -> Series:
    """Totals from step 0 on; a row stands for all steps since the one before it."""
    steps, values = series(run, name)
    if not len(steps):
        return Series(steps, values)
    totals = (values * np.diff(steps, prepend=0.0)).cumsum()
    fresh = steps > 0
    return Series(np.append(0.0, steps[fresh]), np.append(0.0, totals[fresh]))


def phase_seconds(run: Run) -> dict[str, float]:
    """Mean seconds of each part of a step, by its name."""
    timed = [
        n for n in sorted(metric_names(run)) if any(fnmatchcase(n, pattern) for pattern in PHASES)
    ]
    return {
        name.split("/", 2)[-1]: float(series(run, name).values.mean())
        for name in timed
        if name not in TOTALS
    }


__all__ = [
    "CURVES",
    "KL",
    "SCORE",
    "PickedVariant",
    "Quantity",
    "Series",
    "Variant",
    "metric_names",
    "other_accuracy",
    "phase_seconds",
    "pick_variant",
    "samples_drawn",
    "seconds_spent",
    "series",
]
