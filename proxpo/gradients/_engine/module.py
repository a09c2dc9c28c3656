"""A module with trained parameters, as the builders of patched forwards receive it."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from proxpo.gradients._engine.session import ModuleHandle, Session
from proxpo.ops.shapes import Tensor

Forward = Callable[..., Any]


@dataclass(frozen=True)
class TrainedModule:
    """A module under a session: its trained parameters, and the forward it came with."""

    session: Session
    module: Any
    name: str
    names: list[str]  # of its trained parameters; dotted for those of children
    forward: Forward
    warn: Callable[[str], None]

    def handle(self, *, draws: bool) -> ModuleHandle:
        """One module handle for all its parameters; `draws` as in `Session.add`."""
        return self.session.add(self.module, self.name, self.names, draws=draws)

    def separate_handles(self) -> dict[str, ModuleHandle]:
        """A module handle for each of its parameters."""
        add = functools.partial(self.session.add, self.module, self.name, draws=True)
        return {own: add([own]) for own in self.names}

    def value(self, name: str) -> Tensor:
        """The parameter of a dotted name, or what stands for it."""
        return functools.reduce(getattr, name.split("."), self.module)


def containers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules below without a forward, such as a ParameterDict, by name: this one reads them."""
    if prefix or not is_container(module):
        for name, child in module._modules.items():
            if child is not None and is_container(child):
                yield prefix + name, child
                yield from containers(child, f"{prefix}{name}.")


def is_container(module: nn.Module) -> bool:
    """True for a module without a forward."""
    plain = getattr(type(module), "forward", None) is nn.Module.forward
    return plain and "forward" not in vars(module)
