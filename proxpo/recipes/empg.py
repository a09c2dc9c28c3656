from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.advantage import entropy_modulated
from proxpo.types import Recipe


@register("empg", paper="arXiv:2509.09265", confidence="paper formulas")
def empg(
    *,
    advantage: Options = options_of(
        entropy_modulated, "k", "k_future", "bonus", "split", "scale", "eps"
    ),
    base: Options = options_of(grpo, "clip_low", "clip_high", "kl_coef"),
) -> Recipe:
    """EMPG: confident steps of an agent count more, and so do steps that lead to confident ones.

        H̃ = (H - min)/(max - min) over all steps,   g = exp(-k H̃)/mean exp(-k H̃)
        A_it = A_i g_it + ζ exp(-k' H̃_i,t+1) - mean over all steps,   then GRPO's loss

    H is the mean entropy of a step's tokens under the policy that sampled them. ζ (`bonus`) is not
    paid for the last step. split="response": one step each, so that only g and the centring act;
    "mask": runs of valid tokens are steps. Groups of equal rewards still get the bonus.

    Departures: the paper's values per task are not known; k = k' = 1, ζ = 0.1 are those of a
    listing derived from it (a later port has bonus=0.05). A_i is GRPO's; DAPO's differs in the
    clip and the average, `--set trust.clip_high=0.28 --set aggregate=token_mean`.

    Reference: arXiv:2509.09265; ARLArena.
    """
    return grpo(**base).replace(advantage=entropy_modulated(**advantage))
