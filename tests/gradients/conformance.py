"""Every causal language model of transformers, built tiny, against brute force.

Sequence gradients V_i come from one plain backward pass per sequence, position gradients G_t from
running each module again with the gradient of one position. Parameters for which the transform
announces that it has no per-sequence form are compared with Σ_i A_i V_i.
"""

import inspect
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import slow
import torch
from models import nll, padded
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from proxpo.errors import ProxpoError
from proxpo.gradients import Session, Transform, isopo, isopo_ntk

VOCAB = 50
LENGTHS = [5, 7, 4]
ADVANTAGES = torch.tensor([1.0, -0.6, 0.3], dtype=torch.float64)
TOLERANCE = 1e-6
MOST_PARAMETERS = 5_000_000
TRANSFORMS = {
    "isopo": lambda: isopo(p=-1.0, overlap="all"),
    "isopo-ntk": isopo_ntk,
    "p = 0": lambda: isopo(p=0.0),
}

# Sizes under all names that configurations use for them. No size is 3, 7 or 21: these are the
# sequences, the places and the positions, which brute force recognises by their number.
SMALL: dict[str, Any] = {
    name: size
    for names, size in {
        "vocab_size text_vocab_size vocab_size_per_layer_input": VOCAB,
        "hidden_size n_embd d_model dim dim_model embed_dim word_embed_proj_dim embedding_size"
        " emb_dim": 16,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
        " num_decoder_layers": 2,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads linear_num_heads"
        " encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads": 4,
        "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads": 2,
        "head_dim attention_head_size global_head_dim swa_head_dim linear_head_dim": 8,
        "intermediate_size n_inner ffn_dim ffn_hidden_size dff dim_ff d_ff decoder_ffn_dim"
        " encoder_ffn_dim inner_dim": 24,
        "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size"
        " moe_shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp"
        " expert_ffn_hidden_size": 12,
        "num_experts num_local_experts n_routed_experts moe_num_experts n_experts": 4,
        "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts": 2,
        "n_group num_expert_group topk_group n_shared_experts num_shared_experts"
        " moe_num_shared_experts": 1,
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length block_size"
        " original_max_position_embeddings": 64,
        "q_lora_rank kv_lora_rank": 10,
        "qk_rope_head_dim rotary_dim hidden_size_per_layer_input": 4,
        "qk_nope_head_dim v_head_dim": 8,
        "qk_head_dim": 12,
        "state_size ssm_state_size mamba_d_state": 5,
        "mamba_n_heads mamba_num_heads linear_num_value_heads": 4,
        "mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim": 8,
        "mamba_n_groups n_groups first_k_dense_replace": 1,
        "time_step_rank mamba_dt_rank linear_num_key_heads": 2,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings use_cache": False,
        "is_decoder": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }.items()
    for name in names.split()
}


@dataclass
class Result:
    """The outcome of one architecture; `error` is the largest relative one, by transform."""

    kind: str
    status: str  # exact, refused, not built, wrong, crashed
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    unnormalised: list[str] = field(default_factory=list)


def kinds() -> list[str]:
    """Model types that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str, *, varied: bool) -> Any:
    """The default configuration of a model type with every size made small.

    varied: one layer of each kind that the default has, rather than two layers.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    default = cls()
    options = _small(default, kind)
    layers = [*dict.fromkeys(getattr(default, "layer_types", None) or [])]
    if varied and len(layers) > 1 and not {"layer_types", "layers_block_type"} & {*options}:
        options |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    config = cls(**options)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _small(default: Any, kind: str) -> dict[str, Any]:
    known = default.to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention
        chosen |= {"head_dim": 4, "num_key_value_heads": 4}
    chosen |= {name: 0.0 for name in known if "dropout" in name or name.endswith("_pdrop")}
    for name, part in getattr(default, "sub_configs", {}).items():
        value = getattr(default, name, None)
        if value is not None and part is not None:
            chosen[name] = _small(value, value.model_type) | {"model_type": value.model_type}
    return chosen | OVERRIDES.get(kind, {})


OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 16,
        "adapter_out_dim": 16,
        "downsample_hidden_size": 16,
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "dense"],
        "adapter_in_dim": 16,
        "adapter_out_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "inkling_text": {"rel_extent": 8, "sliding_window_size": 5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mpt": {"attn_config": {}},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local"],
        "local_attn_chunk_length": 7,
        "attention_head_size": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 32,
        "attention_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def build(kind: str) -> nn.Module:
    """A tiny model in float64 with weights away from ones, zeros and near-zero."""
    try:
        return _build(kind, varied=True)
    except Exception:
        return _build(kind, varied=False)


