"""Adapter to TRL: `ProxpoTrainer`, a GRPOTrainer that trains with any recipe."""

from proxpo.adapters.trl._compatibility import TESTED_VERSIONS, api_changes, check_trl

check_trl()

from proxpo.adapters.trl._trainer import ProxpoTrainer  # noqa: E402

__all__ = ["TESTED_VERSIONS", "ProxpoTrainer", "api_changes", "check_trl"]
