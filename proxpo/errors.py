"""Errors a user can act on: one line that says what, where, and what was expected."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class ProxpoError(ValueError):
    """A mistake in the input, the options or the combination of stages; never a bug of proxpo.

    Its message is one line, whatever text of the user's it repeats.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))


class NotFiniteError(ProxpoError):
    """A gradient that holds NaN or infinity, where it must not be used.

    parameter: the name of the one whose gradient it is
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class UnknownFieldError(ProxpoError, AttributeError):
    """A name that is no field of a Batch."""


MOST_NAMES = 100  # that an error lists

# Names that options have elsewhere or had before, and what they are called here.
OTHER_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "agg": (("average",),),
    "beta": (("kl_coef",), ("coef",)),
    "clip": (("clip_low", "clip_high"), ("max_norm",)),
    "clip_eps": (("clip_low", "clip_high"),),
    "clip_ratio": (("clip_low", "clip_high"),),
    "clip_ratio_high": (("clip_high",),),
    "clip_ratio_low": (("clip_low",),),
    "cliprange": (("clip_low", "clip_high"),),
    "delta": (("ratio_cap",),),
    "epsilon": (("clip_low", "clip_high"),),
    "epsilon_high": (("clip_high",),),
    "high": (("clip_high",),),
    "low": (("clip_low",),),
    "normalize": (("normalise",),),
    "normalize_std": (("normalise_std",),),
}


def nearest(name: str, valid: Iterable[str], *, listing: str = "") -> str:
    """`; did you mean 'grpo'?` when a valid name is close, the list of them otherwise.

    Of more than MOST_NAMES those that are most alike, and `listing`, the command that shows all.
    """
    valid = sorted(set(valid))
    for names in OTHER_NAMES.get(fold(name), ()):
        if set(names) <= set(valid):
            return f"; did you mean {' and '.join(map(repr, names))}?"
    folded = {fold(v): v for v in valid}
    close = difflib.get_close_matches(fold(name), list(folded), n=5, cutoff=0.6)
    if close:
        best = max(close, key=lambda candidate: _likeness(fold(name), candidate))
        return f"; did you mean '{folded[best]}'?"
    if len(valid) > MOST_NAMES:
        alike = difflib.get_close_matches(fold(name), list(folded), n=8, cutoff=0.0)
        shown = f"; {len(valid)} are valid, among them {', '.join(folded[each] for each in alike)}"
        return f"{shown}; {listing} lists them" if listing else shown
    return f"; valid: {', '.join(valid)}" if valid else ""


def resolve(name: str, valid: Iterable[str], *, what: str, listing: str = "") -> str:
    """The valid name that `name` spells, ignoring case and the difference of `-` and `_`."""
    valid = list(valid)
    if name in valid:
        return name
    spelt = fold(name)
    for candidate in valid:
        if fold(candidate) == spelt:
            return candidate
    raise ProxpoError(f"unknown {what} '{name}'{nearest(name, valid, listing=listing)}")


def imported(module: str, refusal: str) -> Any:
    """The module of a package that may be missing; `refusal` says so, and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ProxpoError(refusal) from None


def _likeness(text: str, name: str) -> tuple[float, bool]:
    """Closeness of two names; equal letters decide a tie: `gpso` is `gspo`, not `pspo`."""
    ratio = difflib.SequenceMatcher(None, name, text).ratio()
    return ratio, sorted(text) == sorted(name)


def fold(name: str) -> str:
    """The name in lower case with `_` for `-`."""
    return name.lower().replace("-", "_")
