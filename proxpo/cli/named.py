"""Recipes from the command line: a slug or a YAML file each, with the settings that apply."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, resolve
from proxpo.recipes import method
from proxpo.settings import make_recipe, parse_setting, parse_value
from proxpo.types import Recipe


@dataclass(frozen=True, kw_only=True)
class NamedMethod:
    """A method of the command line: its label, its slug, and the settings of its file."""

    label: str
    slug: str
    settings: tuple[tuple[str, Any], ...] = ()


def named_recipes(names: Sequence[str], settings: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by label. A setting without a prefix is for all, `label:key=value` for one of them.

    A label is the slug; a YAML file whose slug is taken goes by the name of the file.
    """
    chosen = _labelled([_from_argument(name) for name in names])
    scoped = [_scoped(text, chosen) for text in settings]
    return {
        named.label: make_recipe(
            named.slug,
            [*named.settings, *((k, v) for label, k, v in scoped if label in (None, named.label))],
        )
        for named in chosen
    }


def read_method_file(path: Path) -> tuple[str, dict[str, Any]]:
    """(slug, settings) from YAML: `method: NAME`, then options and stages as in `--set`.

    Of a config of `proxpo train`, its method and the settings under `recipe`.
    """
    from proxpo.runs.yaml_file import read_yaml
    from proxpo.train._schema import SECTIONS

    tree = read_yaml(path)
    if tree.keys() & {"recipe", "seed", "out", *SECTIONS}:
        from proxpo.train.config import load_config

        config = load_config(path)
        return config.method, dict(config.recipe)
    if not isinstance(tree.get("method"), str):
        raise ProxpoError(f"{path}: expected 'method: NAME' and its settings at the top level")
    return tree.pop("method"), _parse_texts(tree)


def _parse_texts(value: Any) -> Any:
    """The value with its texts read as `--set` reads them: `none`, and numbers in quotes."""
    if isinstance(value, dict):
        return {key: _parse_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_parse_texts(item) for item in value]
    return parse_value(value) if isinstance(value, str) else value


def _from_argument(name: str) -> tuple[NamedMethod, str]:
    """The method, and its label if another one has its slug."""
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml") and os.sep not in name:
        slug = method(name).slug
        return NamedMethod(label=slug, slug=slug), slug
    try:
        slug, settings = read_method_file(path)
        slug = method(slug).slug
    except ProxpoError as error:
        raise ProxpoError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return NamedMethod(label=slug, slug=slug, settings=tuple(settings.items())), path.stem


def _labelled(methods: list[tuple[NamedMethod, str]]) -> list[NamedMethod]:
    """The methods with labels that are unique: the slug, or the second label where it is not."""
    slugs = Counter(named.slug for named, _ in methods)
    labels = [named.label if slugs[named.slug] == 1 else second for named, second in methods]
    for label, times in Counter(labels).items():
        if times > 1:
            raise ProxpoError(f"the method '{label}' is named {times} times")
    return [replace(named, label=label) for label, (named, _) in zip(labels, methods)]


def _scoped(text: str, chosen: Sequence[NamedMethod]) -> tuple[str | None, str, Any]:
    key, value = parse_setting(text)
    prefix, separator, rest = key.partition(":")
    if not separator:
        return None, key, value
    return resolve(prefix, [named.label for named in chosen], what="method in --set"), rest, value


__all__ = ["named_recipes", "read_method_file"]
