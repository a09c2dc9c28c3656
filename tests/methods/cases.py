"""Cases of every method, gathered from tests/methods/test_<recipe file>.py."""

import functools
import importlib
import pkgutil

import proxpo.recipes
from methods._case import Case
from proxpo import Recipe, make_recipe

CASES: dict[str, Case] = {}
for _, _name, _ in pkgutil.iter_modules(proxpo.recipes.__path__):
    if not _name.startswith("_"):
        CASES |= importlib.import_module(f"methods.test_{_name}").CASES


@functools.cache
def recipe(case: str) -> Recipe:
    """The recipe of a case."""
    return make_recipe(CASES[case].slug, CASES[case].settings)
