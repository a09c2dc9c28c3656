"""A decoder for the Llama family in plain tensor operations: the model's numbers, less overhead.

Rows are padded on the left, so that all of them write the same slot of the cache at each step.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from proxpo.shapes import Float, Int, Num, Tensor
from proxpo.train.rollouts._weights import Layer, Weights


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
        """Move the rows of `index` to the front."""
        n = len(index)
        for buffer in (*self.keys, *self.values):
            buffer[:n, :, :slots] = buffer[index, :, :slots]
        self.pad[:n] = self.pad[index]


def empty_cache(weights: Weights, rows: int, slots: int) -> Cache:
    """Zeros, not garbage: a masked slot still meets a weight of 0, and 0 · NaN is NaN."""
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
    at = torch.arange(length, device=ids.device)
    real = at >= pad[:, None]
    # Padding sees itself: a query that sees nothing would be NaN, and spread.
    seen = real[:, None, :] & (at <= at[:, None]) | torch.eye(
        length, dtype=torch.bool, device=ids.device
    )
    positions = (at - pad[:, None]).clamp(min=0)
    hidden = _run(weights, ids, positions, cache, 0, _additive(seen, weights.embed.dtype))
    return _logits(weights, hidden[:, -1]), cache


def decode(
    weights: Weights,
    token: Int[Tensor, " row"],
    cache: Cache,
    slot: int | Int[Tensor, ""],
    *,
    padded: bool = True,
) -> Float[Tensor, "row vocab"]:
    """Logits after one more token, written to `slot`; a number on the CPU, a tensor in a graph.

    With a number, only the slots up to it are read, and no mask is needed if no row is padded.
    """
    mask = None
    if isinstance(slot, int):
        cache = cache.head(len(token), slot + 1)
    if padded or not isinstance(slot, int):
        at = torch.arange(cache.keys[0].shape[2], device=token.device)
        seen = (at >= cache.pad[:, None]) & (at <= slot)
        mask = _additive(seen[:, None], weights.embed.dtype)
    positions = (slot - cache.pad)[:, None]
    hidden = _run(weights, token[:, None], positions, cache, slot, mask)
    return _logits(weights, hidden[:, 0])


def _run(
    weights: Weights,
    ids: Int[Tensor, "row tok"],
    positions: Int[Tensor, "row tok"],
    cache: Cache,
    slot: int | Tensor,
    mask: Float[Tensor, "row tok slot"] | None,
) -> Float[Tensor, "row tok dim"]:
    x = embedding(ids, weights.embed).to(weights.norm.dtype)
    turn = (weights.cos[positions][:, :, None], weights.sin[positions][:, :, None])
    bias = None if mask is None else _per_group(mask, weights.heads // weights.kv_heads)
    for layer, keys, values in zip(weights.layers, cache.keys, cache.values):
        h = rms_norm(x, x.shape[-1:], layer.before_attention, weights.eps)
        x = x + layer.out(_attention(weights, layer, h, turn, keys, values, slot, bias))
        h = rms_norm(x, x.shape[-1:], layer.before_mlp, weights.eps)
        gate, up = layer.gate_up(h.to(layer.gate_up.weight.dtype)).chunk(2, dim=-1)
        x = x + layer.down(silu(gate).mul_(up))
    return rms_norm(x, x.shape[-1:], weights.norm, weights.eps)


def _attention(
    weights: Weights,
    layer: Layer,
    h: Float[Tensor, "row tok dim"],
    turn: tuple[Tensor, Tensor],
    keys: Float[Tensor, "row kv slot width"],
    values: Float[Tensor, "row kv slot width"],
    slot: int | Tensor,
    bias: Num[Tensor, "row 1 query slot"] | None,
) -> Float[Tensor, "row tok out"]:
    """Queries that share a key head stand side by side, as if they were several positions."""
    rows, length, _ = h.shape
    heads, kv, width = weights.heads, weights.kv_heads, weights.width
    qkv = layer.qkv(h.to(layer.qkv.weight.dtype)).view(rows, length, heads + 2 * kv, width)
    qk, v = qkv[:, :, : heads + kv], qkv[:, :, heads + kv :]
    if layer.qk_norm is not None:
        qk = rms_norm(qk, (width,), None, weights.eps) * layer.qk_norm
    cos, sin = turn
    qk = torch.addcmul(qk * cos, qk.roll(width // 2, dims=-1), sin).to(qkv.dtype)
    _put(keys, qk[:, :, heads:].transpose(1, 2), slot)
    _put(values, v.transpose(1, 2), slot)
    q = qk[:, :, :heads].unflatten(2, (kv, heads // kv)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    o = scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    return o.unflatten(2, (heads // kv, length)).permute(0, 3, 1, 2, 4).flatten(2)


def _put(
    cache: Float[Tensor, "row kv slot width"],
    new: Float[Tensor, "row kv tok width"],
    slot: int | Tensor,
) -> None:
    if isinstance(slot, int):
        cache[:, :, slot : slot + new.shape[2]] = new
    else:
        cache.index_copy_(2, slot.view(1), new)


def _additive(seen: Tensor, dtype: torch.dtype) -> Float[Tensor, "row tok slot"]:
    zeros = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zeros, float("-inf"))


def _per_group(
    mask: Float[Tensor, "row tok slot"], groups: int
) -> Float[Tensor, "row 1 query slot"]:
    rows, length, slots = mask.shape
    return mask[:, None, None].expand(rows, 1, groups, length, slots).flatten(2, 3)


def _logits(weights: Weights, hidden: Float[Tensor, "row dim"]) -> Float[Tensor, "row vocab"]:
    """In float32 where the device can sum half-precision products in it."""
    hidden = hidden.to(weights.head.dtype)
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weights.head.t(), out_dtype=torch.float32)
    return hidden @ weights.head.t()
