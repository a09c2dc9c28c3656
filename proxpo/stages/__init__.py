"""The registry of stages: every factory by kind and name, so that any stage can be swapped by name.

    @stage("trust", needs=("old_logp",), takes=("ratio",), gives="loss")
    def ppo_clip(*, low: float = 0.2, high: float = 0.2): ...

turns a keyword-only factory of a pure function into a factory of `Stage`.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from proxpo.errors import ProxpoError, nearest, resolve
from proxpo.ops.shapes import Tensor
from proxpo.stages._options import bind
from proxpo.types import KINDS, MANY, Batch, Context, Metrics, Recipe, Stage, State

Factory = Callable[..., Stage]
Needs = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
Instead = Mapping[str, str] | Callable[[Mapping[str, Any]], Mapping[str, str]] | None
STAGES: dict[str, dict[str, Factory]] = {kind: {} for kind in KINDS}


def stage(
    kind: str,
    *,
    name: str = "",
    needs: Needs = (),
    instead: Instead = None,
    takes: Needs = (),
    gives: str = "",
    whole_batch: bool | Callable[[Mapping[str, Any]], bool] = True,
    live: bool = False,
    length: float | None = None,
    decides: tuple[str, ...] = (),
    adds: tuple[str, ...] = (),
    prepare: Callable[[Mapping[str, Any], Batch], dict[str, Tensor]] | None = None,
    init: Callable[[Mapping[str, Any]], State] | None = None,
    update: Callable[[Mapping[str, Any], State, Batch, Metrics], State] | None = None,
    step: Callable[[Mapping[str, Any], Batch, Metrics, Context], State] | None = None,
) -> Callable[[Callable[..., Any]], Factory]:
    """Register a factory. `needs`, `instead`, `takes`, `whole_batch` may depend on the options.

    instead names a field that does in place of one in `needs`: {"rewards": "token_rewards"}.
    whole_batch=False marks a stage that looks at the micro-batch it is given, by its definition,
    so that cutting the batch differently changes its result. live=True marks an advantage that
    every update computes anew, unless the batch came with advantages. length: the longest response
    that the stage assumes where its option max_tokens is none and no host gives its own. decides:
    what a schedule settles itself, so that a host's settings for it have no effect: `count`,
    `parts` and `optimizer` (see `proxpo.stages.schedule.Updates`). adds: the metrics that are
    divided by a count of the whole step, which micro-batches add up; see proxpo/ops/metering.py.
    """

    def decorate(factory: Callable[..., Any]) -> Factory:
        label = name or factory.__name__

        @functools.wraps(factory)
        def make(**given: Any) -> Stage:
            options = bind(factory, given, what=f"{kind}={label}")
            return Stage(
                kind=kind,
                name=label,
                apply=factory(**options),
                options=options,
                needs=needs(options) if callable(needs) else needs,
                instead=(instead(options) if callable(instead) else instead) or {},
                takes=takes(options) if callable(takes) else takes,
                gives=gives,
                whole_batch=whole_batch(options) if callable(whole_batch) else whole_batch,
                live=live,
                length=length,
                decides=decides,
                adds=adds,
                prepare=functools.partial(prepare, options) if prepare else None,
                init=functools.partial(init, options) if init else None,
                update=functools.partial(update, options) if update else None,
                step=functools.partial(step, options) if step else None,
            )

        STAGES[kind][label] = make
        return make

    return decorate


def make_stage(kind: str, name: str, **options: Any) -> Stage:
    """The stage `name` of this kind, e.g. make_stage("ratio", "kalman", q=1e-6)."""
    load_all()
    if kind not in STAGES:
        raise ProxpoError(f"unknown kind of stage '{kind}'{nearest(kind, KINDS)}")
    return STAGES[kind][resolve(name, STAGES[kind], what=f"{kind} stage")](**options)


def check(recipe: Recipe) -> Recipe:
    """The recipe, if its stages fit together; else the reason why they cannot."""
    for kind in KINDS:
        found = getattr(recipe, kind)
        for one in found if kind in MANY else [found]:
            if one is not None and one.kind != kind:
                raise ProxpoError(f"{recipe.name}: '{one.name}' is a {one.kind} stage, not {kind}")
    penalised = [(recipe.ratio, one) for one in recipe.regularisers]
    for giver, taker in (
        (recipe.ratio, recipe.trust),
        (recipe.trust, recipe.aggregate),
        *penalised,
        *(((recipe.ratio, recipe.schedule),) if recipe.schedule is not None else ()),
    ):
        if taker.takes and giver.gives not in taker.takes:
            raise ProxpoError(
                f"{recipe.name}: {taker.kind}={taker.name} works on {' or '.join(taker.takes)}, "
                f"but {giver.kind}={giver.name} gives {giver.gives}"
            )
    if recipe.trust.gives == "log_ratio" and (
        recipe.regularisers or recipe.weights or recipe.select
    ):
        raise ProxpoError(
            f"{recipe.name}: {recipe.aggregate.name} compares whole responses, so token weights, "
            "selections and token regularisers have no place in it"
        )
    return recipe


@functools.cache
def load_all() -> None:
    """Imports every module below `proxpo.stages`, and so registers every stage."""
    for module in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)


__all__ = ["STAGES", "check", "load_all", "make_stage", "stage"]
