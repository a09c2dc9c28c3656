"""Runs tests in the environments of `make test-versions`, one by one.

    python scripts/other_versions.py [--folder .venv-versions] [--only 1.15.0] [PYTEST ARGUMENTS]

Those of the TRL adapter with the versions that proxpo.adapters.versions.TESTED names and else the
pins of requirements/constraints.txt; those of the command line with the lowest versions that
pyproject.toml allows (`--only lowest`). An environment is built once. Exit status 1 if the tests
fail in one of them.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from install import UV, uv_variables

from proxpo.adapters.versions import TESTED, Environment

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/adapters/trl", "--deselect=tests/adapters/trl/test_trl_vllm.py"]
OWN = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# What the tests import beside the packages of the environment.
ALSO = ["accelerate", "datasets", "peft", "deepspeed", "safetensors", "pyyaml", "typer", "rich"]
RUNNERS = ["pytest", "hypothesis", "jaxtyping", "beartype", "psutil"]
LOWEST = "lowest"


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
        failed |= fail(python, [*TESTS, *arguments], environment.variables)
    if options.only in ("", LOWEST):
        python = built_lowest(options.folder / LOWEST)
        print(f"== {LOWEST} versions", flush=True)
        failed |= fail(python, ["tests/cli", *arguments], {})
    return int(failed)


def fail(python: Path, tests: list[str], variables: Mapping[str, str]) -> bool:
    """True if one of the tests fails under this interpreter."""
    own = {**os.environ, **variables, **OWN}
    return bool(
        subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, env=own).returncode
    )


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
        subprocess.run([*install, *environment.packages, *ALSO, *RUNNERS], check=True)
    (place / ".ready").touch()
    return python


def built_lowest(place: Path) -> Path:
    """An interpreter with the lowest versions of what the command line and the trainer need."""
    python = place / "bin" / "python"
    if (place / ".ready").exists():
        return python
    subprocess.run([UV, "venv", "--clear", place], check=True)
    install = [str(UV), "pip", "install", "-q", "--python", str(python)]
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    lowest = [*install, "--resolution", "lowest-direct", torch, "-e", f"{ROOT}[train]"]
    variables = {**uv_variables(), **os.environ}
    subprocess.run(lowest, check=True, env=variables)
    subprocess.run([*install, *RUNNERS], check=True, env=variables)
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
