from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.ppo import ppo
from proxpo.stages.advantage import episode_gae, group_relative
from proxpo.stages.prune import segments
from proxpo.stages.ratio import folded, token
from proxpo.stages.regularisers import context_consistency, kl_to_ref
from proxpo.stages.reward import episode_targets
from proxpo.stages.trust import ppo_clip
from proxpo.stages.weights import separate_means
from proxpo.types import Recipe


@register("foldact", paper="arXiv:2512.22733")
def foldact(
    *,
    weights: Options = options_of(separate_means),
    chosen: Options = options_of(segments),
    consistency_coef: float = 1.0,
    consistency: Options = options_of(context_consistency, "estimator", "every"),
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 10.0,
    kl_coef: float = 0.01,
    critic: bool = True,
    discounts: Options = options_of(episode_targets),
    credit: Options = options_of(episode_gae, "whitening"),
    base: Options = options_of(ppo, "value_coef", "value_clip"),
) -> Recipe:
    """FoldAct: PPO on turns whose history the policy has replaced by its own summaries.

        r = exp(log π - log π_old), at most 10;   ℓ = max(-A r, -A clip(r, 1±ε))
        L = λ_s·mean of ℓ over summaries + λ_a·mean of ℓ over actions + λ_c·mean(log π - log π_full)

    π_full is the policy before the update with the unfolded history as context. drop: share of
    turns, chosen at random, that is not trained on (dropped="skip"), or whose log π_old is that of
    π_full ("flat"). A is GAE over all turns of an episode. KL to the reference: k3, as in verl.

    critic: advantages from a critic; false: from the group

    Departures: the released code trains on one flattened sequence, under which dropped turns have
    r = 1 at the start and kept ones, whose log π_old is of the folded context, do not. Here each
    turn is trained under the context it was taken in, kept turns have r = 1, and dropped ones need
    no pass. Its consistency term takes 4 random rows, this one all whose history
    fits the context. λ are 1, as its README and script have them; its functions default to 0.3, 0.7
    and 0.1. k1 pulls nowhere: estimator=k2 or k3 does.

    Reference: arXiv:2512.22733; SHAO-Jiaqi757/FoldAct.
    """
    made, drop = ppo(**base), chosen["drop"]
    pull = context_consistency(coef=consistency_coef, **consistency) if consistency_coef else None
    anchor = kl_to_ref(coef=kl_coef, clamp="verl") if kl_coef else None
    held = clip_high if cap is None else min(clip_high, cap - 1)  # the cap comes before the clip
    return made.replace(
        reward=(episode_targets(**discounts),) if critic else (),
        advantage=episode_gae(**discounts, **credit) if critic else group_relative(),
        prune=(segments(**chosen),),
        weights=(separate_means(**weights),),
        ratio=token() if chosen["dropped"] == "skip" else folded(drop=drop),
        trust=ppo_clip(clip_low=clip_low, clip_high=held, cap=cap),
        regularisers=tuple(stage for stage in (anchor, pull) if stage is not None),
        value=made.value if critic else None,
    )
