"""Every option does something: each is changed, and the change is seen, or refused in one line."""

import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import method

from properties.effects import WATCHED, Watched, hosts, of_loss, stage_of, with_stage
from proxpo import ProxpoError, Recipe, Stage, make_recipe, methods
from proxpo.settings import _same, parse_setting
from proxpo.stages import STAGES, check_stages, load_stages, make_stage
from proxpo.stages._options import parameters, variations
from proxpo.types import Context

pytestmark = pytest.mark.long
load_stages()

# Options whose effect is seen in a run: what a rollout does with its prompt filters.
ELSEWHERE = {
    f"prompts={name}.{option}": "tests/train/test_effects.py: prompts are drawn in rounds"
    for name in ("informative", "within_reach")
    for option in ("generation_factor", "max_rounds")
} | {"ratio=latent.noise": "tests/train/test_thoughts.py: the sampler draws the thoughts"}
# Settings under which most options of a transform or of a search act.
RICH = {
    "isopo": {"q": -0.5, "r": -0.5, "norm": "sketch", "sketch": 8, "reg": 0.5, "overlap": 5},
    "line_search": {"delta": 0.05, "damping": 0.001},
    "curvature_mask": {"tau_policy": 0.0, "tau_objective": 1.0, "learning_rate": 10.0},
}
REQUIRED = {"coef": 0.1, "max_lag": 2.0, "max_tokens": 4.0, "low": 0.3, "high": 0.6}
FURTHER = {
    "q": [0.0],
    "threshold": ["0.8_1.2", 1.5],
    "window": [4],
    "limit": [1.0],
    "max_ratio": [0.5, 1.0],
}
OPTIONS = [
    (kind, name, option)
    for kind, factories in STAGES.items()
    for name, factory in factories.items()
    if factory.__module__.startswith("proxpo.")
    for option in inspect.signature(factory).parameters
    if f"{kind}={name}.{option}" not in ELSEWHERE
]


def other_values(kind: str, name: str, option: str, value: Any) -> list[Any]:
    hint = parameters(STAGES[kind][name])[option].annotation
    found = [*FURTHER.get(option, []), *variations(hint, value)]
    if str in (hint, *typing.get_args(hint)):  # words that only the factory knows
        with pytest.raises(ProxpoError) as error:
            STAGES[kind][name](**{**_required(kind, name), option: "?"})
        found += re.sub(r".*valid: ", "", str(error.value)).split(", ")
    return [one for one in found if one != value]


def _required(kind: str, name: str) -> dict[str, Any]:
    known = inspect.signature(STAGES[kind][name]).parameters
    return {key: REQUIRED[key] for key, p in known.items() if p.default is p.empty}


def changed(stage: Stage, **options: Any) -> Stage | None:
    """The stage with other options; none if it refuses them."""
    try:
        return STAGES[stage.kind][stage.name](**{**stage.options, **options})
    except ProxpoError:
        return None


def settings(stage: Stage, option: str) -> Iterator[Stage]:
    """The stage as it is, then with each other option changed."""
    yield stage
    for other in stage.options.keys() - {option}:
        for value in other_values(stage.kind, stage.name, other, stage.options[other]):
            if (one := changed(stage, **{other: value})) is not None:
                yield one


class Lazy:
    """The values of an iterator, computed when they are first asked for and then kept."""

    def __init__(self, values: Iterator[Any]) -> None:
        self.values, self.known = values, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        yield from self.known
        for value in self.values:
            self.known.append(value)
            yield value


def sees(stage: Stage, option: str, watch: Any) -> bool:
    """Whether another value of the option shows, compared step by step until it does."""
    before = Lazy(watch(stage))
    for value in other_values(stage.kind, stage.name, option, stage.options[option]):
        other = changed(stage, **{option: value})
        if other is None or other == stage:
            continue
        if any(x != y for x, y in itertools.zip_longest(before, watch(other))):
            return True
    return False


def watchers(kind: str, name: str) -> Iterator[tuple[Stage, Any]]:
    """The stage in every place it can be watched from."""
    if kind in WATCHED:
        for options in (RICH.get(name, {}), {}):
            yield make_stage(kind, name, **{**_required(kind, name), **options}), WATCHED[kind]
        return
    for host in hosts(kind, name) or [method("grpo")]:
        stage = stage_of(host, kind, name) or make_stage(kind, name, **_required(kind, name))
        check_stages(with_stage(host, stage))
        if name in RICH:
            stage = STAGES[kind][name](**{**stage.options, **RICH[name]})
        yield stage, lambda one, host=host: of_loss(with_stage(host, one))


def has_effect(kind: str, name: str, option: str) -> bool:
    places = list(watchers(kind, name))
    if any(sees(stage, option, watch) for stage, watch in places):
        return True
    return any(
        sees(other, option, watch) for stage, watch in places for other in settings(stage, option)
    )


@pytest.mark.parametrize(
    ("kind", "name", "option"), OPTIONS, ids=[".".join(one) for one in OPTIONS]
)
def test_every_option_of_every_stage_has_an_effect(kind: str, name: str, option: str) -> None:
    assert has_effect(kind, name, option)


@pytest.mark.parametrize(("kind", "name"), sorted({one[:2] for one in OPTIONS}))
def test_idle_options_have_no_effect(kind: str, name: str) -> None:
    places = list(watchers(kind, name))
    checked: set[tuple[str, ...]] = {()}
    for stage, watch in places:
        for other in settings(stage, ""):
            if other.idle not in checked:
                checked.add(other.idle)
                assert not [option for option in other.idle if sees(other, option, watch)]


@pytest.mark.parametrize("slug", methods("language"))
def test_every_option_of_every_method_changes_a_stage_or_is_refused(slug: str) -> None:
    """A refusal names a setting under which the option acts, and under that it does."""
    entry = methods()[slug]
    known, default = parameters(entry.make), make_recipe(slug)
    for option, value in entry.defaults.items():
        seen = False
        for other in variations(known[option].annotation, value):
            try:
                seen |= not _same(make_recipe(slug, {option: other}), default)
            except ProxpoError as error:
                _, named, acting = str(error).partition("; it has one with ")
                seen |= "has no effect" not in str(error)
                if named:
                    chosen = dict(parse_setting(text) for text in acting.split(" and "))
                    without = make_recipe(slug, chosen)
                    seen |= not _same(make_recipe(slug, {**chosen, option: other}), without)
        assert seen, option


class Asked(Watched):
    """Remembers which of the host's settings a schedule has followed."""

    def __init__(self, number: int, made: Recipe) -> None:
        super().__init__(number, made)
        self.followed: set[str] = set()
        self.watching = True

    def __getattribute__(self, name: str) -> Any:
        if name in ("count", "parts") and "watching" in super().__getattribute__("__dict__"):
            self.followed.add(name)
        return super().__getattribute__(name)

    def step(self, n: int = 1, *, parts: int | None = None, **options: Any) -> dict[str, Any]:
        own = options.get("rows") is not None
        self.followed |= {"optimizer"} | ({"parts"} if parts is None and not own else set())
        return super().step(n, parts=parts, **options)


@pytest.mark.parametrize("name", STAGES["schedule"])
def test_a_schedule_declares_which_settings_it_does_not_follow(name: str) -> None:
    stage, updates = make_stage("schedule", name), Asked(0, method("fixpo"))
    drawn = torch.Generator().manual_seed(0)
    stage.apply(updates, Context(state=stage.init() if stage.init else {}, generator=drawn))
    assert {"count", "parts", "optimizer"} - updates.followed == set(stage.decides) - {"loss"}
