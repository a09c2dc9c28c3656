"""Supervised warm start: cross entropy on the worked solutions of a task, before training.

    loss = -(1/N) Σ_i Σ_t log π(y_it | prompt_i, y_i,<t),   y_i the solution and its end token

N counts the tokens of an optimizer step's solutions. The folder holds a model that `model.name`
takes, and warmup.json: settings and losses. A run that was stopped continues from its checkpoint.
"""

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from proxpo.errors import ProxpoError, nearest
from proxpo.models import Policy, load_policy, save_policy
from proxpo.ops.shapes import Tensor
from proxpo.ops.streams import generator
from proxpo.optimizers import make_optimizer
from proxpo.recipes import method
from proxpo.replay.graphs import CudaRecorder, PolicyGraphs, unsuited
from proxpo.runs.checkpoint import DAMAGE, checkpoints, load_latest, read_info, save_checkpoint
from proxpo.runs.files import read_object, write_whole
from proxpo.runs.folder import hold_folder
from proxpo.runs.lock import LOCK
from proxpo.runs.stop import StopRequest, stop_on_signal
from proxpo.settings import TASK_OPTIONS, contradiction, parse_setting, put
from proxpo.stages._options import bind
from proxpo.train._schema import Optimizer, TaskConfig
from proxpo.train.cuts import Cut, fitted_budget
from proxpo.train.experience import Experience
from proxpo.train.observer import SILENT, Observer
from proxpo.train.rollouts import fill_weights, restore_optimizer
from proxpo.train.scoring import Learner, LogpOptions, forward, in_micro_batches
from proxpo.train.sources import changed_file, fingerprints, model_folder
from proxpo.train.tasks import Lazy, Problem, Task, make_task
from proxpo.train.update import set_learning_rate

