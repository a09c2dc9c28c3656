"""The parts of a decoding step over a paged cache, in plain torch.

`_triton.py` has the same functions as CUDA kernels; `forward` joins them to a model.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from proxpo.ops.shapes import Float, Int, Num, Tensor
from proxpo.sampler._draw import Draw, draw
from proxpo.sampler._lean import additive, logits_of, rotated
from proxpo.sampler._weights import Layer, Weights

PAGE = 32  # slots of a page


class Paged(NamedTuple):
    """Keys and values of one layer: slot s of a row is slot s % PAGE of page table[row, s // PAGE].

    length: tokens that each row has in its pages
    """

    pages: Float[Tensor, "2 page kv slot width"]
    table: Int[Tensor, "row entry"]
    length: Int[Tensor, " row"]


def add_norm(
    x: Float[Tensor, "row dim"],
    more: Float[Tensor, "row dim"] | None,
    weight: Float[Tensor, " dim"],
    eps: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "row dim"], Float[Tensor, "row dim"]]:
    """x + more, in the memory of x where a kernel does it, and its RMS norm in `dtype`."""
    x = x if more is None else (x + more).to(x.dtype)
    return x, rms_norm(x, x.shape[-1:], weight, eps).to(dtype)


def gated(x: Float[Tensor, "row two_inner"]) -> Float[Tensor, "row inner"]:
    """silu(gate) · up of the two halves."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def attend(
    weights: Weights, layer: Layer, qkv: Float[Tensor, "row out"], cache: Paged, splits: int
) -> Float[Tensor, "row heads_width"]:
    """Attention of one new token in each row, whose key and value are written to the cache.

    splits: parts that a row's slots are cut into, which run side by side on a GPU
    """
    pages, table, length = cache
    position = length.clamp(max=len(weights.cos) - 1)
    turn = weights.cos[position], weights.sin[position]
    q, k, v = rotated(weights, layer, qkv, turn)
    row = torch.arange(len(qkv), device=qkv.device)
    page, slot = table[row, length // PAGE].long(), length % PAGE
    pages[0][page, :, slot], pages[1][page, :, slot] = k, v
    reach = int(length.max()) // PAGE + 1
    keys, values = (x[table[:, :reach]].transpose(1, 2).flatten(2, 3) for x in pages)
    seen = torch.arange(reach * PAGE, device=qkv.device) <= length[:, None]
    bias = additive(seen[:, None, None], q.dtype)
    grouped = q.unflatten(1, (weights.kv_heads, -1))
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias).flatten(1)


def draw_token(
    logits: Float[Tensor, "row vocab"], u: Num[Tensor, " row"], temperature: Num[Tensor, " 1"]
) -> Draw:
    """token ~ softmax(z/τ) and its log-probability; τ > 0 lies in memory, for a recorded step."""
    return draw(logits, u, temperature=float(temperature), top_p=1.0)


class Parts(NamedTuple):
    """The functions of a step, of this module or of `_triton`."""

    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    gated: Callable[[Tensor], Tensor] = gated
    attend: Callable[..., Tensor] = attend
    draw_token: Callable[..., Draw] = draw_token


PLAIN = Parts()


def forward(
    weights: Weights,
    token: Int[Tensor, " row"],
    pages: list[Float[Tensor, "2 page kv slot width"]],
    table: Int[Tensor, "row entry"],
    length: Int[Tensor, " row"],
    *,
    splits: int = 1,
    parts: Parts = PLAIN,
) -> Float[Tensor, "row vocab"]:
    """Logits after one more token in each row, which takes the slot `length`."""
    dtype, eps = weights.embed.dtype, weights.eps
    x, more = embedding(token, weights.embed).to(weights.norm.dtype), None
    for layer, own in zip(weights.layers, pages, strict=True):
        x, h = parts.add_norm(x, more, layer.before_attention, eps, dtype)
        o = parts.attend(weights, layer, layer.qkv(h), Paged(own, table, length), splits)
        x, h = parts.add_norm(x, layer.out(o), layer.before_mlp, eps, dtype)
        more = layer.down(parts.gated(layer.gate_up(h)))
    return logits_of(weights, parts.add_norm(x, more, weights.norm, eps, dtype)[1])
