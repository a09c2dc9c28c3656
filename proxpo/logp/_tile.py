"""One tile of the logits: its share of the softmax statistics, and the gradient of the logits.

A tile is `rows` tokens by `cols` vocabulary entries. Every token's statistics are merged tile by
tile, so that no more than one tile of logits exists at any time. The functions here are in plain
torch; `_triton.py` has the same as one CUDA kernel each, in place, and `head.py` takes one or the
other.

Axes: `tok` tokens of the tile, `col` vocabulary entries of the tile, `dim` the hidden size.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from proxpo.ops.shapes import Float, Int, Tensor

# e^q is 0 long before this; products such as 0 · (q + H) then stay 0 where a logit is -inf.
FLOOR = -1e4


@dataclass(frozen=True)
class Warp:
    """Map from the head's output to the logits: z = softcap · tanh(x / softcap) / τ."""

    temperature: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Float[Tensor, "tok col"]) -> Float[Tensor, "tok col"]:
        if self.softcap is not None:
            x = torch.tanh(x / self.softcap) * self.softcap
        return x if self.temperature == 1.0 else x / self.temperature

    def slope(self, z: Float[Tensor, "tok col"]) -> Float[Tensor, "tok col"] | float:
        """dz/dx, written in z: (1 - (τ z / softcap)²) / τ."""
        if self.softcap is None:
            return 1.0 / self.temperature
        return (1.0 - (z * (self.temperature / self.softcap)).square()) / self.temperature


class SoftmaxStats(NamedTuple):
    """Per token, over the columns seen so far: m = max z, Σ e^(z-m), z[target], Σ e^(z-m) (z-m)."""

    peak: Float[Tensor, " tok"]
    total: Float[Tensor, " tok"]
    picked: Float[Tensor, " tok"]
    moment: Float[Tensor, " tok"] | None  # for the entropy alone

    @staticmethod
    def empty(rows: int, like: Tensor, *, entropy: bool) -> "SoftmaxStats":
        dtype = statistics_dtype(like.dtype)
        # The lowest finite peak, not -inf: -inf minus itself would be NaN in the first merge.
        # A target outside the vocabulary never replaces the NaN it starts from.
        zero = torch.zeros(rows, dtype=dtype, device=like.device)
        return SoftmaxStats(
            peak=torch.full_like(zero, torch.finfo(dtype).min),
            total=zero,
            picked=torch.full_like(zero, float("nan")),
            moment=torch.zeros_like(zero) if entropy else None,
        )

    @staticmethod
    def join(parts: "list[SoftmaxStats]") -> "SoftmaxStats":
        peak, total, picked = (torch.cat(column) for column in list(zip(*parts))[:3])
        moments = [part.moment for part in parts if part.moment is not None]
        return SoftmaxStats(peak, total, picked, torch.cat(moments) if moments else None)

    def logsumexp(self) -> Float[Tensor, " tok"]:
        return self.peak + self.total.log()

    def entropy(self) -> Float[Tensor, " tok"] | None:
        """H = log Σ e^(z-m) - E[z-m]: free of the cancellation in logsumexp - E[z]."""
        return None if self.moment is None else self.total.log() - self.moment / self.total


class TokenGrads(NamedTuple):
    """Softmax statistics of tokens and the gradients dL/dlogp and dL/dH that reach them."""

    logsumexp: Float[Tensor, " tok"]
    d_logp: Float[Tensor, " tok"]
    entropy: Float[Tensor, " tok"] | None = None
    d_entropy: Float[Tensor, " tok"] | None = None

    def take(self, index: slice | Int[Tensor, " row"]) -> "TokenGrads":
        entropy, d_entropy = (None if x is None else x[index] for x in self[2:])
        return TokenGrads(self.logsumexp[index], self.d_logp[index], entropy, d_entropy)

    def scaled(self, factor: Float[Tensor, " tok"]) -> "TokenGrads":
        factor = factor.to(self.d_logp)
        d_entropy = None if self.d_entropy is None else self.d_entropy * factor
        return self._replace(d_logp=self.d_logp * factor, d_entropy=d_entropy)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the statistics: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_shape(tokens: int, vocab: int, logits: int) -> tuple[int, int]:
    """Rows and columns of a tile of about `logits` entries, columns in multiples of 128.

    All tokens at once where possible: the weight gradient of a vocabulary block is then a single
    matrix product. Beyond that, 8192 columns keep the products efficient.
    """
    rows = max(1, min(tokens, logits // min(vocab, 8192)))
    count = math.ceil(vocab * rows / logits)
    cols = math.ceil(vocab / count)
    return rows, min(vocab, math.ceil(cols / 128) * 128) if cols > 128 else max(1, cols)


def absorb(
    stats: SoftmaxStats, x: Float[Tensor, "tok col"], target: Int[Tensor, " tok"], warp: Warp
) -> SoftmaxStats:
    """Merges a tile into the running statistics; `target` counts from the tile's first column.

    Tile and statistics may be overwritten.
    """
    z = warp(x.to(stats.peak.dtype))
    inside = (target >= 0) & (target < z.shape[1])
    picked = z.gather(1, target.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    peak = torch.maximum(stats.peak, z.amax(dim=1))
    step = stats.peak - peak
    shifted = z.sub_(peak[:, None])
    moment = None
    if stats.moment is not None:
        shifted = shifted.clamp_(min=FLOOR)
        before = (stats.moment + stats.total * step) * step.exp()
        moment = before + (shifted.exp() * shifted).sum(dim=1)
    total = stats.total * step.exp() + shifted.exp_().sum(dim=1)
    return SoftmaxStats(peak, total, torch.where(inside, picked, stats.picked), moment)


def logit_grad(
    x: Float[Tensor, "tok col"], target: Int[Tensor, " tok"], grads: TokenGrads, warp: Warp
) -> Float[Tensor, "tok col"]:
    """dL/dx of a tile, in the tile's own precision; the tile may be overwritten.

    With q = z - logsumexp and π = e^q:  dlogp/dz = 1[target] - π  and  dH/dz = -π (q + H).
    """
    z = warp(x.to(grads.d_logp.dtype))
    slope = warp.slope(z)
    q = z - grads.logsumexp[:, None]
    force = grads.d_logp[:, None]
    if grads.d_entropy is not None and grads.entropy is not None:
        q = q.clamp_(min=FLOOR)
        force = force + grads.d_entropy[:, None] * (q + grads.entropy[:, None])
    g = q.exp().mul_(force).neg_()
    inside = (target >= 0) & (target < g.shape[1])
    hit = torch.where(inside, grads.d_logp, 0.0)[:, None]
    g.scatter_add_(1, target.clamp(0, g.shape[1] - 1)[:, None], hit)
    return g.mul_(slope).to(x.dtype)
