"""Cases of the methods that are mostly a schedule or a gradient transform."""

from typing import Any

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sfpo": ("sfpo", {}),
    "sfpo-kl": ("sfpo", {"kl_coef": 0.1, "clip_low": 0.1, "clip_high": 0.05}),
    "fixpo": ("fixpo", {"beta": 0.7}),
    "fixpo-sampled": ("fixpo", {"kl": "sampled", "entropy_coef": 0.01}),
    "remix": ("remix", {"clip": 0.1, "kl_coef": 0.2}),
    "remix-half": ("remix", {"base_share": 0.25, "kl_coef": 0.3, "entropy_coef": 0.02}),
    "trpo": ("trpo", {}),
    "trpo-sequence": ("trpo", {"average": "sequence"}),
    "proma": ("proma", {}),
}
