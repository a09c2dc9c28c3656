"""The config of a run: from YAML files, presets and `--set`, and back to YAML.

    config = load_config("quickstart", sets=["lr=1e-5", "ratio=kalman"], overrides={"seed": 1})

A setting is named by its path (`train.lr`), by its last word where that is unique (`lr`), or, if
it belongs to the method, as everywhere else (`clip_high=0.28`, `ratio=kalman`, `ratio.q=1e-6`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from proxpo.errors import ProxpoError, resolve
from proxpo.recipes import Method, method
from proxpo.runs.files import write_whole
from proxpo.settings import parse_setting
from proxpo.train._schema import (
    SECTIONS,
    Change,
    Config,
    Setting,
    as_dict,
    build,
    changes,
    check_resume,
    differences,
    explain,
    place,
)
from proxpo.train.refusals import check_used
from proxpo.types import Recipe

LARGEST = 1 << 20
REVISIT_AFTER = 8  # steps until a problem of the pool comes again
PRESETS = Path(__file__).parents[1] / "configs"


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    sets: Iterable[str | tuple[str, Any]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The config of a file or preset, then `overrides` (None: not given), then `sets`, checked.

    A file's recipe block belongs to the file's method: another method starts from its own defaults.
    A setting that the recipe does not follow is refused if `overrides` or `sets` give it; in a
    file, which several methods may share, it stands without effect, and the run says so. `source`
    may be a file's contents.
    """
    pairs = [parse_setting(one) if isinstance(one, str) else one for one in sets]
    pairs = [*((k, v) for k, v in (overrides or {}).items() if v is not None), *pairs]
    read = dict(source) if isinstance(source, Mapping) else {}
    if isinstance(source, (str, Path)):
        read = read_yaml(find(source))
    written = read.get("method", Config().method)
    chosen = _method(dict(pairs).get("method", written))
    if chosen != _method(written):
        read.pop("recipe", None)
    tree: dict[str, Any] = {}
    for key, value in [*_entries(read), *pairs, ("method", chosen.slug)]:
        _put(tree, place(key, chosen.defaults), value, key)
    config = build(tree)
    recipe = config.make_recipe()
    check_used(config, recipe, {".".join(place(key, chosen.defaults)) for key, _ in pairs})
    return _with_pool(config, recipe)


def _with_pool(config: Config, recipe: Recipe) -> Config:
    """A pool of problems that come again, for a method that learns from that and an endless task.

    It depends on no setting that may change while a run goes on.
    """
    from proxpo.train.tasks import is_generated

    endless = config.task.problems is None and is_generated(config.task.name)
    if not endless or "prompt_id" not in recipe.needs():
        return config
    pool = REVISIT_AFTER * config.rollout.prompts_per_step
    return replace(config, task=replace(config.task, problems=pool))


def find(source: str | Path) -> Path:
    """The file: a path, or the name of a preset."""
    if Path(source).is_file():
        return Path(source)
    if re.search(r"\.ya?ml$|[/\\]", str(source)):
        raise ProxpoError(f"config {source}: no such file")
    known = presets()
    return known[resolve(str(source), known, what="preset")]


def presets() -> dict[str, Path]:
    """The shipped configs by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a file; a key given twice is refused, as one of them would be lost."""
    try:
        if path.stat().st_size > LARGEST:
            raise ProxpoError(f"{path}: larger than 1 MiB, expected a short YAML file")
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ProxpoError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProxpoError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ProxpoError(f"{path}{where}: {_problem(error)}") from None
    except RecursionError:
        raise ProxpoError(f"{path}: blocks are nested too deep") from None
    except (ValueError, TypeError, OverflowError) as error:  # a date or number that cannot be
        raise ProxpoError(
            f"{path}: a value cannot be read: {' '.join(str(error).split())}"
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or any(not isinstance(key, str) for key in found):
        raise ProxpoError(f"{path}: expected settings as 'name: value' lines")
    return found


def _problem(error: yaml.YAMLError) -> str:
    return " ".join((getattr(error, "problem", None) or "not valid YAML").split())


def to_yaml(config: Config, remarks: Iterable[str] = ()) -> str:
    """The whole config; `load_config` of it gives an equal one. Remarks are comments above it."""
    text = yaml.dump(as_dict(config), Dumper=ConfigDumper, sort_keys=False, allow_unicode=True)
    return "".join(f"# {line}\n" for line in remarks) + text


def write_config(config: Config, path: Path, remarks: Iterable[str] = ()) -> None:
    """The resolved config beside the run's results."""
    write_whole(path, to_yaml(config, remarks).encode())


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number and no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "expected a name before the colon"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                problem = f"'{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class ConfigDumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number."""


for _one in (_Loader, ConfigDumper):
    _one.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def _entries(read: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings of a file one by one; a section may be one word, its name."""
    found: list[tuple[str, Any]] = []
    for key, value in read.items():
        if key in SECTIONS and isinstance(value, Mapping):
            found += [(f"{key}.{inner}", given) for inner, given in value.items()]
        elif key == "recipe" and isinstance(value, Mapping):
            found += [(f"recipe.{inner}", given) for inner, given in value.items()]
        elif not (value is None and (key in SECTIONS or key == "recipe")):
            found.append((key, value))
    return found


def _put(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    *inner, last = path
    for name in inner:
        if tree.get(name) is None:  # a block that was switched off is switched on by an option
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ProxpoError(f"'{key}' cannot be set: '{name}' is {tree!r}, not a block")
    tree[last] = value


def _method(name: Any) -> Method:
    return method(str(name))


__all__ = [
    "Change",
    "Config",
    "ConfigDumper",
    "Setting",
    "as_dict",
    "build",
    "changes",
    "check_resume",
    "differences",
    "explain",
    "find",
    "load_config",
    "presets",
    "read_yaml",
    "to_yaml",
    "write_config",
]
