"""A small model and a padded batch for the tests of gradient transforms."""

import pytest
import torch
from blocks import LENGTHS
from jaxtyping import config as jaxtyping_config
from models import Tiny, padded
from torch import Tensor


@pytest.fixture
def tiny() -> Tiny:
    torch.manual_seed(0)
    model = Tiny().double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return model


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return padded(LENGTHS, 13)


@pytest.fixture
def unchecked() -> None:
    """Annotations are not checked, as outside the tests: ours is the only refusal."""
    jaxtyping_config.update("jaxtyping_disable", True)
