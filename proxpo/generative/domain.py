"""The domains of generative models and of energies, and the settings that runs there read."""

from collections.abc import Mapping

from proxpo.recipes import Procedure
from proxpo.train._domain import OF_RECIPES, Domain, without_language
from proxpo.types import Recipe

NO_RECIPE = "this method makes updates of its own, with its own options"
ALWAYS = {
    **dict.fromkeys(("model.name", "model.options"), "the task brings its network"),
    **without_language(
        text="samples have no text",
        reward="the task's name says the reward",
        problems="there is no list of problems",
        right="no sample is right or wrong",
        sampler="samples are drawn in this process",
        draws="the sampler's noise is fixed by its schedule",
        exam="evaluate.size samples are evaluated",
    ),
}
RECIPE_ALONE = (*OF_RECIPES, "log.samples")


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
