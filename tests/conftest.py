"""Settings of every test: one thread, no leftover of a random state, Hypothesis without chance."""

from collections.abc import Iterator

import annotation_checks
import pytest
import torch
from fuzzing import FACTOR, times
from hypothesis import HealthCheck, settings
from jaxtyping import config as jaxtyping_config

annotation_checks.install()
settings.register_profile(
    "proxpo",
    derandomize=FACTOR == 1,
    print_blob=True,
    max_examples=times(100),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("proxpo")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shapes_unchecked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checking every annotation at every call adds half of its time to a long run."""
    long = request.node.get_closest_marker("long") is not None
    jaxtyping_config.update("jaxtyping_disable", long)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods and stages that the test registers are forgotten at its end."""
    from proxpo.recipes import _registry
    from proxpo.stages import STAGES, load_stages

    load_stages()
    _registry.methods()
    monkeypatch.setattr(_registry, "METHODS", dict(_registry.METHODS))
    for kind, stages in STAGES.items():
        monkeypatch.setitem(STAGES, kind, dict(stages))
