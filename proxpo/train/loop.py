"""The whole job on one page: sample, reward, update, evaluate, log, checkpoint."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.train.checkpoint import load_latest, stop_on_signal
from proxpo.train.collect import Collected, Sampling, collect
from proxpo.train.config import Config, as_dict, changes, write_config
from proxpo.train.config import build as build_config
from proxpo.train.evaluate import evaluate
from proxpo.train.job import Job, build, restore, save
from proxpo.train.learner import needs
from proxpo.train.picture import write_pictures
from proxpo.train.rollouts import agreement
from proxpo.train.sinks import make_sinks, public_names
from proxpo.train.update import update

Told = Callable[[str, int, int], None]
Noted = Callable[[str], None]


def train(
    config: Config,
    *,
    resume: bool = False,
    told: Told = lambda phase, done, total: None,
    noted: Noted = lambda line: None,
    every_step: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None,
) -> dict[str, Any]:
    """Train, leaving config.yaml, metrics.jsonl, samples.jsonl, checkpoints and pictures behind.

    `told(phase, done, total)` follows the work inside a step, `every_step` gets its metrics and
    `noted` lines worth reading. Returns the summary, which is also in summary.json.
    """
    out = Path(config.folder)
    found = _place(out, config, resume=resume, noted=noted)
    job = build(config)
    try:
        if found is not None:
            restore(job, found)
        write_config(config, out / "config.yaml")
        return _run(job, out, told=told, noted=noted, every_step=every_step)
    finally:
        job.close()


def _run(job: Job, out: Path, *, told: Told, noted: Noted, every_step: Callable) -> dict[str, Any]:
    config = job.config
    started = job.step
    with (
        stop_on_signal() as stop,
        make_sinks(
            out,
            config.log.sinks,
            resume_at=job.step if started else None,
            project=config.log.project,
            config=as_dict(config),
        ) as sinks,
        _lines(out / "samples.jsonl", resume_at=job.step and job.step + len(job.waiting)) as show,
    ):
        if not started:
            _check_sampler(job, noted)
            metrics, answers = _examine(job)
            job.before = {"metrics": metrics, "answers": answers}
            sinks.write(0, metrics)
            save(job, out / "checkpoints")
        while job.step < config.train.steps and not stop.requested:
            metrics = _step(job, told, show)
            if _due(job.step, config.evaluate.every, config.train.steps):
                told("evaluating", 0, 1)
                metrics |= _examine(job)[0]
            sinks.write(job.step, metrics)
            every_step(job.step, public_names(metrics))
            if stop.requested or _due(job.step, config.checkpoint.every, config.train.steps):
                told("saving", 0, 1)
                save(job, out / "checkpoints")
    if stop.requested:
        noted(f"stopped by {stop.by} after step {job.step}; --resume continues from there")
    return _finish(job, out)


def _step(job: Job, told: Told, show: Callable[[dict], None]) -> dict[str, float]:
    """One step: a rollout (of this policy or, with a lag, of an earlier one) and its updates."""
    clock = _Clock()
    before = job.learner.version
    while len(job.waiting) <= job.config.train.off_policy_lag:
        number = job.step + len(job.waiting)
        drawn = _sample(job, number, told)
        job.waiting.append(drawn.experience)
        for line in drawn.shown[: job.config.log.samples]:
            show(line)
    clock.lap("rollout")
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
    rollout = job.config.rollout
    return collect(
        policy=job.policy,
        rollout=job.rollout,
        task=job.task,
        pool=job.pool,
        source=job.source,
        recipe=job.learner.recipe,
        prompts=rollout.prompts_per_step,
        how=Sampling(
            samples=rollout.samples_per_prompt,
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_prompt=rollout.max_prompt,
        ),
        seed=job.config.seed,
        step=number,
        version=job.learner.version,
        greedy="greedy_rewards" in needs(job.learner.recipe),
        told=told,
    )


def _examine(job: Job) -> tuple[dict[str, float], list[dict]]:
    return evaluate(
        policy=job.policy,
        initial=job.initial,
        rollout=job.rollout,
        task=job.task,
        pool=job.pool,
        exam=job.exam,
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


def _place(out: Path, config: Config, *, resume: bool, noted: Noted) -> Any:
    """The folder of the run, and the checkpoint to continue from if there is one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProxpoError(f"{out} cannot be created: {error.strerror}") from None
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


def _finish(job: Job, out: Path) -> dict[str, Any]:
    """summary.json, curves.png, report.html."""
    metrics, answers = _examine(job)
    first = job.before["metrics"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = {
        "method": job.config.method,
        "model": job.config.model.name,
        "task": job.config.task.name,
        "seed": job.config.seed,
        "steps": job.step,
        "accuracy_before": first["eval/accuracy"],
        "accuracy_after": metrics["eval/accuracy"],
        "sampled_before": _sampled(first),
        "sampled_after": _sampled(metrics),
        "kl": metrics.get("eval/kl"),
        "entropy": metrics["eval/entropy"],
        "tokens": job.tokens,
        "seconds": round(job.seconds, 3),
        "tokens_per_second": round(job.tokens / max(job.seconds, 1e-9), 1),
        "out": str(out),
        "config": as_dict(job.config),
    }
    pairs = [
        {
            "prompt": b["prompt"],
            "before": b["completion"],
            "after": a["completion"],
            "answer": b["answer"],
        }
        for b, a in zip(job.before["answers"], answers)
    ]
    title = f"{job.config.method} on {job.config.task.name}, {job.config.model.name}"
    (out / "summary.json").write_text(json.dumps(summary | {"samples": pairs}, indent=1))
    write_pictures(out, rows, title=title, summary=summary, samples=pairs)
    return summary | {"samples": pairs}


def _sampled(metrics: dict[str, float]) -> float | None:
    return next((value for name, value in metrics.items() if name.startswith("eval/avg@")), None)


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


@contextmanager
def _lines(path: Path, *, resume_at: int) -> Iterator[Callable[[dict], None]]:
    """Append JSON lines; what a resumed run will write again is cut off first."""
    kept: list[str] = []
    if resume_at and path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] < resume_at]
    with path.open("w") as file:
        file.writelines(kept)

        def show(row: dict) -> None:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()

        yield show


__all__ = ["train"]
