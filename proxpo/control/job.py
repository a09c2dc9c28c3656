"""The job of a task gym:NAME, by its method."""

from proxpo.control.avg import build_avg_job
from proxpo.control.props import build_props_job
from proxpo.control.recipe_job import build_recipe_job
from proxpo.control.stateful import build_stateful_job
from proxpo.errors import ProxpoError
from proxpo.train.config import Config
from proxpo.train.job import Job
from proxpo.types import Recipe

PROCEDURES = {
    "avg": build_avg_job,
    "props": build_props_job,
    "stateful-policies": build_stateful_job,
}


def build_control_job(config: Config) -> Job:
    """Builds the job: environments, networks, optimizers."""
    if config.model.dtype == "bfloat16":
        raise ProxpoError("model.dtype=bfloat16: networks of control are float32 or float64")
    if config.model.device not in ("auto", "cpu"):
        raise ProxpoError(f"model.device={config.model.device}: control runs on the CPU")
    made = config.make_method()
    if isinstance(made, Recipe):
        return build_recipe_job(config, made)
    return PROCEDURES[made.name](config, made.options)


__all__ = ["build_control_job"]
