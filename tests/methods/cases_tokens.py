"""Cases of the methods of rewards, advantages, tokens and budgets: name -> (slug, settings)."""

from typing import Any

TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "pacs": ("pacs", {"singleton": "drop"}),
    "pacs-standardised": (
        "pacs",
        {"singleton": "drop", "score": "standardised", "balance": "only_positive"},
    ),
    "pacs-centred": (
        "pacs",
        {"singleton": "drop", "score": "centred", "balance": "only_negative", "beta": 0.5},
    ),
    "pacs-plain": (
        "pacs",
        {"singleton": "drop", "score": "plain", "balance": "none", "proxy": "mean_logp"},
    ),
    "gtpo": ("gtpo", {}),
    "gtpo-filtered": ("gtpo", {"max_entropy": 1.1, "gamma": 0.3, "boost": 3.0}),
    "gtpo-code": ("gtpo", {"code_compat": True}),
    "redit": ("redit", {"noise": 0.0}),  # with noise: test_redit.py
    "empg": ("empg", {}),
    "empg-response": ("empg", {"split": "response", "scale": "none", "k": 2.0}),
    "empg-runs": ("empg", {"split": "mask", "bonus": 0.5, "k_future": 3.0, "kl_coef": 0.1}),
    "earl": ("earl", {}),
    "earl-gated": ("earl", {"normalize": "gated", "share": 0.5, "kl_coef": 0.1}),
    "earl-batch": ("earl", {"level": "batch", "share": 0.4}),
    "earl-batch-gated": ("earl", {"level": "batch", "share": 0.4, "normalize": "gated"}),
    "palu": ("palu", {}),
    "cppo": ("cppo", {}),
    "cppo-largest": ("cppo", {"metric": "largest", "rate": 1 / 3, "kl_coef": 0.0}),
    "cppo-batch": ("cppo", {"pool": "batch", "rate": 0.3, "aggregate": "token_mean"}),
    "knapsack-rl": ("knapsack-rl", {"bound": 0.9}),
}
