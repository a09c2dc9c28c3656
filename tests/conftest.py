"""Settings of every test: one thread, no leftover of a random state, Hypothesis without chance."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "proxpo", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("proxpo")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
