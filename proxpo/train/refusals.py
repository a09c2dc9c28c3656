"""Refusals: batch fields that nothing provides, settings that the recipe does not follow."""

from collections.abc import Collection

from proxpo.compose import check_advantages_come, local_stages
from proxpo.errors import ProxpoError
from proxpo.recipes import Procedure
from proxpo.settings import lengths, make_recipe
from proxpo.stages.advantage.attempts import ATTEMPTS
from proxpo.stages.ratio.folded import FOLDED
from proxpo.stages.ratio.gaussian import GAUSSIAN
from proxpo.stages.ratio.latent import LATENT
from proxpo.train._schema import Config
from proxpo.train._settings import changes
from proxpo.train.domains import unread
from proxpo.train.fitted import default_config
from proxpo.train.tasks import Task
from proxpo.types import FIELDS, KINDS, Recipe, Stage

NOT_PROVIDED = {
    **dict.fromkeys(
        (field.name for field in GAUSSIAN),
        "tokens of a language model have no Gaussian policy: bring it in a batch of your own",
    ),
    **dict.fromkeys(
        ("token_rewards", "step_end"),
        "this trainer runs no process reward model: bring it in a batch of your own",
    ),
}

# Fields of a policy that thinks in hidden states, among them the means of its thoughts.
THOUGHTS = {"mean", "old_mean", "ref_mean", *(field.name for field in LATENT)}
TURNS = {field.name for field in ATTEMPTS}
VALUED = {"gae", "episode_gae"}  # advantages that read values, or those at rollout time
FOLDS = {field.name for field in FOLDED}

# Settings that follow from what a schedule may decide, and the words for it.
DECIDED = {
    "count": (("train.updates_per_rollout",), "decides how many updates a rollout gets"),
    "parts": (("train.mini_batches",), "decides which part of a rollout each update sees"),
    "optimizer": (
        (
            *("train.optimizer", "train.optimizer_options", "train.lr", "train.weight_decay"),
            *("train.grad_clip", "train.lr_schedule", "train.warmup_steps"),
        ),
        "moves the weights without the optimizer",
    ),
    "loss": ((), "has a loss of its own"),
}
# Kinds of stages that make a loss and its gradient.
OF_THE_LOSS = KINDS[KINDS.index("weights") : KINDS.index("schedule")]


def unused(config: Config, recipe: Recipe | Procedure) -> dict[str, str]:
    """A line for each setting, by path, that was changed and has no effect on this method."""
    changed = dict(line.split(": ", 1) for line in changes(default_config(config), config))
    lines = {
        path: f"{recipe.name}: {path}={changed[path].split(' -> ', 1)[1]} has no effect: {reason}"
        for path, reason in unread(config, recipe).items()
        if path in changed
    }
    schedule = recipe.schedule if isinstance(recipe, Recipe) else None
    if schedule is None:
        return lines
    for decision in schedule.decides:
        paths, reason = DECIDED[decision]
        set_here = {path: changed[path].split(" -> ", 1)[1] for path in changed.keys() & set(paths)}
        if decision == "loss":
            set_here = {f"recipe.{key}": config.recipe[key] for key in _of_the_loss(config)}
        for path, value in set_here.items():
            lines[path] = (
                f"{recipe.name}: {path}={value} has no effect, since schedule={schedule.name} "
                f"{reason}: set the schedule's own options, or schedule=none"
            )
    return dict(sorted(lines.items()))


def _of_the_loss(config: Config) -> list[str]:
    """The settings of the recipe that change its loss and nothing else."""
    recipe, found = config.make_recipe(), []
    for key in config.recipe:
        others = {other: value for other, value in config.recipe.items() if other != key}
        try:
            without = make_recipe(config.method, others)
        except ProxpoError:  # other settings are about what this one sets
            continue
        same_around = _outside_the_loss(without) == _outside_the_loss(recipe)
        if same_around and without.stages() != recipe.stages():
            found.append(key)
    return found


def _outside_the_loss(recipe: Recipe) -> list[tuple[str, Stage]]:
    return [(place, stage) for place, stage in recipe.stages() if stage.kind not in OF_THE_LOSS]


def check_used(config: Config, recipe: Recipe | Procedure, paths: Collection[str]) -> None:
    """Refuses settings without effect among `paths`, which the user wrote for this run."""
    for path, line in unused(config, recipe).items():
        if any(written == path or written.startswith(f"{path}.") for written in paths):
            raise ProxpoError(line)


