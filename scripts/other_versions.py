"""Runs tests in the environments of `make test-versions`, one by one.

    python scripts/other_versions.py [--folder .venv-versions] [--only lowest] [PYTEST ARGUMENTS]

- those of proxpo.adapters.versions.TESTED that `make test` does not have: the TRL adapter, with
  these versions and else the pins of requirements/constraints.txt
- lowest: the command line, with the lowest versions that pyproject.toml allows
- newest: the TRL adapter, models, log-probabilities and the command line, with the newest versions
  that the package index has today, also where pyproject.toml does not allow them. Only torch is
  the pinned one: a newer one may be another build.

`--only` takes lowest, newest or a version in TESTED. The versions are printed before the tests. An
environment is kept until what it is made from changes; the newest one is looked up in every run.
Exit status 1 if the tests fail in one of them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from install import UV, uv_variables

from proxpo.adapters.versions import TESTED, Environment
from proxpo.doctor._hosts import required_versions, satisfies

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
TRL = ["tests/adapters/trl", "--deselect=tests/adapters/trl/test_trl_vllm.py"]
MODELS = ["tests/gradients/test_conformance.py", "tests/gradients/test_models.py", "tests/logp"]
OWN = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# What the tests import beside the packages of the environment.
ALSO = ["accelerate", "datasets", "peft", "deepspeed", "safetensors", "pyyaml", "typer", "rich"]
RUNNERS = ["pytest", "hypothesis", "jaxtyping", "beartype", "psutil"]
LOWEST, NEWEST = "lowest", "newest"
LIST = """
import importlib.metadata, json
print(json.dumps([(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()]))
"""


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
        failed |= fail(str(environment), python, [*TRL, *arguments], environment.variables)
    if options.only in ("", LOWEST):
        python = built_lowest(options.folder / LOWEST)
        failed |= fail(LOWEST, python, ["tests/cli", *arguments])
    if options.only in ("", NEWEST):
        python = built_newest(options.folder / NEWEST)
        failed |= fail(NEWEST, python, [*TRL, *MODELS, "tests/cli", *arguments])
    return int(failed)


def fail(name: str, python: Path, tests: list[str], variables: Mapping[str, str] = {}) -> bool:
    """Prints the versions and runs the tests; True if one of them fails under this interpreter."""
    print(f"== {name}: {', '.join(versions(python))}", flush=True)
    own = {**os.environ, **variables, **OWN}
    return bool(
        subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, env=own).returncode
    )


def versions(python: Path) -> list[str]:
    """Installed versions of torch and packages that proxpo names, and bounds they are out of."""
    listed = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True)
    installed = {name.lower(): version for name, version in json.loads(listed.stdout)}
    lines = []
    for name in ["torch", *sorted({*named("train"), *named("trl"), *ALSO})]:
        version, bounds = installed.get(name, ""), required_versions(name)
        beyond = "" if satisfies(version, bounds) else f" (pyproject.toml requires {bounds})"
        lines += [f"{name} {version}{beyond}"] if version else []
    return lines


def named(extra: str) -> list[str]:
    """Names of the packages of an extra, without the bounds of their versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [match[0] for line in lines if (match := re.match(r"[\w.-]+", line))]


def built(environment: Environment, folder: Path) -> Path:
    """The interpreter of an environment of TESTED."""
    pins = [f"{package}=={version}" for package, version in environment.packages.items()]
    constraints = [*other_pins(environment), *pins]

    def install(place: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraints))
            file.flush()
            pip = [place / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
            # torch first: another package's plain dependency on it would fetch a CUDA build.
            subprocess.run([*pip, "-c", file.name, "torch", "numpy"], check=True)
            packages = [*environment.packages, *ALSO, *RUNNERS]
            subprocess.run([*pip, "-c", file.name, *packages], check=True)

    place = folder / str(environment).replace(", ", "-").replace(" ", "-")
    return kept(place, "\n".join(constraints), install)


def built_lowest(place: Path) -> Path:
    """An interpreter with the lowest versions of what the command line and the trainer need."""

    def install(place: Path) -> None:
        with_uv("venv", "--clear", str(place))
        add = ["pip", "install", "-q", "--python", str(place)]
        with_uv(*add, "--resolution", "lowest-direct", torch_pin(), "-e", f"{ROOT}[train]")
        with_uv(*add, *RUNNERS)

    return kept(place, (ROOT / "pyproject.toml").read_text() + torch_pin(), install)


def built_newest(place: Path) -> Path:
    """An interpreter with the newest versions of today, whatever pyproject.toml allows."""
    python = kept(place, torch_pin(), lambda place: with_uv("venv", "--clear", str(place)))
    packages = {*named(""), *named("train"), *named("trl"), *ALSO, *RUNNERS} - {"torch"}
    add = ["pip", "install", "-q", "--upgrade", "--refresh", "--python", str(place)]
    with_uv(*add, torch_pin(), *sorted(packages))
    with_uv(*add, "--no-deps", "-e", str(ROOT))
    return python


def kept(place: Path, source: str, install: Callable[[Path], None]) -> Path:
    """The interpreter of an environment, which is installed if it is not there as made of this."""
    ready = place / ".ready"
    if not ready.exists() or ready.read_text() != source:
        install(place)
        ready.write_text(source)
    return place / "bin" / "python"


def with_uv(*arguments: str) -> None:
    subprocess.run([UV, *arguments], check=True, env={**uv_variables(), **os.environ})


def torch_pin() -> str:
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))


def other_pins(environment: Environment) -> list[str]:
    """Pins of the constraints but for these packages and what their versions pull along."""
    free = {*environment.packages, "tokenizers", "huggingface_hub"}
    pinned = (re.match(r"([\w.-]+)==", line) for line in CONSTRAINTS.read_text().splitlines())
    return [pin.string for pin in pinned if pin and pin[1].lower() not in free]


if __name__ == "__main__":
    sys.exit(main())
