"""Length limits of the responses to each prompt."""

import torch

from proxpo.ops.masked import row_quantile
from proxpo.ops.prompt_memory import blank, recall, remember
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.budget.responses import PromptResponses, responses_by_prompt
from proxpo.types import Batch, Budget, Context, Metrics, State


def quantile_step(responses: PromptResponses, tau: float) -> Float[Tensor, " prompt"]:
    """α = Q_1 - Q_{1-τ} of the lengths of each prompt's right responses; 0 without any."""
    right = responses.right & responses.there & (responses.length > 0)
    longest = row_quantile(responses.length, right, 1.0)
    return longest - row_quantile(responses.length, right, 1 - tau)


@stage("budget", needs=("prompt_id",))
def length_budget(*, target: float = 0.8, tau: float = 0.5, min_tokens: int = 1):
    """L_q <- L_q - α if the prompt's pass rate was at least `target`, else L_max. arXiv:2510.10168.

        α = Q_1 - Q_{1-τ} of the lengths of its right responses at the last visit

    L_max is the budget that comes in; L_q stays at or above min_tokens and is rounded down. A
    truncated response is wrong. A prompt not seen before has L_max.

    target: pass rate from which on a prompt's limit shrinks
    tau: share of the longest right responses that the shorter limit cuts
    min_tokens: smallest limit
    """
    check_numbers("length_budget", "[0, inf]", target=target)
    check_numbers("length_budget", "[0, 1]", tau=tau)
    check_numbers("length_budget", "[1, inf)", min_tokens=min_tokens)

    def init() -> State:
        return blank("removed")

    def update(state: State, batch: Batch, metrics: Metrics) -> State:
        """L_q - α where the prompt was solved often enough, L_max else; kept as L_max - L_q."""
        responses = responses_by_prompt(batch, by="budget=length_budget", truncated_wrong=True)
        rate = (responses.right & responses.there).sum(dim=1) / responses.size.clamp(min=1)
        shrunk = (
            recall(state, "removed", responses.prompt_id) + quantile_step(responses, tau).ceil()
        )
        removed = torch.where(rate >= target, shrunk, 0.0)
        return remember(state, responses.prompt_id, {"removed": removed})

    def apply(budget: Budget, ctx: Context) -> tuple[Budget, Metrics]:
        most = budget.max_tokens
        removed = (
            recall(ctx.state, "removed", budget.prompt_id)
            if ctx.state
            else torch.zeros(most.shape, dtype=torch.float64, device=most.device)
        )
        tokens = torch.minimum((most - removed).clamp(min=min_tokens).to(most.dtype), most)
        return budget.replace(max_tokens=tokens), {"budget/tokens": tokens.double().mean()}

    return Parts(apply=apply, init=init, update=update)
