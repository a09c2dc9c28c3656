"""proxpo inside TRL: `ProxpoTrainer`, a GRPOTrainer that trains with any recipe."""

from proxpo.adapters.trl._host import TESTED, changes, check_host

check_host()

from proxpo.adapters.trl._trainer import ProxpoTrainer  # noqa: E402

__all__ = ["TESTED", "ProxpoTrainer", "changes", "check_host"]
