"""Updates on a buffer of single steps, after a fit of the critic: DPOK, arXiv:2305.16381."""

import torch

from proxpo.errors import ProxpoError
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.schedule._types import Updates
from proxpo.types import Context, Metrics, State


@stage("schedule", needs=("old_logp", "old_values"), decides=("count", "parts"))
def transition_buffer(
    *,
    buffer: int = 1000,
    updates: int = 5,
    batch: int = 24,
    value_draws: int = 5,
    value_batch: int = 256,
    value_lr: float = 1e-4,
):
    """Keeps the newest transitions; fits the critic to their rewards, then updates the policy.

    Each rollout: one AdamW step of the critic on (V - r)², its gradient averaged over `value_draws`
    draws of `value_batch` transitions, r the reward of the whole sample; then `updates` of the
    policy, each on `batch` transitions drawn from the buffer. value_draws=0 leaves V at 0. The
    buffer holds whole samples: as many as have at most `buffer` transitions, and the newest always.

    buffer: transitions that are kept
    updates: policy updates on each rollout
    batch: transitions of an update
    value_draws, value_batch: draws whose gradients the critic's step averages, and their size
    value_lr: learning rate of the critic
    """
    check_numbers("transition_buffer", "[0, inf)", value_lr=value_lr)
    if min(buffer, updates, batch, value_batch) < 1 or value_draws < 0:
        raise ProxpoError(
            "transition_buffer: expected buffer, updates, batch and value_batch of at least 1 and "
            f"value_draws of at least 0, got {buffer}, {updates}, {batch}, {value_batch}, "
            f"{value_draws}"
        )

    def schedule(rollout: Updates, ctx: Context) -> tuple[State, Metrics]:
        rollout.gather(tokens=buffer)
        metrics = {}
        if value_draws:
            error = rollout.fit_critic(draws=value_draws, batch=value_batch, lr=value_lr)
            metrics["value/error"] = torch.tensor(error)
        transitions = len(rollout.batch().mask)
        for _ in range(updates):
            order = torch.randperm(transitions, generator=ctx.generator)
            rollout.step(rows=order[:batch])
        return {}, metrics

    return schedule


__all__ = ["transition_buffer"]
