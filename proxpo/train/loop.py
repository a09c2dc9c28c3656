"""The loop of every run: step, evaluate, log, checkpoint, and stop or resume in between."""

import math
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.report.text import plural
from proxpo.runs.checkpoint import Checkpoint, load_latest
from proxpo.runs.files import read_object
from proxpo.runs.folder import hold_folder
from proxpo.runs.jsonlines import METRICS, JsonLines, read_rows
from proxpo.runs.sinks import Sinks, check_sinks, make_sinks, public_names
from proxpo.runs.status import SUMMARY, clear_end
from proxpo.runs.stop import Overdue, StopRequest, stop_on_signal
from proxpo.train.build import build_job
from proxpo.train.config import (
    Change,
    Config,
    as_dict,
    build_config,
    check_resume,
    write_config,
)
from proxpo.train.faults import Progress, explained
from proxpo.train.finish import NO_SIGNAL, finish_run
from proxpo.train.job import Examined, Job, StepWatch, restore
from proxpo.train.learning_signal import NoSignalError
from proxpo.train.observer import SILENT, Observer
from proxpo.train.resume import begin_anew
from proxpo.train.saving import Saver, Stopwatch, due
from proxpo.train.sources import check_sources, fingerprints, write_sources


class _Stopped(Exception):
    """Raised inside a rollout or evaluation after a stop signal; it has changed nothing."""


def train(config: Config, *, resume: bool = False, observer: Observer = SILENT) -> dict[str, Any]:
    """Trains; leaves config.yaml, metrics.jsonl, samples.jsonl, checkpoints and pictures behind.

    Returns the summary, which is also in summary.json; a run that a signal stopped returns
    {"stopped", "steps", "out"} instead and writes none.
    """
    out = Path(config.folder)
    check_sinks(config.log.sinks)
    with hold_folder(out, on_notice=observer.on_notice), explained(out, config) as at:
        files = fingerprints(config.model.name, config.task)
        resumed = _resumed(out, config, files, resume=resume, observer=observer)
        observer.on_progress("loading", 0, 1)
        clock = Stopwatch()
        job = build_job(config)
        job.observe(observer)
        saver: Saver | None = None
        try:
            if resumed is not None:
                restore(job, *resumed)
                at.saved = job.step
            observer.on_notice(f"loaded in {clock}")
            if resumed is not None:
                observer.on_notice(_position(job))
            saver = Saver(job, out / "checkpoints", at, observer.on_notice)
            return _finished(_ActiveRun(job, out, at, observer, files, saver))
        finally:
            if saver is not None:
                saver.close()
            job.close()


@dataclass
class _ActiveRun:
    """A run after loading: its job, folder, position and observer, and the stop that was asked.

    files: fingerprints of the local files that it reads
    """

    job: Job
    out: Path
    at: Progress
    observer: Observer
    files: dict[str, str]
    saver: Saver
    stop: StopRequest | None = None

    def announce_stop(self, by: str) -> None:
        """Says that a stop signal has arrived while the work of a step still lasts."""
        grace = self.job.config.checkpoint.grace
        self.observer.on_notice(
            f"{by}: the run stops within {grace:g} s; a second {by} ends it at once"
        )

    @property
    def stoppable(self) -> Observer:
        """The observer of work that can be given up: progress raises after a stop signal."""

        def on_progress(phase: str, done: int, total: int) -> None:
            if self.stop is not None and self.stop.requested:
                raise _Stopped
            self.observer.on_progress(phase, done, total)

        return replace(self.observer, on_progress=on_progress)

    def save(self) -> None:
        """Writes a checkpoint after a stop signal, unless the newest one is of this step."""
        if self.saver.asked and self.job.step and self.saver.step != self.job.step:
            self.saver.begin()
        self.saver.commit()
        self.at.phase = "checkpoint"
        self.saver.wait()

    def examine(self) -> Examined:
        """Evaluates until a stop signal comes; says how long the first and the last one took."""
        clock = Stopwatch()
        examined = self.job.examine(self.stoppable)
        if self.job.step in (0, self.job.config.train.steps):
            self.observer.on_notice(f"evaluated in {clock}")
        return examined


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
            may_end=lambda: at.phase not in ("checkpoint", "finish"),
            on_wait=run.announce_stop,
        ) as run.stop:
            examined = _trained(run) or run.examine()
            at.phase = "finish"
            observer.on_progress("finishing", 0, 1)
            return finish_run(job, out, examined, on_notice=observer.on_notice, wait=run.saver.wait)
    except (_Stopped, Overdue) as end:
        by = run.stop.by
        phase, at.phase = at.phase, "checkpoint"
        run.saver.close()  # one that is being written always is
        if at.saved is None:
            when = f"after step {job.step}" if job.step else "before the first step"
            observer.on_notice(f"stopped by {by} {when}; nothing was saved")
        else:
            late = f", in the {phase} of step {at.step + 1}" if isinstance(end, Overdue) else ""
            observer.on_notice(
                f"stopped by {by} after step {at.saved}{late}; --resume continues from there"
            )
        return {"stopped": by, "steps": at.saved or 0, "out": str(out)}
    except NoSignalError as end:  # the weights are those of the first evaluation
        at.phase = "finish"
        first = job.before["metrics"], job.before["answers"]
        finish_run(job, out, first, on_notice=observer.on_notice, no_signal=str(end))
        raise
    except KeyboardInterrupt:  # the second Ctrl-C
        kept = at.saved is not None
        after = f"--resume continues after step {at.saved}" if kept else "nothing was saved"
        observer.on_notice(f"ended at once; {after}")
        run.saver.close(wait=False)
        raise


