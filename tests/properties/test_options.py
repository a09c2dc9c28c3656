"""Every option does something: each is changed, and the change is seen, or refused in one line."""

import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import method

from properties.effects import WATCHED, hosts, of_loss, stage_of, with_stage
from proxpo import ProxpoError, Stage
from proxpo.options import variations
from proxpo.stages import STAGES, check, load_all, make_stage

load_all()

# Options that only a stage in its place shows: their number in a small case equals another's.
ELSEWHERE: dict[str, str] = {}
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
]


def other_values(kind: str, name: str, option: str, value: Any) -> list[Any]:
    factory = inspect.unwrap(STAGES[kind][name])
    hint = typing.get_type_hints(factory)[option]
    found = [*FURTHER.get(option, []), *variations(hint, value)]
    if str in (hint, *typing.get_args(hint)):  # words that only the factory knows
        with pytest.raises(ProxpoError) as error:
            STAGES[kind][name](**{**_required(kind, name), option: "?"})
        found += re.sub(r".*valid: ", "", str(error.value)).split(", ")
    return [one for one in found if one != value]


def _required(kind: str, name: str) -> dict[str, Any]:
    parameters = inspect.signature(STAGES[kind][name]).parameters
    return {key: REQUIRED[key] for key, p in parameters.items() if p.default is p.empty}


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


def differs(a: Iterator[Any], b: Iterator[Any]) -> bool:
    return any(x != y for x, y in itertools.zip_longest(a, b))


def sees(stage: Stage, option: str, watch: Any) -> bool:
    for value in other_values(stage.kind, stage.name, option, stage.options[option]):
        other = changed(stage, **{option: value})
        if other is not None and other != stage and differs(watch(stage), watch(other)):
            return True
    return False


def watchers(kind: str, name: str) -> Iterator[tuple[Stage, Any]]:
    """The stage in every place it can be watched from."""
    if kind in WATCHED:
        yield make_stage(kind, name, **_required(kind, name)), WATCHED[kind]
        return
    for host in hosts(kind, name) or [method("grpo")]:
        stage = stage_of(host, kind, name) or make_stage(kind, name, **_required(kind, name))
        check(with_stage(host, stage))
        yield stage, lambda one, host=host: of_loss(with_stage(host, one))


def has_effect(kind: str, name: str, option: str) -> bool:
    places = list(watchers(kind, name))
    if any(sees(stage, option, watch) for stage, watch in places):
        return True
    return any(
        sees(other, option, watch) for stage, watch in places for other in settings(stage, option)
    )


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS, ids=".".join)
def test_every_option_of_every_stage_has_an_effect(kind: str, name: str, option: str) -> None:
    listed = f"{kind}={name}.{option}" in ELSEWHERE
    assert has_effect(kind, name, option) != listed
