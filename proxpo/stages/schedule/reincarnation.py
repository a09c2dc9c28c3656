"""Earlier rollouts mixed in, then a new base and fresh data alone: ReMix, arXiv:2507.06892."""

import torch

from proxpo.errors import ProxpoError
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.schedule._types import Updates
from proxpo.types import Context, Metrics, State


@stage("schedule", decides=("count",))
def reincarnation(*, share: float = 0.4, window: int = 2, passes: int = 2, at: int | None = 50):
    """Mixes earlier rollouts in until step `at`; then a new reference and on-policy training.

    Before optimizer step `at` each prompt comes, with chance `share`, from one of the last `window`
    rollouts. Then the reference policy becomes the present one.

    Every batch is used `passes` times (the update-to-data ratio). The log-probabilities under the
    policy before the last rollout's updates are added as `prev_logp`. at=None never resets.
    arXiv:2507.06892.

    share: chance that a prompt comes from an earlier rollout
    window: earlier rollouts that are kept
    passes: uses of every batch
    at: optimizer step of the new base; none: never
    """
    check_numbers("reincarnation", "[0, inf)", at=at)
    if not 0 <= share < 1 or window < 1 or passes < 1:
        raise ProxpoError(
            f"reincarnation: expected share in [0, 1), window and passes of at least 1, got "
            f"{share}, {window}, {passes}"
        )

    def schedule(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        present = updates.weights()
        base = _read(ctx.state, "base")
        previous = _read(ctx.state, "previous") or present
        if base is None and at is not None and ctx.clock.updates >= at:
            base = present
        if base is None:
            updates.keep(rollouts=window if share else 0)
            updates.mix(share=share, rollouts=window)
        else:
            updates.add(ref_logp=updates.logp(base))
        updates.add(prev_logp=updates.logp(previous))
        updates.step(passes * updates.parts)
        state = {"reborn": torch.tensor(base is not None), **_written("previous", present)}
        if base is not None:
            state |= _written("base", base)
        return state, {"schedule/reborn": torch.tensor(float(base is not None))}

    return Parts(apply=schedule, init=lambda: {"reborn": torch.tensor(False)})


def _written(name: str, weights: list[torch.Tensor]) -> State:
    return {f"{name}.{i}": weight for i, weight in enumerate(weights)}


def _read(state: State, name: str) -> list[torch.Tensor] | None:
    """The weights kept under this name, in their order."""
    count = sum(key.startswith(f"{name}.") for key in state)
    return [state[f"{name}.{i}"] for i in range(count)] or None


__all__ = ["reincarnation"]
