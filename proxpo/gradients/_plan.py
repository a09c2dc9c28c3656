"""Which form to compute a layer's lengths in, by cost.

Per layer O x D with T positions, m sequences of L = T/m, overlap M (in FLOPs; moving a byte is
charged `TRAFFIC` of them):

    gram         F: 2MT(O+D)         N: 2TL(O+D)          then the usual GEMM
    materialise  F: 2mMOD            N: 0                 V stacked: Σ w_i V_i replaces the GEMM
    stream       F: 2MT(O+D)         N: 0                 V_i one at a time, scaled and added
"""

from typing import Literal

from proxpo.gradients._layout import Layout
from proxpo.gradients._rows import Outer

Path = Literal["auto", "gram", "materialise", "stream"]

# Stacked sequence gradients are kept whole up to this many entries, else built in blocks (twice).
KEEP = 1 << 26
_LAUNCH = 2e9  # three small kernels, in the FLOPs a large GPU does meanwhile


def traffic(device_type: str) -> float:
    return 100.0 if device_type == "cuda" else 10.0


def choose(
    rows: Outer, layout: Layout, *, overlap: int, norm: bool, path: Path, streams: bool = True
) -> Path:
    """The cheapest form for this layer; `overlap` is 0 when F is not needed."""
    if path != "auto":
        return "gram" if path == "stream" and not (norm and streams) else path
    out, inp = rows.shape
    size, count, cuda = layout.size, layout.count, rows.a.is_cuda
    byte = traffic(rows.a.device.type)
    pairs = size * size / max(1, count)
    gram_f = 2.0 * overlap * size * (out + inp) + 16 * byte * overlap * size
    gram_n = norm * (2.0 * pairs * (out + inp) + 16 * byte * pairs)
    stacked = 16 * byte * count * out * inp
    again = 2.0 * size * out * inp if count * out * inp > KEEP else 0.0
    costs: dict[Path, float] = {
        "gram": gram_f + gram_n,
        "materialise": 2.0 * count * overlap * out * inp + stacked + again,
    }
    if norm and streams:
        costs["stream"] = gram_f + stacked + (count * _LAUNCH if cuda else 0.0)
    return min(costs, key=costs.__getitem__)
