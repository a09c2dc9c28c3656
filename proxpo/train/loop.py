"""The whole job on one page: sample, reward, update, evaluate, log, checkpoint."""

import math
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.checkpoint import Checkpoint, load_latest
from proxpo.runs.folder import hold_folder
from proxpo.runs.jsonlines import JsonLines
from proxpo.runs.sinks import Sinks, make_sinks, public_names
from proxpo.runs.status import clear_end
from proxpo.runs.stop import Overdue, StopRequest, stop_on_signal
from proxpo.sampler import agreement
from proxpo.train.collect import Collected, Collector, SamplingOptions, collect
from proxpo.train.config import (
    Change,
    Config,
    as_dict,
    build_config,
    check_resume,
    write_config,
)
from proxpo.train.evaluate import evaluate
from proxpo.train.faults import Progress, explained
from proxpo.train.finish import Examined, finish_run
from proxpo.train.job import Job, build_job, restore, save, splits
from proxpo.train.observer import SILENT, Observer
from proxpo.train.refusals import remarks
from proxpo.train.update import update


class _Stopped(Exception):
    """Raised inside a rollout or evaluation after a stop signal; it has changed nothing."""


def train(config: Config, *, resume: bool = False, observer: Observer = SILENT) -> dict[str, Any]:
    """Trains; leaves config.yaml, metrics.jsonl, samples.jsonl, checkpoints and pictures behind.

    Returns the summary, which is also in summary.json; a run that a signal stopped returns
    {"stopped", "steps", "out"} instead and writes none.
    """
    out = Path(config.folder)
    with hold_folder(out, on_notice=observer.on_notice), explained(out, config) as at:
        resumed = _resumed(out, config, resume=resume, observer=observer)
        job = build_job(config)
        job.learner.budget.on_notice = observer.on_notice
        try:
            if resumed is not None:
                restore(job, *resumed)
                at.saved = job.step
            return _finished(_ActiveRun(job, out, at, observer))
        finally:
            job.close()


@dataclass
class _ActiveRun:
    """A run after loading: its job, folder, position and observer, and the stop that was asked."""

    job: Job
    out: Path
    at: Progress
    observer: Observer
    stop: StopRequest | None = None

    @property
    def stoppable(self) -> Observer:
        """The observer of work that can be given up: progress raises after a stop signal."""

        def on_progress(phase: str, done: int, total: int) -> None:
            if self.stop is not None and self.stop.requested:
                raise _Stopped
            self.observer.on_progress(phase, done, total)

        return replace(self.observer, on_progress=on_progress)

    def save(self) -> None:
        self.at.phase = "checkpoint"
        save(self.job, self.out / "checkpoints")
        self.at.saved = self.job.step


def _finished(run: _ActiveRun) -> dict[str, Any]:
    """Runs to the end, within reach of stop signals: between steps and inside evaluations.

    An update that has begun is finished and saved, if that takes no longer than
    `checkpoint.grace`; a checkpoint that is being written always is.
    """
    job, out, at, observer = run.job, run.out, run.at, run.observer
    at.step = job.step
    run.stop = StopRequest()
    try:
        with stop_on_signal(
            signal.SIGTERM,
            signal.SIGINT,
            grace=job.config.checkpoint.grace,
            may_end=lambda: at.phase != "checkpoint",
        ) as run.stop:
            examined = _trained(run)
    except (_Stopped, Overdue) as end:
        by = run.stop.by
        if at.saved is None:
            observer.on_notice(f"stopped by {by} before the first step; nothing was saved")
        else:
            late = f", in the {at.phase} of step {at.step + 1}" if isinstance(end, Overdue) else ""
            observer.on_notice(
                f"stopped by {by} after step {at.saved}{late}; --resume continues from there"
            )
        return {"stopped": by, "steps": at.saved or 0, "out": str(out)}
    at.phase = "finish"
    return finish_run(job, out, examined or _examine(job, observer), on_notice=observer.on_notice)


def _trained(run: _ActiveRun) -> Examined | None:
    """Makes all steps that are left; the last evaluation, if there was one."""
    job, out, at, on_notice = run.job, run.out, run.at, run.observer.on_notice
    fresh = not job.before
    if fresh:  # before anything is written: much that is wrong with the input shows here
        at.phase = "evaluate"
        for line in splits(job):
            on_notice(line)
        _check_sampler(job, run.observer)
        metrics, answers = _examine(job, run.stoppable)
        job.before = {"metrics": metrics, "answers": answers}
    at.phase = "logging"
    clear_end(out)
    lines = remarks(job.config, job.learner.recipe)
    for line in lines if fresh else ():
        on_notice(line)
    write_config(job.config, out / "config.yaml", lines)
    # The row of a step whose evaluation is still due is written after it.
    resume_at = None if fresh else job.step - (job.unwritten is not None)
    drawn = None if fresh else job.step + len(job.waiting) - 1  # samples of these are written
    with (
        _sinks(run, resume_at) as sinks,
        JsonLines(out / "samples.jsonl", resume_at=drawn, on_notice=on_notice) as samples,
    ):
        if fresh:
            sinks.write(0, job.before["metrics"])
            run.save()
        return _steps(run, sinks, samples)


