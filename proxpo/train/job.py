"""The parts of a running job: built from a config, saved to a checkpoint, restored from one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.models import Policy, load_policy, save_policy
from proxpo.ops.streams import derive, generator
from proxpo.optimizers import make_optimizer
from proxpo.rewards import RewardPool
from proxpo.runs.checkpoint import Checkpoint, save_checkpoint
from proxpo.sampler import Sampler, make_sampler
from proxpo.settings import at_length
from proxpo.train.collect import Source
from proxpo.train.config import Change, Config, as_dict
from proxpo.train.cuts import TokenBudget, fitted_tokens
from proxpo.train.evaluate import Examination
from proxpo.train.experience import Experience
from proxpo.train.faults import is_out_of_memory
from proxpo.train.graphs import CudaRecorder, PolicyGraphs, unsuited
from proxpo.train.refusals import check_fields
from proxpo.train.scoring import Learner
from proxpo.train.tasks import Task, fit_prompts, make_task, take_pool
from proxpo.types import Clock, Recipe


@dataclass(kw_only=True)
class Job:
    """The parts of a run and its progress; `save` and `restore` say what a checkpoint holds."""

    config: Config
    task: Task
    learner: Learner
    sampler: Sampler
    pool: RewardPool
    exam: Examination
    source: Source
    initial: nn.Module
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    waiting: list[Experience] = field(default_factory=list)  # sampled, not yet trained on
    past: list[Experience] = field(default_factory=list)  # trained on, may be replayed
    before: dict[str, Any] = field(default_factory=dict)  # the first evaluation
    unwritten: dict[str, float] | None = None  # metrics of a step that waits for its evaluation
    changes: list[dict[str, Any]] = field(default_factory=list)  # of settings, on resuming

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def trainer_state(self) -> dict[str, int | float]:
        """Progress of training, under the names of TRL's `trainer_state`."""
        return {
            "global_step": self.step,
            "max_steps": self.config.train.steps,
            "epoch": self.source.cursor / len(self.source.problems),
        }

    @property
    def clock(self) -> Clock:
        """Progress of training, for stages that follow it."""
        learner = self.learner
        rate = learner.optimizer.param_groups[0]["lr"]
        return Clock(
            step=self.step,
            steps=self.config.train.steps,
            updates=learner.version,
            learning_rate=float(rate),
        )

    def close(self) -> None:
        self.pool.close()
        self.sampler.close()


def build_job(config: Config) -> Job:
    """Builds a job: loads the model and the task, starts sampler and reward workers."""
    recipe = config.make_recipe()
    _check_blocks(config)
    policy = load_policy(
        config.model.name,
        device=_device(config.model.device),
        dtype=None if config.model.dtype == "auto" else config.model.dtype,
        lora=config.model.lora,
        seed=derive(config.seed, "init"),
    )
    if config.model.gradient_checkpointing:
        policy.model.gradient_checkpointing_enable()
    task = make_task(
        config.task.name,
        reward=config.task.reward,
        correct_above=config.task.correct_above,
        **config.task.options,
    )
    recipe = fitted(recipe, config, task)
    check_fields(recipe, task)
    if config.task.problems is not None:
        task = take_pool(task, config.task.problems)
    task = fit_prompts(
        task, policy.tokenizer, limit=config.rollout.max_prompt, drop=config.task.drop_long
    )
    for split, problems in (("train", task.train), ("test", task.test)):
        if not len(problems):
            raise ProxpoError(f"task {task.name}: the {split} split is empty")
    initial = copy.deepcopy(policy.model).requires_grad_(False)
    return Job(
        config=config,
        task=task,
        learner=_learner(config, policy, recipe, initial),
        sampler=make_sampler(config.rollout.backend, policy, **config.rollout.options),
        pool=RewardPool(
            task.reward,
            workers=config.task.reward_workers,
            timeout=config.task.reward_timeout,
            max_failed=config.task.reward_max_failed,
            memory=config.task.reward_memory,
        ),
        exam=_exam(config, task),
        source=Source(problems=task.train, seed=config.seed, held_out=task.held_out),
        initial=initial,
    )


