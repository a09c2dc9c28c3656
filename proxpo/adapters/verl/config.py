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
      batch_every: 100
      batch_folder: runs/x
      weighted_terms: all

    `batch_every`: micro-batches of the first rank between those saved in batch_folder/batches, for
    `proxpo inspect --run`; 0: none. verl tells a loss no step, so its calls are counted.
    `weighted_terms`: what `algorithm.rollout_correction` weighs, the "policy" term or "all" terms,
    regularisers of the method among them, as verl's kl_cov and dro do.
    Made in the driver and in every worker before any model is loaded, it refuses a recipe that
    cannot run there.
    """

    options: dict[str, Any] = field(default_factory=dict)
    batch_every: int = 0
    batch_folder: str = "."
    weighted_terms: str = "policy"

    def __post_init__(self) -> None:
        slug = known_slug(self.loss_mode)
        if slug is not None:
            loss_recipe(slug, self.options)
            if self.weighted_terms not in ("policy", "all"):
                raise ProxpoError(
                    "verl: policy_loss.weighted_terms is policy or all, got "
                    f"'{self.weighted_terms}'"
                )
            if self.batch_every < 0:
                raise ProxpoError(
                    f"verl: policy_loss.batch_every is a number of micro-batches, 0 for none, got "
                    f"{self.batch_every}"
                )
        elif self.batch_every:
            raise ProxpoError(
                "verl: policy_loss.batch_every belongs to a loss_mode proxpo_*, got "
                f"'{self.loss_mode}'"
            )
        elif self.weighted_terms != "policy":
            raise ProxpoError(
                "verl: policy_loss.weighted_terms belongs to a loss_mode proxpo_*, got "
                f"'{self.loss_mode}'"
            )
        elif self.options:
            raise ProxpoError(
                f"verl: policy_loss.options belong to a loss_mode proxpo_*, got '{self.loss_mode}'"
            )


__all__ = ["LossConfig"]
