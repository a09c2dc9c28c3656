"""verl's config of a policy loss, extended by options of the method."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig

from proxpo.adapters.verl._recipes import known_slug, loss_recipe
from proxpo.errors import ProxpoError


@dataclass
class LossConfig(PolicyLossConfig):
    """verl's policy loss config and `options` of the method: its own, and swaps of its stages.

    policy_loss:
      _target_: proxpo.adapters.verl.LossConfig
      loss_mode: proxpo_grpo
      options: {clip_high: 0.28, ratio: {name: kalman, q: 1e-6}}

    Made in the driver and in every worker before any model is loaded, it refuses a recipe that
    cannot run there.
    """

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slug = known_slug(self.loss_mode)
        if slug is not None:
            loss_recipe(slug, self.options)
        elif self.options:
            raise ProxpoError(
                f"verl: policy_loss.options belong to a loss_mode proxpo_*, got '{self.loss_mode}'"
            )


__all__ = ["LossConfig"]
