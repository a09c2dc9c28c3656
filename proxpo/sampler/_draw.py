"""Drawing tokens: one uniform number per (row seed, position), then the inverse of the CDF.

Nothing depends on the other rows of the batch or on what was drawn before, so a row's response is
the same alone, in any order, and after finished rows have left the batch.
"""

from typing import NamedTuple

import torch

from proxpo.ops.shapes import Float, Int, Num, Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64, written as signed 64-bit numbers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK = 512  # a large vocabulary is searched in two levels: blocks of this size, then inside one


class Draw(NamedTuple):
    """Tokens and the log-probabilities they had."""

    token: Int[Tensor, " seq"]
    logp: Float[Tensor, " seq"]


def uniforms(seeds: list[int], count: int, device: torch.device) -> Num[Tensor, "seq tok"]:
    """u in [0, 1), `count` for each seed: SplitMix64 of (seed, position), 53 bits."""
    signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    state = _mix(torch.tensor(signed, dtype=torch.int64))[:, None]
    position = torch.arange(1, count + 1)
    bits = _shift(_mix(state + position * _GOLDEN), 11)
    return (bits.double() * 2.0**-53).to(device)


def draw(
    logits: Float[Tensor, "seq vocab"],
    u: Num[Tensor, " seq"],
    *,
    temperature: float,
    top_p: float,
) -> Draw:
    """token ~ softmax(z/τ), cut to its top-p nucleus; logp = z/τ[token] - log Σ e^(z/τ)."""
    z = logits.float() if temperature in (0, 1) else logits.float() / temperature
    z = z - z.amax(dim=-1, keepdim=True)
    mass = z.exp()
    if temperature == 0:
        token = z.argmax(dim=-1, keepdim=True)
    else:
        token = _inverse_cdf(mass if top_p == 1 else _nucleus(mass, top_p), u[:, None])
    logp = z.gather(1, token)[:, 0] - mass.sum(dim=-1).log_()
    return Draw(token[:, 0], logp)


def _inverse_cdf(mass: Float[Tensor, "seq vocab"], u: Num[Tensor, "seq 1"]) -> Int[Tensor, "seq 1"]:
    vocab = mass.shape[1]
    if vocab <= 2 * _BLOCK:
        return _first_above(mass.double(), u).item
    blocks = torch.nn.functional.pad(mass, (0, -vocab % _BLOCK)).view(len(mass), -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    block, edges, target = _first_above(sums, u)
    width = sums.gather(1, block)
    rest = ((target - edges.gather(1, block) + width) / width).clamp(0, 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double()
    return block * _BLOCK + _first_above(inside, rest).item


class _Place(NamedTuple):
    """The item at u · Σ mass, the running sums, and u · Σ mass itself."""

    item: Int[Tensor, "seq 1"]
    edges: Num[Tensor, "seq item"]
    target: Num[Tensor, "seq 1"]


def _first_above(mass: Num[Tensor, "seq item"], u: Num[Tensor, "seq 1"]) -> _Place:
    """The first item whose running sum exceeds u · Σ mass.

    Items without mass are never chosen, whatever the rounding.
    """
    edges = mass.cumsum(dim=-1)
    total = edges[:, -1:]
    target = torch.minimum(u * total, torch.nextafter(total, total * 0))
    item = torch.searchsorted(edges, target, right=True).clamp_(max=mass.shape[1] - 1)
    return _Place(item, edges, target)


def _nucleus(mass: Float[Tensor, "seq vocab"], top_p: float) -> Float[Tensor, "seq vocab"]:
    """The fewest likeliest tokens that hold `top_p` of the mass; the others lose theirs."""
    ordered, index = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(mass).scatter_(1, index, kept)


def _mix(x: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Int[Tensor, "*any"], bits: int) -> Int[Tensor, "*any"]:
    """Shifts right and fills with zeros; torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
