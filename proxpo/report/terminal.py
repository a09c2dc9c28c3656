"""The console that reports are printed to."""

from rich.console import Console


def console() -> Console:
    """A console without markup: formulas and prompts are full of brackets and colons."""
    return Console(markup=False, emoji=False, highlight=False)


__all__ = ["console"]
