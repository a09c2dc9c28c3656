"""The whole job on one page: sample, reward, update, evaluate, log, checkpoint."""

import math
import signal
import time
from collections.abc import Callable
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
from proxpo.train.collect import Collected, Sampler, Sampling, collect
from proxpo.train.config import Change, Config, as_dict, check_resume, write_config
from proxpo.train.config import build as build_config
from proxpo.train.evaluate import evaluate
from proxpo.train.faults import Progress, explained
from proxpo.train.finish import Examined, finish_run
from proxpo.train.job import Job, build, restore, save, splits
from proxpo.train.refusals import remarks
from proxpo.train.update import update

Told = Callable[[str, int, int], None]
Noted = Callable[[str], None]
EveryStep = Callable[[int, dict[str, Any]], None]


class _Stopped(Exception):
    """A rollout or evaluation given up on a stop signal; it has changed nothing."""


def train(
    config: Config,
    *,
    resume: bool = False,
    told: Told = lambda phase, done, total: None,
    noted: Noted = lambda line: None,
    every_step: EveryStep = lambda step, metrics: None,
) -> dict[str, Any]:
    """Train, leaving config.yaml, metrics.jsonl, samples.jsonl, checkpoints and pictures behind.

    `told(phase, done, total)` follows the work inside a step, `every_step` gets its metrics and
    `noted` lines worth reading. Returns the summary, which is also in summary.json; a run that a
    signal stopped returns {"stopped", "steps", "out"} instead and writes none.
    """
    out = Path(config.folder)
    with hold_folder(out, on_notice=noted), explained(out, config) as at:
        resumed = _resumed(out, config, resume=resume, noted=noted)
        job = build(config)
        try:
            if resumed is not None:
                restore(job, *resumed)
                at.saved = job.step
            return _run(job, out, at, told=told, noted=noted, every_step=every_step)
        finally:
            job.close()


def _run(
    job: Job, out: Path, at: Progress, *, told: Told, noted: Noted, every_step: EveryStep
) -> dict[str, Any]:
    """The run in stop signals' reach: they are honoured between steps and inside evaluations.

    An update that has begun is finished and saved, if that takes no longer than
    `checkpoint.grace`; a checkpoint that is being written always is.
    """
    stop = StopRequest()
    at.step = job.step
    try:
        with stop_on_signal(
            signal.SIGTERM,
            signal.SIGINT,
            grace=job.config.checkpoint.grace,
            may_end=lambda: at.phase != "checkpoint",
        ) as stop:

            def ask(phase: str, done: int, total: int) -> None:
                if stop.requested:
                    raise _Stopped
                told(phase, done, total)

            examined = _trained(
                job, out, at, ask=ask, told=told, noted=noted, every_step=every_step
            )
    except (_Stopped, Overdue) as end:
        if at.saved is None:
            noted(f"stopped by {stop.by} before the first step; nothing was saved")
        else:
            late = f", in the {at.phase} of step {at.step + 1}" if isinstance(end, Overdue) else ""
            noted(
                f"stopped by {stop.by} after step {at.saved}{late}; --resume continues from there"
            )
        return {"stopped": stop.by, "steps": at.saved or 0, "out": str(out)}
    at.phase = "finish"
    return finish_run(job, out, examined or _examine(job, told), on_notice=noted)


def _trained(
    job: Job,
    out: Path,
    at: Progress,
    *,
    ask: Told,
    told: Told,
    noted: Noted,
    every_step: EveryStep,
) -> Examined | None:
    """All steps that are left; the last evaluation, where one was made. _Stopped when asked to."""
    fresh = not job.before
    if fresh:  # before anything is written: much that is wrong with the input shows here
        at.phase = "evaluate"
        for line in splits(job):
            noted(line)
        _check_sampler(job, noted)
        metrics, answers = _examine(job, ask)
        job.before = {"metrics": metrics, "answers": answers}
    at.phase = "logging"
    clear_end(out)
    lines = remarks(job.config, job.learner.recipe)
    for line in lines if fresh else ():
        noted(line)
    write_config(job.config, out / "config.yaml", lines)
    # The row of a step whose evaluation is still due is written after it.
    resume_at = None if fresh else job.step - (job.unwritten is not None)
    drawn = None if fresh else job.step + len(job.waiting) - 1  # samples of these are written
    with (
        _sinks(job, out, resume_at, noted) as sinks,
        JsonLines(out / "samples.jsonl", resume_at=drawn, on_notice=noted) as samples,
    ):
        if fresh:
            sinks.write(0, job.before["metrics"])
            _save(job, out, at)
        return _steps(job, out, at, sinks, samples, ask, told, noted, every_step)


