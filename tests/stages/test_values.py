"""Values that would turn a stage's sign, silence it, or leave nothing to train on."""

import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import gradients, make_batch, method, with_leaves
from properties.effects import WATCHED, hosts, stage_of, with_stage

from proxpo import Context, ProxpoError, make_stage, methods
from proxpo.compose import policy_loss, prepare
from proxpo.recipes import Procedure
from proxpo.settings import _same
from proxpo.stages import STAGES, load_stages
from proxpo.stages._options import parameters

load_stages()
REFUSED = [
    ("trust", "clipped_weight", {"clip_high": -2.0}, "must not be negative, got inf, -2.0"),
    ("trust", "clipped_weight", {"mask_low": -1.0}, "must not be negative, .* -1.0, None"),
    ("trust", "clipped_weight", {"absolute": True, "clip_high": 0.0}, "cap must be above 0"),
    ("trust", "clipped_weight", {"absolute": True, "clip_low": 0.1}, "not below the floor"),
    ("trust", "ppo_clip", {"cap": -1.0}, "cap must be above 1, got -1.0"),
    ("trust", "clip_cov", {"cov_low": 5.0, "cov_high": 1.0}, "cov_low must be below cov_high"),
    ("ratio", "geometric_clip", {"clip_low": -1.0}, "must not be negative, got -1.0 and 0.4"),
    ("advantage", "group_relative", {"eps": -1.0}, "eps must not be negative .*, got -1.0"),
    ("aggregate", "pairwise_logistic", {"beta": 0.0}, "beta must be positive and finite"),
    ("aggregate", "pairwise_logistic", {"label_smoothing": 1.5}, r"must be in \[0, 0.5\], got 1.5"),
    ("weights", "behaviour", {"cap": 0.0}, "cap must be positive, got 0.0"),
    ("select", "curvature_mask", {"learning_rate": -1.0}, "learning_rate must not be negative"),
    ("value", "value_loss", {"clip": -1.0}, "clip must not be negative, got -1.0"),
    ("filter", "fresh_enough", {"max_lag": -1.0}, "max_lag must not be negative, got -1"),
    ("reward", "gradient_novelty", {"clip": 0.0}, "clip must be positive, got 0"),
    ("regularisers", "kl_dual", {"lr": -0.1}, "lr must not be negative .*, got -0.1"),
    ("regularisers", "kl_convex", {"every": 0}, "every must be 1 or more, got 0"),
    ("regularisers", "kl_to_ref", {"coef": math.inf}, "coef must not be negative or infinite"),
    ("reward", "clip_reward", {"low": 1.0, "high": 0.0}, "low must not be above high, got 1.0"),
    ("weights", "tis", {"floor": 3.0}, r"floor must be in \[0, cap\], got 3.0 and cap 2.0"),
    ("filter", "reject", {"estimator": "k2", "threshold": "nan"}, "must not be negative, got nan"),
    ("trust", "balanced_clip", {"high_step": math.inf}, "not at most"),
    *(
        (kind, name, {option: 1.5}, rf"{option} must be in \[0, 1\], got 1.5")
        for kind, name, options in (
            ("advantage", "gae", ("gamma", "lam")),
            ("advantage", "episode_gae", ("gamma", "lam")),
            ("advantage", "discounted_return", ("gamma",)),
            ("advantage", "greedy_baseline", ("gamma",)),
            ("reward", "episode_targets", ("gamma", "lam")),
            ("value", "value_loss", ("gamma", "lam")),
            ("select", "probability_split", ("threshold",)),
        )
        for option in options
    ),
]
# Options with a meaning below 0: rewards and their bounds, exponents, seeds, an entropy that is
# kept down, a weight that unlearns, a covariance, a mean log-ratio.
SIGNED = {
    *("reward=clip_reward.low", "reward=fail_truncated.reward", "weights=constant.factor"),
    *("regularisers=entropy_bonus.coef", "schedule=poisson_replay.fresh_entropy"),
    *("trust=clip_cov.cov_low", "regularisers=mirror_kl.tsallis"),
    "weights=off_policy_mask.threshold",
    *(f"gradient=isopo.{option}" for option in ("p", "q", "r", "seed")),
    "gradient=proma.seed",
}
SIGNED_IN_METHODS = {  # besides entropy_coef
    *("clip-cov.cov_low", "mdpo.tsallis", "rloo.reward_low", "rloo.reward_high"),
    *("isopo.p", "isopo.q", "isopo.r", "latentseek.threshold", "grpo.off_policy_threshold"),
}
REQUIRED = {"coef": 0.1, "max_lag": 2.0, "max_tokens": 4.0, "low": 0.3, "high": 0.6}


