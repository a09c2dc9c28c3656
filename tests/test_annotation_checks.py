"""Annotations are checked in every test that is not marked `long`."""

from dataclasses import dataclass
from types import FunctionType

import pytest
import torch
from annotation_checks import jaxtyped
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from proxpo.ops.masked import masked_mean

checked = jaxtyped(typechecker=None)
Row = Float[Tensor, " tok"]


@checked
def doubled(x: Row, *rest: Row, times: "int" = 2, kept: "Unknown | None" = None) -> Row:
    return x.repeat(times) if rest else x * times


@checked
@dataclass
class Pair:
    x: Row
    y: Row


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: doubled(a, b),
        lambda a, b: doubled(a, a),  # its result has another length
        lambda a, b: doubled(a, times="2"),
        lambda a, b: doubled(a[None]),
        lambda a, b: Pair(a, b),
        lambda a, b: masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool)),
    ],
)
def test_what_an_annotation_forbids_is_refused(call):
    with pytest.raises(TypeCheckError):
        call(torch.zeros(2), torch.zeros(3))


def test_what_annotations_allow_passes():
    a = torch.ones(2)
    assert torch.equal(doubled(a, kept=3), 2 * a)
    assert torch.equal(Pair(a, y=a).y, a)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert masked_mean(torch.ones(2, 3), mask) == 1


def test_a_kernel_stays_the_function_that_triton_compiles():
    kernel = FunctionType((lambda x: x).__code__, {"triton": None})
    assert checked(kernel) is kernel
