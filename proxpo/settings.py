"""Recipes from names and settings, as `--set`, YAML files and keyword arguments give them.

make_recipe("grpo", {"clip_high": 0.28})                      an option of the method
make_recipe("grpo", {"ratio": "kalman", "ratio.q": 1e-6})     another stage, and its options
make_recipe("dapo", {"weights+": "tis", "weights.tis.cap": 3})  one more stage where many may be
make_recipe("grpo", {"ratio": {"name": "kalman", "q": 1e-6}}) the same from YAML
"""

import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from proxpo.errors import ProxpoError, fold, nearest, resolve
from proxpo.recipes._registry import Method, Procedure, method
from proxpo.stages import STAGES, check_stages, load_stages, make_stage
from proxpo.stages._options import parameters, variations
from proxpo.types import KINDS, MANY, Recipe, Stage

Settings = Mapping[str, Any] | Iterable[tuple[str, Any]]
Swaps = Sequence[tuple[str, Any]]
TASK_OPTIONS = "task.options."  # before the name of a task's option


def make_recipe(name: str, settings: Settings = ()) -> Recipe:
    """The method `name` with its options set and its stages swapped, checked as a whole."""
    made = make_method(name, settings)
    if isinstance(made, Procedure):
        raise ProxpoError(
            f"{made.name} is a method of {' and '.join(method(name).domains)} with updates of its "
            "own, no recipe of stages"
        )
    return made


def make_method(name: str, settings: Settings = ()) -> Recipe | Procedure:
    """The method `name` with its options set and, where it is a recipe, its stages swapped."""
    entry = method(name)
    given = settings.items() if isinstance(settings, Mapping) else settings
    pairs = [(_with_kind(key), value) for key, value in given]
    own = [(key, value) for key, value in pairs if not _is_stage(key)]
    options = {_option(key, entry): value for key, value in own}
    recipe = entry.make(**options)
    swaps = [(key, value) for key, value in pairs if _is_stage(key)]
    if isinstance(recipe, Procedure) and swaps:
        raise ProxpoError(f"{entry.slug} has no stages, so '{swaps[0][0]}' cannot be set")
    for option in options:
        _check_effect(entry, options, recipe, option)
    if isinstance(recipe, Procedure):
        return recipe
    swapped = apply_swaps(recipe, swaps)
    for option in options if swaps else ():
        _check_kept(entry, options, recipe, option, swaps)
    return swapped


def apply_swaps(recipe: Recipe, swaps: Iterable[tuple[str, Any]]) -> Recipe:
    """Replaces stages first, then their options, in whatever order they were written."""
    load_stages()
    swaps = [pair for key, value in swaps for pair in _unfold(key, value)]
    for key, value in swaps:
        if "." not in key:
            recipe = _swap(recipe, key, value, swaps)
    adjusted = _adjusted(recipe, [(key, value) for key, value in swaps if "." in key])
    for key, value in swaps:
        if "." in key:
            _check_acting(adjusted, key, value)
    return check_stages(adjusted)


def at_length(recipe: Recipe, tokens: int | None) -> Recipe:
    """The recipe with every length that its settings left open set to the host's limit.

    Such a length is an option max_tokens that is none, in a stage that declares the `length` it
    assumes without a host. tokens=None: the host has no limit, and nothing changes.
    """
    if tokens is None:
        return recipe
    fitted = recipe
    for kind in KINDS:
        stages = getattr(recipe, kind)
        if kind in MANY:
            fitted = fitted.replace(**{kind: tuple(_at_length(stage, tokens) for stage in stages)})
        elif stages is not None:
            fitted = fitted.replace(**{kind: _at_length(stages, tokens)})
    return fitted


def lengths(recipe: Recipe) -> dict[str, float | None]:
    """The response length assumed at each place that has one; None where the host decides."""
    return {
        f"{place}.max_tokens": stage.options["max_tokens"]
        for place, stage in recipe.stages()
        if stage.length is not None
    }


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of `key=value`; numbers, true/false and none are read as such."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ProxpoError(f"--set takes option=value, got '{text}'")
    return key.strip(), parse_value(value.strip())


