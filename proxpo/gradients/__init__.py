"""Gradient transforms: per-sequence gradients, layer by layer, inside one backward pass."""

from proxpo.gradients._factories import isopo, isopo_ntk
from proxpo.gradients._layout import Layout
from proxpo.gradients._norms import Picks
from proxpo.gradients._rows import Dense, OneHot, Outer
from proxpo.gradients._session import Rule, Session, Site
from proxpo.gradients._transform import Transform, active
from proxpo.gradients.proma import proma

__all__ = [
    "Dense",
    "Layout",
    "OneHot",
    "Outer",
    "Picks",
    "Rule",
    "Session",
    "Site",
    "Transform",
    "active",
    "isopo",
    "isopo_ntk",
    "proma",
]
