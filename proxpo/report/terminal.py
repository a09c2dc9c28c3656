"""The console that reports are printed to."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


def console() -> Console:
    """A console without markup: formulas and prompts are full of brackets and colons."""
    return Console(markup=False, emoji=False, highlight=False)


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Ends the program with exit code 1, without a traceback, if `head` or `less` has closed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


__all__ = ["console", "until_reader_leaves"]
