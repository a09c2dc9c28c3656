import pytest
from trl_runs import plain_layers


@pytest.fixture(autouse=True, scope="module")
def _plain_layers():
    with plain_layers():
        yield