def remarks(config: Config, recipe: Recipe) -> list[str]:
    """Lines on a run's settings that the config alone does not show.

    Settings of a shared file that this recipe does not follow, lengths from the run's limit, and
    micro-batches that a method depends on.
    """
    asked, own = lengths(config.make_recipe()), lengths(recipe)
    taken = [f"{place}={own[place]:g}" for place, value in asked.items() if value is None]
    lines = [f"{recipe.name}: {', '.join(taken)}, from rollout.max_tokens"] if taken else []
    return [*unused(config, recipe).values(), *lines, *_cut_dependence(config, recipe)]


def _cut_dependence(config: Config, recipe: Recipe) -> list[str]:
    """A line for a method that depends on the cut into micro-batches, where there is one."""
    local, size = depends_on_cut(config, recipe), config.train.micro_batch
    if size == "auto":
        cut = "the cut of train.micro_batch=auto, which follows lengths and memory,"
        remedy = "; a number fixes it"
    else:
        rows = (
            config.rollout.prompts_per_step
            * config.rollout.samples_per_prompt
            // config.train.mini_batches
        )
        if size is None or size >= rows:
            return []
        cut, remedy = f"train.micro_batch={size} of {rows} responses", ""
    return local and [
        f"{recipe.name}: {' and '.join(local)} looks at each micro-batch by itself, so {cut} is "
        f"part of the method{remedy}"
    ]


def depends_on_cut(config: Config, recipe: Recipe) -> list[str]:
    """Parts of the method that look at each micro-batch by itself; transforms where memory cuts."""
    gradient = recipe.gradient if config.train.micro_batch == "auto" else None
    return local_stages(recipe) + ([f"gradient={gradient.name}"] if gradient is not None else [])


def check_advantages(recipe: Recipe) -> None:
    """Refuses a recipe without an advantage stage, or whose advantages read a missing critic."""
    check_advantages_come(recipe)
    advantage = recipe.advantage
    values = recipe.needs() & {"values", "old_values"}
    if advantage is not None and advantage.name in VALUED and not values:
        raise ProxpoError(
            f"{recipe.name}: advantage={advantage.name} reads the values of a critic, and this "
            "recipe trains none: value=value_loss adds one"
        )


def check_fields(recipe: Recipe, task: Task, *, thoughts: int = 0) -> None:
    """Refuses a recipe that reads a batch field which nothing in this run provides.

    thoughts: rollout.thoughts
    """
    if recipe.schedule is not None and recipe.schedule.name == "transition_buffer":
        raise ProxpoError(
            f"{recipe.name}: schedule=transition_buffer fits a critic to observations, and tokens "
            "have none; it is for tasks such as digits: or mixture:"
        )
    check_advantages(recipe)
    thinks = "latent" in recipe.needs()
    for _, stage in recipe.stages():
        for name in stage.needs:
            reason = NOT_PROVIDED.get(name, "")
            if thinks and name in THOUGHTS:
                reason = "" if thoughts else "rollout.thoughts is 0: set it, or take grpo"
            if name == "void" and task.tool is None and task.environment is None:
                reason = f"task {task.name} has no tool; take one with turns, such as calculator"
            if name in TURNS and task.environment is None:
                reason = (
                    f"task {task.name} has no environment; take one with attempts, such as arms"
                )
            if name in FOLDS and not task.folds:
                reason = f"task {task.name} folds no history; take one that does, such as dialogue"
            schedule = recipe.schedule.name if recipe.schedule else "none"
            if name == "prev_logp" and schedule != "reincarnation":
                reason = f"it comes from schedule=reincarnation, and this recipe has {schedule}"
            if reason:
                _refuse(recipe, stage, name, reason)


def check_thoughts(config: Config, recipe: Recipe, task: Task) -> None:
    """Refuses what latent thoughts cannot be combined with."""
    reason = ""
    if config.rollout.backend == "vllm":
        reason = "rollout.backend=vllm feeds tokens alone; take local"
    elif recipe.gradient is not None:
        reason = (
            f"gradient={recipe.gradient.name} knows no inputs but tokens; set gradient=none, or "
            "take a method without a transform, such as vlpo or grpo"
        )
    elif task.tool is not None or task.environment is not None:
        reason = f"they come before a response of one turn, and task {task.name} has several"
    if config.rollout.thoughts and reason:
        raise ProxpoError(
            f"{recipe.name}: rollout.thoughts={config.rollout.thoughts} cannot be: {reason}"
        )


def _refuse(recipe: Recipe, stage: Stage, name: str, reason: str) -> None:
    raise ProxpoError(
        f"{recipe.name}: {stage.kind}={stage.name} needs the batch field '{name}' "
        f"({FIELDS[name].doc}), and {reason}"
    )


__all__ = [
    "check_advantages",
    "check_fields",
    "check_thoughts",
    "check_used",
    "depends_on_cut",
    "remarks",
    "unused",
]
