"""Fuzzed options, stages and `--set` texts: one clear line, or a recipe that is another one."""

import inspect
from typing import Any

import pytest
import torch
from fuzzing import times
from helpers import make_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxpo import Context, ProxpoError, Recipe, make_recipe, methods
from proxpo.compose import policy_loss, prepare
from proxpo.settings import _same, parse_setting
from proxpo.stages import STAGES, load_stages
from proxpo.stages._options import parameters, variations
from proxpo.train.config import load_config
from proxpo.types import KINDS, MANY

pytestmark = pytest.mark.long
load_stages()
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**70, -(2**70), 0.0, -0.5, 1e-300, 1e300, -1e300),
    *(float("inf"), float("-inf"), float("nan"), "", "none", "?", "1_2", "a.b=c", "é\x00", "1e400"),
    *([], [1, 2], ["x"], {}, {"name": "token"}, {"name": 3}, {1: 2}, {"x": {}}, object()),
]
values = st.sampled_from(JUNK) | st.floats() | st.integers(-4, 40) | st.text(max_size=6)
OWN = [(slug, option) for slug, one in methods("language").items() for option in one.defaults]
STAGE_OPTIONS = [
    (kind, name, option)
    for kind, factories in STAGES.items()
    for name, factory in factories.items()
    if factory.__module__.startswith("proxpo.")
    for option in [*inspect.signature(factory).parameters, "unknown"]
]


def one_line(error: ProxpoError) -> None:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 1000


def runs(recipe: Recipe) -> None:
    """The recipe gives a loss of a batch with every field, or the reason why it cannot."""
    batch, chance = make_batch(1), torch.Generator().manual_seed(0)
    try:
        ready = prepare(recipe, batch, Context(generator=chance))
        policy_loss(recipe, ready.batch, ready.ctx)
    except ProxpoError as error:
        one_line(error)


def near(factory: Any, option: str) -> st.SearchStrategy[Any]:
    """Values the option's type suggests, beside those that fit nothing."""
    parameter = parameters(factory).get(option)
    found = [] if parameter is None else variations(parameter.annotation, parameter.default)
    return st.sampled_from(found) | values if found else values


@settings(max_examples=times(150))
@given(st.data())
def test_fuzzed_options_of_methods(data: Any) -> None:
    slug, option = data.draw(st.sampled_from(OWN))
    chosen = {option: data.draw(near(methods()[slug].make, option))}
    others = [name for name in methods()[slug].defaults if name != option]
    if others and data.draw(st.booleans()):
        other = data.draw(st.sampled_from(others))
        chosen[other] = data.draw(near(methods()[slug].make, other))
    try:
        made = make_recipe(slug, chosen)
    except ProxpoError as error:
        one_line(error)
        return
    default = make_recipe(slug)
    assert (made.options == default.options) == _same(made, default)
    runs(made)


@settings(max_examples=times(150))
@given(st.data())
def test_fuzzed_options_of_stages(data: Any) -> None:
    kind, name, option = data.draw(st.sampled_from(STAGE_OPTIONS))
    value = data.draw(near(STAGES[kind][name], option))
    slug = data.draw(st.sampled_from(["grpo", "ppo", "p3o", "dpo", "isopo", "lopti"]))
    add = kind in MANY and data.draw(st.booleans())
    place = f"{kind}.{name}" if kind in MANY else kind
    pairs: dict[str, Any] = {f"{kind}+" if add else kind: name, f"{place}.{option}": value}
    if data.draw(st.integers(0, 5)) == 0:
        pairs = {data.draw(st.sampled_from([kind, f"{kind}.{option}", f"{kind}+", "x.y"])): value}
    try:
        made = make_recipe(slug, pairs)
    except ProxpoError as error:
        one_line(error)
        return
    runs(made)


KEYS = st.sampled_from(
    [
        *("lr", "train.lr", "steps", "mini_batches", "recipe", "recipe.clip_high", "model.lora.r"),
        *(
            "task",
            "task.options.digits",
            "clip_high",
            "clip_low",
            "ratio",
            "ratio.q",
            "weights+",
            "out",
        ),
        *("seed", "log", "log.sinks", "max_tokens", "rollout.max_tokens", "prompts.max_rounds"),
        *("train.optimizer_options.betas", "evaluate.k", "method", "device", ".", "a.b.c", ""),
        *KINDS,
    ]
)
WORDS = st.sampled_from(
    ["", "none", "true", "nan", "inf", "-inf", "1e999", "0", "-1", "1.5", "kalman", "grpo", "tis"]
)


@settings(max_examples=times(100))
@given(
    st.lists(st.tuples(KEYS, WORDS | st.text(max_size=8), st.sampled_from(["=", "=="])), max_size=3)
)
@example([("ratio", "kalman", "="), ("ratio.q", "nan", "=")])
def test_fuzzed_texts_of_set(parts: list[tuple[str, str, str]]) -> None:
    """What `--set` takes on the command line, for a recipe and for a run."""
    texts = [f"{key}{sign}{value}" for key, value, sign in parts]
    for read in (
        lambda: make_recipe("grpo", [parse_setting(text) for text in texts]),
        lambda: load_config(None, texts),
    ):
        try:
            read()
        except ProxpoError as error:
            one_line(error)
