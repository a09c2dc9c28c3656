"""The update between two checkpoints, and the overlap of two updates, a tensor at a time."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Tensor

Dtype = Literal["bfloat16", "float16", "float32", "float64", "stored"]
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class TensorUpdate:
    """Change of one tensor: number of entries, of those moved by more than tol, of those moved.

    rank: that of the difference over the smaller side, for matrices other than norms, on request.
    """

    name: str
    size: int
    changed: int
    changed_exactly: int
    rank: float | None = None

    @property
    def density(self) -> float:
        """Share of entries that are not exactly what they were."""
        return self.changed_exactly / self.size


@dataclass(frozen=True, kw_only=True)
class Update:
    """Changes of all tensors between two checkpoints, at this dtype and tolerance."""

    dtype: str
    tol: float
    tensors: tuple[TensorUpdate, ...]
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sparsity(self) -> float:
        """Share of weights that moved by no more than tol."""
        return 1 - sum(tensor.changed for tensor in self.tensors) / self.size

    @property
    def exact_sparsity(self) -> float:
        """Share of weights that did not move at all."""
        return 1 - sum(tensor.changed_exactly for tensor in self.tensors) / self.size

    @property
    def rank(self) -> float | None:
        """Mean over matrices of rank(d)/min(shape)."""
        ranks = [tensor.rank for tensor in self.tensors if tensor.rank is not None]
        return sum(ranks) / len(ranks) if ranks else None

    def layer_density(self) -> dict[int, float]:
        """Unweighted mean of the densities of each layer's tensors, as the paper's script has."""
        densities: dict[int, list[float]] = {}
        for tensor in self.tensors:
            if layer := _LAYER.search(tensor.name):
                densities.setdefault(int(layer[1]), []).append(tensor.density)
        return {
            number: sum(densities[number]) / len(densities[number]) for number in sorted(densities)
        }


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of two updates, |I₁∩I₂|/|I₁| and |I₁∩I₂|/|I₂|; None where a set is empty.

    chance: what independent sets of these sizes give.
    """

    dtype: str
    tol: float
    first: float | None
    second: float | None
    chance_first: float
    chance_second: float


def changed(
    before: Float[Tensor, "*shape"], after: Float[Tensor, "*shape"], *, tol: float = 0.0
) -> Bool[Tensor, "*shape"]:
    """|θ₁ - θ₀| > tol, in the dtype of the tensors; a difference that is NaN has changed."""
    difference = after - before
    return ~(difference.abs() <= torch.tensor(tol, dtype=difference.dtype))


def compare(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    dtype: Dtype = "bfloat16",
    tol: float = 1e-5,
    only: str = "",
    rank: bool = False,
) -> Update:
    """The update from one set of weights to another, a tensor at a time.

    Mappings may load what they are asked for, as `stored_weights` does. Tensors that share
    their memory count once. only: a regular expression that names must contain.
    """
    tensors = []
    for name, old, new in _pairs(before, after, dtype=dtype, only=only):
        tensors.append(
            TensorUpdate(
                name=name,
                size=old.numel(),
                changed=int(changed(old, new, tol=_tolerance(tol)).sum()),
                changed_exactly=int(changed(old, new).sum()),
                rank=_rank(name, new - old) if rank else None,
            )
        )
    if not sum(tensor.size for tensor in tensors):
        raise ProxpoError(
            "sparsity: the checkpoints share no floating-point weights"
            + (f" with names that match '{only}'" if only else "")
        )
    wanted = re.compile(only)
    return Update(
        dtype=dtype,
        tol=tol,
        tensors=tuple(tensors),
        only_before=tuple(k for k in before if k not in after and wanted.search(k)),
        only_after=tuple(k for k in after if k not in before and wanted.search(k)),
    )


def overlap(
    before: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    dtype: Dtype = "bfloat16",
    tol: float = 1e-5,
    only: str = "",
) -> Overlap:
    """The share of weights that two runs from the same start both changed."""
    n = first_changed = second_changed = both = 0
    for name, old, new in _pairs(before, first, dtype=dtype, only=only):
        if name not in second:
            continue
        other = _same_shape(name, old, second[name])
        mine = changed(old, new, tol=_tolerance(tol))
        theirs = changed(old, other.to(old.dtype), tol=tol)
        n += old.numel()
        first_changed += int(mine.sum())
        second_changed += int(theirs.sum())
        both += int((mine & theirs).sum())
    if not n:
        raise ProxpoError("sparsity: the three checkpoints share no floating-point weights")
    return Overlap(
        dtype=dtype,
        tol=tol,
        first=both / first_changed if first_changed else None,
        second=both / second_changed if second_changed else None,
        chance_first=second_changed / n,
        chance_second=first_changed / n,
    )


def _pairs(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, dtype: Dtype, only: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Weights that both sides have, in one dtype; each place in memory once."""
    wanted, places = _expression(only), set()
    for name in before:
        if name not in after or not wanted.search(name):
            continue
        old = before[name].detach()
        new = _same_shape(name, old, after[name])
        if not (old.is_floating_point() and new.is_floating_point() and old.numel()):
            continue
        if isinstance(before, dict):  # all in memory at once: tied weights share their place
            place = (old.data_ptr(), old.shape)
            if place in places:
                continue
            places.add(place)
        stored = torch.promote_types(old.dtype, new.dtype)
        kind = stored if dtype == "stored" else getattr(torch, dtype)
        yield name, old.cpu().to(kind), new.to(kind)


def _same_shape(name: str, old: Tensor, new: Tensor) -> Tensor:
    if old.shape != new.shape:
        raise ProxpoError(
            f"sparsity: '{name}' has the shape {list(old.shape)} before and {list(new.shape)} after"
        )
    return new.detach().cpu()


def _tolerance(tol: float) -> float:
    if not tol >= 0:
        raise ProxpoError(f"sparsity: the tolerance must not be negative, got {tol}")
    return tol


def _expression(only: str) -> re.Pattern[str]:
    try:
        return re.compile(only)
    except re.error as error:
        raise ProxpoError(f"sparsity: '{only}' is no regular expression: {error}") from None


def _rank(name: str, difference: Tensor) -> float | None:
    if difference.dim() != 2 or "norm" in name:
        return None
    return int(torch.linalg.matrix_rank(difference.float())) / min(difference.shape)
