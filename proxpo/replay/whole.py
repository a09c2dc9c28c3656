"""Forward pass over whole sequences, padded behind, through the model's own modules.

The Llama family as in the sampler, except that matrices are used by their modules, which a
gradient transform patches, and the vectors of norms position by position. Nothing here waits for
the device, as the model's own forward does for its attention masks: the pass can be recorded.
"""

from typing import Any

import torch
from torch import nn

from proxpo.gradients._engine.transform import scaled_norm
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.sampler._lean import attention_before
from proxpo.sampler._pieces import gated, turned


def states_of_rows(
    model: nn.Module, ids: Int[Tensor, "seq pos"], dtype: torch.dtype
) -> Float[Tensor, "seq*pos dim"]:
    """Hidden states, ready for the head, of rows that begin in the first column.

    dtype: of products and attention. Modules see all positions in their first axis.
    """
    body: Any = model.model
    eps = body.config.rms_norm_eps
    rows, length = ids.shape
    x = body.embed_tokens(ids.flatten())
    cos, sin = body.rotary_emb(x, torch.arange(length, device=ids.device)[None])
    left, right = sin[0].chunk(2, dim=-1)
    turn = cos[0], torch.cat([-left, right], dim=-1)
    for layer in body.layers:
        h = _normed(layer.input_layernorm, x, eps).to(dtype)  # once for the modules that read it
        qkv = _qkv(layer.self_attn, h, turn, eps)
        q, k, v = (part.to(dtype).unflatten(0, (rows, length)) for part in qkv)
        x = x + layer.self_attn.o_proj(attention_before(q, k, v))
        h = _normed(layer.post_attention_layernorm, x, eps).to(dtype)
        x = x + layer.mlp.down_proj(gated(layer.mlp.gate_proj(h), layer.mlp.up_proj(h)))
    return _normed(body.norm, x, eps)


def _qkv(
    layer: Any, h: Float[Tensor, "pos dim"], turn: tuple[Tensor, Tensor], eps: float
) -> tuple[Float[Tensor, "pos _ width"], ...]:
    """Queries and keys, normalised and rotated, and values."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (project(h).unflatten(1, (-1, layer.head_dim)) for project in projections)
    if hasattr(layer, "q_norm"):
        q, k = _normed(layer.q_norm, q, eps), _normed(layer.k_norm, k, eps)
    return turned(q, *turn), turned(k, *turn), v


def _normed(norm: Any, x: Float[Tensor, "pos *heads wide"], eps: float) -> Tensor:
    """RMS norm in one kernel, with its weight."""
    return scaled_norm(x, norm.weight, eps)


__all__ = ["states_of_rows"]