def _trained(run: _ActiveRun) -> Examined | None:
    """Makes all steps that are left; the last evaluation, if there was one."""
    job, out, at, on_notice = run.job, run.out, run.at, run.observer.on_notice
    fresh = not job.before
    if not fresh:
        run.saver.announce()
    if fresh:  # before anything is written: much that is wrong with the input shows here
        at.phase = "evaluate"
        job.check(run.observer)
        run.saver.announce()
        metrics, answers = run.examine()
        job.before = {"metrics": metrics, "answers": answers}
    at.phase = "logging"
    if job.unwritten is not None or job.step < job.config.train.steps:
        clear_end(out)
    lines = job.remarks()
    for line in lines if fresh else ():
        on_notice(line)
    write_config(job.config, out / "config.yaml", lines)
    at.begun = True
    if fresh:
        write_sources(run.files, out)
    # The row of a step whose evaluation is still due is written after it.
    resume_at = None if fresh else job.step - (job.unwritten is not None)
    drawn = None if fresh else job.sampled  # samples of as many rollouts are written
    with (
        _sinks(run, resume_at) as sinks,
        JsonLines(out / "samples.jsonl", resume_at=drawn, on_notice=on_notice) as samples,
    ):
        if fresh:
            sinks.write(0, job.before["metrics"])
        return _steps(run, sinks, samples)


def _steps(run: _ActiveRun, sinks: Sinks, samples: JsonLines) -> Examined | None:
    """Step by step to the end, or to a stop, before which the state is saved."""
    job, at, observer, config = run.job, run.at, run.observer, run.job.config
    examined = None
    try:
        while job.unwritten is not None or job.step < config.train.steps:
            at.step = job.step
            run.saver.check()
            if job.unwritten is None:
                job.unwritten = _step(run, samples)
            if run.saver.due(job.step):
                run.saver.begin()  # before the evaluation, which changes nothing that is saved
            metrics = job.unwritten
            if not math.isfinite(metrics["grad_norm"]):
                observer.on_notice(
                    f"step {job.step}: an update was left out, its gradient was not finite"
                    f"{job.fault}"
                )
            if due(job.step, config.evaluate.every, config.train.steps):
                at.phase = "evaluate"
                run.stoppable.on_progress("evaluating", 0, 1)
                examined = run.examine()
                metrics = metrics | examined[0]
            at.phase = "logging"
            sinks.write(job.step, metrics)
            job.unwritten = None
            observer.on_step(job.step, public_names(metrics))
            if run.saver.due(job.step):
                observer.on_progress("saving", 0, 1)
                run.saver.commit()
    except _Stopped:
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
    """One step of the job, with the seconds of its parts."""
    job, timer = run.job, _StepTimer()

    def enter(phase: str) -> None:
        run.at.phase = phase
        if phase == "update":
            run.observer.on_progress("updating", 0, 1)

    watch = StepWatch(run.stoppable, enter, timer.lap, samples.append)
    metrics = job.make_step(watch)
    job.seconds += timer.total
    laps = {f"proxpo/time/{name}": seconds for name, seconds in timer.laps.items()}
    return {**metrics, "step_time": timer.total, **laps}


def _resumed(
    out: Path, config: Config, files: dict[str, str], *, resume: bool, observer: Observer
) -> tuple[Checkpoint, list[Change]] | None:
    """The checkpoint to continue from and the settings that change there, if there is one."""
    checkpoint = load_latest(out / "checkpoints")
    if checkpoint is None:
        summary = read_object(out / SUMMARY)
        if summary is not None and NO_SIGNAL not in summary:  # one that learnt nothing may go
            raise ProxpoError(
                f"{out} holds a finished run without checkpoints: choose another --out"
            )
        if resume:
            begin_anew(out, config, observer.on_notice)
        elif summary is None and _has_steps(out / METRICS):
            raise ProxpoError(
                f"{out} already holds a run, without a checkpoint: --resume begins it anew, --out "
                "starts another"
            )
        return None
    if not resume:
        raise ProxpoError(f"{out} already holds a run: --resume continues it, --out starts another")
    for line in checkpoint.skipped:
        observer.on_notice(f"damaged checkpoint passed over: {line}")
    if config.train.steps < checkpoint.step:
        raise ProxpoError(
            f"{out} has done {plural(checkpoint.step, 'step')} already; steps={config.train.steps} "
            "asks for fewer"
        )
    earlier = build_config(checkpoint.info["config"])
    changed = check_resume(earlier, config, step=checkpoint.step, where=checkpoint.path)
    check_sources(files, out)
    for change in changed:
        if change.path not in ("train.steps", "out"):
            observer.on_notice(f"setting changed since the checkpoint: {change}")
    return checkpoint, changed


def _has_steps(metrics: Path) -> bool:
    return metrics.is_file() and any(row["step"] for row in read_rows(metrics))


def _position(job: Job) -> str:
    """One line on the step from which a resumed run goes on."""
    steps = job.config.train.steps
    if job.step < steps or job.unwritten is not None:
        return f"continues after step {job.step} of {steps}"
    return f"all steps are done already, {steps} of {steps}; --set steps=N with a larger N goes on"


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


__all__ = ["train"]
