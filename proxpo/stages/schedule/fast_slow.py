"""Fast steps, a step back, a slow one: SFPO, arXiv:2510.04072."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.schedule._types import Updates
from proxpo.types import Context, Metrics, State

ROUNDING = 1e-12  # a std below this share of the values is of the arithmetic


@stage("schedule", needs=("old_logp", "entropy"), decides=("count", "parts"))
def fast_slow(
    *,
    steps: int = 3,
    alpha: float = 0.8,
    trigger: float | None = 2.0,
    window: int = 20,
    latch: bool = True,
    restore_optimizer: bool = False,
):
    """K fast steps on one batch, θ̃ = θ₀ + α(θ_K - θ₀), then one step from θ̃. arXiv:2510.04072.

    θ₀ stays the old policy of all K+1 steps. α becomes 0, the plain single update, when the mean
    token entropy leaves the last `window` ones by `trigger` standard deviations; for good with
    `latch`. trigger=None never asks. The optimizer's moments run through all steps;
    restore_optimizer=True puts those of θ₀ back before the last one.

    steps: K, the fast steps
    alpha: share of the fast steps that is kept
    trigger: standard deviations of the entropy that end the fast steps; none: never
    window: rollouts over which they are measured
    latch: end them for good
    restore_optimizer: put the optimizer's moments back before the last step
    """
    if steps < 0 or not 0 <= alpha <= 1:
        raise ProxpoError(
            f"fast_slow: expected steps >= 0 and alpha in [0, 1], got {steps}, {alpha}"
        )
    if window < 2 or (trigger is not None and not trigger > 0):
        raise ProxpoError(
            f"fast_slow: expected window >= 2 and trigger > 0, got {window}, {trigger}"
        )

    def init() -> State:
        return {"entropies": torch.zeros(0, dtype=torch.float64), "off": torch.tensor(False)}

    def schedule(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        batch = updates.batch()
        per_token = batch.require("entropy", by="schedule=fast_slow")
        entropy = masked_mean(per_token, batch.mask, all_sum=ctx.all_sum).double().cpu()
        past = ctx.state["entropies"]
        z = z_score(entropy, past[-window:] if len(past) >= window else past[:0])
        fired = trigger is not None and bool(z.abs() >= trigger)
        off = fired or (latch and bool(ctx.state["off"]))
        share = 0.0 if off else alpha
        if share and steps:
            start = updates.weights()
            moments = updates.optimizer_state() if restore_optimizer else None
            updates.step(steps, parts=1)
            updates.load(between(start, updates.weights(), share))
            if moments is not None:
                updates.load_optimizer_state(moments)
        updates.step(1, parts=1, only=not (share and steps))
        kept = torch.cat([past, entropy[None]])[-window:]
        state = {"entropies": kept, "off": torch.tensor(off)}
        return state, {
            "schedule/alpha": torch.tensor(share, dtype=torch.float64),
            "schedule/entropy_z": z,
        }

    return Parts(apply=schedule, init=init, idle=("latch",) if trigger is None else ())


def z_score(x: Float[Tensor, ""], past: Float[Tensor, " past"]) -> Float[Tensor, ""]:
    """(x - mean)/std over earlier values, population std; 0 without any, or if all are equal.

    Values that rounding alone tells apart are equal.
    """
    if not len(past):
        return torch.zeros_like(x)
    spread = past.std(correction=0)
    varied = spread > ROUNDING * past.abs().max()
    return torch.where(varied, (x - past.mean()) / torch.where(varied, spread, 1.0), 0.0)


@torch.no_grad()
def between(start: list[Tensor], end: list[Tensor], share: float) -> list[Tensor]:
    """θ₀ + α(θ - θ₀), weight by weight; α = 1 is θ itself."""
    return [a + share * (b - a) if share < 1 else b for a, b in zip(start, end)]


__all__ = ["between", "fast_slow", "z_score"]
