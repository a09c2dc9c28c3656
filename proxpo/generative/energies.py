"""Tasks energy:NAME and energy:FILE.py:FUNCTION: energies whose exp(-E) is to be sampled."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from proxpo.errors import ProxpoError, resolve
from proxpo.ops.shapes import Float, Tensor
from proxpo.rewards.worker import Unusable, describe, load_function
from proxpo.stages._options import bind

LARGEST = 1024  # dimensions


@dataclass(frozen=True, kw_only=True)
class Energy:
    """An energy of `size` coordinates; log_z = log ∫ exp(-E), where it is known."""

    name: str
    size: int
    function: Callable[[Float[Tensor, "row size"]], Tensor]
    log_z: float | None = None

    def __call__(self, x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
        """E of every row, or one line on what is wrong with it."""
        try:
            value = self.function(x)
        except Exception as error:
            raise ProxpoError(f"task energy:{self.name} failed: {describe(error)}") from None
        if not isinstance(value, Tensor) or value.shape != x.shape[:1]:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ProxpoError(
                f"task energy:{self.name}: expected a tensor of {len(x)} energies for points of "
                f"shape {list(x.shape)}, got {got}"
            )
        return value

    def gradient(self, x: Float[Tensor, "row size"]) -> Float[Tensor, "row size"]:
        """∇E at every row; refuses NaN and infinity."""
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            value = self(points)
            if not value.requires_grad:
                raise ProxpoError(f"task energy:{self.name}: the energy has no gradient in x")
            [slope] = torch.autograd.grad(value.sum(), points)
        for what, numbers in (("energy", value), ("gradient", slope)):
            bad = ~numbers.detach().isfinite().view(len(x), -1).all(dim=1)
            if bad.any():
                place = ", ".join(f"{float(c):.4g}" for c in x[bad.nonzero()[0, 0]][:4])
                raise ProxpoError(
                    f"task energy:{self.name}: the {what} is not finite for {int(bad.sum())} of "
                    f"{len(x)} points, such as ({place}{', ...' if x.shape[1] > 4 else ''})"
                )
        return slope.detach()


def gaussian(*, dim: int = 1, mean: float = 1.0, std: float = 0.6) -> Energy:
    """‖x - mean‖²/(2 std²)."""
    _positive(std=std)

    def function(x: Tensor) -> Tensor:
        return (x - mean).square().sum(dim=1) / (2 * std**2)

    log_z = dim * (math.log(std) + math.log(2 * math.pi) / 2)
    return Energy(name="gaussian", size=dim, function=function, log_z=log_z)


def two_modes(
    *, dim: int = 2, distance: float = 2.0, std: float = 0.5, weight: float = 0.7
) -> Energy:
    """-log of two Gaussians at ±distance/2 on the first axis; `weight` of them on the right."""
    _positive(std=std)
    if not 0 < weight < 1:
        raise ProxpoError(f"task energy:two-modes: weight is between 0 and 1, got {weight:g}")

    def function(x: Tensor) -> Tensor:
        centre = x.new_zeros(2, dim)
        centre[:, 0] = torch.tensor([-distance / 2, distance / 2])
        parts = -(x[:, None] - centre).square().sum(-1) / (2 * std**2)
        return -(parts + x.new_tensor([1 - weight, weight]).log()).logsumexp(1)

    log_z = dim * (math.log(std) + math.log(2 * math.pi) / 2)
    return Energy(name="two-modes", size=dim, function=function, log_z=log_z)


def own_energy(*, dim: int = 2) -> int:
    """Options of a user's energy: the number of its coordinates."""
    return dim


ENERGIES: dict[str, Callable[..., Energy]] = {"gaussian": gaussian, "two-modes": two_modes}


def make_energy(name: str, options: Mapping[str, Any]) -> Energy:
    """The energy called `name`, or the function FILE.py:FUNCTION, with its options."""
    what = f"task energy:{name}"
    if ".py:" in name:
        size = own_energy(**bind(own_energy, dict(options), what=what))
        try:
            function = load_function(name)
        except Unusable as error:
            raise ProxpoError(f"{what}: {error}") from None
        energy = Energy(name=name, size=_checked(size, what), function=function)
    else:
        if not name:
            raise ProxpoError(
                f"task energy needs a name: energy:{' or energy:'.join(ENERGIES)}, or "
                "energy:FILE.py:FUNCTION"
            )
        make = ENERGIES[resolve(name, ENERGIES, what="energy (or FILE.py:FUNCTION)")]
        chosen = bind(make, dict(options), what=what)
        _checked(chosen["dim"], what)
        energy = make(**chosen)
    energy.gradient(torch.linspace(-0.5, 0.5, 3)[:, None].expand(3, energy.size).clone())
    return energy


def _checked(size: int, what: str) -> int:
    if not 1 <= size <= LARGEST:
        raise ProxpoError(f"{what}: dim is 1 to {LARGEST}, got {size}")
    return size


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ProxpoError(f"task energy: {name} is positive, got {value:g}")


__all__ = ["ENERGIES", "Energy", "gaussian", "make_energy", "two_modes"]