def put(tree: dict[str, Any], path: Sequence[str], value: Any, key: str) -> None:
    """Sets the value under nested keys; a block on the way that is missing or none is made.

    key: the setting's name, for the refusal where the way leads through a plain value
    """
    *inner, last = path
    for name in inner:
        if tree.get(name) is None:  # a block that was switched off is switched on by an option
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ProxpoError(f"'{key}' cannot be set: '{name}' is {tree!r}, not a block")
    tree[last] = deepcopy(value)  # a later option of a block is not written into its source


def contradiction(option: str, key: str, value: Any) -> ProxpoError:
    """The refusal of a setting that an option gives another value."""
    return ProxpoError(f"{option} and --set {key}={value} contradict each other")


def parse_value(text: str) -> Any:
    """The number, truth value, None, [list] or {name: value} that the text spells; else the text.

    Lists and blocks are those of YAML on one line, `[a, b]` and `{r: 8, alpha: 16}`.
    """
    parts = _parts(text)
    if parts is not None and text[0] == "[":
        return [parse_value(_unquoted(part)) for part in parts]
    if parts is not None and all(re.match(r"[\w.\"'-]+:(\s|$)", part) for part in parts):
        pairs = (part.partition(":") for part in parts)
        return {_unquoted(name): parse_value(_unquoted(value.strip())) for name, _, value in pairs}
    plain = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in plain:
        return plain[text.lower()]
    for number in (int, float):
        if "_" in text:  # Python reads 1_2 as 12; here it is a pair of bounds
            break
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _parts(text: str) -> list[str] | None:
    """Entries of a list or block, cut at its own commas; None for any other text."""
    if text[:1] + text[-1:] not in ("[]", "{}") or len(text) > 10_000:
        return None
    depth, quote, parts = 0, "", [""]
    for letter in text[1:-1]:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if depth < 0:  # the first bracket is closed before the end
            return None
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    return None if depth or quote else parts[:-1] if not parts[-1] else parts


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _check_effect(
    entry: Method, options: Mapping[str, Any], recipe: Recipe | Procedure, option: str
) -> None:
    """Refuses an option that no stage of the recipe, or no part of the procedure, reads.

    A value that comes to the same as the default ("auto" that stands for it) is not refused.
    """
    value = recipe.options[option]
    if value == entry.defaults[option] or _matters(entry, options, option):
        return
    kinds = {name: p.annotation for name, p in parameters(entry.make).items()}
    near = variations(kinds[option], value)
    if any(_matters(entry, {**options, option: other}, option) for other in near):
        return
    others = {
        name: variations(kinds[name], recipe.options[name])
        for name in entry.defaults
        if name != option
    }
    singly = [((name, other),) for name in others for other in others[name]]
    few = [(name, other) for name in others for other in others[name][:3]]
    where = ""
    for chosen in itertools.chain(singly, itertools.combinations(few, 2)):
        if _matters(entry, {**options, **dict(chosen)}, option):
            where = "; it has one with " + " and ".join(_shown(*pair) for pair in chosen)
            break
    raise ProxpoError(
        f"{entry.slug}: option '{option}'={value} has no effect with these settings{where}"
    )


def _shown(name: str, value: Any) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool | None) else value}"


def _check_kept(
    entry: Method, options: Mapping[str, Any], recipe: Recipe, option: str, swaps: Swaps
) -> None:
    """Refuses an option of the method whose stages have all been swapped for others."""
    if recipe.options[option] == entry.defaults[option] or not _matters(entry, options, option):
        return
    if not _matters(entry, options, option, swaps):
        shown = " and ".join(f"{key}={value}" for key, value in swaps)
        raise ProxpoError(
            f"{entry.slug}: option '{option}'={recipe.options[option]} has no effect beside {shown}"
        )


