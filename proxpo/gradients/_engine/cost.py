"""Cost of the forms in which a layer's lengths and kernels can be computed, and the cheapest one.

Per layer O x D with T positions, m sequences of L = T/m, overlap M (in FLOPs; moving a byte is
charged `traffic` of them):

    gram         F: 2MT(O+D)         N: 2TL(O+D)          then the usual GEMM
    materialise  F: 2mMOD            N: 0                 V stacked: Σ w_i V_i replaces the GEMM
    stream       F: 2MT(O+D)         N: 0                 V_i one at a time, scaled and added

With the positions on several ranks, each does its part of 2MT(O+D). Over the group go M(O+D)
numbers for J and Mm for F whatever the form; for N (and K) T(O+D) in the Gram form, or mOD in the
others.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from proxpo.gradients._engine import inner_products
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import Outer

PATHS = ("auto", "gram", "materialise", "stream")

# Stacked sequence gradients are kept whole up to this many entries, else built in blocks (twice).
KEEP = 1 << 26
HELD = 1 << 30  # bytes of stacked sequence gradients that a kernel may hold
POSTPONED = 1 << 31  # bytes of position gradients that wait for the weights of many parameters
_LAUNCH = 2e9  # three small kernels, in the FLOPs a large GPU does meanwhile


def traffic(device_type: str) -> float:
    """FLOPs that a device does while it moves a byte."""
    return 100.0 if device_type == "cuda" else 10.0


def wire(device_type: str, ranks: int) -> float:
    """Cost of a number sent to the other ranks: about as much as twenty moved in memory."""
    return 0.0 if ranks == 1 else 80 * traffic(device_type)


class Sizes(NamedTuple):
    """The numbers that the cost of a layer depends on."""

    out: int
    inp: int
    positions: int
    sequences: int
    ranks: int
    device_type: str

    @staticmethod
    def of(rows: Outer, layout: Layout) -> "Sizes":
        out, inp = rows.shape
        size, kind = layout.whole.size, rows.a.device.type
        return Sizes(out, inp, size, layout.count, layout.ranks, kind)


@lru_cache(maxsize=4096)
def cheapest_form(
    sizes: Sizes, *, overlap: int, norm: bool, path: str, streams: bool = True
) -> str:
    """The cheapest form for a layer.

    overlap: positions of J, 0 where F is not needed; norm: N is needed, exactly; streams: V_i may
        be weighted one at a time.
    """
    if path != "auto":
        return "gram" if path == "stream" and not (norm and streams) else path
    out, inp, size, count, ranks, device_type = sizes
    byte, own = traffic(device_type), size / ranks
    sent = wire(device_type, ranks)
    pairs = size * size / max(1, count)
    gram_f = 2.0 * overlap * own * (out + inp) + 16 * byte * overlap * own
    gram_n = norm * (2.0 * pairs * (out + inp) + 16 * byte * pairs + sent * size * (out + inp))
    stacked = (16 * byte + sent) * count * out * inp
    again = 2.0 * own * out * inp if sent or count * out * inp > KEEP else 0.0
    costs: dict[str, float] = {
        "gram": gram_f + gram_n,
        "materialise": 2.0 * count * overlap * out * inp + stacked + again,
    }
    if norm and streams:
        costs["stream"] = gram_f + stacked + (count * _LAUNCH if device_type == "cuda" else 0.0)
    return min(costs, key=costs.__getitem__)


def gram_kernel(
    shape: tuple[int, ...],
    layout: Layout,
    groups: Groups,
    path: str,
    kind: torch.dtype,
    *,
    held: bool,
) -> bool:
    """True where K of a weight O x D is cheaper in Gram form.

    kind, held: dtype of stacked V, and whether all of it would be held at once.

    Of n places for sequences in groups of s, the longest of L positions (FLOPs, and bytes moved):

        gram     2nsL²(O+D), 16nsL²       then the usual GEMM
        stacked  2nsOD, 4 nOD numbers     V replaces that GEMM where it is held whole
    """
    if path != "auto":
        return path == "gram"
    out, inp = shape
    device = layout.seq.device.type
    byte, sent = traffic(device), wire(device, layout.ranks)
    places, length = groups.count * groups.size, max(layout.whole.lengths)
    pairs = places * groups.size * length**2 / layout.ranks
    gram = pairs * (2.0 * (out + inp) + 16 * byte) + sent * places * length * (out + inp)
    stacked = places * out * inp * (2.0 * groups.size + 4 * kind.itemsize * byte + sent)
    again = 2.0 * places * length / layout.ranks * out * inp
    return gram < stacked + (0.0 if held else again)


def holds_stack(shape: tuple[int, ...], layout: Layout, groups: Groups, kind: torch.dtype) -> bool:
    """True where V of all sequences is held at once, so that Σ w_i V_i needs no second GEMM.

    Up to the size of a block always; up to HELD bytes if reading V costs less than that GEMM.
    """
    size = groups.count * groups.size * shape[0] * shape[1] * kind.itemsize
    limit = HELD if reading_pays(layout, kind) else inner_products.STACK
    return layout.alone and size <= limit


def reading_pays(layout: Layout, kind: torch.dtype) -> bool:
    """True where reading V costs less than Σ w_i V_i from its positions, 2L FLOPs an entry."""
    return 2.0 * max(layout.whole.lengths) > kind.itemsize * traffic(layout.seq.device.type)
