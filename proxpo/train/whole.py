"""Forward pass over whole padded sequences through the model's own modules.

The Llama family as in the sampler, except that every module with weights is called, so that a
gradient transform finds what it has patched. Nothing here waits for the device, as the model's own
forward does for its attention masks: the pass can be recorded.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.sampler._lean import additive, attention, causal, places


def states_of_rows(
    model: nn.Module, ids: Int[Tensor, "seq pos"], pad: Int[Tensor, " seq"], dtype: torch.dtype
) -> Float[Tensor, "seq*pos dim"]:
    """Hidden states, ready for the head, of rows with `pad` positions of padding on the left.

    dtype: of the attention. Modules see all positions in their first axis.
    """
    body: Any = model.model
    rows, length = ids.shape
    bias = additive(causal(pad, length), dtype)
    x = body.embed_tokens(ids.flatten())
    cos, sin = body.rotary_emb(x, places(pad, length).view(1, -1))
    turn = cos[0, :, None], sin[0, :, None]
    for layer in body.layers:
        qkv = _qkv(layer.self_attn, layer.input_layernorm(x), turn)
        q, k, v = (part.to(dtype).unflatten(0, (rows, length)) for part in qkv)
        x = x + layer.self_attn.o_proj(attention(q, k, v, bias))
        h = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
    return body.norm(x)


def _qkv(
    layer: Any, h: Float[Tensor, "pos dim"], turn: tuple[Tensor, Tensor]
) -> tuple[Float[Tensor, "pos _ width"], ...]:
    """Queries and keys, normalised and rotated, and values."""
    width = layer.head_dim
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (project(h).unflatten(1, (-1, width)) for project in projections)
    if hasattr(layer, "q_norm"):
        q, k = layer.q_norm(q), layer.k_norm(k)
    return _rotated(q, turn), _rotated(k, turn), v


def _rotated(x: Float[Tensor, "pos heads width"], turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


__all__ = ["states_of_rows"]
