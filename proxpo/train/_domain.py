"""`Domain`: a kind of thing to train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxpo.recipes import Procedure
from proxpo.train._schema import Config
from proxpo.types import Recipe

# Settings of recipes, which a method with updates of its own has options for, or no use of.
OF_RECIPES = (
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "train.updates_per_rollout"),
    *("train.mini_batches", "train.micro_batch", "train.optimizer", "train.optimizer_options"),
    *("train.lr", "train.weight_decay", "train.grad_clip", "train.lr_schedule"),
    *("train.warmup_steps", "train.off_policy_lag", "train.replay_share"),
    "train.on_no_signal",
)


def without_language(
    *, text: str, reward: str, problems: str, right: str, sampler: str, draws: str, exam: str
) -> dict[str, str]:
    """The settings of language models alone, by path, and why a domain does not read them.

    text, reward, ...: the reason for the settings of prompts, of the reward, of the problems to
    train on, of right and wrong, of the sampler, of its distribution, and of pass@k
    """
    reasons = {
        "the network is small": ("model.gradient_checkpointing", "train.graphs"),
        "the network is trained whole": ("model.lora",),
        "a language model alone reads its hidden states": ("rollout.thoughts",),
        "a language model's batch alone is saved": ("log.batch_every",),
        text: ("task.drop_long", "rollout.max_prompt"),
        reward: (
            *("task.reward", "task.reward_workers", "task.reward_timeout"),
            *("task.reward_memory", "task.reward_max_failed"),
        ),
        problems: ("task.problems",),
        right: ("task.correct_above",),
        sampler: ("rollout.backend", "rollout.options"),
        draws: ("rollout.temperature", "rollout.top_p", "train.train_temperature"),
        exam: ("evaluate.k",),
    }
    return {path: reason for reason, paths in reasons.items() for path in paths}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A kind of thing to train: its tasks, its methods, and the settings it reads.

    prefixes: of its tasks' names, before the colon; example: the name of one task
    method: taken where none is given; suggested: methods that a refusal names
    recipes: it also trains recipes of language models, where it knows their fields
    defaults: settings by path, in place of those of `Config`
    options: of methods that have them, in place of the method's own defaults
    check: refuses settings that do not fit each other
    unread: the settings by path that have no effect there with a method, and why
    """

    name: str
    prefixes: tuple[str, ...] = ()
    example: str
    method: str
    suggested: tuple[str, ...]
    recipes: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unread: Callable[[Recipe | Procedure], Mapping[str, str]] = lambda made: {}
    check: Callable[[Config], None] = lambda config: None


__all__ = ["OF_RECIPES", "Domain", "without_language"]