SUMMARY, CHECKPOINTS = "warmup.json", "checkpoints"
NO_REWARD = "proxpo.rewards.answers:exact"  # of a file of problems: a warm start asks for none
PASS = LogpOptions(temperature=1.0, micro_batch=None)


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Settings of a warm start.

    problems: the first so many training problems; none: all, of a generated task 8192
    batch: solutions of an optimizer step; the rate rises over a twentieth of the steps, then falls
        to 0 in a straight line
    max_tokens: longer solutions, and prompts longer than max_prompt, are left out
    save_every: steps between checkpoints; after a stop signal and after the last step there is one
        in any case
    """

    task: str
    model: str = "tiny"
    problems: int | None = None
    epochs: int = 2
    batch: int = 64
    lr: float = 2e-4
    weight_decay: float = 0.01
    grad_clip: float | None = 1.0
    optimizer: Optimizer = "adamw"
    max_prompt: int = 512
    max_tokens: int = 512
    save_every: int = 500
    seed: int = 0
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    task_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"problems": 1, "epochs": 1, "batch": 1, "max_prompt": 1, "max_tokens": 1}
        for name, low in {**least, "save_every": 0, "seed": 0, "lr": 0.0}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ProxpoError(f"warmup: {name} is at least {low}, got {value}")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ProxpoError(
                f"warmup: grad_clip is above 0, or none for no limit, got {self.grad_clip}"
            )

    def rate_factor(self, step: int, steps: int) -> float:
        """Factor on the learning rate in a step, counted from 0."""
        return min(1.0, (step + 1) / math.ceil(steps / 20)) * (1 - step / steps)


def load_warmup(sets: Iterable[str] = (), **common: Any) -> WarmupSettings:
    """Settings from `KEY=VALUE` texts and keyword arguments; options of the task are
    `task.options.NAME`."""
    known = {member.name for member in fields(WarmupSettings)} - {"task_options"}
    values: dict[str, Any] = {name: value for name, value in common.items() if value is not None}
    options: dict[str, Any] = {}
    for text in sets:
        key, value = parse_setting(text)
        if key.startswith(TASK_OPTIONS):
            put(options, key.removeprefix(TASK_OPTIONS).split("."), value, key)
        elif key == "task.reward":
            options["reward"] = value
        elif key in known:
            if common.get(key) not in (None, value):
                option = f"task {common[key]}" if key == "task" else f"--{key} {common[key]}"
                raise contradiction(option, key, value)
            values[key] = value
        else:
            raise ProxpoError(f"unknown setting of warmup '{key}'{nearest(key, known)}")
    made = bind(WarmupSettings, {**values, "task_options": {}}, what="warmup")
    return WarmupSettings(**{**made, "task_options": options})


def warm_up(settings: WarmupSettings, out: Path, observer: Observer = SILENT) -> dict[str, Any]:
    """Trains on worked solutions and writes the model to `out`; the contents of warmup.json.

    A folder with the finished model of the same settings is left as it is. After a stop signal
    {"stopped", "steps"} is returned and the same call continues.
    """
    model = model_folder(settings.model)
    if model is not None and model.resolve() == out.resolve():
        raise ProxpoError(f"{out} is the folder of the model itself: choose another --out")
    done = read_object(out / SUMMARY)
    if done is not None:
        _refuse_other(settings, out, done)
        return done
    _refuse_used(out)
    with hold_folder(out, on_notice=observer.on_notice):
        run = WarmupRun(settings, out, observer)
        with stop_on_signal(signal.SIGTERM, signal.SIGINT) as stop:
            return run.make(stop)


def _refuse_other(settings: WarmupSettings, out: Path, begun: Mapping[str, Any]) -> None:
    """Refuses to go on with other settings, or other files under the same names."""
    before, now = begun["settings"], asdict(settings)
    apart = "; ".join(
        f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]
    )
    if before != now:
        raise ProxpoError(
            f"{out} holds a warm start with other settings ({apart}): choose another --out"
        )
    changed = changed_file(_files(settings), begun.get("files"))
    if changed:
        raise ProxpoError(
            f"{changed} has changed since the warm start in {out} began: choose another --out"
        )


def _files(settings: WarmupSettings) -> dict[str, str]:
    """Fingerprints of the local files that a warm start reads."""
    task = TaskConfig(name=settings.task, options=settings.task_options)
    return fingerprints(settings.model, task)


def _refuse_used(out: Path) -> None:
    """Refuses a folder with a model, a run or anything else in which no warm start was begun."""
    saved = checkpoints(out / CHECKPOINTS)
    others = {path.name for path in out.glob("*")} - {LOCK, CHECKPOINTS}
    begun = (out / SUMMARY).exists() or any(map(_is_own, saved))
    if (saved or others) and not begun:
        raise ProxpoError(f"{out} holds something other than a warm start: choose another --out")


def _is_own(checkpoint: Path) -> bool:
    """True for a checkpoint of a warm start, false for one of a run."""
    try:
        return "losses" in read_info(checkpoint)
    except DAMAGE:
        return False


class WarmupRun:
    """A warm start after loading: the learner, the encoded solutions and the losses so far."""

    def __init__(self, settings: WarmupSettings, out: Path, observer: Observer) -> None:
        self.settings, self.checkpoints, self.out = settings, out / CHECKPOINTS, out
        self.observer = observer
        self.files = _files(settings)
        unasked = {"reward": NO_REWARD} if Path(settings.task).is_file() else {}
        task = make_task(settings.task, **{**unasked, **settings.task_options})
        problems = solved(task, settings.problems)
        self.policy = load_policy(settings.model, device=settings.device, dtype=settings.dtype)
        self.learner = make_learner(settings, self.policy)
        self.rows = encoded(task, self.policy, problems, settings)
        if len(self.rows) < len(problems):
            observer.on_notice(f"{len(problems) - len(self.rows)} long solutions were left out")
        self.steps = settings.epochs * math.ceil(len(self.rows) / settings.batch)
        self.losses: list[float] = []
        self._resume()

    def make(self, stop: StopRequest) -> dict[str, Any]:
        settings, learner = self.settings, self.learner
        for step in range(len(self.losses), self.steps):
            set_learning_rate(learner.optimizer, settings.rate_factor(step, self.steps))
            rows = self._batch(step)
            self.losses.append(gradient(learner, rows))
            limit = math.inf if settings.grad_clip is None else settings.grad_clip
            norm = torch.nn.utils.clip_grad_norm_(learner.trainable(), limit)
            if not math.isfinite(float(norm)):
                raise ProxpoError(
                    f"warmup: the gradient of step {step + 1} is not finite: lower lr"
                )
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=True)
            self.observer.on_step(step + 1, {"loss": self.losses[-1], "steps": self.steps})
            due = settings.save_every and (step + 1) % settings.save_every == 0
            # The last one marks the folder: a kill in `_finish` leaves a part of the model there.
            if step + 1 == self.steps or stop.requested or due:
                self._save()
            if stop.requested and step + 1 < self.steps:
                return {"stopped": stop.by, "steps": step + 1}
        return self._finish()

    def _batch(self, step: int) -> Experience:
        """The solutions of a step: each epoch passes over all of them in an order of its own."""
        epoch, number = divmod(step, self.steps // self.settings.epochs)
        order = torch.randperm(
            len(self.rows), generator=generator(self.settings.seed, "data", epoch)
        )
        size = self.settings.batch
        chosen = order[number * size : (number + 1) * size].tolist()
        return as_experience([self.rows[i] for i in chosen], self.policy)

    def _save(self) -> None:
        model = self.policy.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts = {"weights": trained, "optimizer": self.learner.optimizer.state_dict()}
        info = {"settings": asdict(self.settings), "files": self.files, "losses": self.losses}
        save_checkpoint(self.checkpoints, len(self.losses), parts, info, keep_last=1)

    def _resume(self) -> None:
        checkpoint = load_latest(self.checkpoints)
        if checkpoint is None:
            return
        _refuse_other(self.settings, self.out, checkpoint.info)
        fill_weights(self.policy.model, checkpoint.parts["weights"])
        restore_optimizer(self.learner.optimizer, checkpoint.parts["optimizer"])
        self.losses = list(checkpoint.info["losses"])
        self.observer.on_notice(f"continued after step {len(self.losses)}")

    def _finish(self) -> dict[str, Any]:
        save_policy(self.policy, self.out)
        tenth = max(1, len(self.losses) // 10)
        summary = {
            "settings": asdict(self.settings),
            "files": self.files,
            "solutions": len(self.rows),
            "tokens": sum(len(response) for _, response in self.rows),
            "steps": self.steps,
            "loss_first": sum(self.losses[:tenth]) / tenth,
            "loss_last": sum(self.losses[-tenth:]) / tenth,
            "losses": [round(loss, 5) for loss in self.losses],
        }
        write_whole(self.out / SUMMARY, json.dumps(summary, indent=1).encode())
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        return summary


FIELD = " (of a file: --set task.options.solution_field=NAME)"


def solved(task: Task, count: int | None) -> list[Problem]:
    """The training problems of a warm start; refused where one has no worked solution."""
    if count is None and isinstance(task.train, Lazy):
        count = 8192
    problems = list(islice(task.train, count))
    missing = next((problem for problem in problems if not problem.solution), None)
    if missing is not None:
        raise ProxpoError(
            f"task {task.name}: problem {missing.index} has no worked solution to warm up on"
            f"{FIELD if task.name.endswith('.jsonl') else ''}"
        )
    return problems


def encoded(
    task: Task, policy: Policy, problems: Sequence[Problem], settings: WarmupSettings
) -> list[tuple[list[int], list[int]]]:
    """Token ids of each prompt and of its solution with the end token; long ones left out."""
    tokenizer = policy.tokenizer
    texts = [problem.solution for problem in problems]
    end = policy.eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    solutions = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts = task.encode_prompts([problem.prompt for problem in problems], tokenizer)
    rows = [(prompt, [*solution, end]) for prompt, solution in zip(prompts, solutions)]
    kept = [
        (prompt, response)
        for prompt, response in rows
        if len(prompt) <= settings.max_prompt and len(response) <= settings.max_tokens
    ]
    if not kept:
        raise ProxpoError(
            f"task {task.name}: every prompt is longer than max_prompt={settings.max_prompt} or "
            f"its solution than max_tokens={settings.max_tokens}"
        )
    return kept


def as_experience(rows: Sequence[tuple[list[int], list[int]]], policy: Policy) -> Experience:
    """Prompts and solutions as sampled sequences, each prompt a group of its own."""

    def padded(side: int, where: Literal["left", "right"], fill: int) -> Tensor:
        ids = [torch.tensor(row[side]) for row in rows]
        return pad_sequence(ids, batch_first=True, padding_value=fill, padding_side=where)

    prompts, responses = padded(0, "left", -1), padded(1, "right", -1)
    ids, mask = torch.cat([prompts, responses], dim=1), responses >= 0
    none = torch.zeros(len(rows))
    return Experience(
        input_ids=ids.where(ids >= 0, policy.pad_id),
        attention_mask=ids >= 0,
        mask=mask,
        rollout_logp=torch.zeros(mask.shape),
        rewards=none,
        truncated=none.bool(),
        group=torch.arange(len(rows)),
        version=none.long(),
    ).to(policy.device)


def gradient(learner: Learner, rows: Experience) -> float:
    """Adds the gradient of the cross entropy, a mean over all tokens; returns the loss."""
    tokens = float(rows.mask.sum())

    def work(cut: Cut) -> float:
        total = torch.zeros((), device=rows.mask.device, dtype=torch.float64)
        for part in cut:
            logp = forward(learner, rows.rows(part), PASS)["logp"]
            loss = -logp.sum() / tokens
            loss.backward()
            total += loss.detach()
        return float(total)

    undo: Callable[[], None] = lambda: learner.optimizer.zero_grad(set_to_none=True)  # noqa: E731
    return in_micro_batches(learner, rows, PASS, work, undo=undo)


def make_learner(settings: WarmupSettings, policy: Policy) -> Learner:
    recipe = method("reinforce").make()
    graphs = None
    if not unsuited(policy, recipe, critic=False):
        graphs = PolicyGraphs(policy, record=CudaRecorder())
    return Learner(
        policy=policy,
        recipe=recipe,
        optimizer=make_optimizer(
            settings.optimizer, policy.model, settings.lr, weight_decay=settings.weight_decay
        ),
        graphs=graphs,
        budget=fitted_budget(policy),
    )


__all__ = ["WarmupSettings", "load_warmup", "solved", "warm_up"]
