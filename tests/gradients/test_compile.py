"""Compiled models, in a process without the run-time type checks of the other tests."""

import subprocess
import sys
from pathlib import Path


def test_compiled_models():
    script = Path(__file__).with_name("compiled_models.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
