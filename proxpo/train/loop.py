"""The whole job on one page: sample, reward, update, evaluate, log, checkpoint."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.train import folder
from proxpo.train.checkpoint import load_latest, stop_on_signal
from proxpo.train.collect import Collected, Sampler, Sampling, collect
from proxpo.train.config import Config, as_dict, changes, write_config
from proxpo.train.config import build as build_config
from proxpo.train.evaluate import evaluate
from proxpo.train.faults import Progress, explained
from proxpo.train.finish import finish
from proxpo.train.job import Job, build, restore, save, splits
from proxpo.train.rollouts import agreement
from proxpo.train.sinks import JsonLines, Sinks, make_sinks, public_names
from proxpo.train.update import update

Told = Callable[[str, int, int], None]
Noted = Callable[[str], None]
EveryStep = Callable[[int, dict[str, Any]], None]


class _Stopped(Exception):
    """A rollout given up because the run was asked to stop; nothing has changed by it."""


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
    with folder.held(out, noted=noted), explained(out, config) as at:
        found = _found(out, config, resume=resume, noted=noted)
        job = build(config)
        try:
            if found is not None:
                restore(job, found)
            return _run(job, out, at, told=told, noted=noted, every_step=every_step)
        finally:
            job.close()


def _run(
    job: Job, out: Path, at: Progress, *, told: Told, noted: Noted, every_step: EveryStep
) -> dict[str, Any]:
    with stop_on_signal(signal.SIGTERM, signal.SIGINT) as stop:
        fresh = not job.before
        at.step = job.step
        if fresh:  # before anything is written: much that is wrong with the input shows here
            at.phase = "evaluate"
            for line in splits(job):
                noted(line)
            _check_sampler(job, noted)
            metrics, answers = _examine(job)
            job.before = {"metrics": metrics, "answers": answers}
        at.phase = "logging"
        folder.begin(out)
        write_config(job.config, out / "config.yaml")
        resume_at = None if fresh else job.step
        drawn = None if fresh else job.step + len(job.waiting) - 1  # samples of these are written
        with (
            _sinks(job, out, resume_at, noted) as sinks,
            JsonLines(out / "samples.jsonl", resume_at=drawn, noted=noted) as samples,
        ):
            if fresh:
                sinks.write(0, job.before["metrics"])
                save(job, out / "checkpoints")

            def ask(phase: str, done: int, total: int) -> None:
                if stop.requested:
                    raise _Stopped
                told(phase, done, total)

            examined = _steps(job, out, at, sinks, samples, ask, told, noted, every_step)
        if job.step < job.config.train.steps:
            noted(f"stopped by {stop.by} after step {job.step}; --resume continues from there")
            return {"stopped": stop.by, "steps": job.step, "out": str(out)}
    at.phase = "finish"
    return finish(job, out, examined or _examine(job), noted=noted)


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
) -> tuple[dict[str, float], list[dict]] | None:
    """Step by step to the end, or until `ask` says stop; the last evaluation, if there was one."""
    config, saved, examined = job.config, job.step, None
    while job.step < config.train.steps:
        at.step = job.step
        try:
            metrics = _step(job, at, ask, told, samples)
        except _Stopped:
            break
        if not math.isfinite(metrics["grad_norm"]):
            noted(f"step {job.step}: an update was left out, its gradient was not finite")
        if _due(job.step, config.evaluate.every, config.train.steps):
            at.phase = "evaluate"
            told("evaluating", 0, 1)
            examined = _examine(job)
            metrics |= examined[0]
        at.phase = "logging"
        sinks.write(job.step, metrics)
        every_step(job.step, public_names(metrics))
        if _due(job.step, config.checkpoint.every, config.train.steps):
            at.phase = "checkpoint"
            told("saving", 0, 1)
            save(job, out / "checkpoints")
            saved = job.step
    if saved != job.step:
        at.phase = "checkpoint"
        save(job, out / "checkpoints")
    return examined


def _sinks(job: Job, out: Path, resume_at: int | None, noted: Noted) -> Sinks:
    log, plain = job.config.log, as_dict(job.config)
    return make_sinks(
        out, log.sinks, resume_at=resume_at, project=log.project, config=plain, noted=noted
    )


def _step(job: Job, at: Progress, ask: Told, told: Told, samples: JsonLines) -> dict[str, float]:
    """One step: a rollout (of this policy or, with a lag, of an earlier one) and its updates."""
    clock = _Clock()
    before = job.learner.version
    at.phase = "rollout"
    while len(job.waiting) <= job.config.train.off_policy_lag:
        number, cursor = job.step + len(job.waiting), job.source.cursor
        try:
            ask("sampling", 0, 1)
            drawn = _sample(job, number, ask)
        except _Stopped:
            job.source.cursor = cursor
            raise
        job.waiting.append(drawn.experience)
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
    job.tokens += int(drawn.metrics["proxpo/tokens"])
    job.seconds += clock.total
    return {
        **drawn.metrics,
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


def _examine(job: Job) -> tuple[dict[str, float], list[dict]]:
    return evaluate(
        policy=job.policy,
        initial=job.initial,
        rollout=job.rollout,
        task=job.task,
        pool=job.pool,
        exam=job.exam,
        progress=job.progress,
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


def _found(out: Path, config: Config, *, resume: bool, noted: Noted) -> Any:
    """The checkpoint to continue from, if there is one."""
    found = load_latest(out / "checkpoints")
    if found is None:
        return None
    if not resume:
        raise ProxpoError(f"{out} already holds a run: --resume continues it, --out starts another")
    for line in found.skipped:
        noted(f"damaged checkpoint passed over: {line}")
    if config.train.steps < found.step:
        raise ProxpoError(
            f"{out} has done {found.step} steps already; steps={config.train.steps} asks for fewer"
        )
    earlier = build_config(found.info["config"])
    other = [
        line for line in changes(earlier, config) if not line.startswith(("train.steps", "out"))
    ]
    for line in other:
        noted(f"setting changed since the checkpoint: {line}")
    return found


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
