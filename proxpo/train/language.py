"""Jobs of language models: built from a config; rollouts and evaluation with their sampler."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from proxpo.batch_file import save_step, saved_steps
from proxpo.errors import ProxpoError
from proxpo.models import (
    Policy,
    load_policy,
    recompute_layers,
    recomputes_layers,
    save_policy,
)
from proxpo.ops.shapes import Tensor
from proxpo.ops.streams import derive, generator
from proxpo.replay.graphs import CudaRecorder, PolicyGraphs, unsuited
from proxpo.report.text import plural
from proxpo.rewards import RewardPool
from proxpo.runs.jsonlines import CUT_TOKENS
from proxpo.sampler import (
    Backend,
    Sampler,
    agreement,
    fastest_backend,
    logp_gap,
    make_sampler,
)
from proxpo.settings import at_length
from proxpo.stages.ratio.latent import thought_noise
from proxpo.train.collect import Collected, Collector, SamplingOptions, Source, collect
from proxpo.train.config import Config
from proxpo.train.cuts import fitted_budget, fitting_tokens, update_bytes
from proxpo.train.evaluate import Examination, evaluate
from proxpo.train.experience import Experience
from proxpo.train.job import Examined
from proxpo.train.observer import SILENT, Observer
from proxpo.train.refusals import check_fields, check_thoughts, depends_on_cut, remarks
from proxpo.train.rollouts import RolloutJob
from proxpo.train.scoring import Learner, run_optimizer, run_transform
from proxpo.train.tasks import Task, fit_prompts, make_task, take_pool
from proxpo.train.update import update
from proxpo.types import Recipe

MOVED = "proxpo/budget/moved"
_COMPARED = 16  # responses of a rollout whose log-probabilities are compared


@dataclass(kw_only=True)
class LanguageJob(RolloutJob):
    """A language model that answers the problems of a task."""

    task: Task
    sampler: Sampler
    pool: RewardPool
    exam: Examination
    source: Source
    initial: nn.Module

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

    def observe(self, observer: Observer) -> None:
        self.learner.budget.on_notice = observer.on_notice

    def check(self, observer: Observer) -> None:
        """Reports sizes and splits; refuses a sampler that runs another model than the trainer."""
        for line in [start_line(self), *splits(self)]:
            observer.on_notice(line)
        if self.config.rollout.backend == "auto":
            backend = sampling_backend(self.config, self.policy)
            observer.on_notice(f"rollout.backend=auto takes {backend.name}: {backend.reason}")
        prompts = [self.task.encode(p, self.policy.tokenizer) for p in self.exam.problems[:16]]
        tokens = min(self.config.rollout.max_tokens, 64)
        gap = agreement(self.policy, self.sampler, prompts, max_tokens=tokens)
        observer.on_notice(
            f"sampler and trainer differ by {gap.largest:.1e} at most, {gap.mean:.1e} on average"
        )
        if not gap.mean < 0.1:
            raise ProxpoError(
                f"the sampler's log-probs differ from the trainer's by {gap.mean:.2g} on average: "
                "they do not run the same model"
            )

    def remarks(self) -> list[str]:
        return remarks(self.config, self.learner.recipe)

    def collect(self, number: int, observer: Observer = SILENT) -> Collected:
        rollout, learner, cursor = self.config.rollout, self.learner, self.source.cursor
        collector = Collector(
            policy=self.policy,
            sampler=self.sampler,
            task=self.task,
            pool=self.pool,
            recipe=learner.recipe,
            options=SamplingOptions(
                samples=rollout.samples_per_prompt,
                max_tokens=rollout.max_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                max_prompt=rollout.max_prompt,
            ),
            seed=self.config.seed,
            state=learner.state,
            clock=self.clock,
            trainer_state=self.trainer_state,
            observer=observer,
        )
        try:
            return collect(
                collector,
                self.source,
                prompts=rollout.prompts_per_step,
                step=number,
                version=learner.version,
            )
        except BaseException:
            self.source.cursor = cursor
            raise

    def update(self, rollout: Experience) -> dict[str, float]:
        gap = self._sampler_gap(rollout)
        metrics = update(self, rollout, on_batch=self._on_batch()) | gap
        cut_at = self.learner.budget.cut_at
        told = cut_at and depends_on_cut(self.config, self.learner.recipe)
        return metrics | ({CUT_TOKENS: float(cut_at)} if told else {})

    def _on_batch(self) -> Callable[[dict[str, Tensor]], None] | None:
        """Writes the batch of the step that is being made, where one is due."""
        step, every = self.step + 1, self.config.log.batch_every
        if not every or step % every:
            return None
        return partial(save_step, self.config.folder, step, on_notice=self.learner.budget.on_notice)

    def _sampler_gap(self, rollout: Experience) -> dict[str, float]:
        """Mean |Δ log π| between vLLM and the trainer, before the update on a fresh rollout."""
        if sampling_backend(self.config, self.policy).name != "vllm":
            return {}
        if bool((rollout.version != self.learner.version).any()):
            return {}
        rows = rollout.rows(torch.arange(min(_COMPARED, len(rollout.mask))))
        gap = logp_gap(
            self.policy,
            rows.input_ids,
            rows.attention_mask,
            mask=rows.token_mask,
            logp=rows.rollout_logp,
            temperature=self.config.rollout.temperature,
        )
        return {"proxpo/sampler_gap": gap.mean}

    def sync(self) -> None:
        self.sampler.sync()

    def examine(self, observer: Observer) -> Examined:
        return evaluate(
            policy=self.policy,
            initial=self.initial if self.learner.version else self.policy.model,
            sampler=self.sampler,
            task=self.task,
            pool=self.pool,
            exam=self.exam,
            budget=self.learner.budget,
            observer=observer,
            trainer_state=self.trainer_state,
        )

    def info(self) -> dict[str, Any]:
        chosen = {"cursor": self.source.cursor, "recomputes": self._recomputes}
        return super().info() | chosen

    @property
    def _recomputes(self) -> bool:
        """True where the layers run again in the backward pass."""
        return recomputes_layers(self.policy.model)

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        super().load(parts, info)
        self.source.cursor = info["cursor"]
        recomputes = info.get("recomputes", self._recomputes)
        if self.config.model.gradient_checkpointing == "auto" and recomputes != self._recomputes:
            recompute_layers(self.policy, on=recomputes)
            learner = self.learner
            learner.graphs = _graphs(
                self.config,
                self.policy,
                learner.recipe,
                critic=learner.critic is not None,
                transform=learner.transform,
            )
        for step, path in saved_steps(self.config.folder).items():
            if step > self.step:  # made again
                path.unlink()

    def model_writer(self, copied: Callable[[Any], Any]) -> Callable[[Path], None]:
        model = self.policy.model
        frozen = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
        state = {
            name: tensor if tensor.data_ptr() in frozen else copied(tensor)
            for name, tensor in model.state_dict().items()
        }
        return partial(save_policy, self.policy, state=state)

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return {
            "accuracy_before": before.get("eval/accuracy"),
            "accuracy_after": after.get("eval/accuracy"),
            "reward_before": before.get("eval/reward"),
            "reward_after": after["eval/reward"],
            "sampled_before": _sampled(before),
            "sampled_after": _sampled(after),
            "kl": after.get("eval/kl"),
            "entropy": after["eval/entropy"],
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }

    def closing_notes(self, rows: list[dict[str, Any]]) -> list[str]:
        """Lines on parts of the method that had no effect: this run never met their condition."""
        method, lines = self.config.method, list[str]()
        if "prompt_id" not in self.learner.recipe.needs():
            return lines
        if self.source.cursor <= len(self.source.problems):
            lines.append(
                f"{method} learns from problems that come again, and none did: more train.steps, "
                "or a smaller task.problems"
            )
        moved = [row[MOVED] for row in rows if row.get(MOVED) is not None]
        if moved and not any(moved):
            lines.append(
                f"{method}: its budget never departed from the even share, so this run is that of "
                "the method without it"
            )
        return lines

    def close(self) -> None:
        self.pool.close()
        self.sampler.close()


def build_language_job(config: Config) -> LanguageJob:
    """Builds a job: loads the model and the task, starts sampler and reward workers."""
    recipe = config.make_recipe()
    _check_blocks(config)
    policy = load_policy(
        config.model.name,
        device=config.model.device,
        dtype=config.model.dtype,
        lora=config.model.lora,
        seed=derive(config.seed, "init"),
    )
    task = make_task(
        config.task.name,
        reward=config.task.reward,
        correct_above=config.task.correct_above,
        **config.task.options,
    )
    recipe = fitted(recipe, config, task)
    check_fields(recipe, task, thoughts=config.rollout.thoughts)
    check_thoughts(config, recipe, task)
    if config.task.problems is not None:
        task = take_pool(task, config.task.problems)
    task = fit_prompts(
        task, policy.tokenizer, limit=config.rollout.max_prompt, drop=config.task.drop_long
    )
    for split, problems in (("train", task.train), ("test", task.test)):
        if not len(problems):
            raise ProxpoError(f"task {task.name}: the {split} split is empty")
    initial = copy.deepcopy(policy.model).requires_grad_(False)
    return LanguageJob(
        config=config,
        task=task,
        learner=_learner(config, policy, recipe, initial, longest=_longest(config, task)),
        sampler=_sampler(config, policy, recipe),
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


def splits(job: LanguageJob) -> list[str]:
    """Lines on the sizes of the training and held-out splits and on their overlap."""
    task, pool, size = job.task, job.config.task.problems, job.config.evaluate.size
    lines = []
    if pool is not None:
        fewer = "" if len(task.train) >= pool else f", all there are (task.problems is {pool})"
        lines.append(f"training on {len(task.train)} different problems{fewer}")
    common, asked = task.overlap(), len(task.held_out)
    lines.append(f"held out: {plural(asked, 'question')}, {common} of them also in training")
    if len(job.exam.problems) < size:
        lines.append(
            f"evaluating on {plural(len(job.exam.problems), 'problem')}, all there are "
            f"(evaluate.size is {size})"
        )
    if common:
        lines.append(
            f"warning: {common} of {asked} held-out questions are trained on, so their score says "
            "nothing about new ones"
        )
    return lines


def start_line(job: LanguageJob) -> str:
    """One line on the sizes of a step, its rate, and the memory that its micro-batches follow."""
    config, turns = job.config, job.task.max_turns > 1
    rollout, train = config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.samples_per_prompt
    parts = [
        f"{plural(rollout.prompts_per_step, 'prompt')} x "
        f"{plural(rollout.samples_per_prompt, 'response')} of at most "
        f"{plural(rollout.max_tokens, 'token')}{' a turn' if turns else ''}",
        f"lr {train.lr:g}".replace("e-0", "e-"),
    ]
    most = -(-rows // train.mini_batches)
    if train.micro_batch == "auto":
        parts.append(_by_memory(job, most))
    else:
        size = min(train.micro_batch or most, most)
        parts.append(f"micro-batches of {plural(size, 'response')}" if size < most else "one pass")
    if recomputes_layers(job.policy.model):
        asked = config.model.gradient_checkpointing is True
        parts.append(
            "gradient checkpointing" + ("" if asked else ", without which a row would not fit")
        )
    return ", ".join(parts)


def _by_memory(job: LanguageJob, rows: int) -> str:
    """Words on the micro-batches that a budget of tokens cuts; rows: of a mini-batch."""
    policy, budget = job.policy, job.learner.budget.tokens
    if policy.device.type != "cuda":
        return f"micro-batches of at most {budget:,} tokens"
    longest = job.config.rollout.max_prompt + _longest(job.config, job.task)
    taken = update_bytes(policy, min(budget, rows * longest), job.learner.transform)
    return f"micro-batches by memory (about {taken / 2**30:.0f} GiB)"


def fitted(recipe: Recipe, config: Config, task: Task) -> Recipe:
    """The recipe with its open lengths set to the longest response of this run."""
    return at_length(recipe, _longest(config, task))


def _longest(config: Config, task: Task) -> int:
    """Tokens of the longest response, with those of all its turns."""
    return config.rollout.max_tokens * (task.max_turns if task.tool is not None else 1)


# Names in a block of options that are settings of their own, or belong to the caller.
RESERVED = {
    "task.options": {
        "name": "task.name",
        "reward": "task.reward",
        "correct_above": "task.correct_above",
    },
    "rollout.options": {
        "name": "rollout.backend",
        "policy": "model.name",
        "thoughts": "rollout.thoughts",
        "thought_noise": "recipe.noise",
    },
    "train.optimizer_options": {
        "name": "train.optimizer",
        "model": "model.name",
        "lr": "train.lr",
        "weight_decay": "train.weight_decay",
    },
}


def _check_blocks(config: Config) -> None:
    """Refuses options that are settings of their own, and dropout: they would be ignored."""
    dropout = (config.model.lora or {}).get("lora_dropout")
    if dropout:
        raise ProxpoError(
            f"model.lora.lora_dropout={dropout} has no effect: models are sampled and trained "
            "without dropout"
        )
    for path, names in RESERVED.items():
        section, name = path.split(".")
        for option in getattr(getattr(config, section), name):
            if option in names:
                raise ProxpoError(f"{path} takes no '{option}': it is the setting {names[option]}")


def sampling_backend(config: Config, policy: Policy) -> Backend:
    """The sampler that a run takes."""
    rollout = config.rollout
    if rollout.backend != "auto":
        return Backend(rollout.backend, "rollout.backend")
    return fastest_backend(policy, thoughts=rollout.thoughts, top_p=rollout.top_p)


def _sampler(config: Config, policy: Policy, recipe: Recipe) -> Sampler:
    rollout = config.rollout
    options = dict(rollout.options)
    if rollout.thoughts:
        options |= {"thoughts": rollout.thoughts, "thought_noise": thought_noise(recipe)}
    return make_sampler(sampling_backend(config, policy).name, policy, **options)


def _recomputes(config: Config, policy: Policy, transform: Any, longest: int) -> bool:
    """True where layers are to run again in the backward pass: asked for, or for want of memory.

    longest: tokens of the longest response with all its turns
    """
    asked = config.model.gradient_checkpointing
    if asked != "auto" or policy.device.type != "cuda":
        return asked is True
    row = min(config.rollout.max_prompt + longest, policy.context)
    return fitting_tokens(policy, transform) < row


def _learner(
    config: Config, policy: Policy, recipe: Any, initial: nn.Module, *, longest: int
) -> Learner:
    wanted = recipe.needs()
    critic = None
    if wanted & {"values", "old_values"} or recipe.value is not None:
        critic = nn.Linear(policy.model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(critic.weight)  # starts by expecting nothing; no draw of random numbers
        nn.init.zeros_(critic.bias)
        critic.to(policy.device)
    transform = run_transform(recipe, config.seed)
    if _recomputes(config, policy, transform, longest):
        recompute_layers(policy)
    return Learner(
        policy=policy,
        recipe=recipe,
        optimizer=run_optimizer(config.train, policy.model, critic),
        reference=initial if wanted & {"ref_logp", "ref_kl"} else None,
        critic=critic,
        transform=transform,
        graphs=_graphs(config, policy, recipe, critic=critic is not None, transform=transform),
        state=recipe.init_state(),
        budget=fitted_budget(policy, transform),
    )


def _graphs(
    config: Config, policy: Policy, recipe: Recipe, *, critic: bool, transform: Any
) -> PolicyGraphs | None:
    reason = unsuited(policy, recipe, critic=critic, transform=transform)
    if config.rollout.thoughts:
        reason = "latent thoughts enter the model's own modules"
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


def _sampled(metrics: dict[str, float]) -> float | None:
    return next((value for name, value in metrics.items() if name.startswith("eval/avg@")), None)


__all__ = [
    "LanguageJob",
    "build_language_job",
    "fitted",
    "sampling_backend",
    "splits",
    "start_line",
]
