from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.budget import length_budget
from proxpo.stages.reward import fail_truncated
from proxpo.types import Recipe


@register("palu", paper="arXiv:2510.10168", confidence="paper formulas")
def palu(
    *,
    budget: Options = options_of(length_budget),
    base: Options = options_of(grpo, "clip_low", "clip_high", "kl_coef", "eps"),
) -> Recipe:
    """PALU: shrink a prompt's length budget while it is solved often enough, else restore it.

        L_q <- L_q - (Q_1 - Q_{1-τ})   if its pass rate was at least C (`target`),   else L_max
        A_i, L as GRPO; a response that does not end within L_q is wrong

    Q are quantiles of the lengths of the prompt's right responses at its last visit, interpolated;
    L_max is the trainer's limit, also at the first visit. Equal lengths leave the budget alone.

    Departures: restated from public reviews. Enforcing the budget by truncation, rounding down and
    the lower bound of min_tokens are our choices. The base method is GRPO.

    Reference: arXiv:2510.10168.
    """
    return grpo(**base).replace(budget=(length_budget(**budget),), reward=(fail_truncated(),))
