"""The config of a run: from YAML files, presets and `--set`, and back to YAML.

    config = load_config("quickstart", sets=["lr=1e-5", "ratio=kalman"], overrides={"seed": 1})

A setting is named by its path (`train.lr`), by its last word where that is unique (`lr`), or, if
it belongs to the method, as everywhere else (`clip_high=0.28`, `ratio=kalman`, `ratio.q=1e-6`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, resolve
from proxpo.recipes import Method, Procedure, method
from proxpo.runs.files import write_whole
from proxpo.runs.yaml_file import dump_yaml, read_yaml
from proxpo.settings import contradiction, parse_setting, parse_value, put
from proxpo.train._schema import SECTIONS, Config
from proxpo.train._settings import (
    Change,
    Setting,
    as_dict,
    build_config,
    changes,
    check_resume,
    differences,
    explain,
    place,
)
from proxpo.train.domains import check_domain, default_settings, domain_of
from proxpo.train.fitted import with_fitted
from proxpo.train.refusals import check_used
from proxpo.types import Recipe

REVISIT_AFTER = 8  # steps until a problem of the pool comes again
PRESETS = Path(__file__).parents[1] / "configs"


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    sets: Iterable[str | tuple[str, Any]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Loads a file or preset, then applies `overrides` (None: not given) and `sets`, and checks.

    A file's recipe block belongs to the file's method: another method starts from its own defaults.
    What is not given comes from the domain of the task and from the method, then from what fits
    task and model (fitted.py), then from `Config`.
    A setting that the recipe does not follow is refused if `overrides` or `sets` give it; in a
    file, which several methods may share, it stands without effect, and the run says so. `source`
    may be a file's contents.
    """
    return load_explained(source, sets, overrides)[0]


