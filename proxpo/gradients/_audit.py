"""Does every gradient pass through the transform? Asked once, in the first block on a model.

A weight that is also used without calling its module (`h @ embed.weight.T`) would get a gradient
without advantages for that use. Some entries of what arrives at each parameter are compared with
what was sent there; later blocks run the same code and are not asked again.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from proxpo.errors import ProxpoError
from proxpo.shapes import Tensor

if TYPE_CHECKING:
    from proxpo.gradients._session import Session, Site

_ENTRIES = 4096
_TOLERANCE = 0.05  # sums of two gradients in bfloat16 differ by a tenth of this


class Audit:
    """Entries sent to and received by each parameter during one block."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self._sent: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}
        whole = {id(s.parameter): s.parameter for s in session.sites.values() if _usable(s)}
        self._entries = {key: _some(parameter) for key, parameter in whole.items()}
        self._hooks = [p.register_hook(partial(self._receive, key)) for key, p in whole.items()]

    def send(self, site: "Site", gradient: Tensor) -> None:
        self._add(self._sent, id(site.parameter), gradient)

    def _receive(self, key: int, gradient: Tensor | None) -> None:
        if gradient is not None:  # none yet, while another call of the module is still to come
            self._add(self._received, key, gradient)

    def _add(self, totals: dict[int, Tensor], key: int, gradient: Tensor) -> None:
        if key in self._entries:
            part = gradient.detach().flatten()[self._entries[key]].double()
            totals[key] = totals[key] + part if key in totals else part

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Parameters whose sites have all spoken must have received what these sent."""
        silent = {id(s.parameter) for s in self.session.sites.values() if s.done and not s.sent}
        keys = [key for key in self._received if key in self._sent and key not in silent]
        if not keys:
            return
        wrong = torch.stack([self._differ(key).cpu() for key in keys]).tolist()
        names = {id(site.parameter): name for name, site in self.session.sites.items()}
        for key, bad in zip(keys, wrong):
            if bad:
                raise ProxpoError(
                    f"gradients.applied: {names[key]} received a gradient that did not pass "
                    "through the transform: its weight is also used without calling the module; "
                    "p.grad must not be used"
                )

    def _differ(self, key: int) -> Tensor:
        received = self._received[key]
        # Not `>`: what is not a number is for the check of the weights to name.
        return (received - self._sent[key]).norm() > _TOLERANCE * received.norm()


def _usable(site: "Site") -> bool:
    """Sharded parameters and slices of a bank of experts have gradients of another shape."""
    return site.parameter.dim() < 3 and not hasattr(site.parameter, "device_mesh")


def _some(parameter: Tensor) -> Tensor:
    size = parameter.numel()
    if size <= _ENTRIES:
        return torch.arange(size, device=parameter.device)
    generator = torch.Generator(device=parameter.device).manual_seed(size)
    return torch.randint(size, (_ENTRIES,), generator=generator, device=parameter.device)
