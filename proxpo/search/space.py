"""The search space: compositions of registered stages, and the options that vary, with ranges.

A composition has one advantage, ratio, trust and aggregate stage and at most two further stages.
Stages come from the registry, those of other packages too; this file declares ranges and leaves
out stages whose effect a search cannot see. A stage that reads a batch field which the run does not
provide is never drawn, nor is a pair whose `takes` and `gives` do not fit.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe
from proxpo.stages import STAGES, load_stages
from proxpo.stages._options import parameters
from proxpo.train.config import Config
from proxpo.train.language import fitted
from proxpo.train.refusals import check_fields
from proxpo.train.tasks import Task, make_task
from proxpo.types import MANY, Recipe, Stage

METHOD = "grpo"  # whose stages are all replaced; it has no further ones
REQUIRED = ("advantage", "ratio", "trust", "aggregate")
FURTHER = ("reward", "filter", "prune", "weights", "regularisers", "select", "gradient")
MOST_FURTHER = 2
DIGITS = 3  # significant ones of a drawn number
Settings = dict[str, Any]


@dataclass(frozen=True)
class Between:
    """A number between two bounds; log: uniform in its logarithm."""

    low: float
    high: float
    log: bool = True


@dataclass(frozen=True)
class Range:
    """Values of an option; `when`: the value of another option with which it has an effect."""

    values: Between | tuple[Any, ...]
    when: tuple[str, Any] | None = None


def _between(low: float, high: float, *, log: bool = True) -> Range:
    return Range(Between(low, high, log))


def _among(*values: Any) -> Range:
    return Range(values)


_CLIP = _between(0.05, 0.6)
# Options that vary, by stage; all others keep their defaults.
RANGES: Mapping[str, Mapping[str, Range]] = {
    "advantage.group_relative": {"scale": _among("group", "batch", "centred", "none")},
    "advantage.leave_one_out": {"normalise": _among(False, True)},
    "advantage.discounted_return": {
        "baseline": _among("batch", "group", "leave_one_out"),
        "whitening": _among(False, True),
    },
    "advantage.entropy_penalised": {"gamma": _between(0.01, 1.0)},
    "advantage.reweighted_baseline": {
        "baseline": _among("weighted", "self_normalised"),
        "normalise_std": _among(False, True),
    },
    "ratio.sequence": {"own_gradient": _among(False, True)},
    "ratio.smoothed": {
        "alpha": _between(0.02, 0.6),
        "level": _among("token", "sequence"),
    },
    "ratio.kalman": {"q": _between(1e-8, 1e-1)},
    "ratio.ema": {
        "mode": _among("scheduled", "fixed"),
        "alpha": Range(Between(1e-3, 0.9), when=("mode", "fixed")),
        "q": Range(Between(1e-8, 1e-1), when=("mode", "scheduled")),
    },
    "ratio.geometric_clip": {
        "clip_low": _between(0.05, 1.0),
        "clip_high": _between(0.05, 1.0),
    },
    "trust.ppo_clip": {"clip_low": _CLIP, "clip_high": _CLIP},
    "trust.hard_clip": {"clip_low": _CLIP, "clip_high": _CLIP},
    "trust.dynamic_clip": {"clip_low": _CLIP, "clip_high": _CLIP},
    "trust.mixed_clip": {"clip_low": _CLIP, "clip_high": _CLIP},
    "trust.clip_cov": {"share": _between(1e-4, 0.05)},
    "trust.clipped_weight": {"clip_high": _between(0.05, 5.0)},
    "trust.asymmetric_clip": {
        "clip_low": _CLIP,
        "clip_high": _CLIP,
        "clip_uncertain": _CLIP,
    },
    "trust.divergence_mask": {"clip_low": _between(0.02, 0.4), "clip_high": _between(0.02, 0.4)},
    "trust.gamma_weight": {
        "k_pos": _between(0.5, 5.0),
        "lambda_pos": _between(0.5, 5.0),
        "k_neg": _between(0.5, 5.0),
        "lambda_neg": _between(0.5, 5.0),
    },
    "trust.soft_gate": {"tau_pos": _between(0.3, 5.0), "tau_neg": _between(0.3, 5.0)},
    "reward.dither": {"scale": _between(0.005, 0.3)},
    "reward.kl_in_reward": {"coef": _between(1e-4, 0.1), "per": _among("sequence")},
    "reward.gradient_novelty": {"strength": _between(0.1, 2.0)},
    "prune.largest_advantages": {"rate": _between(0.2, 0.5, log=False)},
    "weights.conflict_tokens": {"boost": _between(1.2, 4.0)},
    "weights.entropy_gate": {"share": _between(0.1, 0.8, log=False)},
    "weights.top_entropy": {
        "share": _between(0.1, 0.8, log=False),
        "normalise": _among("selected", "all"),
    },
    "weights.off_policy_mask": {"threshold": _between(0.01, 1.0)},
    "weights.probability_reweight": {"alpha": _between(0.05, 0.9, log=False)},
    "weights.behaviour": {"cap": _between(1.0, 10.0)},
    "regularisers.covariance_penalty": {
        "share": _between(1e-3, 0.2),
        "coef": _between(0.01, 1.0),
    },
    "regularisers.entropy_bonus": {"coef": _between(1e-4, 0.03)},
    "regularisers.kl_from_old": {"coef": _between(1e-3, 1.0), "estimator": _among("k2", "k3")},
    "regularisers.kl_to_ref": {"coef": _between(1e-4, 0.3), "estimator": _among("k2", "k3")},
    "regularisers.kl_dual": {"radius": _between(0.01, 1.0)},
    "regularisers.mirror_kl": {"estimator": _among("sampled", "exact")},
    "select.probability_split": {
        "threshold": _between(0.2, 0.9, log=False),
        "part": _among("low", "high"),
    },
    "select.curvature_mask": {"tau_policy": _between(1e-6, 1e-2)},
    "gradient.isopo": {
        "preset": _among("fisher", "nearest-npg", "figure4", "euclidean"),
        "reg": _between(1e-3, 10.0),
    },
    "gradient.isopo_ntk": {"rho": _between(0.1, 10.0)},
    "gradient.proma": {"sigma": _between(0.2, 1.0, log=False)},
}

_CRITIC = "it needs a critic, which is trained beside the policy"
_SCALE = "another mean times a number of the batch, which AdamW undoes"
_SAMPLER = "it acts where the sampler differs from the trainer"
_TURNS = "on responses of one turn it is another stage"
# Stages that are never drawn, and the reason.
LEFT_OUT: Mapping[str, str] = {
    "advantage.gae": _CRITIC,
    "advantage.episode_gae": _CRITIC,
    "advantage.greedy_baseline": "it draws a further response to each prompt",
    "advantage.smooth_standardised": "it learns from problems that come again",
    "advantage.signed_labels": "it refuses rewards other than right and wrong",
    "advantage.entropy_modulated": _TURNS,
    "ratio.turn": _TURNS,
    "ratio.current": "ratio=none with the score function has the same gradient",
    "aggregate.constant_length": _SCALE,
    "aggregate.token_sum": _SCALE,
    "aggregate.seq_sum_token_mean": _SCALE,
    "aggregate.guarded_token_mean": "token_mean until the ratios run away",
    "reward.clip_reward": "rewards of the tasks lie within any useful range",
    "reward.episode_targets": _CRITIC,
    "reward.feasible_only": "all responses of the tasks are feasible",
    "reward.span_reward": "it needs a critique",
    "reward.fail_truncated": "a truncated response of the tasks is wrong already",
    "reward.usable_only": "a response without a token is wrong already",
    "filter.fresh_enough": "it throws samples away that others train on",
    "filter.reject": _SAMPLER,
    "prune.void_turns": _TURNS,
    "weights.tis": _SAMPLER,
    "weights.by_duration": "it weighs by measured seconds, which do not repeat",
    "weights.constant": "a factor on the loss, which AdamW undoes",
    "regularisers.feasible_share": "all responses of the tasks are feasible",
}
# Stages that act on data of an older policy alone.
STALE_ONLY = (
    "trust.mixed_clip",
    "trust.two_anchor_ess_cap",
    "weights.behaviour",
    "regularisers.two_anchor_kl",
)


@runtime_checkable
class Draw(Protocol):
    """A source of choices, each under a name that stands for the same alternatives always."""

    def choose(self, name: str, values: Sequence[Any]) -> Any: ...
    def number(self, name: str, low: float, high: float, *, log: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Space:
    """Stages that a run can compose, by kind, and the swept settings of the run."""

    config: Config = field(repr=False)
    task: Task = field(repr=False)
    stages: Mapping[str, tuple[str, ...]]
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def compose(self, draw: Draw) -> tuple[Settings, Settings]:
        """(settings of the recipe, swept settings) as `draw` chooses them."""
        ratio = draw.choose("ratio", self.stages["ratio"])
        given = _make("ratio", ratio).gives
        trust = draw.choose(f"trust of {given}", self.trusts(given))
        recipe: Settings = {}
        for kind, name in (
            ("advantage", draw.choose("advantage", self.stages["advantage"])),
            ("ratio", ratio),
            ("trust", trust),
            ("aggregate", draw.choose("aggregate", self.stages["aggregate"])),
        ):
            recipe |= {kind: name, **_options(draw, kind, name, f"{kind}.")}
        chosen = sorted(self._further(draw, given))
        for kind in dict.fromkeys(kind for kind, _ in chosen):
            names = [name for other, name in chosen if other == kind]
            recipe[kind] = ",".join(names)
            for name in names:
                prefix = f"{kind}.{name}." if kind in MANY else f"{kind}."
                recipe |= _options(draw, kind, name, prefix)
        swept = {key: draw.choose(f"set {key}", values) for key, values in self.sweep.items()}
        return recipe, swept

    def trusts(self, given: str) -> tuple[str, ...]:
        """Trust stages that work on what the ratio gives."""
        return tuple(name for name in self.stages["trust"] if _takes("trust", name, given))

    def further(self, given: str) -> tuple[str, ...]:
        """KIND.NAME of the further stages that may stand beside the ratio."""
        return tuple(
            f"{kind}.{name}"
            for kind in FURTHER
            for name in self.stages[kind]
            if _takes(kind, name, given)
        )

    def check(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe of these settings, as a run makes it; refused where the run would refuse."""
        recipe = fitted(make_recipe(METHOD, settings), self.config, self.task)
        check_fields(recipe, self.task, thoughts=self.config.rollout.thoughts)
        return recipe

    @property
    def size(self) -> int:
        """Number of compositions, options not counted; further stages in pairs of two kinds."""
        total = 0
        for ratio in self.stages["ratio"]:
            given = _make("ratio", ratio).gives
            extra = self.further(given)
            pairs = sum(
                a.split(".")[0] != b.split(".")[0] or a.split(".")[0] in MANY
                for i, a in enumerate(extra)
                for b in extra[:i]
            )
            total += len(self.trusts(given)) * (1 + len(extra) + pairs)
        return total * len(self.stages["advantage"]) * len(self.stages["aggregate"])

    def _further(self, draw: Draw, given: str) -> set[tuple[str, str]]:
        extra = self.further(given)
        count = draw.choose("further stages", tuple(range(MOST_FURTHER + 1))) if extra else 0
        names = [draw.choose(f"stage {i + 1} of {given}", extra) for i in range(count)]
        chosen = {(kind, name) for kind, _, name in (text.partition(".") for text in names)}
        single = [kind for kind, _ in chosen if kind not in MANY]
        if len(chosen) < count or len(single) > len(set(single)):
            raise ProxpoError(f"{' and '.join(names)} cannot stand together")
        return chosen


