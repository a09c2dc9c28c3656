"""The weights of a Llama-like model, laid out for few large products.

Query, key and value projections become one matrix, and so do gate and up; LoRA is merged in. A copy
is refreshed in place, so that captured CUDA graphs keep reading the right memory. Read where
gradients are recorded, the tensors lead back to the model's parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor

# Pre-norm blocks of RMS norm, rotary attention and a gated SiLU: the part read here is the same.
FAMILY = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
# Rotary tables of these kinds are fixed; others change with the length of the text.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Affine:
    """x Wᵀ + b."""

    weight: Float[Tensor, "out dim"]
    bias: Float[Tensor, " out"] | None

    def __call__(self, x: Float[Tensor, "tok dim"]) -> Float[Tensor, "tok out"]:
        return nn.functional.linear(x, self.weight, self.bias)

    def onto(
        self, x: Float[Tensor, "tok out"], h: Float[Tensor, "tok dim"]
    ) -> Float[Tensor, "tok out"]:
        """x + h Wᵀ + b, in one product where the precisions agree."""
        if self.bias is not None or x.dtype != h.dtype:
            return x + self(h)
        return torch.addmm(x, h, self.weight.t())


@dataclass(frozen=True)
class Layer:
    """One block; `qk_norm` holds the norm's weight for each query and key head (Qwen3)."""

    before_attention: Float[Tensor, " dim"]
    qkv: Affine
    qk_norm: Float[Tensor, "heads width"] | None
    out: Affine
    before_mlp: Float[Tensor, " dim"]
    gate_up: Affine
    down: Affine


@dataclass(frozen=True)
class Weights:
    """All of a model; `cos` and `sin` are tables over positions, with rotate-half's sign in sin."""

    embed: Float[Tensor, "vocab dim"]
    layers: list[Layer]
    norm: Float[Tensor, " dim"]
    head: Float[Tensor, "vocab dim"]
    cos: Float[Tensor, "pos width"]
    sin: Float[Tensor, "pos width"]
    heads: int
    kv_heads: int
    eps: float

    @property
    def width(self) -> int:
        return self.cos.shape[1]


def readable(bare: nn.Module) -> bool:
    """True if the lean decoder computes exactly what this model computes."""
    config: Any = getattr(bare, "config", None)
    if type(bare).__name__ not in FAMILY or config.hidden_act != "silu":
        return False
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return False
    if (config.rope_parameters or {}).get("rope_type", "default") not in _FIXED_ROPE:
        return False
    modules: Any = bare
    linears = [m for layer in modules.model.layers for m in _linears(layer)]
    head = modules.lm_head
    return (
        all(_is_plain(m) for m in [*linears, head])
        and getattr(head, "base_layer", head).bias is None
        and type(modules.model.embed_tokens) is nn.Embedding
    )


def read(bare: nn.Module, dtype: torch.dtype, context: int) -> Weights:
    """Copies of all weights, matrices in `dtype`, norms in the model's own; tables to `context`."""
    model: Any = bare
    config = model.config
    body = model.model
    embed = body.embed_tokens.weight.to(dtype, copy=True)
    head = model.lm_head
    tied = getattr(head, "base_layer", head).weight is body.embed_tokens.weight
    cos, sin = _rotary(body.rotary_emb, context, embed.device)
    return Weights(
        embed=embed,
        layers=[_layer(layer, config, dtype) for layer in body.layers],
        norm=body.norm.weight.clone(),
        head=embed if tied and not hasattr(head, "base_layer") else _merged(head, dtype),
        cos=cos,
        sin=sin,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        eps=config.rms_norm_eps,
    )


def refresh(weights: Weights, bare: nn.Module) -> None:
    """Brings the copy up to date in place."""
    fresh = read(bare, weights.embed.dtype, len(weights.cos))
    for old, new in zip(_tensors(weights), _tensors(fresh), strict=True):
        old.copy_(new)


def merged_parameters(bare: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters by their names without adapters, which are merged in.

    A head that is tied to the embedding comes under its own name too.
    """
    for name, module in bare.named_modules():
        if hasattr(module, "base_layer"):
            if not _is_plain(module):
                raise ProxpoError(
                    f"rollout: {name} is a {type(module).__name__} that cannot be merged into its"
                    " weight; plain LoRA on linear layers can"
                )
            yield f"{name}.weight", _merged(module, dtype)
            if module.base_layer.bias is not None:
                yield f"{name}.bias", module.base_layer.bias.detach().to(dtype)
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        if ".base_layer." not in name and ".lora_" not in name:
            yield name, parameter.detach().to(dtype)


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, list):
        return [t for item in part for t in _tensors(item)]
    if isinstance(part, Weights | Layer | Affine):
        return [t for value in vars(part).values() for t in _tensors(value)]
    return []


def _layer(layer: Any, config: Any, dtype: torch.dtype) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm.weight, attention.k_norm.weight
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qk_norm = torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)])
    return Layer(
        before_attention=layer.input_layernorm.weight.clone(),
        qkv=_stack([attention.q_proj, attention.k_proj, attention.v_proj], dtype),
        qk_norm=qk_norm,
        out=_stack([attention.o_proj], dtype),
        before_mlp=layer.post_attention_layernorm.weight.clone(),
        gate_up=_stack([mlp.gate_proj, mlp.up_proj], dtype),
        down=_stack([mlp.down_proj], dtype),
    )


def _linears(layer: Any) -> list[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


def _is_plain(module: nn.Module) -> bool:
    """A linear layer, or one with plain LoRA around it (no DoRA, nothing quantised)."""
    base = getattr(module, "base_layer", module)
    variants = getattr(module, "lora_variant", {})
    mergeable = base is module or hasattr(module, "get_delta_weight")
    return type(base) is nn.Linear and mergeable and not variants


def _merged(module: Any, dtype: torch.dtype) -> Float[Tensor, "out dim"]:
    weight = getattr(module, "base_layer", module).weight
    if hasattr(module, "base_layer") and not module.merged and not module.disable_adapters:
        for name in module.active_adapters:
            if name in module.scaling:
                weight = weight + module.get_delta_weight(name)
    return weight.to(dtype, copy=True)


def _stack(modules: list[Any], dtype: torch.dtype) -> Affine:
    biases = [getattr(m, "base_layer", m).bias for m in modules]
    bias = None if biases[0] is None else torch.cat(biases).to(dtype)
    weight = torch.cat([_merged(m, dtype) for m in modules])
    # A CPU multiplies by a matrix that lies as it is read, x @ Wᵀ, in three quarters of the time.
    return Affine(weight if weight.is_cuda else weight.t().contiguous().t(), bias)


def _rotary(rotary: Any, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The model's own tables; q ↦ q cos + roll(q) sin takes the sign of rotate-half from sin."""
    positions = torch.arange(context, device=device)[None]
    cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    sign = torch.ones_like(sin[0])
    sign[:, : sin.shape[-1] // 2] = -1.0
    return cos[0], sin[0] * sign
