from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.dapo import dapo
from proxpo.stages.weights import top_entropy
from proxpo.types import Recipe


@register("entropy-80-20", paper="arXiv:2506.01939")
def entropy_80_20(
    *,
    weights: Options = options_of(top_entropy),
    base: Options = options_of(dapo, "clip_low", "clip_high", "dual"),
) -> Recipe:
    """Entropy 80/20: DAPO's gradient on the 20 % of tokens with the highest entropy only.

        S = the max(1, ⌈ρN⌉) tokens of largest H
        L = (1/|S|) Σ_{t∈S} max(-A r, -A clip(r, 0.8, 1.28))

    H is the entropy of the current policy's whole next-token distribution, detached. Terms such as
    a KL stay on all tokens.

    Departures: TRL divides by all tokens (normalise="all", smaller by about ρ) and takes an
    interpolated quantile (rule="quantile"). N are the tokens of the optimizer step; TRL and the
    released code choose within each micro-batch (scope="microbatch"). The released script adds
    dual=10.

    Reference: Wang et al., arXiv:2506.01939 (revised) eq. 6.
    """
    return dapo(**base).replace(weights=(top_entropy(**weights),))