def numbers(factory: Any) -> list[str]:
    """Options that take a number."""
    return [
        name
        for name, p in parameters(factory).items()
        if {int, float} & {p.annotation, *typing.get_args(p.annotation)}
    ]


def required(factory: Any) -> dict[str, Any]:
    return {k: REQUIRED[k] for k, p in parameters(factory).items() if p.default is p.empty}


def own_stages() -> Iterator[tuple[str, str, Any]]:
    for kind, factories in STAGES.items():
        for name, factory in factories.items():
            if factory.__module__.startswith("proxpo."):
                yield kind, name, factory


@pytest.mark.parametrize(("kind", "name", "options", "message"), REFUSED)
def test_a_value_without_sense_is_refused(
    kind: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProxpoError, match=f"^{name}: .*{message}"):
        make_stage(kind, name, **{**required(STAGES[kind][name]), **options})


def refused(make: Callable[..., Any], **options: Any) -> bool:
    try:
        make(**options)
    except ProxpoError:
        return True
    return False


def test_a_number_below_0_is_refused_where_it_has_no_meaning() -> None:
    accepted = {
        f"{kind}={name}.{option}"
        for kind, name, factory in own_stages()
        for option in numbers(factory)
        if not refused(factory, **{**required(factory), option: -1})
    }
    assert accepted == SIGNED


def test_a_method_takes_a_number_below_0_where_it_has_a_meaning() -> None:
    """Of the options that act beside the defaults of the others."""
    accepted = {
        f"{slug}.{option}"
        for slug, entry in methods().items()
        for option in numbers(entry.make)
        if not refused(entry.make, **{option: -1})
        and acts(entry.make(**{option: -1}), entry.make(), option)
    }
    entropy = {f"{slug}.entropy_coef" for slug in methods()}
    assert accepted - entropy == SIGNED_IN_METHODS


def acts(made: Any, default: Any, option: str) -> bool:
    if isinstance(made, Procedure):
        return option not in made.idle
    return not _same(made, default)


@pytest.mark.parametrize("extreme", [0, math.inf])
def test_numbers_that_are_accepted_leave_the_loss_finite(extreme: float) -> None:
    """Also its gradients and metrics."""
    batch = make_batch(1, groups=4, size=4)
    rewards = batch.rewards.clone()
    rewards[4:8] = 0.5
    batch = batch.replace(rewards=rewards)
    for kind, name, factory in own_stages():
        if kind in WATCHED:
            continue
        host = next(iter(hosts(kind, name)), method("grpo"))
        usual = stage_of(host, kind, name) or make_stage(kind, name, **required(factory))
        for option in numbers(factory):
            try:
                stage = factory(**{**usual.options, option: extreme})
            except ProxpoError:
                continue
            made = with_stage(host, stage)
            ready = prepare(made, batch, Context(generator=torch.Generator().manual_seed(0)))
            leaves = with_leaves(ready.batch)
            loss = policy_loss(made, leaves, ready.ctx)
            seen = [loss.value, *ready.metrics.values(), *loss.metrics.values()]
            if loss.value.requires_grad:
                seen += gradients(loss.value, leaves).values()
            assert all(bool(x.isfinite().all()) for x in seen), f"{kind}={name}.{option}"
