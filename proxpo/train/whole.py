"""Forward pass over whole padded sequences through the model's own modules.

The Llama family as in the sampler, except that matrices are used by their modules, which a
gradient transform patches, and the vectors of norms position by position. Nothing here waits for
the device, as the model's own forward does for its attention masks: the pass can be recorded.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from proxpo.gradients._engine.transform import position_vector
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.sampler._lean import additive, attention, causal, places


def states_of_rows(
    model: nn.Module, ids: Int[Tensor, "seq pos"], pad: Int[Tensor, " seq"], dtype: torch.dtype
) -> Float[Tensor, "seq*pos dim"]:
    """Hidden states, ready for the head, of rows with `pad` positions of padding on the left.

    dtype: of the attention. Modules see all positions in their first axis.
    """
    body: Any = model.model
    eps = body.config.rms_norm_eps
    rows, length = ids.shape
    bias = additive(causal(pad, length), dtype)
    x = body.embed_tokens(ids.flatten())
    cos, sin = body.rotary_emb(x, places(pad, length).view(1, -1))
    left, right = sin.chunk(2, dim=-1)
    turn = cos[0, :, None], torch.cat([-left, right], dim=-1)[0, :, None]
    for layer in body.layers:
        qkv = _qkv(layer.self_attn, _normed(layer.input_layernorm, x, eps), turn, eps)
        q, k, v = (part.to(dtype).unflatten(0, (rows, length)) for part in qkv)
        x = x + layer.self_attn.o_proj(attention(q, k, v, bias))
        h = _normed(layer.post_attention_layernorm, x, eps)
        x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
    return _normed(body.norm, x, eps)


def _qkv(
    layer: Any, h: Float[Tensor, "pos dim"], turn: tuple[Tensor, Tensor], eps: float
) -> tuple[Float[Tensor, "pos _ width"], ...]:
    """Queries and keys, normalised and rotated, and values."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (project(h).unflatten(1, (-1, layer.head_dim)) for project in projections)
    if hasattr(layer, "q_norm"):
        q, k = _normed(layer.q_norm, q, eps), _normed(layer.k_norm, k, eps)
    return _rotated(q, turn), _rotated(k, turn), v


def _normed(norm: Any, x: Float[Tensor, "pos *heads wide"], eps: float) -> Tensor:
    """RMS norm in one kernel, times its weight."""
    return rms_norm(x, x.shape[-1:], None, eps) * position_vector(norm.weight, x.shape[:-1])


def _rotated(x: Float[Tensor, "pos heads width"], turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding; `turn` is cos, and sin with the sign of rotate-half."""
    cos, sin = turn
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


__all__ = ["states_of_rows"]
