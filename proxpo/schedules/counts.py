"""How many updates a rollout gets. A schedule's function answers for one rollout."""

import torch

from proxpo.stages import stage


@stage("schedule")
def single_update():
    """One update on the whole rollout batch, so that the data are on-policy (OPO, ReMax)."""

    def updates(on_policy: int, generator: torch.Generator | None = None) -> tuple[int, int]:
        return 1, 0

    return updates


@stage("schedule")
def poisson_replay(
    *, ratio: float = 2.0, capacity: int = 50_000, start: int = 15_000, batch: float = 6.0
):
    """After each on-policy update m ~ Poisson(ratio) updates on replayed data. P3O 2019.

    `capacity` and `start` count samples in the buffer; an off-policy batch is `batch` times as
    large as the number of parallel environments (prompts here).
    """

    def updates(on_policy: int, generator: torch.Generator | None = None) -> tuple[int, int]:
        return on_policy, int(torch.poisson(torch.tensor(float(ratio)), generator=generator))

    return updates