def _matters(entry: Method, options: Mapping[str, Any], option: str, swaps: Swaps = ()) -> bool:
    """True if the recipe with these options differs from the recipe without this option.

    A procedure says itself which options have no effect.
    """
    try:
        made = entry.make(**options)
        if isinstance(made, Procedure):
            return option not in made.idle
        recipe = apply_swaps(made, swaps)
    except ProxpoError:
        return False
    try:
        others = {name: value for name, value in options.items() if name != option}
        without = apply_swaps(entry.make(**others), swaps)
    except ProxpoError:  # what cannot be left out has an effect
        return True
    return not _same(recipe, without)


def _same(a: Recipe, b: Recipe) -> bool:
    """True if two recipes have stages that act alike; unregistered stages are compared by id."""
    return len(a.stages()) == len(b.stages()) and all(
        (x[0], _acting(x[1])) == (y[0], _acting(y[1]))
        and (x[1].apply is y[1].apply or x[1].name in STAGES[x[1].kind])
        for x, y in zip(a.stages(), b.stages())
    )


def _acting(stage: Stage) -> Stage:
    """The stage with those of its options that have an effect."""
    acting = {name: value for name, value in stage.options.items() if name not in stage.idle}
    return replace(stage, options=acting)


def _is_stage(key: str) -> bool:
    return key.split(".")[0].rstrip("+") in KINDS


def _with_kind(key: Any) -> Any:
    """The key with a kind of stage in the spelling of the registry: RATIO.q is ratio.q."""
    head = re.match(r"[A-Za-z]+(?=[.+]|$)", str(key))
    kind = next((kind for kind in KINDS if head and fold(head[0]) == kind), None)
    return key if head is None or kind is None else f"{kind}{key[head.end() :]}"


def _option(key: str, entry: Method) -> str:
    defaults, slug = entry.defaults, entry.slug
    if "." in key:
        raise ProxpoError(
            f"unknown kind of stage '{key.split('.')[0]}'{nearest(key.split('.')[0], KINDS)}"
        )
    try:
        return resolve(key, defaults, what=f"option of {slug}")
    except ProxpoError:
        hint = nearest(key, [*defaults, *KINDS])
        made = entry.make()
        if isinstance(made, Recipe) and "did you mean" not in hint:
            places = [place for place, s in made.stages() if fold(key) in map(fold, s.options)]
            hint = f"; did you mean '{places[0]}.{key}'?" if places else hint
        raise ProxpoError(f"unknown option '{key}' of {slug}{hint}") from None


def _unfold(key: str, value: Any) -> list[tuple[str, Any]]:
    """{"name": "kalman", "q": 1e-6} under `ratio` becomes ratio=kalman, ratio.q=1e-6.

    Without a name, tables within tables are places: {"kl": {"coef": 0.1}} under `regularisers`.
    """
    if not isinstance(value, Mapping):
        return [(key, value)]
    kind = key.rstrip("+")
    rest = {option: setting for option, setting in value.items() if option != "name"}
    if "name" not in value:
        inner = [
            _unfold(option, rest[option]) if kind in MANY else [(option, rest[option])]
            for option in rest
        ]
        return [(f"{kind}.{place}", setting) for pairs in inner for place, setting in pairs]
    place = f"{kind}.{value['name']}" if kind in MANY else kind
    return [(key, value["name"]), *((f"{place}.{option}", rest[option]) for option in rest)]


def _swap(recipe: Recipe, key: str, value: Any, swaps: Swaps) -> Recipe:
    kind, add = key.rstrip("+"), key.endswith("+")
    if kind not in MANY:
        if add:
            raise ProxpoError(f"{recipe.name}: there is one {kind} stage; write {kind}=NAME")
        if value is None:
            optional = ("advantage", "value", "gradient", "schedule")
            if kind not in optional and "none" not in STAGES[kind]:
                raise ProxpoError(f"{recipe.name}: the {kind} stage cannot be left out")
            if kind in optional:
                return recipe.replace(**{kind: None})
        return recipe.replace(**{kind: _stage(kind, "none" if value is None else value, swaps)})
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    names = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    stages = tuple(_stage(kind, name, swaps) for name in names)
    return recipe.replace(**{kind: (*getattr(recipe, kind), *stages) if add else stages})


