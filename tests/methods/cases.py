"""Cases of the methods for language models, gathered from tests/methods/test_<recipe file>.py."""

import functools
import importlib

import proxpo
from methods._case import Case
from proxpo import Recipe, make_recipe

CASES: dict[str, Case] = {}
for _method in proxpo.methods("language").values():
    _package, _, _name = _method.make.__module__.rpartition(".")
    if _package == "proxpo.recipes":
        CASES |= importlib.import_module(f"methods.test_{_name}").CASES


@functools.cache
def recipe(case: str) -> Recipe:
    """The recipe of a case."""
    return make_recipe(CASES[case].slug, CASES[case].settings)
