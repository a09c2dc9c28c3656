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
    "g2rl": ("g2rl", {}),
    "g2rl-printed": ("g2rl", {"reading": "printed", "strength": 2.0, "reward_clip": 1.5}),
    "g2rl-signed": (
        "g2rl",
        {"reading": "signed", "level": "sequence", "unbiased": True, "skip_uniform": True},
    ),
}
