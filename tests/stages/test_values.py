"""Values that would turn a stage's sign, silence it, or leave nothing to train on."""

from typing import Any

import pytest

from proxpo import ProxpoError, make_stage

REFUSED = [
    ("trust", "clipped_weight", {"clip_high": -2.0}, "must not be negative, got inf, -2.0"),
    ("trust", "clipped_weight", {"mask_low": -1.0}, "must not be negative, .* -1.0, None"),
    ("trust", "clipped_weight", {"absolute": True, "clip_high": 0.0}, "cap must be above 0"),
    ("trust", "clipped_weight", {"absolute": True, "clip_low": 0.1}, "not below the floor"),
    ("trust", "ppo_clip", {"cap": -1.0}, "cap must be above 1, got -1.0"),
    ("trust", "clip_cov", {"cov_low": 5.0, "cov_high": 1.0}, "cov_low must be below cov_high"),
    ("ratio", "geometric_clip", {"clip_low": -1.0}, "must not be negative, got -1.0 and 0.4"),
    ("advantage", "group_relative", {"eps": -1.0}, "eps must not be negative, got -1.0"),
    ("aggregate", "pairwise_logistic", {"beta": 0.0}, "expected beta > 0 .* got 0.0, 0.0"),
    ("aggregate", "pairwise_logistic", {"label_smoothing": 1.5}, r"in \[0, 0.5\], got 0.1, 1.5"),
    ("weights", "behaviour", {"cap": 0.0}, "cap must be positive, got 0.0"),
    ("select", "curvature_mask", {"learning_rate": -1.0}, "learning_rate must not be negative"),
    ("value", "value_loss", {"clip": -1.0}, "clip must not be negative, got -1.0"),
    ("filter", "fresh_enough", {"max_lag": -1.0}, "max_lag must not be negative, got -1"),
    ("reward", "gradient_novelty", {"clip": 0.0}, "clip must be positive, got 0"),
    ("regularisers", "kl_dual", {"lr": -0.1}, "lr >= 0, got 1.0, 0.2, 2.0, -0.1"),
]


@pytest.mark.parametrize(("kind", "name", "options", "message"), REFUSED)
def test_a_value_without_sense_is_refused(
    kind: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProxpoError, match=f"^{name}: .*{message}"):
        make_stage(kind, name, **options)
