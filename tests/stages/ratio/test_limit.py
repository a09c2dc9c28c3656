"""The bound on the exponent of a ratio."""

import pytest

from proxpo import ProxpoError, make_stage

STAGES = ("token", "sequence", "turn", "gaussian", "recentred", "kalman", "ema")


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_that_leaves_one_ratio_is_refused(name: str, limit: float) -> None:
    with pytest.raises(ProxpoError, match=f"ratio={name}: limit must be positive"):
        make_stage("ratio", name, limit=limit)
