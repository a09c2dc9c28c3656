"""A candidate as a file that `proxpo train` reads, and as Python."""

from collections.abc import Mapping
from pprint import pformat
from typing import Any

from proxpo.compare.plan import Arm
from proxpo.runs.yaml_file import dump_yaml
from proxpo.search.space import METHOD
from proxpo.train._settings import place
from proxpo.types import KINDS, MANY


def config_text(arm: Arm) -> str:
    """The arm as a config: method, recipe and the settings of the run that the search chose."""
    tree: dict[str, Any] = {"method": arm.method}
    if arm.method == METHOD and _recipe(arm):
        tree["recipe"] = recipe_tree(_recipe(arm))
    for key, value in arm.settings.items():
        section = tree
        *path, last = place(key, ())
        if path[:1] != ["recipe"]:
            for name in path:
                section = section.setdefault(name, {})
            section[last] = value
    return dump_yaml(tree)


def python_text(arm: Arm) -> str:
    """The arm's recipe as an expression."""
    tree = pformat(recipe_tree(_recipe(arm)), sort_dicts=False, width=90)
    return f'import proxpo\n\nrecipe = proxpo.make_recipe("{arm.method}", {tree})\n'


def recipe_tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `recipe` block of flat settings: each stage with its options in one place."""
    tree: dict[str, Any] = {}
    for kind in (kind for kind in KINDS if kind in settings):
        names = str(settings[kind]).split(",")
        stages = [_stage(settings, kind, name) for name in names]
        tree[kind] = stages if kind in MANY else stages[0]
    return tree


def _stage(settings: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    prefix = f"{kind}.{name}." if kind in MANY else f"{kind}."
    options = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    return {"name": name, **options}


def _recipe(arm: Arm) -> dict[str, Any]:
    marked = {k: v for k, v in arm.settings.items() if k.startswith("recipe.")}
    return {key.removeprefix("recipe."): value for key, value in marked.items()}


__all__ = ["config_text", "python_text", "recipe_tree"]
