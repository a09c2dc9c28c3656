"""The domains of generative models and of energies, and the settings that runs there read."""

from collections.abc import Mapping

from proxpo.recipes import Procedure
from proxpo.train._domain import Domain
from proxpo.types import Recipe

NO_WORDS = "samples have no text"
NO_RECIPE = "this method makes updates of its own, with its own options"
TASK_NETWORK = "the task brings its network"
REWARD = "the task's name says the reward"
ALWAYS = {
    "model.name": TASK_NETWORK,
    "model.options": TASK_NETWORK,
    "model.gradient_checkpointing": "the network is small",
    "model.lora": "the network is trained whole",
    "task.reward": REWARD,
    "task.reward_workers": REWARD,
    "task.reward_timeout": REWARD,
    "task.reward_memory": REWARD,
    "task.reward_max_failed": REWARD,
    "task.problems": "there is no list of problems",
    "task.correct_above": "no sample is right or wrong",
    "task.drop_long": NO_WORDS,
    "rollout.backend": "samples are drawn in this process",
    "rollout.options": "samples are drawn in this process",
    "rollout.max_prompt": NO_WORDS,
    "rollout.temperature": "the sampler's noise is fixed by its schedule",
    "rollout.top_p": "the sampler's noise is fixed by its schedule",
    "rollout.thoughts": "a language model alone reads its hidden states",
    "train.train_temperature": "the sampler's noise is fixed by its schedule",
    "train.graphs": "the network is small",
    "evaluate.k": "evaluate.size samples are evaluated",
    "log.batch_every": "a language model's batch alone is saved",
}
RECIPE_ALONE = (
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "train.updates_per_rollout"),
    *("train.mini_batches", "train.micro_batch", "train.optimizer", "train.optimizer_options"),
    *("train.lr", "train.weight_decay", "train.grad_clip", "train.lr_schedule"),
    *("train.warmup_steps", "train.off_policy_lag", "train.replay_share", "log.samples"),
)


def unread(made: Recipe | Procedure) -> Mapping[str, str]:
    """Settings that a run of this method does not read, and why."""
    own = RECIPE_ALONE if isinstance(made, Procedure) else ()
    options = {"task.options": "the task's name says it all"}
    return {**ALWAYS, **options, **dict.fromkeys(own, NO_RECIPE)}


GENERATIVE = Domain(
    name="generative models",
    prefixes=("digits", "mixture"),
    example="digits:class=7",
    method="dpok",
    suggested=("dpok", "grpo-guard", "grpo", "ac-flow"),
    recipes=True,
    defaults={
        "model.name": "denoiser",
        "rollout.prompts_per_step": 1,
        "rollout.samples_per_prompt": 64,
        "rollout.max_tokens": 20,
        "train.steps": 200,
        "train.updates_per_rollout": 4,
        "train.lr": 3e-4,
        "train.weight_decay": 0.0,
        "evaluate.every": 20,
        "evaluate.size": 256,
        "evaluate.k": 0,
        "checkpoint.every": 50,
    },
    unread=unread,
)

ENERGIES = Domain(
    name="energies",
    prefixes=("energy",),
    example="energy:two-modes",
    method="adjoint-sampling",
    suggested=("adjoint-sampling",),
    defaults={
        "model.name": "control",
        "train.steps": 100,
        "evaluate.every": 10,
        "evaluate.size": 1000,
        "evaluate.k": 0,
        "checkpoint.every": 20,
    },
    unread=lambda made: {**ALWAYS, **dict.fromkeys(RECIPE_ALONE, NO_RECIPE)},
)

__all__ = ["ENERGIES", "GENERATIVE"]
