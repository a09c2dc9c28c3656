from pathlib import Path

import pytest
from comparisons import arguments, run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished comparison of two methods on two seeds, and what it said."""
    out = tmp_path_factory.mktemp("comparison") / "straight"
    code, said, errors = run(arguments(out, "grpo", "isopo:overlap=4", seeds="2", jobs="2"))
    assert code == 0, errors
    return out, said
