"""Identity of a problem: by its prompt, wherever and however often it occurs."""

from proxpo.ops.streams import derive
from proxpo.rewards._types import Messages


def identity(prompt: str | Messages) -> int:
    """A 63-bit number of the exact prompt, the same in every run."""
    return derive(0, "problem", _written(prompt))


def question(prompt: str | Messages) -> str:
    """The prompt's text without its case and its white space.

    Prompts that differ in nothing else are one question: never trained on and held out at once.
    """
    return " ".join(_written(prompt).casefold().split())


def _written(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


__all__ = ["identity", "question"]
