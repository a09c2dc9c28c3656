"""Gradient transforms: per-sequence gradients, layer by layer, inside one backward pass."""

from proxpo.gradients._engine.inner_products import OverlapSet
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import Dense, OneHot, Outer
from proxpo.gradients._engine.session import ParameterHandle, Rule, Session
from proxpo.gradients._engine.transform import Transform, active_handle
from proxpo.gradients.isopo import isopo
from proxpo.gradients.ntk import isopo_ntk
from proxpo.gradients.proma import proma

__all__ = [
    "Dense",
    "Layout",
    "OneHot",
    "Outer",
    "OverlapSet",
    "ParameterHandle",
    "Rule",
    "Session",
    "Transform",
    "active_handle",
    "isopo",
    "isopo_ntk",
    "proma",
]
