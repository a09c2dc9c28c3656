"""Cases of the methods that move ratios and trust regions: name -> (slug, settings)."""

from typing import Any

TRUST: dict[str, tuple[str, dict[str, Any]]] = {
    "dcpo": ("dcpo", {}),
    "dcpo-code": (
        "dcpo",
        {"history": False, "agg": "token-mean", "clip_low": 0.02, "clip_high": 0.03, "dual": 1.2},
    ),
    "bapo": ("bapo", {"target": 1.45, "dual": 1.1}),
    "bapo-paper": (
        "bapo",
        {"statistic": "paper", "target": 0.53, "low_from": 0.8, "high_from": 1.01},
    ),
    "bapo-gradient": (
        "bapo",
        {"statistic": "gradient", "target": 0.5, "low_from": 0.7, "low_to": 1.0, "high_from": 1.0},
    ),
    "aspo": ("aspo", {}),
    "aspo-capped": (
        "aspo",
        {"cap_pos": 1.1, "cap_neg": 1.2, "clip": 0.1, "kl_coef": 0.0, "average": "sequence"},
    ),
    "pspo": ("pspo", {}),
    "pspo-sequence": ("pspo", {"level": "sequence", "alpha": 0.3}),
    "rapid": ("rapid", {"cap": 1.2}),
    "rapid-token": (
        "rapid",
        {
            "cap": 1.1,
            "weight_level": "token",
            "self_normalised_baseline": True,
            "normalize_std": True,
        },
    ),
    "rapid-mean": ("rapid", {"importance_weighted_baseline": False}),
    "mdpo": ("mdpo", {}),
    "mdpo-k3": ("mdpo", {"kl": "k3", "step_size": 0.5}),
    "mdpo-exact": ("mdpo", {"kl": "exact"}),
    "mdpo-tsallis": ("mdpo", {"tsallis": 1.5}),
    "st-ppo": ("st-ppo", {"clip": 0.05}),
    "st-ppo-group": ("st-ppo", {"critic": False, "average": "token", "clip": 0.1, "kl_coef": 0.1}),
    "s-ppo": ("st-ppo", {"variant": "s-ppo"}),
    "turn-ppo": ("st-ppo", {"variant": "turn-ppo", "split": "mask", "clip": 0.05}),
    "grpo-guard": ("grpo-guard", {"clip": 0.02}),
    "grpo-guard-dance": (
        "grpo-guard",
        {"noise_schedule": "dance", "clip": 0.05, "advantage_bound": 0.8, "kl_coef": 0.1},
    ),
    "grpo-guard-plain": ("grpo-guard", {"normalise": False, "reweight": False, "clip": 0.2}),
    "grpo-guard-tokens": ("grpo-guard", {"policy": "tokens"}),
}
