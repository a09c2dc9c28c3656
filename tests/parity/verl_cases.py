"""Every question put to verl 0.9.1 and, where it is a recipe on the same batch, ours to it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from parity_inputs import KINDS, compose, given_weights

import proxpo
from proxpo.stages import aggregate, regularisers, trust
from proxpo.stages import ratio as ratios

AGGREGATES: dict[str, Callable[[], proxpo.Stage]] = {
    "token-mean": aggregate.token_mean,
    "token-sum": aggregate.token_sum,
    "seq-mean-token-sum": aggregate.seq_mean_token_sum,
    "seq-mean-token-sum-norm": lambda: aggregate.constant_length(max_tokens=14),
    "seq-mean-token-mean": aggregate.seq_mean_token_mean,
}
EXACT = [name for name in AGGREGATES if name != "seq-mean-token-mean"]
GLOBAL = {"batch_num_tokens": 333, "global_batch_size": 40, "loss_scale_factor": 14}
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
REJECTIONS = [  # verl's option, our estimator and statistic, a threshold that rejects some
    ("token_k1", "k1", "token", "0.8_1.3"),
    ("token_k2", "k2", "token", "0.03"),
    ("token_k3", "k3", "token", "0.03"),
    ("seq_sum_k1", "k1", "seq_sum", "0.5_1.7"),
    ("seq_sum_k2", "k2", "seq_sum", "0.2"),
    ("seq_sum_k3", "k3", "seq_sum", "0.2"),
    ("seq_mean_k1", "k1", "seq_mean", "0.95_1.1"),
    ("seq_mean_k1", "k1", "seq_mean", 1.08),
    ("seq_mean_k2", "k2", "seq_mean", "0.02"),
    ("seq_mean_k3", "k3", "seq_mean", "0.02"),
    ("seq_max_k2", "k2", "seq_max", "0.08"),
    ("seq_max_k3", "k3", "seq_max", "0.08"),
]
CORRECTIONS = [  # level, verl's threshold, our mode, floor and cap
    ("token", 1.1, "truncate", 0.0, 1.1),
    ("token", "0.8_1.3", "mask", 0.8, 1.3),
    ("sequence", 1.1, "truncate", 0.0, 1.1),
    ("sequence", "0.5_2.0", "mask", 0.5, 2.0),
]


class Case(NamedTuple):
    """A call of verl's and, where ours is a recipe on the same batch, that recipe."""

    call: str
    options: dict[str, Any]
    batch: str = "plain"
    recipe: Callable[[], proxpo.Recipe] | None = None


def loss(mode: str, recipe: Callable[[], proxpo.Recipe], batch: str = "plain", **options) -> Case:
    return Case("policy_loss", {"mode": mode, **options}, batch, recipe)


def clip(agg: str = "token-mean", **stages) -> Callable[[], proxpo.Recipe]:
    return lambda: compose(
        trust=trust.ppo_clip(clip_low=0.1, clip_high=0.15, dual=1.4),
        aggregate=AGGREGATES[agg](),
        **stages,
    )


