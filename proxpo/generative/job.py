"""The job of a task on generative models or energies, by its method."""

import torch

from proxpo.errors import ProxpoError
from proxpo.generative.adjoint_job import build_adjoint_job
from proxpo.generative.denoising_job import build_denoising_job
from proxpo.generative.flow_job import build_flow_job
from proxpo.train.config import Config
from proxpo.train.job import Job
from proxpo.types import Recipe

PROCEDURES = {"ac-flow": build_flow_job, "adjoint-sampling": build_adjoint_job}


def build_generative_job(config: Config) -> Job:
    """Builds the job: networks, task, optimizers."""
    if config.model.dtype == "bfloat16":
        raise ProxpoError("model.dtype=bfloat16: generative models are float32 or float64")
    if config.model.device not in ("auto", "cpu"):
        raise ProxpoError(f"model.device={config.model.device}: generative models run on the CPU")
    dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
    made = config.make_method()
    if isinstance(made, Recipe):
        return build_denoising_job(config, made, dtype)
    return PROCEDURES[made.name](config, made.options, dtype)


__all__ = ["build_generative_job"]