def load_explained(
    source: str | Path | Mapping[str, Any] | None = None,
    sets: Iterable[str | tuple[str, Any]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Config, dict[str, str]]:
    """As `load_config`, with the origin of each setting's value by path: "task gsm8k", "given"."""
    own = [parse_setting(entry) if isinstance(entry, str) else entry for entry in sets]
    flags = [(k, v) for k, v in (overrides or {}).items() if v is not None]
    pairs = [*flags, *own]
    read = dict(source) if isinstance(source, Mapping) else {}
    if isinstance(source, (str, Path)):
        read = read_yaml(find(source))
    task = task_name([*_entries(read), *pairs])
    written = read.get("method", domain_of(task).method)
    chosen = _method(dict(pairs).get("method", written))
    if chosen != _method(written):
        read.pop("recipe", None)
    _refuse_unknown([*_entries(read), *pairs], chosen.defaults)
    _refuse_contradictions(_entries(read), flags, own, chosen.defaults)
    check_domain(chosen, task)
    defaults = default_settings(chosen, task)
    tree: dict[str, Any] = {}
    entries = [*_entries(read), *pairs]
    for key, value in [*defaults.items(), *entries, ("method", chosen.slug)]:
        put(tree, place(key, chosen.defaults), value, key)
    given = {_leaf(place(key, chosen.defaults)): "given" for key, _ in entries}
    config, fitted = with_fitted(build_config(tree), {*defaults, *given})
    domain_of(task).check(config)
    made = config.make_method()
    check_used(config, made, {".".join(place(key, chosen.defaults)) for key, _ in pairs})
    by_method = f"method {chosen.slug}"
    by_domain = {p: by_method if p in chosen.settings else f"task {task}" for p in defaults}
    origins = {**by_domain, **{path: default.origin for path, default in fitted.items()}, **given}
    pooled = _with_pool(config, made)
    if pooled is not config:
        origins["task.problems"] = by_method
    return pooled, origins


def _leaf(path: list[str]) -> str:
    """The path of the setting that a path with options inside leads to."""
    return ".".join(path[: 2 if path[0] in SECTIONS else 1])


def left_out(source: str | Path | None, config: Config) -> list[str]:
    """A line on the recipe block of a file, where it belongs to another method than the run's."""
    read = read_yaml(find(source)) if source is not None else {}
    own = _method(read.get("method", domain_of(config.task.name).method)).slug
    recipe = read.get("recipe")
    if not recipe or own == config.method:
        return []
    written = ", ".join(map(str, recipe)) if isinstance(recipe, Mapping) else str(recipe)
    return [
        f"recipe of {source} ({written}) left out: it is for {own}, and this is {config.method}"
    ]


def _refuse_unknown(pairs: Iterable[tuple[str, Any]], options: Collection[str]) -> None:
    """Refuses all names that are no setting in one line, so that a file is mended in one go."""
    faults: list[str] = []
    for key, _ in pairs:
        try:
            place(key, options)
        except ProxpoError as error:
            faults.append(str(error))
    if faults:
        raise ProxpoError("; ".join(dict.fromkeys(faults)))


def _refuse_contradictions(
    read: Iterable[tuple[str, Any]],
    flags: Iterable[tuple[str, Any]],
    sets: Iterable[tuple[str, Any]],
    options: Collection[str],
) -> None:
    """Refuses one setting with two values in a file, or by an option and by --set."""
    of_file: dict[str, Any] = {}
    for key, value in read:
        for path, leaf in spread(".".join(place(key, options)), value):
            if _differ(path, of_file.setdefault(path, leaf), leaf):
                raise ProxpoError(f"'{path}' is given twice, as {of_file[path]} and as {leaf}")
    by_set = {".".join(place(key, options)): (key, value) for key, value in sets}  # the last counts
    for flag, other in flags:
        path = ".".join(place(flag, options))
        key, value = by_set.get(path, (flag, other))
        if path in by_set and _differ(path, other, value):
            raise contradiction(f"--{flag} {other}", key, value)


def spread(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values inside a block, each with its path; any other value as it is."""
    if not (isinstance(value, Mapping) and value):
        yield path, value
        return
    for key, inner in value.items():
        yield from spread(f"{path}.{key}", inner)


def _differ(path: str, a: Any, b: Any) -> bool:
    """True for two values that do not come to the same: 1 and 1.0 do, and two spellings do."""
    if path == "method":
        return _method(a) != _method(b)
    a, b = (parse_value(value) if isinstance(value, str) else value for value in (a, b))
    return a != b


def task_name(entries: Iterable[tuple[str, Any]]) -> str:
    """The name of the task, which decides over defaults."""
    named = [value for key, value in entries if key in ("task", "task.name")]
    return str(named[-1]) if named else Config().task.name


def _with_pool(config: Config, recipe: Recipe | Procedure) -> Config:
    """Adds a pool of problems that come again, for methods that learn from revisits.

    It depends on no setting that may change while a run goes on.
    """
    from proxpo.train.tasks import is_generated

    endless = config.task.problems is None and is_generated(config.task.name)
    if not endless or isinstance(recipe, Procedure) or "prompt_id" not in recipe.needs():
        return config
    pool = REVISIT_AFTER * config.rollout.prompts_per_step
    return replace(config, task=replace(config.task, problems=pool))


def find(source: str | Path) -> Path:
    """The file of a config: a path, or the name of a preset."""
    if Path(source).is_file():
        return Path(source)
    if re.search(r"\.ya?ml$|[/\\]", str(source)):
        raise ProxpoError(f"config {source}: no such file")
    known = presets()
    return known[resolve(str(source), known, what="preset")]


def presets() -> dict[str, Path]:
    """The shipped configs by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def to_yaml(config: Config, remarks: Iterable[str] = ()) -> str:
    """The whole config as YAML, which `load_config` reads back. Remarks are comments above it."""
    return "".join(f"# {line}\n" for line in remarks) + dump_yaml(as_dict(config))


def write_config(config: Config, path: Path, remarks: Iterable[str] = ()) -> None:
    """Writes the resolved config beside the run's results."""
    write_whole(path, to_yaml(config, remarks).encode())


def _entries(read: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings of a file one by one; a section may be one word, its name."""
    entries: list[tuple[str, Any]] = []
    for key, value in read.items():
        if key in SECTIONS and isinstance(value, Mapping):
            entries += [(f"{key}.{inner}", entry) for inner, entry in value.items()]
        elif key == "recipe" and isinstance(value, Mapping):
            entries += [(f"recipe.{inner}", entry) for inner, entry in value.items()]
        elif not (value is None and (key in SECTIONS or key == "recipe")):
            entries.append((key, value))
    return entries


def _method(name: Any) -> Method:
    return method(str(name))


__all__ = [
    "Change",
    "Config",
    "Setting",
    "as_dict",
    "build_config",
    "changes",
    "check_resume",
    "differences",
    "explain",
    "find",
    "left_out",
    "load_config",
    "load_explained",
    "presets",
    "spread",
    "task_name",
    "to_yaml",
    "write_config",
]
