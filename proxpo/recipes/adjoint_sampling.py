from typing import Literal

from proxpo.recipes._registry import Procedure, register


@register(
    "adjoint-sampling",
    paper="arXiv:2504.11713",
    domains=("energies",),
    settings={"recipe.control_lr": 1e-3, "rollout.max_tokens": 100},
)
def adjoint_sampling(
    *,
    noise: Literal["geometric", "constant"] = "geometric",
    sigma_min: float = 1e-3,
    sigma_max: float = 1.0,
    samples_per_step: int = 512,
    buffer: int = 1000,
    batches: int = 100,
    batch: int = 512,
    control_lr: float = 1e-4,
    max_norm: float = 50.0,
    temperature: float = 1.0,
    hidden: int = 64,
) -> Procedure:
    """Adjoint Sampling: an SDE from a point to exp(-E), many updates for each energy evaluated.

        dX = g(t) u(X, t) dt + g(t) dW,  X_0 = 0,   ν_t = ∫_0^t g²
        loss = mean ‖u(X_t, t)/g(t) - s*‖²,   s* = -∇E(X_1) + X_1/ν_1, its norm at most `max_norm`
        X_t ~ N((ν_t/ν_1) X_1, ν_t (1 - ν_t/ν_1)): the bridge of the base process

    Each step: end points X_1 of the present control (of u = 0 the first time), ∇E once for each,
    then `batches` updates on draws from a buffer of the last `buffer` steps. No gradient passes
    through the simulation or the energy. E is divided by `temperature`.

    noise="geometric": g = σ_min R^{1-t} √(2 ln R), R = σ_max/σ_min; "constant": g = σ_max.
    `rollout.max_tokens` is the number of Euler steps (released: 500; runs here: 100).

    noise: course of g(t): "geometric" or "constant"
    sigma_min, sigma_max: range of the noise
    samples_per_step: end points, and energies, of a step
    buffer: steps whose end points are kept
    batches: updates of the control in a step
    batch: end points of an update
    control_lr: learning rate of the control
    max_norm: largest norm of a target
    temperature: divisor of the energy
    hidden: width of the network

    Departures: runs here have a learning rate of 1e-3 (released: 1e-4), for a network of 64 units.
    The network gives u/g. A step of the simulation has the exact noise of the base process. The
    regulariser's own gradient, bridge-matching, centred positions and the torus are left out.

    Reference: Havens et al., arXiv:2504.11713; facebookresearch/adjoint_sampling.
    """
    return Procedure(
        ranges={
            "[1, inf)": ("samples_per_step", "buffer", "batches", "batch", "hidden"),
            "(0, inf)": ("sigma_min", "sigma_max", "max_norm", "temperature"),
            "[0, inf)": ("control_lr",),
        },
        idle=("sigma_min",) if noise == "constant" else (),
    )