def _stage(kind: str, value: Any, swaps: Swaps) -> Stage:
    if isinstance(value, Stage):
        return value
    if not isinstance(value, Mapping):
        return make_stage(kind, str(value), **_required(kind, str(value), swaps))
    if "name" not in value:
        raise ProxpoError(f"{kind}: a stage is NAME or a table with a 'name', got {dict(value)}")
    options = {option: setting for option, setting in value.items() if option != "name"}
    return make_stage(kind, str(value["name"]), **options)


def _required(kind: str, name: str, swaps: Swaps) -> dict[str, Any]:
    """The settings a stage cannot be made without: its options that have no default."""
    name = resolve(name, STAGES[kind], what=f"{kind} stage")
    known = inspect.signature(STAGES[kind][name]).parameters
    needed = [option for option, p in known.items() if p.default is p.empty]
    places = {fold(f"{kind}.{place}{o}"): o for o in needed for place in ("", f"{name}.")}
    return {places[fold(key)]: value for key, value in swaps if fold(key) in places}


def _adjusted(recipe: Recipe, swaps: Swaps) -> Recipe:
    """The recipe with options of its stages set: each stage is built once, with all of its own.

    Bounds that are valid together may be invalid one by one.
    """
    stages: dict[int, Stage] = {}
    options: dict[int, dict[str, Any]] = {}
    for key, value in swaps:
        stage = _named(recipe, key)
        stages[id(stage)] = stage
        options.setdefault(id(stage), {})[_stage_option(stage, key.split(".")[-1])] = value
    for number, stage in stages.items():
        changed, members = _with_options(stage, options[number]), getattr(recipe, stage.kind)
        swapped = (
            tuple(changed if each is stage else each for each in members)
            if stage.kind in MANY
            else changed
        )
        recipe = recipe.replace(**{stage.kind: swapped})
    return recipe


def _check_acting(recipe: Recipe, key: str, value: Any) -> None:
    """Refuses an option that the stage's other options leave without effect."""
    stage = _named(recipe, key)
    known = parameters(STAGES[stage.kind][stage.name])
    option = resolve(key.split(".")[-1], known, what="option")
    if option in stage.idle and stage.options[option] != known[option].default:
        raise ProxpoError(f"{recipe.name}: {key}={value} has no effect beside {stage}")


def _named(recipe: Recipe, key: str) -> Stage:
    """The stage that KIND.OPTION or KIND.STAGE.OPTION means."""
    kind, *path = key.split(".")
    stages = getattr(recipe, kind)
    if kind not in MANY:
        if stages is None:
            raise ProxpoError(f"{recipe.name}: '{key}' needs a stage: {kind}=NAME adds it")
        if len(path) != 1:
            raise ProxpoError(f"{recipe.name}: '{key}' should read {kind}.{path[-1]}")
        return stages
    named = path[0] if len(path) == 2 else None
    fitting = [stage for stage in stages if named is None or fold(stage.name) == fold(named)]
    if len(fitting) != 1:
        present = ", ".join(stage.name for stage in stages) or "none"
        if named is not None and not fitting and fold(named) in map(fold, STAGES[kind]):
            raise ProxpoError(
                f"{recipe.name}: '{key}' needs the stage: {kind}+={named} adds it ({kind} stages: "
                f"{present})"
            )
        raise ProxpoError(
            f"{recipe.name}: '{key}' should read {kind}.STAGE.OPTION; {kind} stages: {present}"
        )
    return fitting[0]


def _at_length(stage: Stage, tokens: int) -> Stage:
    is_open = stage.length is not None and stage.options["max_tokens"] is None
    return _with_options(stage, {"max_tokens": tokens}) if is_open else stage


def _with_options(stage: Stage, options: Mapping[str, Any]) -> Stage:
    return STAGES[stage.kind][stage.name](**{**stage.options, **options})


def _stage_option(stage: Stage, option: str) -> str:
    return resolve(option, stage.options, what=f"option of {stage.kind}={stage.name}")


__all__ = [
    "TASK_OPTIONS",
    "apply_swaps",
    "at_length",
    "contradiction",
    "lengths",
    "make_method",
    "make_recipe",
    "parse_setting",
    "parse_value",
    "put",
]