def _build(kind: str, *, varied: bool) -> nn.Module:
    import transformers

    config = tiny_config(kind, varied=varied)
    with torch.device("meta"):
        size = sum(p.numel() for p in _model(transformers, config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters with all known sizes small")
    torch.manual_seed(1)
    model = _model(transformers, config).double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * (0.2 if value.dim() == 1 else 0.1))
    _untie(model)
    return model.eval()


def _model(transformers: Any, config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def _untie(model: nn.Module) -> None:
    """A copy for each place of a shared weight, so that brute force can tell its uses apart."""
    visited: set[int] = set()
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) in visited:
                module._parameters[name] = nn.Parameter(value.detach().clone())
            elif value is not None:
                visited.add(id(value))


def losses(model: nn.Module, ids: Tensor, seq: Tensor) -> Tensor:
    """One loss per sequence."""
    # Places for each sequence: an embedding of places shared by all has no G_t for brute force.
    places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    options = {"attention_mask": (seq >= 0).long(), "position_ids": places, "use_cache": False}
    known = inspect.signature(model.forward).parameters
    out = model(input_ids=ids, **{name: x for name, x in options.items() if name in known})
    return nll(out.logits, ids, seq).sum(1)


def sequence_gradients(model: nn.Module, ids: Tensor, seq: Tensor) -> dict[str, Tensor]:
    """V_i by parameter, sequences first; parameters that take no part are left out."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = losses(model, ids, seq)
    rows = [
        torch.autograd.grad(one, [*named.values()], retain_graph=True, allow_unused=True)
        for one in total
    ]
    actual = {}
    for name, parts in zip(named, zip(*rows)):
        if any(part is not None for part in parts):
            zero = torch.zeros_like(named[name])
            actual[name] = torch.stack([zero if part is None else part for part in parts])
    return actual


def position_gradients(
    model: nn.Module, ids: Tensor, seq: Tensor, skip: set[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """G_t by parameter, positions first, and the sequence of each; calls follow one another."""
    calls: list[tuple[str, nn.Module, Any, list[dict[str, Tensor]]]] = []

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            leaves, spec = tree_flatten(output)
            grads: list[dict[str, Tensor]] = [{} for _ in leaves]
            for place, (leaf, entry) in enumerate(zip(leaves, grads)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    # A copy: outputs may depend on each other, or be changed in place.
                    leaves[place] = _per_sequence(leaf)
                    leaves[place].register_hook(lambda grad, e=entry: e.update(grad=grad))
            calls.append((name, module, _detached((args, kwargs)), grads))
            return tree_unflatten(leaves, spec)

        return hook

    handles = []
    for name, module in model.named_modules():
        own = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        if any(f"{name}.{n}".lstrip(".") not in skip for n in own):
            handles.append(module.register_forward_hook(record(name), with_kwargs=True))
    losses(model, ids, seq).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    actual: dict[str, list[Tensor]] = {}
    numbers: dict[str, list[Tensor]] = {}
    for name, module, (args, kwargs), grads in calls:
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        leaves = tree_flatten(module(*args, **kwargs))[0]
        pairs = [(_per_sequence(x), e["grad"]) for x, e in zip(leaves, grads) if "grad" in e]
        for n, (value, row) in _of_call(own, pairs, seq).items():
            actual.setdefault(f"{name}.{n}", []).append(value)
            numbers.setdefault(f"{name}.{n}", []).append(row)
    return {name: (torch.cat(parts), torch.cat(numbers[name])) for name, parts in actual.items()}


def _of_call(
    own: dict[str, nn.Parameter], pairs: list[tuple[Tensor, Tensor]], seq: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """G_t and the sequence of each; a matrix that sees a position several times has one for each.

    Such are projections of the heads of a position, one after the other.
    """
    outs, grads = [out for out, _ in pairs], [grad for _, grad in pairs]
    several = _heads(grads[0], tuple(seq.shape)) if len(grads) == 1 else []
    out = {}
    for n, value in own.items():
        masks = [
            [grad * _only(grad, tuple(seq.shape), t) * head for grad in grads]
            for t in range(seq.numel() if pairs else 0)
            for head in (several if value.dim() == 2 and several else [1])
        ]
        rows = [
            torch.autograd.grad(
                outs, value, mask, retain_graph=True, allow_unused=True, materialize_grads=True
            )[0]
            for mask in masks
        ]
        if rows:
            out[n] = torch.stack(rows), seq.flatten().repeat_interleave(len(rows) // seq.numel())
    return out


def _heads(grad: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """A mask for each index of a leading axis that is not of positions."""
    masks = []
    for axis, size in enumerate(grad.shape[:-1]):
        if size not in (1, *shape, math.prod(shape)):
            eye = torch.eye(size, dtype=grad.dtype)
            masks += [row.view([-1 if a == axis else 1 for a in range(grad.dim())]) for row in eye]
    return masks


def _per_sequence(x: Tensor) -> Tensor:
    """A copy; of what is shared by all sequences (embedded places), one for each."""
    rows, places = len(LENGTHS), max(LENGTHS)
    if x.dim() in (2, 3) and x.shape[-2] == places and x.shape[:-2] in ((), (1,)):
        x = x.expand(rows, places, x.shape[-1])
    return x.clone()


def _detached(value: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)


def _only(grad: Tensor, shape: tuple[int, int], t: int) -> Tensor:
    """1 at position t, 0 elsewhere, for whatever axes hold the positions."""
    mask = torch.zeros(math.prod(shape), dtype=grad.dtype)
    mask[t] = 1
    sizes = tuple(grad.shape)
    if math.prod(shape) in sizes:
        axis = sizes.index(math.prod(shape))
        return mask.view([-1 if a == axis else 1 for a in range(len(sizes))])
    rows, places = sizes.index(shape[0]), sizes.index(shape[1])
    mask = mask.view(shape) if rows < places else mask.view(shape).T
    return mask.reshape([n if a in (rows, places) else 1 for a, n in enumerate(sizes)])


def transformed(
    model: nn.Module, ids: Tensor, seq: Tensor, transform: Transform
) -> tuple[dict[str, Tensor | None], Session, set[str]]:
    """p.grad, the session, and the parameters announced to have no per-sequence form."""
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with transform.applied(model, sequences=seq, advantages=ADVANTAGES) as session:
            losses(model, ids, seq).sum().backward()
    announced: set[str] = set()
    for warning in caught:
        message = re.search(
            r"no per-sequence form for (\S+|the model itself) \(\w+: (.*?)\);", str(warning.message)
        )
        if message:
            prefix = "" if message[1] == "the model itself" else f"{message[1]}."
            announced |= {prefix + name for name in message[2].split(", ")}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return grads, session, announced


def _expected(
    method: str, v: Tensor, g: Tensor | None, numbers: Tensor | None, bank: bool, plain: bool
) -> Tensor:
    if bank:
        slices = [(v[:, e], None if g is None else g[:, e]) for e in range(v.shape[1])]
        parts = [_expected(method, *both, numbers, False, plain) for both in slices]
        return torch.stack(parts)
    if plain or method == "p = 0":
        return torch.tensordot(ADVANTAGES, v, 1)
    if method == "isopo-ntk":
        return slow.ntk(v, torch.arange(len(v)), ADVANTAGES)
    assert g is not None
    assert numbers is not None
    return slow.isopo(g, numbers, ADVANTAGES, (numbers >= 0).nonzero()[:, 0])


@contextmanager
def precise() -> Iterator[None]:
    """Let models that ask for float32 have float64, so that 1e-6 tells a mistake from rounding."""
    own = torch.float32, torch.float, torch.Tensor.float
    try:
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = own


def check(kind: str) -> Result:
    """Compare one architecture under all transforms with brute force."""
    with precise():
        return _check(kind)


def _check(kind: str) -> Result:
    try:
        model = build(kind)
        ids, seq = padded(LENGTHS, VOCAB)
        v = sequence_gradients(model, ids, seq)
    except Exception as why:
        return Result(kind, "not built", _line(why))
    result = Result(kind, "exact")
    g: dict[str, tuple[Tensor, Tensor]] = {}
    for method, make in TRANSFORMS.items():
        try:
            actual, session, announced = transformed(model, ids, seq, make())
        except ProxpoError as why:
            return Result(kind, "refused", str(why))
        except Exception as why:
            return Result(kind, "crashed", _line(why))
        result.unnormalised = sorted(announced)
        g = g or position_gradients(model, ids, seq, announced)
        worst = 0.0
        for name in actual.keys() | v.keys():
            bank = name not in session.handles
            error, what = _compare(method, name, actual[name], v, g, bank, name in announced)
            if error > worst:
                worst, result.detail = error, f"{method}: {name}: {what} ({error:.1e})"
        result.errors[method] = worst
    if max(result.errors.values()) > TOLERANCE:
        result.status = "wrong"
    return result


def _compare(
    method: str,
    name: str,
    grad: Tensor | None,
    v: dict[str, Tensor],
    g: dict[str, tuple[Tensor, Tensor]],
    bank: bool,
    plain: bool,
) -> tuple[float, str]:
    """The relative error of one parameter's gradient, and what was compared."""
    if grad is None or name not in v:
        return (0.0 if grad is None and name not in v else math.inf), "gradient or none"
    largest = max(float(value.norm()) for value in v.values())
    if v[name].norm() < 1e-7 * largest:  # 0 but for rounding: the bias of attention keys
        return (math.inf if grad.norm() > 1e-3 * largest else 0.0), "no gradient"
    positions, numbers = g.get(name, (None, None))
    if positions is not None and not plain:
        own = slow.sequence_gradients(positions, numbers, len(LENGTHS))
        if (own - v[name]).norm() > TOLERANCE * largest:
            return math.inf, "brute force disagrees with itself"
    want = _expected(method, v[name], positions, numbers, bank, plain)
    return _distance(grad, want), "gradient"


def _distance(actual: Tensor, want: Tensor) -> float:
    return float((actual - want).norm() / want.norm().clamp(min=1e-12))


def _line(why: Exception) -> str:
    text = str(why).strip().splitlines() or [""]
    return f"{type(why).__name__}: {text[0]}"[:300]


def run(names: list[str]) -> Iterator[Result]:
    for name in names:
        yield check(name)
