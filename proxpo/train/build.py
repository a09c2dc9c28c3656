"""The job of a config, by the domain of its task; a domain's code is imported when it is needed."""

from collections.abc import Mapping
from typing import Any

from proxpo.train.config import Config
from proxpo.train.domains import domain_of
from proxpo.train.job import Job
from proxpo.train.refusals import check_advantages, remarks, unused
from proxpo.train.tasks import make_task
from proxpo.types import Recipe


def build_job(config: Config) -> Job:
    """Builds the job: loads model and task, starts whatever samples."""
    made = config.make_method()
    if isinstance(made, Recipe):
        check_advantages(made)
    domain = domain_of(config.task.name).name
    if domain == "architecture":
        from proxpo.control.architecture import build_architecture_job

        return build_architecture_job(config)
    if domain == "control":
        from proxpo.control.job import build_control_job

        return build_control_job(config)
    if domain in ("generative models", "energies"):
        from proxpo.generative.job import build_generative_job

        return build_generative_job(config)
    from proxpo.train.language import build_language_job

    return build_language_job(config)


def settings_remarks(config: Config) -> list[str]:
    """Lines on a run's settings that the config alone does not show, without building its job."""
    if domain_of(config.task.name).name != "language":
        return list(unused(config, config.make_method()).values())
    from proxpo.train.language import fitted

    task = make_task(config.task.name, reward=config.task.reward, **config.task.options)
    system = [f"task {task.name}: system prompt: {task.system}"] if task.system else []
    return [*system, *remarks(config, fitted(config.make_recipe(), config, task))]


def check_task(task: Mapping[str, Any]) -> None:
    """Refuses a task, given by its settings, that cannot be made."""
    domain, name = domain_of(task["name"]).name, task["name"].partition(":")[2]
    if domain == "architecture":
        from proxpo.control.architecture import make_space

        make_space(name, task["options"])
    elif domain == "control":
        from proxpo.control.environments import Environments, read_options

        Environments(name, 1, read_options(name, task["options"])).close()
    elif domain == "generative models":
        from proxpo.generative.tasks import make_sample_task

        make_sample_task(task["name"])
    elif domain == "energies":
        from proxpo.generative.energies import make_energy

        make_energy(name, task["options"])
    else:
        chosen = {key: task[key] for key in ("reward", "correct_above")}
        make_task(task["name"], **chosen, **task["options"])


__all__ = ["build_job", "check_task", "settings_remarks"]
