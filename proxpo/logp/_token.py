"""`token_logp`: log-probabilities and entropies of tokens, without the logits."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from proxpo.logp._check import check_ids, check_options, check_shapes
from proxpo.logp._tile import TokenGrads, Warp
from proxpo.logp.head import (
    Backward,
    Head,
    HeadCall,
    HeadTokens,
    find_backward,
    head_backward,
    softmax_stats,
)
from proxpo.ops.shapes import Bool, Float, Int, Tensor


class LogpEntropy(NamedTuple):
    """Log-probability of each token and entropy of the distribution it was drawn from."""

    logp: Float[Tensor, "*batch"]
    entropy: Float[Tensor, "*batch"]


@overload
def token_logp(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, bias: Tensor | None = ...,
    mask: Tensor | None = ..., temperature: float = ..., softcap: float | None = ...,
    entropy: Literal[False] = ..., chunk: int | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def token_logp(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, bias: Tensor | None = ...,
    mask: Tensor | None = ..., temperature: float = ..., softcap: float | None = ...,
    entropy: Literal[True], chunk: int | None = ...,
) -> LogpEntropy: ...  # fmt: skip
@_disable_dynamo
def token_logp(
    hidden: Float[Tensor, "*batch dim"],
    head_weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "*batch"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    mask: Bool[Tensor, "*batch"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch"] | LogpEntropy:
    """log π(target) = z[target] - log Σ e^z,  z = (h Wᵀ + b) / τ,  and the entropy of π on request.

    The logits exist one tile at a time, about `chunk` of them, and are computed again in the
    backward pass; hidden states, targets and one number per token are all that is kept in between.
    Gradients reach hidden states, head weight and bias through log-probabilities and entropies
    alike. Statistics are float32 (float64 for float64 input) whatever the input's precision.

    mask: positions to score; the others cost nothing, their hidden states and targets may be
        anything, and they get 0. Without a mask every target must be a valid id; on CUDA, where a
        check would wait for the device, an invalid one gets NaN.
    softcap: z = softcap · tanh((h Wᵀ + b) / softcap) / τ, as in Gemma.

    Inside `transform.applied(...)` of `proxpo.gradients` the head weight and bias get their
    transformed gradient and the hidden states the plain one. Hidden states must then come in the
    shape of `sequences`, masked positions included.
    """
    check_shapes(hidden, head_weight, targets, bias, mask)
    check_options("token_logp", temperature=temperature, softcap=softcap, chunk=chunk)
    index = None if mask is None else mask.flatten().nonzero()[:, 0]
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.flatten().long()
    if index is not None:
        rows, ids = rows[index], ids[index]
    check_ids(ids, len(head_weight))
    call = HeadCall(head_weight, bias, hidden.shape[:-1], index)
    warp = Warp(temperature, softcap)
    scored = scored_logp(rows, ids, call, warp=warp, entropy=entropy, chunk=chunk)
    logp, *spread = (_spread(x, index, targets) for x in scored)
    return LogpEntropy(logp, *spread) if entropy else logp


def scored_logp(
    hidden: Float[Tensor, "tok dim"],
    targets: Int[Tensor, " tok"],
    call: HeadCall,
    *,
    warp: Warp,
    entropy: bool = False,
    chunk: int | None = None,
) -> list[Float[Tensor, " tok"]]:
    """`token_logp` of the scored positions alone, and their entropy if wanted.

    `call` says which ones they are. Nothing is read from the device.
    """
    operands = as_autocast(hidden, call.weight, call.bias)
    options = warp, tile_budget(chunk, hidden), entropy
    scored = _TokenLogp.apply(*operands, targets, *options, find_backward(call))
    return list(scored) if entropy else [scored[0]]


class _TokenLogp(torch.autograd.Function):
    """Saves hidden states, head, targets, logsumexp (and entropy); recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        warp: Warp,
        budget: int,
        entropy: bool,
        replaced: Backward | None,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(weight, bias, warp, budget)
            stats = softmax_stats(head, hidden, targets, entropy=entropy)
        logsumexp, spread = stats.logsumexp(), stats.entropy()
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, spread)
        ctx.warp, ctx.budget, ctx.replaced = warp, budget, replaced
        ctx.set_materialize_grads(False)
        return stats.picked - logsumexp, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        token_grads = TokenGrads(
            logsumexp.contiguous(),
            torch.zeros_like(logsumexp) if d_logp is None else d_logp.contiguous(),
            None if d_entropy is None else entropy,
            None if d_entropy is None else d_entropy.contiguous(),
        )
        head = Head(weight, bias, ctx.warp, ctx.budget)
        tokens = HeadTokens(hidden, targets, token_grads)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        sides = {"weight": hidden} if to_weight else {}
        if to_bias:
            sides["bias"] = torch.ones_like(hidden[:, :1])
        with torch.autocast(hidden.device.type, enabled=False):
            if ctx.replaced is None:
                d_hidden, outs = head_backward(head, tokens, [*sides.values()], to_hidden=to_hidden)
            else:
                d_hidden, outs = ctx.replaced(head, tokens, sides, to_hidden=to_hidden)
        grads = dict(zip(sides, outs))
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            grads.get("weight"),
            grads["bias"][:, 0] if to_bias else None,
            *[None] * 5,
        )


def _spread(x: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """Puts scored positions back into the shape of the targets, 0 elsewhere."""
    if index is not None:
        x = x.new_zeros(like.numel()).index_put((index,), x)
    return x.reshape(like.shape)


def tile_budget(chunk: int | None, hidden: Tensor) -> int:
    """Logits at a time: 256 MiB of them on a GPU in bfloat16, what a CPU cache likes otherwise."""
    if chunk is not None:
        return chunk
    return 1 << 27 if hidden.is_cuda else 1 << 20


def as_autocast(*operands: Tensor | None) -> list[Tensor | None]:
    """The operands as an ordinary linear layer would see them under autocast."""
    kind = next(x.device.type for x in operands if x is not None)
    if not torch.is_autocast_enabled(kind):
        return list(operands)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in operands]