def splits(job: Job) -> list[str]:
    """Lines on the sizes of the training and held-out splits and on their overlap."""
    task, pool, size = job.task, job.config.task.problems, job.config.evaluate.size
    lines = []
    if pool is not None:
        fewer = "" if len(task.train) >= pool else f", all there are (task.problems is {pool})"
        lines.append(f"training on {len(task.train)} different problems{fewer}")
    common, asked = task.overlap(), len(task.held_out)
    lines.append(f"held out: {asked} questions, {common} of them also in training")
    if len(job.exam.problems) < size:
        lines.append(
            f"evaluating on {len(job.exam.problems)} problems, all there are (evaluate.size is "
            f"{size})"
        )
    if common:
        lines.append(
            f"warning: {common} of {asked} held-out questions are trained on, so their score says "
            "nothing about new ones"
        )
    return lines


def fitted(recipe: Recipe, config: Config, task: Task) -> Recipe:
    """The recipe with its open lengths set to the longest response of this run."""
    turns = task.max_turns if task.tool is not None else 1
    return at_length(recipe, config.rollout.max_tokens * turns)


# Names in a block of options that are settings of their own, or belong to the caller.
RESERVED = {
    "task.options": {
        "name": "task.name",
        "reward": "task.reward",
        "correct_above": "task.correct_above",
    },
    "rollout.options": {"name": "rollout.backend", "policy": "model.name"},
    "train.optimizer_options": {
        "name": "train.optimizer",
        "model": "model.name",
        "lr": "train.lr",
        "weight_decay": "train.weight_decay",
    },
}


def _check_blocks(config: Config) -> None:
    """Refuses options that are settings of their own: one of the two would be ignored."""
    for path, names in RESERVED.items():
        section, name = path.split(".")
        for option in getattr(getattr(config, section), name):
            if option in names:
                raise ProxpoError(f"{path} takes no '{option}': it is the setting {names[option]}")


def save(job: Job, root: Path) -> Path:
    """Writes a checkpoint from which a run continues bit for bit, with weights others can load."""
    learner = job.learner
    trained = {n: p for n, p in learner.policy.model.named_parameters() if p.requires_grad}
    parts: dict[str, Any] = {
        "weights": trained,
        "optimizer": learner.optimizer.state_dict(),
        "recipe": learner.state,
        "waiting": [experience.tensors() for experience in job.waiting],
        "past": [experience.tensors() for experience in job.past],
    }
    if learner.transform is not None:
        parts["transform"] = learner.transform.state_dict()
    if learner.critic is not None:
        parts["critic"] = learner.critic.state_dict()

    info = {
        "config": as_dict(job.config),
        "version": learner.version,
        "cursor": job.source.cursor,
        "tokens": job.tokens,
        "seconds": job.seconds,
        "skipped": job.skipped,
        "before": job.before,
        "unwritten": job.unwritten,
        "changes": job.changes,
    }
    keep, write_model = job.config.checkpoint.keep, partial(save_policy, learner.policy)
    return save_checkpoint(root, job.step, parts, info, keep_last=keep, write_model=write_model)


def restore(job: Job, checkpoint: Checkpoint, changed: Sequence[Change] = ()) -> None:
    """Brings a freshly built job to the state of the checkpoint, or refuses one that does not fit.

    `changed` settings, already in the job's config, are recorded with the step.
    """
    try:
        _restore(job, checkpoint)
        job.changes += [
            {
                "step": checkpoint.step,
                "setting": change.path,
                "before": change.before,
                "after": change.after,
            }
            for change in changed
            if change.path != "out"
        ]
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ProxpoError(
            f"{checkpoint.path} does not fit these settings ({reason}): resume with those the run "
            "was started with, or start another with --out"
        ) from error


