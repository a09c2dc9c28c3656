import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import gae
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import none, token
from proxpo.stages.regularisers import entropy_bonus, ess_kl_from_old, ess_kl_full
from proxpo.stages.schedule import poisson_replay
from proxpo.stages.trust import ess_cap, score_function
from proxpo.stages.value import value_loss
from proxpo.types import Recipe


@register("p3o-2019", paper="arXiv:1905.01756")
def p3o_2019(
    *,
    step: Literal["on", "off"] = "off",
    kl: Literal["sampled", "full"] = "sampled",
    kl_direction: Literal["beta_pi", "pi_beta"] = "beta_pi",
    kl_mean_over_actions: bool = False,
    cap: bool = True,
    replay_ratio: float = 2.0,
    gamma: float = 0.99,
    lam: float = 0.95,
    entropy_coef: float = 0.01,
) -> Recipe:
    """P3O (2019): on-policy actor-critic steps interleaved with replayed ones, held by their ESS.

        w = π/(β + 1e-7),   ESS = ((Σw)²/Σw² + 1e-7)/N,   λ = 1 - ESS,   c = ESS
        L = mean[ -sg[min(w, c)]·Â·log π ] + ½ mean Â² + λ·KL

    step="on" is the on-policy step, -mean(Â log π) + ½ mean Â² - 0.01 mean H. kl="full" takes the
    KL over the vocabulary (`vocab_logp`, `old_vocab_logp`); "sampled" P3O's k3 on the drawn tokens.

    step: loss of replayed data ("off"), or of fresh data ("on")
    kl: KL on "sampled" tokens, or over the "full" vocabulary
    kl_direction: KL(π_β‖π) ("beta_pi"), or the other way
    kl_mean_over_actions: divide that KL by the size of the vocabulary

    Departures: paper KL(β‖π), code KL(π‖β) averaged over actions (kl_direction="pi_beta",
    kl_mean_over_actions=True). The code silences the policy term when λ ≤ 1e-7; here c = ESS holds
    there too. cap=False is the code's default ceiling of 1. Replay starts with the second rollout
    and takes an earlier one whole; the code waits for 15,000 frames and takes 6 times the
    environments (`--set schedule.start=15000 --set schedule.batch=6`, in responses and prompts).

    Reference: Fakoor, Chaudhari & Smola, arXiv:1905.01756.
    """
    full = ess_kl_full(direction=kl_direction, mean_over_actions=kl_mean_over_actions)
    pull = ess_kl_from_old(eps=1e-7, eps_in="count") if kl == "sampled" else full
    on = step == "on"
    return Recipe(
        advantage=gae(gamma=gamma, lam=lam, whitening=False),
        ratio=none() if on else token(limit=math.inf, smooth=1e-7),
        trust=score_function() if on else ess_cap(eps=1e-7, eps_in="count", cap=cap),
        regularisers=(entropy_bonus(coef=entropy_coef),) if on else (pull,),
        aggregate=token_mean(),
        value=value_loss(clip=None, gamma=gamma, lam=lam),
        schedule=poisson_replay(ratio=replay_ratio, fresh_entropy=None if on else entropy_coef),
    )
