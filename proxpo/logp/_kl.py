"""`token_kl`: KL divergence of two whole next-token distributions, without either's logits."""

from typing import NamedTuple

import torch
from torch._compile import _disable_dynamo

from proxpo.errors import ProxpoError
from proxpo.logp._check import check_options
from proxpo.logp._tile import SoftmaxStats, Warp
from proxpo.logp._token import as_autocast, tile_budget
from proxpo.logp.head import Head, tile_functions
from proxpo.ops.blocks import blocks
from proxpo.ops.shapes import Float, Tensor


class HeadInput(NamedTuple):
    """Hidden states that enter a language-model head, the head, and the map of its output.

    scale, softcap: logits are scale · x, or softcap · tanh(x / softcap), of the head's output x
    """

    hidden: Float[Tensor, "tok dim"]
    weight: Float[Tensor, "vocab dim"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Float[Tensor, "tok dim"]) -> Float[Tensor, "tok vocab"]:
        """Logits of any states under this head, all of them at once."""
        x = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return Warp(1.0 / self.scale, self.softcap)(x)


class KlEntropy(NamedTuple):
    """KL(π‖π_other) and the entropy of π at each token."""

    kl: Float[Tensor, " tok"]
    entropy: Float[Tensor, " tok"]


@torch.no_grad()
@_disable_dynamo
def token_kl(
    own: HeadInput, other: HeadInput, *, temperature: float = 1.0, chunk: int | None = None
) -> KlEntropy:
    """KL(π‖π_other) = Σ_v π(v) (log π(v) - log π_other(v)) and H(π), exact over the vocabulary.

    Logits exist one tile at a time, about `chunk` numbers with all that is made of them. Per token,
    over the columns so far, with z and y the logits of π and π_other:

        d = Σ e^(z-m) (z - y),   KL = d / Σ e^(z-m) - logsumexp(z) + logsumexp(y)

    Without gradient; float32 (float64 for float64 input) whatever the input's precision.
    """
    if own.hidden.shape[:-1] != other.hidden.shape[:-1] or len(own.weight) != len(other.weight):
        shapes = [list(x.shape) for x in (own.hidden, own.weight, other.hidden, other.weight)]
        raise ProxpoError(
            "token_kl: two distributions need as many tokens and one vocabulary; got hidden "
            f"{shapes[0]}, weight {shapes[1]} and hidden {shapes[2]}, weight {shapes[3]}"
        )
    check_options("token_kl", temperature=temperature, chunk=chunk)
    budget = max(1, tile_budget(chunk, own.hidden) // 4)  # z, y, their π and product
    sides = [_head(side, temperature, budget) for side in (own, other)]
    with torch.autocast(own.hidden.device.type, enabled=False):
        rows, cols = sides[0][0].tile(len(own.hidden))
        parts = [_rows(sides, row, cols) for row in blocks(len(own.hidden), rows)]
    return KlEntropy(*(torch.cat(column) for column in zip(*parts)))


def _head(side: HeadInput, temperature: float, budget: int) -> tuple[Head, Tensor]:
    """The head and the states that enter it, as a linear layer would see them under autocast."""
    hidden, weight, bias = as_autocast(side.hidden, side.weight, side.bias)
    assert hidden is not None
    assert weight is not None
    return Head(weight, bias, Warp(temperature / side.scale, side.softcap), budget), hidden


def _rows(sides: list[tuple[Head, Tensor]], row: slice, cols: int) -> KlEntropy:
    """KL and entropy of the tokens `row`, from tiles of `cols` vocabulary entries."""
    (head, hidden), (other_head, other_hidden) = ((head, x[row]) for head, x in sides)
    p = SoftmaxStats.empty(len(hidden), hidden, entropy=True)
    q = SoftmaxStats.empty(len(hidden), other_hidden, entropy=False)
    nowhere = torch.full_like(p.peak, -1, dtype=torch.long)  # no target is looked up
    gap = torch.zeros_like(p.peak)
    for col in blocks(len(head.weight), cols):
        x, y = head(hidden, col), other_head(other_hidden, col)
        gap = _absorb_gap(gap, p.peak, head.warp(x.to(gap.dtype)), other_head.warp(y.to(gap.dtype)))
        p = tile_functions(x).absorb(p, x, nowhere, head.warp)
        q = tile_functions(y).absorb(q, y, nowhere, other_head.warp)
    kl = gap / p.total - p.logsumexp() + q.logsumexp().to(gap.dtype)
    entropy = p.entropy()
    assert entropy is not None
    return KlEntropy(kl, entropy)


def _absorb_gap(
    gap: Float[Tensor, " tok"],
    peak: Float[Tensor, " tok"],
    z: Float[Tensor, "tok col"],
    y: Float[Tensor, "tok col"],
) -> Float[Tensor, " tok"]:
    """Adds the columns of a tile to Σ e^(z-m) (z - y), whose m was `peak` before them.

    Entries whose probability is 0 add nothing, whatever the other distribution says of them.
    """
    highest = torch.maximum(peak, z.amax(dim=1))
    p = (z - highest[:, None]).exp_()
    terms = (z - y).masked_fill_(p == 0, 0.0).mul_(p)
    return gap * (peak - highest).exp() + terms.sum(dim=1)
