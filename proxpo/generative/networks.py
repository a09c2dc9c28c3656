"""Networks of points and times, and the weights of the models in the box."""

import functools
import math
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from proxpo.ops.shapes import Float, Tensor

WEIGHTS = Path(__file__).parents[1] / "data" / "generative.safetensors"
FREQUENCIES = 8
Network = TypeVar("Network", bound=nn.Module)
HIDDEN = {"digits": 160, "mixture": 64}  # of the denoisers and flows in the box


class TimeField(nn.Module):
    """f(x, t) for t in [0, 1]: a residual network with sines and cosines of t at every layer."""

    frequency: Tensor

    def __init__(self, size: int, out: int, *, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.register_buffer(
            "frequency", math.pi * torch.logspace(-1, 1.5, FREQUENCIES), persistent=False
        )
        self.enter = nn.Linear(size, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.times = nn.ModuleList(nn.Linear(2 * FREQUENCIES, hidden) for _ in range(layers + 1))
        self.leave = nn.Linear(hidden, out)

    def forward(self, x: Float[Tensor, "*row size"], t: Float[Tensor, "*row"]) -> Tensor:
        angle = t[..., None] * self.frequency
        wave = torch.cat([angle.sin(), angle.cos()], dim=-1)
        first, *rest = (time(wave) for time in self.times)
        h = nn.functional.silu(self.enter(x) + first)
        for layer, shift in zip(self.layers, rest):
            h = h + nn.functional.silu(layer(h) + shift)
        return self.leave(h)


def zero_at_start(network: TimeField) -> TimeField:
    """The network with its last layer at 0, so that it returns 0 everywhere."""
    nn.init.zeros_(network.leave.weight)
    nn.init.zeros_(network.leave.bias)
    return network


def descend(optimizer: torch.optim.Optimizer, loss: Float[Tensor, ""]) -> float:
    """One optimizer step; the norm of the gradient. Leaves out a gradient that is not finite."""
    optimizer.zero_grad()
    loss.backward()
    slopes = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = float(nn.utils.get_total_norm(slopes))
    if math.isfinite(norm):
        optimizer.step()
    return norm


class Classifier(nn.Module):
    """log p(digit | image) of 8 x 8 images in [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Float[Tensor, "row 64"]) -> Float[Tensor, "row 10"]:
        return self.body(x).log_softmax(-1)


@functools.cache
def _weights() -> dict[str, Tensor]:
    return load_file(WEIGHTS)


def in_the_box(network: Network, name: str, dtype: torch.dtype) -> Network:
    """The network with the weights called `name`, which scripts/train_generative_models.py made."""
    own = {
        key.removeprefix(f"{name}."): value.to(dtype)
        for key, value in _weights().items()
        if key.startswith(f"{name}.")
    }
    network.to(dtype).load_state_dict(own)
    return network


__all__ = ["HIDDEN", "WEIGHTS", "Classifier", "TimeField", "descend", "in_the_box", "zero_at_start"]