def losses() -> dict[str, Case]:
    """Policy losses that agree exactly."""
    dual = {**CLIP, "clip_ratio_c": 1.4}
    cases = {
        f"vanilla {agg} {kind}": loss(
            "vanilla", clip(agg), kind, agg=agg, config={**dual, "global_batch_info": info}
        )
        for kind in KINDS
        for agg in EXACT
        for info in [{"loss_scale_factor": 14} if agg.endswith("norm") else {}]
    }
    own = ratios.sequence(own_gradient=True)
    narrow = trust.ppo_clip(clip_low=0.05, clip_high=0.03)
    for kind in KINDS:
        cases |= {
            f"gspo {kind}": loss(
                "gspo",
                lambda: compose(ratio=own, trust=narrow),
                kind,
                agg="token-mean",
                config={"clip_ratio_low": 0.05, "clip_ratio_high": 0.03},
            ),
            f"cispo {kind}": loss(
                "cispo",
                lambda: compose(trust=trust.clipped_weight(clip_low=0.1, clip_high=0.15)),
                kind,
                config=CLIP,
            ),
            f"dppo_tv {kind}": loss(
                "dppo_tv",
                lambda: compose(
                    trust=trust.divergence_mask(clip_low=0.03, clip_high=0.05, weight_cap=1.1)
                ),
                kind,
                config={"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.1},
            ),
            f"gpg {kind}": loss(
                "gpg", lambda: compose(ratio=ratios.none(), trust=trust.score_function()), kind
            ),
            f"dro {kind}": loss(
                "dro",
                lambda: compose(
                    ratio=ratios.none(),
                    trust=trust.score_function(),
                    regularisers=(regularisers.kl_from_old(coef=0.3, estimator="k2"),),
                ),
                kind,
                config={"policy_loss": {"dro_beta": 0.3}},
            ),
        }
    for kind in ("plain", "holes"):
        cases |= {
            f"kl_cov {kind}": loss(
                "kl_cov",
                lambda: compose(
                    trust=trust.unclipped(),
                    regularisers=(regularisers.covariance_penalty(share=0.1, coef=0.7),),
                ),
                kind,
                config={"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}},
            ),
            f"clip_cov {kind}": loss(
                "clip_cov",
                lambda: compose(
                    trust=trust.clip_cov(
                        share=0.05, cov_low=0.2, cov_high=3.0, clip_low=0.1, clip_high=0.15
                    )
                ),
                kind,
                seed=11,
                config={
                    **CLIP,
                    "policy_loss": {"clip_cov_ratio": 0.05, "clip_cov_lb": 0.2, "clip_cov_ub": 3.0},
                },
            ),
        }
    weighted = {"weights": "ref_logp"}  # any positive numbers will do as precomputed weights
    cases["vanilla weighted"] = loss("vanilla", weigh(clip()), config=dual, **weighted)
    cases["cispo weighted"] = loss(
        "cispo", weigh(cases["cispo plain"].recipe), config=CLIP, **weighted
    )
    cases["gpg weighted"] = loss("gpg", weigh(cases["gpg plain"].recipe), **weighted)
    for name, reinforce, level in (
        ("token", "token", "token"),
        ("sequence", "sequence", "sequence"),
    ):
        cases[f"bypass reinforce {name}"] = loss(
            "bypass_mode",
            lambda level=level: proxpo.make_recipe(
                "reinforce", {"form": "truncated", "cap": 1.1, "level": level}
            ),
            agg="seq-mean-token-sum",
            anchor="rollout_logp",
            config={
                "policy_loss": {
                    "rollout_correction": {
                        "loss_type": "reinforce",
                        "rollout_is": reinforce,
                        "rollout_is_threshold": 1.1,
                    }
                }
            },
        )
    cases["bypass ppo_clip"] = loss(
        "bypass_mode",
        lambda: proxpo.make_recipe("tis", {"bypass": True, "aggregate": "token_mean"}),
        anchor="rollout_logp",
        config={
            "clip_ratio_c": 1e9,
            "policy_loss": {"rollout_correction": {"rollout_is": "token"}},
        },
    )
    return cases


def weigh(recipe: Callable[[], proxpo.Recipe]) -> Callable[[], proxpo.Recipe]:
    """The recipe with fixed token weights: what verl calls rollout_is_weights."""
    return lambda: recipe().replace(weights=(given_weights("weights", "ref_logp"),))


def near_losses() -> dict[str, Case]:
    """Losses whose response average verl divides by L + 1e-8."""
    cases = {
        f"vanilla mean {kind}": loss(
            "vanilla",
            clip("seq-mean-token-mean"),
            kind,
            agg="seq-mean-token-mean",
            config={**CLIP, "clip_ratio_c": 1.4},
        )
        for kind in KINDS
    }
    for kind in KINDS:
        cases[f"sapo {kind}"] = loss(
            "sapo",
            lambda: proxpo.make_recipe("sapo", {"tau_pos": 1.2, "tau_neg": 1.7}),
            kind,
            config={"tau_pos": 1.2, "tau_neg": 1.7},
        )
    cases["gspo recipe"] = loss(
        "gspo",
        lambda: proxpo.make_recipe("gspo", {"variant": "token"}),
        agg="seq-mean-token-mean",
        config={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    )
    return cases


GEO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.25}
ADVANTAGES: dict[str, tuple[dict[str, Any], Callable[[], proxpo.Recipe]]] = {
    "grpo": ({"estimator": "grpo"}, lambda: proxpo.make_recipe("grpo")),
    "dr-grpo": (
        {"estimator": "grpo", "norm_adv_by_std_in_grpo": False},
        lambda: proxpo.make_recipe("dr-grpo", {"advantage.singleton": "raw"}),
    ),
    "rloo": (
        {"estimator": "rloo"},
        lambda: proxpo.make_recipe("rloo", {"kl_coef": 0, "advantage.singleton": "raw"}),
    ),
    "rloo_vectorized": (
        {"estimator": "rloo_vectorized"},
        lambda: proxpo.make_recipe("rloo", {"kl_coef": 0}),
    ),
    "opo": ({"estimator": "opo"}, lambda: proxpo.make_recipe("opo")),
    "remax": ({"estimator": "remax"}, lambda: proxpo.make_recipe("remax")),
    "remax kl": (
        {"estimator": "remax", "kl": 0.2},
        lambda: proxpo.make_recipe("remax", {"kl_coef": 0.2}),
    ),
}
WHITENED: dict[str, tuple[dict[str, Any], Callable[[], proxpo.Recipe]]] = {
    "gae": (
        {"estimator": "gae", "gamma": 0.95, "lam": 0.9},
        lambda: proxpo.make_recipe("ppo", {"gamma": 0.95, "lam": 0.9}),
    ),
    "gae kl": (
        {"estimator": "gae", "gamma": 0.95, "lam": 0.9, "kl": 0.1},
        lambda: proxpo.make_recipe("ppo", {"gamma": 0.95, "lam": 0.9, "kl_coef": 0.1}),
    ),
    "reinforce_pp": (
        {"estimator": "reinforce_plus_plus", "gamma": 0.9, "kl": 0.1},
        lambda: proxpo.make_recipe("reinforce-pp", {"gamma": 0.9, "kl_coef": 0.1}),
    ),
    "reinforce_pp_baseline": (
        {"estimator": "reinforce_plus_plus_baseline"},
        lambda: proxpo.make_recipe("reinforce-pp-baseline", {"kl_coef": 0}),
    ),
}
PENALTIES = ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k2+", "k3+"]
LOSSES, NEAR = losses(), near_losses()


def all_cases() -> dict[str, Case]:
    cases = LOSSES | NEAR
    for kind in KINDS:
        cases |= {f"kl {p} {kind}": Case("kl_penalty", {"penalty": p}, kind) for p in PENALTIES}
        for agg in AGGREGATES:
            scale = 14 if agg.endswith("norm") else None
            cases[f"agg {agg} {kind}"] = Case("aggregate", {"agg": agg, "scale": scale}, kind)
    for kind in ("plain", "holes"):
        for name, (options, _) in (ADVANTAGES | WHITENED).items():
            cases[f"advantage {name} {kind}"] = Case("advantage", options, kind)
        cases[f"value {kind}"] = Case("value_loss", {"clip": 0.4, "gamma": 0.95, "lam": 0.9}, kind)
        cases[f"geo_mean {kind}"] = Case(
            "policy_loss", {"mode": "geo_mean", "config": GEO, "rows": True}, kind
        )
    for agg in AGGREGATES:
        config = {**CLIP, "clip_ratio_c": 1.4, "global_batch_info": GLOBAL}
        options = {"mode": "vanilla", "agg": agg, "config": config}
        cases[f"global {agg}"] = Case("policy_loss", options)
    vectorized = {"estimator": "grpo_vectorized"}
    cases["advantage grpo_vectorized"] = Case("advantage", vectorized, "holes")
    for kind in KINDS:
        for option, _, _, threshold in REJECTIONS:
            given = {"rollout_rs": option, "rollout_rs_threshold": threshold}
            cases[f"reject {option} {threshold} {kind}"] = Case("correction", given, kind)
        for level, threshold, *_ in CORRECTIONS:
            for normalised in (False, True):
                given = {
                    "rollout_is": level,
                    "rollout_is_threshold": threshold,
                    "rollout_is_batch_normalize": normalised,
                }
                name = f"weights {level} {threshold} {normalised} {kind}"
                cases[name] = Case("correction", given, kind)
    both = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.3,0.02"}
    cases["reject two"] = Case("correction", both)
    given = {"mode": "kl_cov", "weights": "ref_logp"}
    given["config"] = {"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}}
    cases["kl_cov weighted"] = Case("policy_loss", given)
    cases["kl_cov wild"] = Case("policy_loss", {**given, "weights": None}, "wild")
    given = {"mode": "dro", "weights": "ref_logp", "config": {"policy_loss": {"dro_beta": 0.3}}}
    cases["dro weighted"] = Case("policy_loss", given)
    given = {"mode": "gspo", "weights": "ref_logp", "agg": "token-mean"}
    given["config"] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.03}
    for name, changes in (("tokens", {"weights": None}), ("weighted", {"rows": True})):
        cases[f"gspo {name}"] = Case("policy_loss", {**given, **changes})
    geo = {"mode": "geo_mean", "config": GEO, "rows": True, "weights": "ref_logp"}
    cases["geo_mean weighted"] = Case("policy_loss", geo)
    cases["vanilla default"] = Case("policy_loss", {"mode": "vanilla"}, "wild")
    for name, seen in (("above", 0.9), ("below", 0.02), ("near", 0.105)):
        cases[f"controller {name}"] = Case(
            "controller", {"coef": 0.02, "target": 0.1, "horizon": 300, "kl": seen, "n": 12}
        )
    return cases
