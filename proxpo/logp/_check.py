"""Checks of the arguments of `token_logp` and `token_kl`."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor


def check_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, mask: Tensor | None
) -> None:
    """Refuses tensors whose shapes or dtypes do not fit together."""

    def refuse(rule: str, *tensors: Tensor) -> None:
        got = " and ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in tensors)
        raise ProxpoError(f"token_logp: {rule}; got {got}")

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


def check_options(function: str, **options: float | int | None) -> None:
    """Refuses options of a function that are not positive and finite."""
    for name, value in options.items():
        if value is not None and not 0.0 < value < float("inf"):
            raise ProxpoError(f"{function}: {name} must be positive and finite; got {value}")


def check_ids(ids: Tensor, vocab: int) -> None:
    """Refuses ids outside the vocabulary; on the CPU alone, where that needs no wait."""
    if ids.device.type != "cpu" or not len(ids):
        return
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= vocab:
        raise ProxpoError(
            f"token_logp: targets must lie in 0..{vocab - 1}; found {low if low < 0 else high}"
            " (mask out positions that are not to be scored)"
        )
