"""Training of a part of the weights: the subnetwork that an earlier run has changed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Tensor


def train_only(
    optimizer: torch.optim.Optimizer, masks: Mapping[nn.Parameter, Bool[Tensor, "..."]]
) -> Callable[[], None]:
    """Restricts each further step to the entries of these parameters that are 1 in their mask.

    Gradients are zero elsewhere, and what the optimizer does without a gradient (weight decay,
    momentum) is undone: those weights stay identical to the bit. Returns a function that ends it.
    """
    for parameter, mask in masks.items():
        if mask.shape != parameter.shape or mask.dtype != torch.bool:
            raise ProxpoError(
                f"train_only: a parameter of shape {list(parameter.shape)} needs a bool mask of "
                f"that shape, got {list(mask.shape)} {str(mask.dtype)[6:]}"
            )
    held: dict[nn.Parameter, Tensor] = {}

    def before(_: Any, args: Any, kwargs: Any) -> None:
        for parameter, mask in masks.items():
            held[parameter] = parameter.detach().clone()
            if parameter.grad is not None:
                parameter.grad.masked_fill_(~mask, 0.0)

    def after(_: Any, args: Any, kwargs: Any) -> None:
        for parameter, mask in masks.items():
            parameter.data.copy_(torch.where(mask, parameter.data, held.pop(parameter)))

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
