"""The registry of stages: every factory by kind and name, so that any stage can be swapped by name.

    @stage("trust", takes=("ratio",), gives="loss")
    def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2): ...

turns a keyword-only factory of pure functions into a factory of `Stage`; see `stage`.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from proxpo.errors import ProxpoError, nearest, resolve
from proxpo.fields import LOADERS
from proxpo.ops.shapes import Tensor
from proxpo.stages._options import bind
from proxpo.types import KINDS, MANY, Batch, Clock, Context, Metrics, Recipe, Stage, State

Factory = Callable[..., Stage]
STAGES: dict[str, dict[str, Factory]] = {kind: {} for kind in KINDS}


class Parts(NamedTuple):
    """The functions of one stage and the declarations that depend on its factory's arguments.

    The functions are closures: they share the arguments of the factory that returns them. Their
    meaning is that of the fields of `Stage`; None leaves what the decorator declares.
    """

    apply: Callable[..., Any]
    init: Callable[[], State] | None = None
    update: Callable[[State, Batch, Metrics], State] | None = None
    step: Callable[[Batch, Metrics, Context], State] | None = None
    prepare: Callable[[Batch], dict[str, Tensor]] | None = None
    needs: tuple[str, ...] | None = None
    instead: Mapping[str, str] | None = None
    takes: tuple[str, ...] | None = None
    whole_batch: bool | None = None
    acts: Callable[[Clock], bool] | None = None
    idle: tuple[str, ...] | None = None


def stage(
    kind: str,
    *,
    name: str = "",
    needs: tuple[str, ...] = (),
    instead: Mapping[str, str] | None = None,
    takes: tuple[str, ...] = (),
    gives: str = "",
    whole_batch: bool = True,
    live: bool = False,
    length: float | None = None,
    decides: tuple[str, ...] = (),
    adds: tuple[str, ...] = (),
    draws: str = "",
) -> Callable[[Callable[..., Any]], Factory]:
    """Registers a factory of stages: keyword-only options in, one function or `Parts` out.

        @stage("reward", needs=("rewards",))
        def less_usual(*, momentum: float = 0.9):
            def init():
                return {"usual": torch.zeros(())}

            def apply(batch, ctx):
                mean = batch.rewards.mean()
                return batch.replace(rewards=batch.rewards - ctx.state["usual"]), {"reward": mean}

            def update(state, batch, metrics):
                return {"usual": momentum * state["usual"] + (1 - momentum) * metrics["reward"]}

            return Parts(apply=apply, init=init, update=update)

    A stage without memory returns its `apply` alone. `apply` takes what its kind is given (see
    CONTRIBUTING.md) and returns (value, metrics). `init` makes the state; `update` makes the next
    one after a rollout, `step` after every optimizer step. `prepare` returns fields to add to the
    batch once per rollout. `acts` is False for a clock at which the stage does nothing and its
    fields need not be there. The decorator declares what holds for all options:

    needs: the batch fields it reads
    instead: a field that does in place of one in `needs`, as in {"rewards": "token_rewards"}
    takes, gives: the kind of per-token values it works on and makes, "ratio" or "loss" for example
    whole_batch: False if it looks at the micro-batch it is given, so that another cut of the batch
        changes its result; an option scope="microbatch" says so by itself
    live: True for an advantage that every update computes anew, unless the batch came with
        advantages
    length: the longest response assumed where its option max_tokens is none and no host gives its
        own
    decides: what a schedule settles itself, so that a host's settings for it have no effect:
        `count`, `parts`, `optimizer`, `loss` (see `proxpo.stages.schedule.Updates`)
    adds: the metrics that are divided by a count of the whole step, which micro-batches add up;
        see proxpo/ops/metering.py
    draws: a field "seq tok" that `prepare` fills with numbers in [0, 1) drawn for each token, where
        the batch comes without it: by them a choice at random is the same in every cut of the batch

    If `needs`, `instead`, `takes` or `whole_batch` depends on an option, `Parts` gives it. `Parts`
    also names, as `idle`, the options that have no effect beside the others: settings refuse them.
    """
    _check_kind(kind)
    declared: dict[str, Any] = {
        "needs": needs,
        "instead": instead or {},
        "takes": takes,
        "gives": gives,
        "whole_batch": whole_batch,
        "live": live,
        "length": length,
        "decides": decides,
        "adds": adds,
        "draws": draws,
    }

    def decorate(factory: Callable[..., Any]) -> Factory:
        label = name or factory.__name__
        check_free(f"{kind}={label}", STAGES[kind].get(label), factory)

        @functools.wraps(factory)
        def make(**settings: Any) -> Stage:
            options = bind(factory, settings, what=f"{kind}={label}")
            made = factory(**options)
            parts = made if isinstance(made, Parts) else Parts(apply=made)
            own = {field: part for field, part in parts._asdict().items() if part is not None}
            if options.get("scope") == "microbatch":
                own["whole_batch"] = False
            return Stage(kind=kind, name=label, options=options, **declared | own)

        STAGES[kind][label] = make
        return make

    return decorate


def _check_kind(kind: str) -> None:
    if kind not in STAGES:
        raise ProxpoError(f"unknown kind of stage '{kind}'{nearest(kind, KINDS)}")


def check_free(what: str, taken: Callable[..., Any] | None, factory: Callable[..., Any]) -> None:
    """Refuses a name that another module has registered; a module may run twice, or as a script."""
    if taken is None or taken.__module__ == factory.__module__:
        return
    if inspect.getsourcefile(inspect.unwrap(taken)) != inspect.getsourcefile(factory):
        raise ProxpoError(
            f"{what} is defined in {taken.__module__} and in {factory.__module__}: give one of "
            "them another name"
        )


def make_stage(kind: str, name: str, **options: Any) -> Stage:
    """Makes the stage `name` of this kind, e.g. make_stage("ratio", "kalman", q=1e-6)."""
    load_stages()
    _check_kind(kind)
    return STAGES[kind][resolve(name, STAGES[kind], what=f"{kind} stage")](**options)


def check_stages(recipe: Recipe) -> Recipe:
    """Returns the recipe if its stages fit together; else raises with the reason."""
    for kind in KINDS:
        member = getattr(recipe, kind)
        for each in member if kind in MANY else [member]:
            if each is not None and each.kind != kind:
                raise ProxpoError(
                    f"{recipe.name}: '{each.name}' is a {each.kind} stage, not {kind}"
                )
    # Masks of two filters are joined; any other stage would be counted twice, and share its state.
    places = [place for place, each in recipe.stages() if each.kind not in ("filter", "prune")]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ProxpoError(f"{recipe.name}: {twice.replace('.', '=')} stands there twice")
    if recipe.gradient is not None and recipe.advantage is not None and recipe.advantage.live:
        raise ProxpoError(
            f"{recipe.name}: gradient={recipe.gradient.name} takes the advantages before the "
            f"forward pass, but advantage={recipe.advantage.name} computes them anew after it"
        )
    penalised = [(recipe.ratio, penalty) for penalty in recipe.regularisers]
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
def load_stages() -> None:
    """Imports every module below `proxpo.stages`, and so registers every stage."""
    for module in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)


LOADERS.append(load_stages)  # stages declare batch fields of their own

__all__ = ["STAGES", "Parts", "check_stages", "load_stages", "make_stage", "stage"]
