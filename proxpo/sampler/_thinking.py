"""Latent thoughts before a response: hidden states are fed back as inputs.

    z_n = μ_n + s ε_n,   μ_n the state after the prompt and z_1 ... z_{n-1}, as it enters the head

The noise of a row depends on its seed alone, like its tokens (_draw.py).
"""

import torch

from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive
from proxpo.sampler._draw import uniforms
from proxpo.sampler._engines import ModelEngine
from proxpo.sampler._types import Thoughts


def think(
    engine: ModelEngine, noise: Float[Tensor, "row thought dim"]
) -> tuple[Float[Tensor, "row vocab"], Thoughts]:
    """Feeds a thought for each column of `noise`, s ε; logits after them, and the thoughts."""
    means, values = [], []
    for shift in noise.unbind(dim=1):
        mean = engine.states
        means.append(mean.float())
        values.append((means[-1] + shift).to(mean.dtype))  # kept as it is fed
        logits = engine.feed(values[-1])
    return logits, Thoughts(torch.stack(values, dim=1).float(), torch.stack(means, dim=1))


def normals(
    seeds: list[int], shape: tuple[int, int], device: torch.device
) -> Float[Tensor, "seq thought dim"]:
    """ε ~ N(0, 1), `shape` numbers for each seed: the inverse CDF of uniform numbers."""
    streams = [derive(seed, "thought") for seed in seeds]
    u = uniforms(streams, shape[0] * shape[1], device) + 2.0**-54  # within (0, 1)
    return torch.special.ndtri(u).float().unflatten(1, shape)


__all__ = ["normals", "think"]
