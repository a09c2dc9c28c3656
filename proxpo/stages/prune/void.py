"""Turns of an agent that lead nowhere, and the responses that hold one."""

import re
from collections.abc import Sequence

from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics

_CODE = re.compile(r"```(?:py|python)?\n.*?\n```", re.DOTALL)
_ANSWER = r"\boxed{"


def is_void(turn: str) -> bool:
    """True for a turn that has neither a complete fenced code block nor a boxed answer.

    A fence that was not closed, as in a truncated turn, is void; code that fails when run is not.
    """
    return _ANSWER not in turn and _CODE.search(turn) is None


def has_void(turns: Sequence[str]) -> bool:
    """True if any turn of a response is void: its value of the batch field `void`."""
    return any(is_void(turn) for turn in turns)


@stage("prune", needs=("void",))
def void_turns():
    """Masks out responses with a void turn, once advantages are known. SimpleTIR, arXiv:2509.02479.

    They keep their say in the group's statistics and leave every denominator.
    """

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, "seq tok"], Metrics]:
        present = batch.mask.any(dim=1)
        share = (batch.void & present).sum() / present.sum().clamp(min=1)
        return ~batch.void[:, None].expand_as(batch.mask), {"prune/void": share}

    return keep


__all__ = ["has_void", "is_void", "void_turns"]
