"""The Llama family in plain tensor operations: the model's numbers, less overhead.

`run` is the model without its attention, over tokens in one flat list: `prefill` and `decode` give
it the attention of a sampler. Rows are padded on the left, so that all of them write the same slot
of the cache at each step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, pad, rms_norm, scaled_dot_product_attention

from proxpo.ops.attention import spare_keys
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.sampler._pieces import gated_halves, turned
from proxpo.sampler._weights import Layer, Weights

# Number of the layer, queries [tok heads width], keys and values [tok kv width] -> [tok out].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, `slot` positions for each row, and the rows' padding."""

    keys: list[Float[Tensor, "row kv slot width"]]
    values: list[Float[Tensor, "row kv slot width"]]
    pad: Int[Tensor, " row"]

    def head(self, rows: int, slots: int) -> "Cache":
        """A view of the first rows and slots."""
        return Cache(
            [k[:rows, :, :slots] for k in self.keys],
            [v[:rows, :, :slots] for v in self.values],
            self.pad[:rows],
        )

    def keep(self, index: Int[Tensor, " kept"], slots: int) -> None:
        """Moves the rows of `index` to the front."""
        n = len(index)
        for buffer in (*self.keys, *self.values):
            buffer[:n, :, :slots] = buffer[index, :, :slots]
        self.pad[:n] = self.pad[index]


def empty_cache(weights: Weights, rows: int, slots: int) -> Cache:
    """An empty cache of zeros: a masked slot still meets a weight of 0, and 0 · NaN is NaN."""
    like = weights.embed
    shape = (rows, weights.kv_heads, slots, weights.width)

    def buffers() -> list[Tensor]:
        return [like.new_zeros(shape) for _ in weights.layers]

    return Cache(buffers(), buffers(), torch.zeros(rows, dtype=torch.int64, device=like.device))


def prefill(
    weights: Weights, ids: Int[Tensor, "row tok"], pad: Int[Tensor, " row"]
) -> tuple[Float[Tensor, "row vocab"], Cache]:
    """Logits after each prompt, and a cache that holds the prompts alone."""
    rows, length = ids.shape
    cache = empty_cache(weights, rows, length)
    cache.pad.copy_(pad)
    bias = additive(causal(pad, length), weights.embed.dtype)

    def attend(number: int, *qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, length)) for x in qkv)
        cache.keys[number].copy_(k.transpose(1, 2))
        cache.values[number].copy_(v.transpose(1, 2))
        return attention(q, k, v, bias)

    hidden = run(weights, ids.flatten(), places(pad, length).flatten(), attend)
    return logits_of(weights, hidden[length - 1 :: length]), cache


def decode(
    weights: Weights,
    token: Int[Tensor, " row"],
    cache: Cache,
    slot: int,
    *,
    padded: bool = True,
) -> Float[Tensor, "row vocab"]:
    """Logits after one more token, written to `slot`; no mask is needed if no row is padded."""
    bias, positions = None, slot - cache.pad[: len(token)]
    cache = cache.head(len(token), slot + 1)
    if padded:
        at = torch.arange(slot + 1, device=token.device)
        bias = additive((at >= cache.pad[:, None])[:, None, None], weights.embed.dtype)
    else:
        positions = positions[:1]  # the same for all

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one position; queries that share a key head stand like several positions."""
        keys, values = cache.keys[number], cache.values[number]
        keys[:, :, slot], values[:, :, slot] = k, v
        grouped = q.unflatten(1, (k.shape[1], -1))
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias).flatten(1)

    return logits_of(weights, run(weights, token, positions, attend))


def run(
    weights: Weights, ids: Int[Tensor, " tok"], positions: Int[Tensor, " place"], attend: Attend
) -> Float[Tensor, "tok dim"]:
    """Hidden states, ready for the head; positions are repeated where there are more tokens."""
    x = embedding(ids, weights.embed).to(weights.norm.dtype)
    turn = weights.cos[positions], weights.sin[positions]
    for number, layer in enumerate(weights.layers):
        h = rms_norm(x, x.shape[-1:], layer.before_attention, weights.eps)
        q, k, v = rotated(weights, layer, layer.qkv(h.to(layer.qkv.weight.dtype)), turn)
        x = layer.out.onto(x, attend(number, q, k, v))
        h = rms_norm(x, x.shape[-1:], layer.before_mlp, weights.eps)
        x = layer.down.onto(x, gated_halves(layer.gate_up(h.to(layer.gate_up.weight.dtype))))
    return rms_norm(x, x.shape[-1:], weights.norm, weights.eps)


def rotated(
    weights: Weights, layer: Layer, qkv: Float[Tensor, "tok out"], turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries and keys, and values; `turn` is cos and sin of each token."""
    heads, kv, width = weights.heads, weights.kv_heads, weights.width
    qkv = qkv.unflatten(1, (heads + 2 * kv, width))
    qk, v = qkv.split([heads + kv, kv], dim=1)
    if layer.qk_norm is not None:
        qk = rms_norm(qk, (width,), None, weights.eps) * layer.qk_norm
    q, k = turned(qk, *turn).to(qkv.dtype).split([heads, kv], dim=1)
    return q, k, v


def attention(
    q: Float[Tensor, "row tok heads width"],
    k: Float[Tensor, "row slot kv width"],
    v: Float[Tensor, "row slot kv width"],
    bias: Float[Tensor, "#row 1 tok slot"],
) -> Float[Tensor, "row*tok out"]:
    """Attention; queries that share a key head stand side by side, like further positions."""
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    q = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if spare := spare_keys(k.shape[1], k.device):
        k, v = (pad(x, (0, 0, 0, 0, 0, spare)) for x in (k, v))
        bias = pad(bias, (0, spare), value=float("-inf"))
    o = scaled_dot_product_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias.repeat(1, 1, groups, 1)
    )
    return o.unflatten(2, (groups, length)).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)


def attention_before(
    q: Float[Tensor, "row tok heads width"],
    k: Float[Tensor, "row tok kv width"],
    v: Float[Tensor, "row tok kv width"],
) -> Float[Tensor, "row*tok out"]:
    """Attention to all positions before. Padding stands behind a row, where nobody looks."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2).flatten(2).flatten(0, 1)


def places(pad: Int[Tensor, " row"], length: int) -> Int[Tensor, "row tok"]:
    """Positions counted from the first token that is not padding."""
    return (torch.arange(length, device=pad.device) - pad[:, None]).clamp(min=0)


def causal(pad: Int[Tensor, " row"], length: int) -> Bool[Tensor, "row 1 tok slot"]:
    """Positions that each position attends to. Padding attends to itself: nothing would be NaN."""
    at = torch.arange(length, device=pad.device)
    real = at >= pad[:, None, None]
    return (real & (at <= at[:, None]) | (at == at[:, None]))[:, None]


def additive(visible: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    zeros = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zeros, float("-inf"))


def logits_of(weights: Weights, hidden: Float[Tensor, "row dim"]) -> Float[Tensor, "row vocab"]:
    """Product in float32 where the device can sum half-precision products in it."""
    hidden = hidden.to(weights.head.dtype)
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weights.head.t(), out_dtype=torch.float32)
    return hidden @ weights.head.t()
