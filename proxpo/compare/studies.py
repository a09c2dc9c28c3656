"""Studies: YAML files that describe a comparison and its question, by name or by path.

title: ...
question: ...
set: {task: arithmetic, steps: 100}            of all runs, keys as in --set
arms: [{method: grpo}, {method: isopo, name: isopo p=-1, set: {p: -1}}]
vary: {temperature: [0.8, 1.0, 1.2]}
sweep: {lr: [1e-5, 3e-5]}
seeds: 5
first_seed: 0

`like: OTHER` begins with the study OTHER: what stands in the file takes the place of what stands
there, of `set` key by key. Options of OTHER's task go where the file names a task of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.compare.request import Request, foreign_options
from proxpo.errors import ProxpoError, nearest, resolve
from proxpo.runs.yaml_file import read_yaml

STUDIES = Path(__file__).parents[1] / "studies"
NUMBERS = ("seeds", "first_seed", "tune", "tune_best")
KEYS = ("like", "title", "question", "config", "set", "arms", "vary", "sweep", *NUMBERS, "score")
ARM_KEYS = ("method", "name", "set")


def studies() -> dict[str, Path]:
    """The shipped studies by name."""
    return {path.stem: path for path in sorted(STUDIES.glob("*.yaml"))}


def read_study(name: str) -> Request:
    """The study called `name`, or in the file of that name."""
    tree = _tree(_file(name), ())
    try:
        return _request(tree)
    except ProxpoError as error:
        raise ProxpoError(f"study {name}: {error}") from None


def _file(name: str, folder: Path = Path()) -> Path:
    """The file of a study; a path begins at `folder`."""
    path = folder / name
    if path.is_file():
        return path
    if re.search(r"\.ya?ml$|[/\\]", name):
        raise ProxpoError(f"study {name}: no such file")
    known = studies()
    return known[resolve(name, known, what="study")]


def _tree(path: Path, later: tuple[Path, ...]) -> dict[str, Any]:
    """The keys of a study's file, and of the study that it is like; later: files that led here."""
    tree = read_yaml(path)
    like = tree.get("like")
    if like is None:
        return tree
    try:
        if not isinstance(like, str):
            raise ProxpoError(f"'like' is the name of a study, got {like!r}")
        other = _file(like, path.parent)
        if other.resolve() in (path.resolve(), *later):
            raise ProxpoError(f"'like: {like}' leads back to the study itself")
        own = _block(tree, "set")
    except ProxpoError as error:
        raise ProxpoError(f"study {path.stem}: {error}") from None
    before = _tree(other, (path.resolve(), *later))
    base = _block(before, "set")
    left = foreign_options(list(base.items()), list(own.items()))
    kept = {key: value for key, value in base.items() if key not in left}
    return {**before, **tree, "set": {**kept, **own}}


def _request(tree: Mapping[str, Any]) -> Request:
    _check_keys(tree, KEYS, "")
    arms = tree.get("arms")
    if not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise ProxpoError("'arms' is a list of blocks with 'method'")
    for arm in arms:
        _check_keys(arm, ARM_KEYS, "arms.")
        if not isinstance(arm.get("method"), str):
            raise ProxpoError(f"an arm needs 'method: NAME', got {arm}")
        if not isinstance(arm.get("name", ""), str):
            raise ProxpoError(f"the name of an arm is text, got {arm['name']!r}: put it in quotes")
    for key in NUMBERS:
        if type(tree.get(key, 1)) is not int:
            raise ProxpoError(f"'{key}' is a number, got {tree[key]!r}")
    for key in ("score", "config"):
        if not isinstance(tree.get(key, ""), str):
            raise ProxpoError(f"'{key}' is a name, got {tree[key]!r}")
    return Request(
        title=str(tree.get("title", "")),
        question=" ".join(str(tree.get("question", "")).split()),
        config=tree.get("config"),
        base=tuple(_block(tree, "set").items()),
        arms=tuple((arm.get("name"), arm["method"], _block(arm, "set")) for arm in arms),
        vary=_axes(tree, "vary"),
        sweep=_axes(tree, "sweep"),
        **{key: tree[key] for key in (*NUMBERS, "score") if key in tree},
    )


def _check_keys(tree: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in tree:
        if key not in known:
            raise ProxpoError(f"unknown key '{prefix}{key}'{nearest(str(key), known)}")


def _block(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    block = tree.get(key) or {}
    if not isinstance(block, dict) or any(not isinstance(name, str) for name in block):
        raise ProxpoError(f"'{key}' is a block of settings, got {block!r}")
    return block


def _axes(tree: Mapping[str, Any], key: str) -> dict[str, tuple[Any, ...]]:
    axes = _block(tree, key)
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ProxpoError(f"'{key}.{name}' is a list of values, got {values!r}")
    return {name: tuple(values) for name, values in axes.items()}


__all__ = ["read_study", "studies"]
