"""The learning signal of a run: why a step had no gradient, the end of a run that never had one.

All follows from the metrics of a step and its measured gradient, so a method that learns without
rewards is left alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxpo.errors import ProxpoError
from proxpo.train._schema import Config
from proxpo.types import Recipe

MOST_IDLE = 3  # steps without a gradient, from the first one on
CLIP = "clip"  # the fact that grad_clip acts on a transformed gradient
BEST = 1.0  # reward of a right response, where the reward function does not say what is right
# Causes that remain in later steps, with what helps, the most likely first.
REMEDIES = {
    "cut": "a higher rollout.max_tokens",
    "unparsed": "a prompt that asks for answers in the form that the reward reads",
    "single": "rollout.samples_per_prompt above 1",
    "constant": "an easier task, a better model or another reward function",
}


class NoSignalError(ProxpoError):
    """A run ends because no step since its start had a gradient, for a cause that remains."""


@dataclass
class LearningSignal:
    """Gradients of the steps so far and the causes of missing ones; part of a checkpoint.

    learnt: a step had a gradient
    idle: number of the last steps in a row that had none, for a cause that remains
    reason: that cause in words, with what helps
    said: facts that a line was about; each gets one line in a run
    """

    learnt: bool = False
    idle: int = 0
    reason: str = ""
    said: list[str] = field(default_factory=list)

    def see(
        self, step: int, metrics: Mapping[str, float], config: Config, recipe: Recipe
    ) -> list[str]:
        """Counts a step; lines on its gradient, where a fact about it is new to this run."""
        norm, rollout = metrics["grad_norm"], config.rollout
        reads_rewards = "rewards" in recipe.needs()
        limits = {"max_tokens": rollout.max_tokens, "samples": rollout.samples_per_prompt}
        facts = common_facts(metrics, **limits) if reads_rewards else {}
        if math.isfinite(norm):
            self._count(facts, has_gradient=norm != 0)
        if norm != 0:  # such a method may learn from equal rewards
            facts = {name: words for name, words in facts.items() if name in REMEDIES}
            facts.pop("single", None)
        words = "; ".join(facts.values())
        if norm == 0:
            link = ": " if facts else ", though rewards differ" if reads_rewards else ""
            words = f"the gradient is zero{link}{words}"
            facts = {**facts, "zero" if facts else "zero alone": ""}
        new = [name for name in facts if name not in self.said]
        self.said += new
        lines = [f"step {step}: {words}"] if new else []
        if metrics.get("gradient/clipped") == 1 and recipe.gradient and CLIP not in self.said:
            self.said.append(CLIP)
            limit = config.train.grad_clip
            lines.append(
                f"step {step}: grad_norm={norm:.4g} is the norm after gradient="
                f"{recipe.gradient.name}; where that is above train.grad_clip={limit:g}, an update "
                f"gets a gradient of norm {limit:g}"
            )
        return lines

    def _count(self, facts: Mapping[str, str], *, has_gradient: bool) -> None:
        self.learnt = self.learnt or has_gradient
        remaining = [name for name in REMEDIES if name in facts and "best" not in facts]
        self.idle = self.idle + 1 if remaining and not has_gradient else 0
        if len(remaining) > 1 and "constant" in remaining:  # a consequence of the others
            remaining.remove("constant")
        helps = " and ".join(REMEDIES[name] for name in remaining)
        self.reason = f"{'; '.join(facts.values())}. What helps: {helps}" if self.idle else ""

    def check(self) -> None:
        """Raises where no step so far had a gradient, for a cause that remains."""
        if not self.learnt and self.idle >= MOST_IDLE:
            raise NoSignalError(
                "nothing is learnt: the gradient was zero in every step so far. In the last one "
                f"{self.reason}. train.on_no_signal=warn goes on all the same"
            )


def common_facts(
    metrics: Mapping[str, float], *, max_tokens: int, samples: int = 2
) -> dict[str, str]:
    """Facts on all responses of a rollout that leave nothing to learn, in words by name."""
    facts: dict[str, str] = {}
    if metrics.get("reward_std") == 0 and metrics.get("proxpo/samples") != 1:
        name, words = _constant(metrics)
        facts[name] = words
    elif metrics.get("frac_reward_zero_std") == 1:
        if samples == 1:
            facts["single"] = "rollout.samples_per_prompt=1 leaves no response to compare with"
        else:
            facts["alike"] = "no prompt has responses with different rewards"
    if metrics.get("proxpo/parsed") == 0:
        facts["unparsed"] = "the reward found no answer in any response"
    # Turns of an environment are often as long as the limit.
    if metrics.get("completions/clipped_ratio") == 1 and "proxpo/crowded" not in metrics:
        facts["cut"] = f"every response was cut at rollout.max_tokens={max_tokens}"
    return facts


def _constant(metrics: Mapping[str, float]) -> tuple[str, str]:
    """The fact that all rewards of a step are equal."""
    reward = metrics["reward"]
    if math.isnan(reward):
        return "constant", "no response has a reward"
    right = metrics.get("proxpo/train_accuracy")
    if right == 1:
        return "best", f"every reward is {reward:g}, and every response right"
    if right is None and reward >= BEST:
        return "best", f"every reward is {reward:g}, taken for the best"
    return "constant", f"every reward is {reward:g}"


__all__ = ["LearningSignal", "NoSignalError", "common_facts"]
