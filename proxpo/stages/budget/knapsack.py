"""Numbers of responses to each prompt, from the rate at which it was solved before."""

from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.prompt_memory import blank, recall, remember
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.budget.allocation import allocate
from proxpo.stages.budget.responses import PromptResponses, responses_by_prompt
from proxpo.types import Batch, Budget, Context, Metrics, State

MOST_OUTCOMES = 48  # outcomes that fit into one float64, a bit each


def record_outcomes(state: State, batch: Batch, *, window: int) -> State:
    """p of this visit, or of the last `window` outcomes if it had fewer; those as bits."""
    responses = responses_by_prompt(batch, by="budget=knapsack")
    right, size = responses.right & responses.there, responses.size
    recorded = recall(state, "recorded", responses.prompt_id) + size
    before = recall(state, "recent", responses.prompt_id).long()
    recent = (before << size.clamp(max=window)) % 2**window + _bits(responses, window)
    ones = ((recent[:, None] >> torch.arange(window, device=recent.device)) & 1).sum(dim=1)
    now = right.sum(dim=1).double() / size.clamp(min=1)
    pooled = ones / recorded.clamp(min=1, max=window)
    rate = torch.where(size >= window, now, pooled)
    columns: dict[str, Float[Tensor, " row"]] = {
        "rate": rate,
        "recorded": recorded,
        "recent": recent.double(),
    }
    return remember(state, responses.prompt_id, columns)


def _bits(responses: PromptResponses, window: int) -> Int[Tensor, " prompt"]:
    """The last `window` outcomes of the visit, the latest as the lowest bit."""
    place = torch.arange(responses.there.shape[1], device=responses.there.device)
    age = responses.size[:, None] - 1 - place
    counted = responses.right & responses.there & (age < window)
    return torch.where(counted, 2 ** age.clamp(0, window), 0).sum(dim=1)


@stage("budget", needs=("prompt_id",))
def knapsack(
    *,
    low: int = 2,
    high: int = 128,
    positive: int = 2,
    negative: int = 2,
    min_history: int = 8,
    window: int = 16,
    confidence: float = 0.9,
    cost: Literal["quantile", "expectation"] = "quantile",
    fallback: bool = True,
    code_compat: bool = False,
):
    """Rollouts N_i that maximise Σ_i [1 - p^N - (1-p)^N]·p(1-p)² at the same total. 2509.25849.

    p is the share of right responses at the prompt's last visit, or among its `window` latest ones
    if that visit had fewer. With fewer than `min_history` known a prompt keeps its share; p = 1 and
    p = 0 get `positive` and `negative`; the others between `low` and `high`. code_compat=True is
    the released dynamic programme, which can miss the optimum; see `proxpo.stages.budget.allocate`.

    low, high: fewest and most responses to a prompt that is neither always nor never solved
    positive, negative: responses to a prompt that was always, or never, solved
    min_history: responses that must be known before a prompt's share changes
    window: latest responses that count where the last visit had fewer
    confidence: probability with which a prompt's cost covers a right and a wrong response
    cost: responses that a prompt costs: a quantile at `confidence`, or the expectation
    fallback: spread responses that are left over evenly
    code_compat: allocate as the released code, which can miss the optimum
    """
    if not 1 <= low <= high or positive < 0 or negative < 0:
        raise ProxpoError(
            f"budget=knapsack: need 1 ≤ low ≤ high and no negative counts, got low {low}, "
            f"high {high}, positive {positive}, negative {negative}"
        )
    check_numbers("budget=knapsack", "[0, inf)", min_history=min_history)
    if not 0 < confidence < 1 or not 1 <= window <= MOST_OUTCOMES:
        raise ProxpoError(
            f"budget=knapsack: confidence is in (0, 1) and window in 1..{MOST_OUTCOMES}, "
            f"got {confidence}, {window}"
        )

    def init() -> State:
        return blank("rate", "recorded", "recent")

    def update(state: State, batch: Batch, metrics: Metrics) -> State:
        return record_outcomes(state, batch, window=window)

    def apply(budget: Budget, ctx: Context) -> tuple[Budget, Metrics]:
        few, many = int(budget.samples.min()), int(budget.samples.max())
        if max(low, positive, negative) > few or high < many:
            raise ProxpoError(
                f"budget=knapsack: with {few} samples a prompt, low ({low}), positive ({positive}) "
                f"and negative ({negative}) must be at most that, and high ({high}) at least {many}"
            )
        rate = _column(ctx.state, "rate", budget)
        known = _column(ctx.state, "recorded", budget) >= min_history
        samples = allocate(
            rate,
            known,
            budget.samples,
            low=low,
            high=high,
            positive=positive,
            negative=negative,
            confidence=confidence,
            cost=cost,
            fallback=fallback,
            official=code_compat,
        )
        effective = known & (rate > 0) & (rate < 1)
        metrics = {
            "budget/effective": effective.double().mean(),
            "budget/most": samples.max().double(),
        }
        return budget.replace(samples=samples.to(budget.samples.dtype)), metrics

    idle = ("confidence",) if cost == "expectation" else ()
    return Parts(
        apply=apply, init=init, update=update, idle=idle if fallback else ("cost", "confidence")
    )


def _column(state: State, name: str, budget: Budget) -> Float[Tensor, " prompt"]:
    if not state:
        return torch.zeros(len(budget.prompt_id), dtype=torch.float64, device=budget.samples.device)
    return recall(state, name, budget.prompt_id)
