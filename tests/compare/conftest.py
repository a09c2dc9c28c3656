import os
import subprocess
import sys
from pathlib import Path

import pytest
from comparisons import arguments


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished comparison of two methods on two seeds, made by the real command; its output."""
    out = tmp_path_factory.mktemp("comparison") / "straight"
    argv = arguments(out, "grpo", "isopo:overlap=4", seeds="2", jobs="2")
    done = subprocess.run(
        [sys.executable, "-m", "proxpo.cli", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout
