"""Runs the tests of the TRL adapter in the environments of `make test-versions`, one by one.

    python scripts/other_versions.py [--folder .venv-versions] [--only 1.15.0] [PYTEST ARGUMENTS]

An environment is built once, with the pins of requirements/constraints.txt but for the packages
that proxpo.adapters.versions.TESTED names. Exit status 1 if the tests fail in one of them.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from proxpo.adapters.versions import TESTED, Environment

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/adapters/trl", "--deselect=tests/adapters/trl/test_trl_vllm.py"]
OWN = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# What the tests import beside the packages of the environment.
ALSO = ["accelerate", "datasets", "peft", "deepspeed", "safetensors", "pyyaml", "typer", "rich"]
ALSO += ["pytest", "hypothesis", "jaxtyping", "beartype", "psutil"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--only", default="", help="environments with this version alone")
    options, arguments = parser.parse_known_args()
    failed = False
    for environment in TESTED:
        if environment.command != "make test-versions":
            continue
        if options.only and options.only not in environment.packages.values():
            continue
        python = built(environment, options.folder)
        print(f"== {environment}", flush=True)
        done = subprocess.run(
            [python, "-m", "pytest", "-q", *TESTS, *arguments],
            cwd=ROOT,
            env={**os.environ, **environment.variables, **OWN},
        )
        failed |= done.returncode != 0
    return int(failed)


def built(environment: Environment, folder: Path) -> Path:
    """The interpreter of the environment, which is built if it is not there."""
    place = folder / str(environment).replace(", ", "-").replace(" ", "-")
    python = place / "bin" / "python"
    if (place / ".ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pins = [f"{package}=={version}" for package, version in environment.packages.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*other_pins(environment), *pins]))
        constraints.flush()
        install = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", constraints.name]
        # torch first: another package's plain dependency on it would fetch a CUDA build.
        subprocess.run([*install, "torch", "numpy"], check=True)
        subprocess.run([*install, *environment.packages, *ALSO], check=True)
    (place / ".ready").touch()
    return python


def other_pins(environment: Environment) -> list[str]:
    """Pins of the constraints but for these packages and what their versions pull along."""
    free = {*environment.packages, "tokenizers", "huggingface_hub"}
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pinned = (re.match(r"([\w.-]+)==", line) for line in lines)
    return [pin.string for pin in pinned if pin and pin[1].lower() not in free]


if __name__ == "__main__":
    sys.exit(main())
