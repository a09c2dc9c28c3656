"""Domains: what can be trained (language models, ...), told apart by the name of the task.

A domain has tasks, methods, defaults for a run's settings, and settings that it does not read. Its
job is built in build.py. A package with a domain of its own (`proxpo/control`) keeps its `Domain`
in a module that imports little, and is listed in `DOMAINS`.
"""

from collections.abc import Mapping
from typing import Any

from proxpo.control.domain import ARCHITECTURE, CONTROL
from proxpo.errors import ProxpoError, fold
from proxpo.generative.domain import ENERGIES, GENERATIVE
from proxpo.recipes import Method, Procedure
from proxpo.train._domain import Domain
from proxpo.train._schema import Config
from proxpo.types import Recipe


def _check_language(config: Config) -> None:
    rollout, parts = config.rollout, config.train.mini_batches
    if rollout.prompts_per_step % parts:
        raise ProxpoError(
            f"rollout.prompts_per_step={rollout.prompts_per_step} cannot be cut into "
            f"train.mini_batches={parts} equal parts"
        )


LANGUAGE = Domain(
    name="language",
    method=Config().method,
    suggested=("isopo", "grpo", "ppo"),
    example="arithmetic",
    unread=lambda made: {"model.options": "a language model takes none"},
    check=_check_language,
)
DOMAINS = (LANGUAGE, CONTROL, ARCHITECTURE, GENERATIVE, ENERGIES)
TEST_TIME = "test time"  # methods of proxpo/adapt, which train nothing that outlives a problem


def domain_of(task: str) -> Domain:
    """The domain of the task called `task`: that of its prefix, else language models."""
    head = fold(task.partition(":")[0])
    return next((domain for domain in DOMAINS if head in map(fold, domain.prefixes)), LANGUAGE)


def check_domain(entry: Method, task: str) -> None:
    """Refuses a method that does not train what the task is about."""
    domain = domain_of(task)
    foreign = domain.recipes and not isinstance(entry.make(), Procedure)
    if domain.name in entry.domains or (foreign and LANGUAGE.name in entry.domains):
        return
    own = [each for each in DOMAINS if each.name in entry.domains]
    raise ProxpoError(
        f"{entry.slug} is a method for {' and '.join(entry.domains)}"
        + "".join(f" (task {each.example})" for each in own)
        + (f" (proxpo adapt {entry.slug})" if TEST_TIME in entry.domains else "")
        + f", and task {task} is one for {domain.name}, with methods such as "
        + ", ".join(domain.suggested)
    )


def default_settings(entry: Method, task: str) -> dict[str, Any]:
    """Settings of a run, by path, that are not those of `Config`: the domain's, the method's."""
    domain = domain_of(task)
    options = {k: v for k, v in domain.options.items() if k in entry.defaults}
    own = entry.settings if domain.name in entry.domains else {}
    return {**domain.defaults, **({"recipe": options} if options else {}), **own}


def unread(config: Config, made: Recipe | Procedure) -> Mapping[str, str]:
    """Settings, by path, that the config's domain does not read for this method, and why."""
    return domain_of(config.task.name).unread(made)


__all__ = [
    "DOMAINS",
    "Domain",
    "check_domain",
    "default_settings",
    "domain_of",
    "unread",
]
