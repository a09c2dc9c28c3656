"""`token_logp`: log-probabilities and entropies of tokens, without the logits."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.logp._head import Head, Rows, pull_back, softmax_stats
from proxpo.logp._tile import Pull, Warp
from proxpo.shapes import Bool, Float, Int, Tensor


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
    entropy: bool, chunk: int | None = ...,
) -> LogpEntropy: ...  # fmt: skip
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

    The logits exist one tile at a time, `chunk` of them, and are computed again in the backward
    pass; hidden states, targets and one number per token are all that is kept in between. Gradients
    reach hidden states, head weight and bias through log-probabilities and entropies alike.
    Statistics are float32 (float64 for float64 input) whatever the precision of the input.

    mask: positions to score; the others cost nothing, their hidden states and targets may be
        anything, and they get 0. Without a mask every target must be a valid id; on CUDA, where a
        check would wait for the device, an invalid one gets NaN.
    softcap: z = softcap · tanh((h Wᵀ + b) / softcap) / τ, as in Gemma.

    Inside `transform.applied(...)` of `proxpo.gradients` the head weight and bias get their
    transformed gradient and the hidden states the plain one. The positions must then be those of
    `sequences`, masked or not.
    """
    _check_shapes(hidden, head_weight, targets, bias, mask)
    _check_options(temperature, softcap, chunk)
    index = None if mask is None else mask.flatten().nonzero()[:, 0]
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    if index is not None:
        rows, ids = rows[index], ids[index]
    _check_ids(ids, len(head_weight))
    operands = _autocast(rows, head_weight, bias)
    budget = chunk or (1 << 27 if hidden.is_cuda else 1 << 22)
    results = _TokenLogp.apply(*operands, ids, Warp(temperature, softcap), budget, entropy)
    logp, spread = (_spread(x, index, targets) for x in results)
    return LogpEntropy(logp, spread) if entropy else logp


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
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            stats = softmax_stats(Head(weight, bias, warp, budget), hidden, targets)
        logsumexp = stats.logsumexp()
        spread = stats.entropy() if entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, spread)
        ctx.warp, ctx.budget = warp, budget
        ctx.set_materialize_grads(False)
        return stats.picked - logsumexp, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        pull = Pull(
            logsumexp.contiguous(),
            torch.zeros_like(logsumexp) if d_logp is None else d_logp.contiguous(),
            None if d_entropy is None else entropy,
            None if d_entropy is None else d_entropy.contiguous(),
        )
        head = Head(weight, bias, ctx.warp, ctx.budget)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        sides = ([hidden] if to_weight else []) + ([torch.ones_like(hidden[:, :1])] if to_bias else [])
        with torch.autocast(hidden.device.type, enabled=False):
            d_hidden, outs = pull_back(
                head, Rows(hidden, targets, pull), sides, to_hidden=to_hidden
            )
        d_bias = outs.pop()[:, 0] if to_bias else None
        d_weight = outs.pop() if to_weight else None
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _spread(x: Tensor | None, index: Tensor | None, like: Tensor) -> Tensor | None:
    """Back to the shape of the targets, 0 where nothing was scored."""
    if x is None or index is None:
        return None if x is None else x.reshape(like.shape)
    return x.new_zeros(like.numel()).index_put((index,), x).reshape(like.shape)


def _autocast(*operands: Tensor | None) -> list[Tensor | None]:
    """The operands as an ordinary linear layer would see them under autocast."""
    kind = next(x.device.type for x in operands if x is not None)
    if not torch.is_autocast_enabled(kind):
        return list(operands)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in operands]


def _check_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, mask: Tensor | None
) -> None:
    def refuse(rule: str, *got: Tensor) -> None:
        found = " and ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in got)
        raise ProxpoError(f"token_logp: {rule}; got {found}")

    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        refuse("hidden [..., dim] and head_weight [vocab, dim] must share dim", hidden, weight)
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        refuse("hidden and head_weight must have one dtype outside autocast", hidden, weight)
    if targets.shape != hidden.shape[:-1] or targets.is_floating_point():
        refuse("targets must be token ids, one per row of hidden", targets, hidden)
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse("bias must have one entry per row of head_weight", bias, weight)
    if mask is not None and (mask.shape != targets.shape or mask.dtype != torch.bool):
        refuse("mask must be bool and shaped like targets", mask, targets)


def _check_options(temperature: float, softcap: float | None, chunk: int | None) -> None:
    for name, value in (("temperature", temperature), ("softcap", softcap), ("chunk", chunk)):
        if value is not None and not 0.0 < value < float("inf"):
            raise ProxpoError(f"token_logp: {name} must be positive and finite; got {value}")


def _check_ids(ids: Tensor, vocab: int) -> None:
    if ids.is_cuda or not len(ids):
        return
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= vocab:
        raise ProxpoError(
            f"token_logp: targets must lie in 0..{vocab - 1}; found {low if low < 0 else high}"
            " (mask out positions that are not to be scored)"
        )
