"""The domain of control: tasks gym:NAME, and the settings that runs there read."""

from collections.abc import Mapping

from proxpo.errors import ProxpoError
from proxpo.recipes import Procedure
from proxpo.train._domain import Domain
from proxpo.train._schema import Config
from proxpo.types import Recipe

NO_WORDS = "an environment has no text"
NO_RECIPE = "this method makes updates of its own"
LANGUAGE_ALONE = {
    "model.gradient_checkpointing": "the network is small",
    "model.lora": "the network is trained whole",
    "task.reward": "the environment gives the reward",
    "task.reward_workers": "the environment gives the reward",
    "task.reward_timeout": "the environment gives the reward",
    "task.reward_memory": "the environment gives the reward",
    "task.reward_max_failed": "the environment gives the reward",
    "task.problems": "an environment has no list of problems",
    "task.correct_above": "an environment does not say what is right",
    "task.drop_long": NO_WORDS,
    "rollout.backend": "environments run in this process",
    "rollout.options": "environments run in this process",
    "rollout.max_prompt": NO_WORDS,
    "rollout.temperature": "a policy draws from its own distribution",
    "rollout.top_p": "a policy draws from its own distribution",
    "rollout.thoughts": "a language model alone reads its hidden states",
    "train.train_temperature": "a policy draws from its own distribution",
    "train.graphs": "the network is small",
    "evaluate.k": "episodes of the deterministic policy are evaluated",
    "log.batch_every": "a language model's batch alone is saved",
}
# Settings of recipes that a method with updates of its own has options for, or no use of.
RECIPE_ALONE = (
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "train.updates_per_rollout"),
    *("train.mini_batches", "train.micro_batch", "train.optimizer", "train.optimizer_options"),
    *("train.lr", "train.weight_decay", "train.grad_clip", "train.lr_schedule"),
    *("train.warmup_steps", "train.off_policy_lag", "train.replay_share"),
)


def unread(made: Recipe | Procedure) -> Mapping[str, str]:
    """Settings that a run of this method does not read, and why."""
    own = isinstance(made, Procedure) and not _samples_rollouts(made)
    brings = ("model.name", "model.options") if made.name == "avg" else ()
    return {
        **LANGUAGE_ALONE,
        **dict.fromkeys(RECIPE_ALONE if own else (), NO_RECIPE),
        **dict.fromkeys(brings, "this method brings its networks; its option is hidden"),
    }


def _samples_rollouts(made: Procedure) -> bool:
    """True for procedures that update on rollouts as recipes do."""
    return made.name == "props" or made.options.get("variant") == "reinforce"


def _check(config: Config) -> None:
    if config.method == "stateful-policies" and config.model.name != "gru":
        raise ProxpoError(
            f"stateful-policies needs model.name=gru, got {config.model.name}; with "
            "model.options.state=0 that is the method without an internal state"
        )


CONTROL = Domain(
    name="control",
    prefixes=("gym",),
    example="gym:CartPole-v1",
    method="ppo",
    suggested=("ppo", "avg", "props", "stateful-policies"),
    recipes=True,
    defaults={
        "model.name": "mlp",
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 256,
        "train.steps": 25,
        "train.mini_batches": 8,
        "train.updates_per_rollout": 80,
        "train.lr": 3e-4,
        "train.weight_decay": 0.0,
        "train.grad_clip": 0.5,
        "train.optimizer_options": {"eps": 1e-5},
        "evaluate.every": 5,
        "evaluate.size": 10,
        "evaluate.k": 0,
        "checkpoint.every": 10,
    },
    options={"gamma": 0.99, "lam": 0.95, "value_clip": None},
    unread=unread,
    check=_check,
)

ARCHITECTURE = Domain(
    name="architecture",
    prefixes=("architecture",),
    example="architecture:toy",
    method="tabnas",
    suggested=("tabnas",),
    defaults={
        "model.name": "controller",
        "train.steps": 500,
        "evaluate.every": 50,
        "evaluate.k": 0,
        "checkpoint.every": 100,
    },
    unread=lambda made: dict.fromkeys(
        (
            *(path for path in LANGUAGE_ALONE if not path.startswith("model.")),
            *("model.name", "model.options", "model.device", "model.dtype", "model.lora"),
            *("model.gradient_checkpointing", "rollout.max_tokens", "evaluate.size"),
            *("log.samples", *RECIPE_ALONE),
        ),
        "a controller of categorical choices has its own options",
    ),
)

__all__ = ["ARCHITECTURE", "CONTROL"]
