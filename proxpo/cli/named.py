"""Methods as the command line names them: a slug or a YAML file, and the settings that apply."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, resolve
from proxpo.recipes import method
from proxpo.settings import make_recipe, parse_setting, parse_value
from proxpo.types import Recipe

MAX_YAML_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Named:
    """A method that was asked for: what to call it, its slug, and the settings of its file."""

    label: str
    slug: str
    settings: tuple[tuple[str, Any], ...] = ()


def named_recipes(names: Sequence[str], settings: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by label. A setting without a prefix is for all, `label:key=value` for one of them.

    A label is the slug; a YAML file whose slug is taken goes by the name of the file.
    """
    chosen = _labelled([_from_argument(name) for name in names])
    given = [_scoped(text, chosen) for text in settings]
    return {
        one.label: make_recipe(
            one.slug,
            [*one.settings, *((k, v) for label, k, v in given if label in (None, one.label))],
        )
        for one in chosen
    }


def read_method_file(path: Path) -> tuple[str, dict[str, Any]]:
    """(slug, settings) from YAML: `method: NAME`, then options and stages as in `--set`."""
    import yaml

    if path.stat().st_size > MAX_YAML_BYTES:
        raise ProxpoError(f"{path}: larger than 1 MiB, expected a short YAML file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ProxpoError(f"{path}:{where} not valid YAML") from None
    if not isinstance(found, dict) or not isinstance(found.get("method"), str):
        raise ProxpoError(f"{path}: expected 'method: NAME' and its settings at the top level")
    odd = [key for key in found if not isinstance(key, str)]
    if odd:
        raise ProxpoError(f"{path}: the key {odd[0]!r} is not a name")
    return found.pop("method"), _numbers(found)


def _numbers(value: Any) -> Any:
    """Text that spells a number becomes one: YAML 1.1 takes 1e-6, without a dot, for text."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return parse_value(value) if isinstance(value, str) else value


def _from_argument(name: str) -> tuple[Named, str]:
    """The method, and what to call it if its slug is taken."""
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml") and os.sep not in name:
        slug = method(name).slug
        return Named(label=slug, slug=slug), slug
    try:
        slug, settings = read_method_file(path)
        slug = method(slug).slug
    except ProxpoError as error:
        raise ProxpoError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return Named(label=slug, slug=slug, settings=tuple(settings.items())), path.stem


def _labelled(found: list[tuple[Named, str]]) -> list[Named]:
    slugs = Counter(one.slug for one, _ in found)
    labels = [one.label if slugs[one.slug] == 1 else other for one, other in found]
    for label, times in Counter(labels).items():
        if times > 1:
            raise ProxpoError(f"the method '{label}' is named {times} times")
    return [
        Named(label=label, slug=n.slug, settings=n.settings) for label, (n, _) in zip(labels, found)
    ]


def _scoped(text: str, chosen: Sequence[Named]) -> tuple[str | None, str, Any]:
    key, value = parse_setting(text)
    prefix, separator, rest = key.partition(":")
    if not separator:
        return None, key, value
    return resolve(prefix, [one.label for one in chosen], what="method in --set"), rest, value


__all__ = ["named_recipes", "read_method_file"]
