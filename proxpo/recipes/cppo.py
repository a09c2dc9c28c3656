from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.prune import largest_advantages
from proxpo.types import Recipe


@register("cppo", paper="arXiv:2503.22342")
def cppo(
    *,
    prune: Options = options_of(largest_advantages, "rate", "pool", "floor"),
    metric: Literal["smallest", "largest", "random"] = "smallest",
    prompt_factor: float | None = None,
    base: Options = options_of(grpo, "clip_low", "clip_high", kl_coef=0.04, eps=1e-4),
) -> Recipe:
    """CPPO: GRPO on the responses of largest |advantage| alone; the others cost no pass.

        A_i = (r_i - mean_g)/(std_g + δ) over the full group,   k = ⌊G (1 - P)⌋
        L = (1/k) Σ_{i∈I} (1/L_i) Σ_t [ max(-A r, -A clip(r, 1±ε)) + β k3(π, π_ref) ]

    I holds the k responses of each prompt with the largest |A|; metric says what is pruned: the
    smallest |A|, the largest, or any. pool="batch" lets the prompts of a batch compete, as both
    released versions do: a prompt of equal rewards is dropped first. prompt_factor: how many times
    the prompts are drawn, to fill the room; by default 1/(1 - P), the paper's allocation.

    Departures: ties go to the earlier response. k = 0 leaves nothing to train on. The released
    open-r1 version removes ⌊G P⌋ responses where the paper and the verl version keep ⌊G (1 - P)⌋
    (floor="removed"), and averages over tokens (`--set aggregate=token_mean`).

    Reference: arXiv:2503.22342; lzhxmu/CPPO.
    """
    factor = 1 / max(1 - prune["rate"], 1e-9) if prompt_factor is None else prompt_factor
    pruned = largest_advantages(prune=metric, prompt_factor=factor, **prune)
    return grpo(**base).replace(prune=(pruned,))
