"""Bounds on numbers that carry a gradient."""

from torch.nn.functional import hardtanh

from proxpo.ops.shapes import Float, Tensor


def hold_within(x: Float[Tensor, "*shape"], limit: float) -> Float[Tensor, "*shape"]:
    """x within ±limit, its gradient 0 beyond: a clamp whose backward is one pass, not four."""
    return hardtanh(x, -limit, limit)


__all__ = ["hold_within"]
