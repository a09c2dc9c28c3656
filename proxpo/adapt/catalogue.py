"""Methods of test-time adaptation by slug: factory, paper, confidence."""

from collections.abc import Callable
from typing import NamedTuple

from proxpo.adapt.latentseek import latentseek
from proxpo.adapt.rosa import rosa
from proxpo.adapt.types import Adaptation


class Entry(NamedTuple):
    """A method: the factory that takes its options, and where it comes from."""

    make: Callable[..., Adaptation]
    paper: str
    confidence: str


ADAPTATIONS = {
    "latentseek": Entry(latentseek, "arXiv:2505.13308", "official code"),
    "rosa": Entry(rosa, "arXiv:2509.23166", "reconstructed"),
}

__all__ = ["ADAPTATIONS", "Entry"]