def _steps(run: _ActiveRun, sinks: Sinks, samples: JsonLines) -> Examined | None:
    """Step by step to the end, or to a stop, before which the state is saved."""
    job, at, observer, config = run.job, run.at, run.observer, run.job.config
    examined = None
    try:
        while job.unwritten is not None or job.step < config.train.steps:
            at.step = job.step
            if job.unwritten is None:
                job.unwritten = _step(run, samples)
            metrics = job.unwritten
            if not math.isfinite(metrics["grad_norm"]):
                observer.on_notice(
                    f"step {job.step}: an update was left out, its gradient was not finite"
                )
            if _due(job.step, config.evaluate.every, config.train.steps):
                at.phase = "evaluate"
                run.stoppable.on_progress("evaluating", 0, 1)
                examined = _examine(job, run.stoppable)
                metrics = metrics | examined[0]
            at.phase = "logging"
            sinks.write(job.step, metrics)
            job.unwritten = None
            observer.on_step(job.step, public_names(metrics))
            if _due(job.step, config.checkpoint.every, config.train.steps):
                observer.on_progress("saving", 0, 1)
                run.save()
    except _Stopped:
        if at.saved != job.step:
            run.save()
        raise
    return examined


def _sinks(run: _ActiveRun, resume_at: int | None) -> Sinks:
    config = run.job.config
    return make_sinks(
        run.out,
        config.log.sinks,
        resume_at=resume_at,
        project=config.log.project,
        config=as_dict(config),
        on_notice=run.observer.on_notice,
    )


def _step(run: _ActiveRun, samples: JsonLines) -> dict[str, float]:
    """One step: a rollout (of this policy or, with a lag, of an earlier one) and its updates."""
    job, timer = run.job, _StepTimer()
    before = job.learner.version
    run.at.phase = "rollout"
    sampled = _rollouts(run, samples)
    timer.lap("rollout")
    run.at.phase = "update"
    run.observer.on_progress("updating", 0, 1)
    metrics = update(job, job.waiting.pop(0))
    timer.lap("update")
    job.sampler.sync()
    timer.lap("sync")
    job.step += 1
    job.seconds += timer.total
    return {
        **sampled,
        **metrics,
        "learning_rate": job.learner.optimizer.param_groups[0]["lr"],
        "num_tokens": job.tokens,
        "step_time": timer.total,
        "proxpo/updates": job.learner.version - before,
        "proxpo/skipped": job.skipped,
        **{f"proxpo/time/{name}": seconds for name, seconds in timer.laps.items()},
    }


def _rollouts(run: _ActiveRun, samples: JsonLines) -> dict[str, float]:
    """Samples until a rollout waits for training; metrics of the last one.

    There are none while a lag that was lowered is worked off.
    """
    job, observer = run.job, run.stoppable
    metrics: dict[str, float] = {}
    while len(job.waiting) <= job.config.train.off_policy_lag:
        number, cursor = job.step + len(job.waiting), job.source.cursor
        try:
            observer.on_progress("sampling", 0, 1)
            collected = collect_rollout(job, number, observer)
        except _Stopped:
            job.source.cursor = cursor
            raise
        job.waiting.append(collected.experience)
        job.tokens += int(collected.metrics["proxpo/tokens"])
        metrics = collected.metrics
        for line in collected.lines[: job.config.log.samples]:
            samples.append(line)
    return metrics


def collect_rollout(job: Job, number: int, observer: Observer = SILENT) -> Collected:
    """Samples and scores rollout `number` with the job's settings."""
    rollout, learner = job.config.rollout, job.learner
    collector = Collector(
        policy=job.policy,
        sampler=job.sampler,
        task=job.task,
        pool=job.pool,
        recipe=learner.recipe,
        options=SamplingOptions(
            samples=rollout.samples_per_prompt,
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_prompt=rollout.max_prompt,
        ),
        seed=job.config.seed,
        state=learner.state,
        clock=job.clock,
        trainer_state=job.trainer_state,
        observer=observer,
    )
    prompts = rollout.prompts_per_step
    return collect(collector, job.source, prompts=prompts, step=number, version=learner.version)


def _examine(job: Job, observer: Observer) -> Examined:
    return evaluate(
        policy=job.policy,
        initial=job.initial,
        sampler=job.sampler,
        task=job.task,
        pool=job.pool,
        exam=job.exam,
        budget=job.learner.budget,
        observer=observer,
        trainer_state=job.trainer_state,
    )


def _check_sampler(job: Job, observer: Observer) -> None:
    """Refuses a sampler that runs another model than the trainer; reports their difference."""
    prompts = [job.task.encode(p, job.policy.tokenizer) for p in job.exam.problems[:16]]
    tokens = min(job.config.rollout.max_tokens, 64)
    gap = agreement(job.policy, job.sampler, prompts, max_tokens=tokens)
    observer.on_notice(
        f"sampler and trainer differ by {gap.largest:.1e} at most, {gap.mean:.1e} on average"
    )
    if not gap.mean < 0.1:
        raise ProxpoError(
            f"the sampler's log-probs differ from the trainer's by {gap.mean:.2g} on average: they "
            "do not run the same model"
        )


def _resumed(
    out: Path, config: Config, *, resume: bool, observer: Observer
) -> tuple[Checkpoint, list[Change]] | None:
    """The checkpoint to continue from and the settings that change there, if there is one."""
    checkpoint = load_latest(out / "checkpoints")
    if checkpoint is None:
        return None
    if not resume:
        raise ProxpoError(f"{out} already holds a run: --resume continues it, --out starts another")
    for line in checkpoint.skipped:
        observer.on_notice(f"damaged checkpoint passed over: {line}")
    if config.train.steps < checkpoint.step:
        raise ProxpoError(
            f"{out} has done {checkpoint.step} steps already; steps={config.train.steps} asks for "
            "fewer"
        )
    earlier = build_config(checkpoint.info["config"])
    changed = check_resume(earlier, config, step=checkpoint.step, where=checkpoint.path)
    for change in changed:
        if change.path not in ("train.steps", "out"):
            observer.on_notice(f"setting changed since the checkpoint: {change}")
    return checkpoint, changed


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


class _StepTimer:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.start = self.mark = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.mark = now - self.mark, now

    @property
    def total(self) -> float:
        return self.mark - self.start


__all__ = ["collect_rollout", "train"]
