"""Processes and engines that the tests of verl's engine share."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Results of several processes, run before this one has a group or a gradient."""
    from engine_ranks import forked, slices, work
    from engine_setup import own_model

    own_model()  # the weights all read
    tasks = {"halves": (work, 2), "slices": (slices, 2), "both": (slices, 4)}
    return {name: forked(*task, str(tmp_path_factory.mktemp(name))) for name, task in tasks.items()}


@pytest.fixture(scope="session")
def group(ranks):
    import torch
    from engine_setup import start

    start()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def engine(group):
    from engine_setup import make_engine

    return make_engine()
