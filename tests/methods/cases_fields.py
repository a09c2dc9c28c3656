"""Cases of the methods that read durations, turns, spans, features or hidden states."""

from typing import Any

FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "duration-aware": ("duration-aware", {}),
    "duration-aware-bounded": (
        "duration-aware",
        {"max_weight": 1.2, "min_duration": 2.0, "gamma": 0.9, "whitening": False},
    ),
    "simpletir": ("simpletir", {"dual": 1.2}),
    "simpletir-nonvoid": (
        "simpletir",
        {"statistics": "nonvoid", "drop_truncated": True, "kl_coef": 0.1},
    ),
    "simpletir-unfiltered": ("simpletir", {"filter_void": False}),
    "text2grad": ("text2grad", {}),
    "text2grad-raw": (
        "text2grad",
        {
            "gamma": 0.9,
            "lam": 0.8,
            "whitening": False,
            "holes": "skip",
            "kl": "k2",
            "kl_coef": 0.5,
            "outcome": True,
            "max_ratio": 1.5,
        },
    ),
    "capo": ("capo", {"learning_rate": 0.05}),
    "capo-one-sided": (
        "capo",
        {"optimizer": "sgd", "sides": "one", "k": 2, "learning_rate": 0.4, "tau_policy": 2e-3},
    ),
    "capo-dr-grpo": ("capo", {"host": "dr-grpo", "learning_rate": 0.02, "max_tokens": 9}),
    "capo-reinforce": ("capo", {"host": "reinforce", "learning_rate": 0.04, "tau_objective": 0.0}),
    "g2rl": ("g2rl", {}),
    "g2rl-printed": ("g2rl", {"reading": "printed", "strength": 2.0, "reward_clip": 1.5}),
    "g2rl-signed": (
        "g2rl",
        {"reading": "signed", "level": "sequence", "unbiased": True, "skip_uniform": True},
    ),
}
