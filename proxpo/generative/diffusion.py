"""Denoising as a chain of Gaussian actions: DDIM with η = 1 on the schedule of diffusers.

x̂0 = (x_t - √(1-ᾱ_t) e)/√ᾱ_t;   σ² = (1-ᾱ_p)/(1-ᾱ_t) · (1 - ᾱ_t/ᾱ_p)
x_{t-1} ~ N(√ᾱ_p x̂0 + √(1-ᾱ_p-σ²) e, σ²),   e the predicted noise, p the step after t
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from proxpo.errors import ProxpoError, imported
from proxpo.ops.shapes import Float, Int, Tensor

TRAINED = 1000  # steps of the schedule that the denoiser was trained with


def make_scheduler() -> Any:
    """DDIM's schedule as Stable Diffusion has it: no step without noise, the last one included."""
    ddim = imported(
        "diffusers.schedulers.scheduling_ddim",
        "denoising needs diffusers: pip install 'proxpo[generative]'",
    )
    return ddim.DDIMScheduler(
        num_train_timesteps=TRAINED,
        beta_schedule="linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


class Chain(NamedTuple):
    """Steps of a sampler, from noise to sample: ᾱ of each and of the next, and the timestep."""

    alpha: Float[Tensor, " tok"]
    alpha_next: Float[Tensor, " tok"]
    timestep: Int[Tensor, " tok"]

    @property
    def variance(self) -> Float[Tensor, " tok"]:
        return (1 - self.alpha_next) / (1 - self.alpha) * (1 - self.alpha / self.alpha_next)

    @property
    def time(self) -> Float[Tensor, " tok"]:
        """The timestep as a share of the whole schedule, in (0, 1)."""
        return self.timestep.double() / TRAINED


def make_chain(steps: int) -> Chain:
    """The chain of so many steps, in float64."""
    if not 1 <= steps <= TRAINED // 2:
        raise ProxpoError(
            f"rollout.max_tokens={steps}: a chain has 1 to {TRAINED // 2} denoising steps"
        )
    scheduler = make_scheduler()
    scheduler.set_timesteps(steps)
    alphas, timestep = scheduler.alphas_cumprod.double(), scheduler.timesteps
    following = timestep - TRAINED // steps
    after = torch.where(
        following >= 0, alphas[following.clamp(min=0)], scheduler.final_alpha_cumprod.double()
    )
    return Chain(alphas[timestep], after, timestep)


class Step(NamedTuple):
    """A Gaussian action: its mean, its width, and the noise that was predicted."""

    mean: Float[Tensor, "*row size"]
    std: Float[Tensor, "*row"]
    predicted_noise: Float[Tensor, "*row size"]


class DenoisingPolicy(nn.Module):
    """A denoiser as a policy: the state is (x_t, number of the step), the action x_{t-1}."""

    scale: Tensor
    shift: Tensor
    std: Tensor
    time: Tensor

    def __init__(self, denoiser: nn.Module, chain: Chain, size: int) -> None:
        super().__init__()
        self.denoiser, self.chain, self.size = denoiser, chain, size
        # mean = scale·x + shift·e: the two lines of the module's formula, with x̂0 put in
        scale = (chain.alpha_next / chain.alpha).sqrt()
        direction = (1 - chain.alpha_next - chain.variance).sqrt()
        tables = {
            "scale": scale,
            "shift": direction - scale * (1 - chain.alpha).sqrt(),
            "std": chain.variance.sqrt(),
            "time": chain.time,
        }
        dtype = next(denoiser.parameters()).dtype
        for name, table in tables.items():
            self.register_buffer(name, table.to(dtype), persistent=False)

    def forward(self, state: Float[Tensor, "*row obs"]) -> Step:
        x, index = state[..., :-1], state[..., -1].long()
        e = self.denoiser(x, self.time[index])
        mean = self.scale[index][..., None] * x + self.shift[index][..., None] * e
        return Step(mean, self.std[index], e)

    def __len__(self) -> int:
        return len(self.chain.timestep)


def log_density(
    x: Float[Tensor, "*row size"], mean: Float[Tensor, "*row size"], std: Float[Tensor, "*row"]
) -> Float[Tensor, "*row"]:
    """log N(x; mean, std²), averaged over the dimensions."""
    return (
        torch.distributions.Normal(mean, std[..., None], validate_args=False).log_prob(x).mean(-1)
    )


class Trajectories(NamedTuple):
    """Chains from noise to sample."""

    states: Float[Tensor, "row tok obs"]
    actions: Float[Tensor, "row tok size"]
    means: Float[Tensor, "row tok size"]

    @property
    def samples(self) -> Float[Tensor, "row size"]:
        return self.actions[:, -1]


@torch.no_grad()
def sample(
    policy: DenoisingPolicy,
    rows: int,
    draws: torch.Generator,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectories:
    """Draws trajectories from the policy."""
    dtype = policy.std.dtype
    noise = torch.randn(len(policy) + 1, rows, policy.size, generator=draws, dtype=dtype)
    x, states, actions, means = noise[0], [], [], []
    for index in range(len(policy)):
        progress(index, len(policy))
        states.append(torch.cat([x, x.new_full((rows, 1), index)], dim=1))
        step = policy(states[-1])
        x = step.mean + step.std[:, None] * noise[index + 1]
        means.append(step.mean)
        actions.append(x)
    return Trajectories(*(torch.stack(parts, dim=1) for parts in (states, actions, means)))


@torch.no_grad()
def path_kl(
    policy: DenoisingPolicy, other: DenoisingPolicy, drawn: Trajectories
) -> Float[Tensor, " row"]:
    """Σ_t ‖μ - μ'‖²/(2σ²): the KL of the chains along samples of `policy`, in nats."""
    own, theirs = policy(drawn.states), other(drawn.states)
    gap = (own.mean - theirs.mean).square().sum(-1) / (2 * own.std.square())
    return gap.sum(dim=1)


__all__ = [
    "Chain",
    "DenoisingPolicy",
    "Trajectories",
    "log_density",
    "make_chain",
    "make_scheduler",
    "path_kl",
    "sample",
]
