"""Gradient transforms as stages of a recipe."""

import functools
from collections.abc import Callable
from typing import Any

from proxpo.gradients import isopo, isopo_ntk
from proxpo.gradients.proma import proma
from proxpo.stages import stage


def _gradient_stage(factory: Callable[..., Any]) -> None:
    """Registers a transform as a `gradient` stage, whose function makes a fresh transform."""

    @functools.wraps(factory)
    def configured(**options: Any) -> Callable[[], Any]:
        factory(**options)  # refuses wrong options early
        return functools.partial(factory, **options)

    stage("gradient")(configured)


for _factory in (isopo, isopo_ntk, proma):
    _gradient_stage(_factory)
