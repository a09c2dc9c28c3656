"""Recipes that a run cannot feed: refused before anything is loaded, by field and provider."""

from proxpo.errors import ProxpoError
from proxpo.train.tasks import Task
from proxpo.types import FIELDS, Recipe, Stage

NOBODY = {
    **dict.fromkeys(
        ("mean", "old_mean", "ref_mean", "noise", "step_size", "time"),
        "tokens of a language model have no Gaussian policy: bring it in a batch of your own",
    ),
    **dict.fromkeys(
        ("token_rewards", "step_end"),
        "this trainer runs no process reward model: bring it in a batch of your own",
    ),
}


def check_fields(recipe: Recipe, task: Task) -> None:
    """Refuse a recipe one of whose fields nobody in this run provides."""
    for _, stage in recipe.stages():
        for name in stage.needs:
            reason = NOBODY.get(name, "")
            if name == "void" and task.tool is None:
                reason = f"task {task.name} has no tool; take one with turns, such as calculator"
            schedule = recipe.schedule.name if recipe.schedule else "none"
            if name == "prev_logp" and schedule != "reincarnation":
                reason = f"it comes from schedule=reincarnation, and this recipe has {schedule}"
            if reason:
                _refuse(recipe, stage, name, reason)


def _refuse(recipe: Recipe, stage: Stage, name: str, reason: str) -> None:
    raise ProxpoError(
        f"{recipe.name}: {stage.kind}={stage.name} needs the batch field '{name}' "
        f"({FIELDS[name]}), and {reason}"
    )


__all__ = ["check_fields"]
