"""Ratios of responses that mix tokens with latent thoughts, which have Gaussian densities."""

import math

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import declare_field
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.gaussian import SMALLEST
from proxpo.stages.ratio.token import bounded_exp, check_limit
from proxpo.types import Batch, Context, PerToken, Recipe

LATENT = (  # fields of a policy that thinks in hidden states
    declare_field(
        "latent",
        "seq tok",
        kind="bool",
        source="sampler",
        doc="1 at positions of latent thoughts, which are hidden states and no tokens, from the "
        "sampler",
    ),
    declare_field(
        "thought",
        "seq tok latent",
        source="sampler",
        doc="the latent thought at each position, as it was fed back to the model, from the "
        "sampler",
    ),
)


def check_sigma(sigma: float, *, by: str) -> None:
    """Refuses a width without a density."""
    if not SMALLEST <= sigma < math.inf:
        raise ProxpoError(f"{by}: sigma must be at least {SMALLEST} and finite, got {sigma:g}")


def thought_logp(
    thought: Float[Tensor, "seq tok latent"], mean: Float[Tensor, "seq tok latent"], sigma: float
) -> Float[Tensor, "seq tok"]:
    """-‖z - μ‖²/(2σ²): the log-density of a thought but for its constant, over all dimensions."""
    return -(thought - mean).square().sum(-1) / (2 * sigma**2)


def thought_noise(recipe: Recipe) -> float:
    """Standard deviation of thoughts in a recipe's rollouts: noise·σ of ratio=latent, else 0."""
    options = recipe.ratio.options
    return options["noise"] * options["sigma"] if recipe.ratio.name == "latent" else 0.0


@stage("ratio", needs=("old_logp", "mean", "old_mean", "latent", "thought"), gives="ratio")
def latent(*, sigma: float = 10.0, noise: float = 0.0, limit: float = 10.0):
    """exp(log π - log π_old) of tokens, exp((‖z - μ_old‖² - ‖z - μ‖²)/(2σ²)) of latent thoughts.

    The exponents are held within ±limit. noise: thoughts are drawn as z = μ_old + noise·σ·ε; with
    0, as in VLPO's released code (2511.21395), z = μ_old, so that the ratio is at most 1 and has no
    gradient at μ = μ_old; with 1 z is a draw from the density.

    sigma: σ, the width of the Gaussian of a latent thought
    noise: noise on sampled thoughts, in units of σ
    limit: bound on the log-ratio, in either direction
    """
    check_sigma(sigma, by="ratio=latent")
    check_limit(limit, stage="latent")
    check_numbers("latent", "[0, inf)", noise=noise)

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        thought = batch.thought.detach()
        now, old = (thought_logp(thought, m, sigma) for m in (batch.mean, batch.old_mean.detach()))
        log_ratio = torch.where(batch.latent, now - old, batch.logp - batch.old_logp.detach())
        return bounded_exp(log_ratio, limit), {}

    return ratio


__all__ = ["LATENT", "latent", "thought_logp", "thought_noise"]