def make_space(config: Config, sweep: Mapping[str, tuple[Any, ...]]) -> Space:
    """The space of a run with this config; `sweep`: settings of the run and their values."""
    load_stages()
    task = make_task(
        config.task.name,
        reward=config.task.reward,
        correct_above=config.task.correct_above,
        **config.task.options,
    )
    lag = config.train.off_policy_lag > 0 or config.train.replay_share > 0
    moved = lag or config.updates > 1 or config.train_temperature != config.rollout.temperature
    base = make_recipe(METHOD)
    stages: dict[str, tuple[str, ...]] = {}
    for kind in (*REQUIRED, *FURTHER):
        stages[kind] = tuple(
            name
            for name in sorted(STAGES[kind])
            if f"{kind}.{name}" not in LEFT_OUT
            and (lag or f"{kind}.{name}" not in STALE_ONLY)
            and _provided(kind, name, base, task, config)
        )
    losses = [name for name in stages["ratio"] if _make("ratio", name).gives != "log_ratio"]
    # On fresh data every ratio is 1, so that ratios and trust regions cannot be told apart.
    stages["ratio"] = tuple(losses) if moved else ("none",)
    stages["aggregate"] = tuple(n for n in stages["aggregate"] if _takes("aggregate", n, "loss"))
    return Space(config=config, task=task, stages=stages, sweep=sweep)


