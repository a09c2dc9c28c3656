"""The domain of control: tasks gym:NAME, and the settings that runs there read."""

from collections.abc import Mapping

from proxpo.errors import ProxpoError
from proxpo.recipes import Procedure
from proxpo.train._domain import OF_RECIPES, Domain, without_language
from proxpo.train._schema import Config
from proxpo.types import Recipe

NO_RECIPE = "this method makes updates of its own"
LANGUAGE_ALONE = without_language(
    text="an environment has no text",
    reward="the environment gives the reward",
    problems="an environment has no list of problems",
    right="an environment does not say what is right",
    sampler="environments run in this process",
    draws="a policy draws from its own distribution",
    exam="episodes of the deterministic policy are evaluated",
)


def unread(made: Recipe | Procedure) -> Mapping[str, str]:
    """Settings that a run of this method does not read, and why."""
    own = isinstance(made, Procedure) and not _samples_rollouts(made)
    brings = ("model.name", "model.options") if made.name == "avg" else ()
    return {
        **LANGUAGE_ALONE,
        **dict.fromkeys(OF_RECIPES if own else (), NO_RECIPE),
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
            *("log.samples", *OF_RECIPES),
        ),
        "a controller of categorical choices has its own options",
    ),
)

__all__ = ["ARCHITECTURE", "CONTROL"]