def _restore(job: Job, checkpoint: Checkpoint) -> None:
    learner, parts, info = job.learner, checkpoint.parts, checkpoint.info
    _fill(learner.policy.model, parts["weights"])
    _restore_optimizer(learner.optimizer, parts["optimizer"])
    learner.state = parts["recipe"]
    if learner.transform is not None:
        learner.transform.load_state_dict(parts["transform"])
    if learner.critic is not None:
        learner.critic.load_state_dict(parts["critic"])
    device = job.policy.device
    job.waiting = [Experience(**tensors).to(device) for tensors in parts["waiting"]]
    job.past = [Experience(**tensors).to(device) for tensors in parts["past"]]
    job.step, learner.version = checkpoint.step, info["version"]
    job.source.cursor, job.tokens = info["cursor"], info["tokens"]
    job.seconds, job.skipped, job.before = info["seconds"], info["skipped"], info["before"]
    # Checkpoints of earlier versions have neither.
    job.unwritten, job.changes = info.get("unwritten"), list(info.get("changes", ()))
    job.sampler.sync()


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads the optimizer's state; its rate and decay stay those of the settings.

    Groups come as last scheduled, `lr` = `base_lr` x factor; a new rate takes the factor over
    until the next step sets its own.
    """
    own = [
        {name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(saved)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group["weight_decay"], base = settings["weight_decay"], group.get("base_lr", group["lr"])
        if settings["lr"] != base:
            factor = group["lr"] / base if base else 1.0
            group["lr"], group["base_lr"] = settings["lr"] * factor, settings["lr"]


def _fill(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads the trained weights of the checkpoint, which must have these and no others."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if own.keys() != weights.keys():
        raise ValueError(f"it holds {len(weights)} trained weights, this model has {len(own)}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(own[name].shape)}")
        with torch.no_grad():
            own[name].copy_(value)


def _learner(config: Config, policy: Policy, recipe: Any, initial: nn.Module) -> Learner:
    wanted = recipe.needs()
    critic = None
    if wanted & {"values", "old_values"} or recipe.value is not None:
        critic = nn.Linear(policy.model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(critic.weight)  # starts by expecting nothing; no draw of random numbers
        nn.init.zeros_(critic.bias)
        critic.to(policy.device)
    trained = (
        policy.model
        if critic is None
        else nn.ModuleDict({"policy": policy.model, "critic": critic})
    )
    transform = recipe.gradient.apply() if recipe.gradient is not None else None
    if transform is not None:
        own = recipe.gradient.options.get("seed")  # 0 is its default: the run's seed alone
        transform.seed = derive(config.seed, "overlap", *([own] if own else [])) % 2**31
    return Learner(
        policy=policy,
        recipe=recipe,
        optimizer=make_optimizer(
            config.train.optimizer,
            trained,
            config.train.lr,
            weight_decay=config.train.weight_decay,
            **config.train.optimizer_options,
        ),
        reference=initial if wanted & {"ref_logp", "ref_kl"} else None,
        critic=critic,
        transform=transform,
        graphs=_graphs(config, policy, recipe, critic=critic is not None, transform=transform),
        state=recipe.init_state(),
        budget=TokenBudget(fitted_tokens(policy, transform=transform is not None)),
    )


def _graphs(
    config: Config, policy: Policy, recipe: Recipe, *, critic: bool, transform: Any
) -> PolicyGraphs | None:
    reason = unsuited(policy, recipe, critic=critic, transform=transform)
    if config.train.graphs == "on" and reason:
        raise ProxpoError(f"train.graphs=on cannot record the policy's passes: {reason}")
    if config.train.graphs == "off" or reason:
        return None
    return PolicyGraphs(policy, transform=transform, record=CudaRecorder())


def _exam(config: Config, task: Task) -> Examination:
    """The same held-out problems for every run with this task, whatever its seed."""
    order = torch.randperm(len(task.test), generator=generator(0, "exam"))
    size = config.train.micro_batch
    chosen = [task.test[int(i)] for i in order[: config.evaluate.size]]
    return Examination(
        problems=chosen,
        samples=config.evaluate.k,
        max_tokens=config.rollout.max_tokens,
        temperature=config.train_temperature,
        micro_batch=None if size == "auto" else size or 256,
        seed=0,
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


__all__ = ["Job", "build_job", "fitted", "restore", "save", "splits"]