def _provided(kind: str, name: str, base: Recipe, task: Task, config: Config) -> bool:
    """True if the stage can be made and the run provides the batch fields it reads."""
    try:
        stage = _make(kind, name)
        member: Any = (stage,) if kind in MANY else stage
        check_fields(base.replace(**{kind: member}), task, thoughts=config.rollout.thoughts)
    except ProxpoError:
        return False
    return not config.rollout.thoughts or kind != "gradient"


@functools.cache
def _make(kind: str, name: str) -> Stage:
    """The stage with its defaults; options without one at the low end of their ranges."""
    ranges, known = RANGES.get(f"{kind}.{name}", {}), parameters(STAGES[kind][name])
    required = {
        option: (values.values.low if isinstance(values.values, Between) else values.values[0])
        for option, values in ranges.items()
        if known[option].default is known[option].empty
    }
    return STAGES[kind][name](**required)


def _takes(kind: str, name: str, given: str) -> bool:
    takes = _make(kind, name).takes
    return not takes or given in takes


def _options(draw: Draw, kind: str, name: str, prefix: str) -> Settings:
    """Drawn options of a stage under their names in `--set`."""
    drawn: Settings = {}
    for option, values in RANGES.get(f"{kind}.{name}", {}).items():
        if values.when is not None and drawn[values.when[0]] != values.when[1]:
            continue
        label = f"{kind}.{name}.{option}"
        if isinstance(values.values, Between):
            low, high = values.values.low, values.values.high
            number = draw.number(label, low, high, log=values.values.log)
            drawn[option] = float(f"{number:.{DIGITS}g}")
        else:
            drawn[option] = draw.choose(label, values.values)
    return {f"{prefix}{option}": value for option, value in drawn.items()}


__all__ = ["LEFT_OUT", "METHOD", "RANGES", "Between", "Draw", "Range", "Space", "make_space"]
