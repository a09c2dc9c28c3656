"""The job of a config, by the domain of its task; a domain's code is imported when it is needed."""

from proxpo.train.config import Config
from proxpo.train.domains import domain_of
from proxpo.train.job import Job
from proxpo.train.refusals import remarks, unused


def build_job(config: Config) -> Job:
    """Builds the job: loads model and task, starts whatever samples."""
    domain = domain_of(config.task.name).name
    if domain == "architecture":
        from proxpo.control.architecture import build_architecture_job

        return build_architecture_job(config)
    if domain == "control":
        from proxpo.control.job import build_control_job

        return build_control_job(config)
    from proxpo.train.language import build_language_job

    return build_language_job(config)


def settings_remarks(config: Config) -> list[str]:
    """Lines on a run's settings that the config alone does not show, without building its job."""
    if domain_of(config.task.name).name != "language":
        return list(unused(config, config.make_method()).values())
    from proxpo.train.language import fitted
    from proxpo.train.tasks import make_task

    task = make_task(config.task.name, reward=config.task.reward, **config.task.options)
    return remarks(config, fitted(config.make_recipe(), config, task))


__all__ = ["build_job", "settings_remarks"]