def _steps(
    job: Job,
    out: Path,
    at: Progress,
    sinks: Sinks,
    samples: JsonLines,
    ask: Told,
    told: Told,
    noted: Noted,
    every_step: EveryStep,
) -> Examined | None:
    """Step by step to the end, or until `ask` raises _Stopped; then the state is saved first."""
    config, examined = job.config, None
    try:
        while job.unwritten is not None or job.step < config.train.steps:
            at.step = job.step
            if job.unwritten is None:
                job.unwritten = _step(job, at, ask, told, samples)
            metrics = job.unwritten
            if not math.isfinite(metrics["grad_norm"]):
                noted(f"step {job.step}: an update was left out, its gradient was not finite")
            if _due(job.step, config.evaluate.every, config.train.steps):
                at.phase = "evaluate"
                ask("evaluating", 0, 1)
                examined = _examine(job, ask)
                metrics = metrics | examined[0]
            at.phase = "logging"
            sinks.write(job.step, metrics)
            job.unwritten = None
            every_step(job.step, public_names(metrics))
            if _due(job.step, config.checkpoint.every, config.train.steps):
                told("saving", 0, 1)
                _save(job, out, at)
    except _Stopped:
        if at.saved != job.step:
            _save(job, out, at)
        raise
    return examined


def _save(job: Job, out: Path, at: Progress) -> None:
    at.phase = "checkpoint"
    save(job, out / "checkpoints")
    at.saved = job.step


def _sinks(job: Job, out: Path, resume_at: int | None, noted: Noted) -> Sinks:
    log, plain = job.config.log, as_dict(job.config)
    return make_sinks(
        out, log.sinks, resume_at=resume_at, project=log.project, config=plain, on_notice=noted
    )


def _step(job: Job, at: Progress, ask: Told, told: Told, samples: JsonLines) -> dict[str, float]:
    """One step: a rollout (of this policy or, with a lag, of an earlier one) and its updates."""
    clock = _Clock()
    before = job.learner.version
    at.phase = "rollout"
    sampled: dict[str, float] = {}  # stays empty while a lag that was lowered is worked off
    while len(job.waiting) <= job.config.train.off_policy_lag:
        number, cursor = job.step + len(job.waiting), job.source.cursor
        try:
            ask("sampling", 0, 1)
            drawn = _sample(job, number, ask)
        except _Stopped:
            job.source.cursor = cursor
            raise
        job.waiting.append(drawn.experience)
        job.tokens += int(drawn.metrics["proxpo/tokens"])
        sampled = drawn.metrics
        for line in drawn.shown[: job.config.log.samples]:
            samples.append(line)
    clock.lap("rollout")
    at.phase = "update"
    told("updating", 0, 1)
    metrics = update(job, job.waiting.pop(0))
    clock.lap("update")
    job.rollout.sync()
    clock.lap("sync")
    job.step += 1
    job.seconds += clock.total
    return {
        **sampled,
        **metrics,
        "learning_rate": job.learner.optimizer.param_groups[0]["lr"],
        "num_tokens": job.tokens,
        "step_time": clock.total,
        "proxpo/updates": job.learner.version - before,
        "proxpo/skipped": job.skipped,
        **{f"proxpo/time/{name}": seconds for name, seconds in clock.laps.items()},
    }


def _sample(job: Job, number: int, told: Told) -> Collected:
    rollout, learner = job.config.rollout, job.learner
    sampler = Sampler(
        policy=job.policy,
        rollout=job.rollout,
        task=job.task,
        pool=job.pool,
        recipe=learner.recipe,
        how=Sampling(
            samples=rollout.samples_per_prompt,
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_prompt=rollout.max_prompt,
        ),
        seed=job.config.seed,
        state=learner.state,
        clock=job.clock,
        progress=job.progress,
        told=told,
    )
    return collect(
        sampler,
        job.source,
        prompts=rollout.prompts_per_step,
        step=number,
        version=learner.version,
    )


def _examine(job: Job, told: Told) -> Examined:
    return evaluate(
        policy=job.policy,
        initial=job.initial,
        rollout=job.rollout,
        task=job.task,
        pool=job.pool,
        exam=job.exam,
        told=told,
        state=job.progress,
    )


def _check_sampler(job: Job, noted: Noted) -> None:
    """Sampler and trainer must see the same policy; the gap is told."""
    prompts = [job.task.encode(p, job.policy.tokenizer) for p in job.exam.problems[:16]]
    tokens = min(job.config.rollout.max_tokens, 64)
    gap = agreement(job.policy, job.rollout, prompts, max_tokens=tokens)
    noted(f"sampler and trainer differ by {gap.largest:.1e} at most, {gap.mean:.1e} on average")
    if not gap.mean < 0.1:
        raise ProxpoError(
            f"the sampler's log-probs differ from the trainer's by {gap.mean:.2g} on average: they "
            "do not run the same model"
        )


def _resumed(
    out: Path, config: Config, *, resume: bool, noted: Noted
) -> tuple[Checkpoint, list[Change]] | None:
    """The checkpoint to continue from and the settings that change there, if there is one."""
    checkpoint = load_latest(out / "checkpoints")
    if checkpoint is None:
        return None
    if not resume:
        raise ProxpoError(f"{out} already holds a run: --resume continues it, --out starts another")
    for line in checkpoint.skipped:
        noted(f"damaged checkpoint passed over: {line}")
    if config.train.steps < checkpoint.step:
        raise ProxpoError(
            f"{out} has done {checkpoint.step} steps already; steps={config.train.steps} asks for "
            "fewer"
        )
    earlier = build_config(checkpoint.info["config"])
    changed = check_resume(earlier, config, step=checkpoint.step, where=checkpoint.path)
    for change in changed:
        if change.path not in ("train.steps", "out"):
            noted(f"setting changed since the checkpoint: {change}")
    return checkpoint, changed


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


class _Clock:
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


__all__ = ["train"]
