"""End of a run: curves.png and report.html, then summary.json."""

from pathlib import Path
from typing import Any

from proxpo.runs.jsonlines import METRICS, OnNotice, missing_steps, read_rows
from proxpo.runs.status import write_summary
from proxpo.train.config import as_dict
from proxpo.train.job import Job
from proxpo.train.picture import write_pictures

MOVED = "proxpo/budget/moved"
Examined = tuple[dict[str, float], list[dict]]


def finish_run(job: Job, out: Path, examined: Examined, *, on_notice: OnNotice) -> dict[str, Any]:
    """Writes curves.png, report.html, then summary.json from the last evaluation; the summary."""
    metrics, answers = examined
    first = job.before["metrics"]
    rows = read_rows(out / METRICS)
    gap = missing_steps(rows, job.step)
    if gap:
        on_notice(f"{out / METRICS} has no row of step {gap}: the curves have a gap there")
    summary = {
        "method": job.config.method,
        "model": job.config.model.name,
        "task": job.config.task.name,
        "seed": job.config.seed,
        "steps": job.step,
        "accuracy_before": first.get("eval/accuracy"),
        "accuracy_after": metrics.get("eval/accuracy"),
        "reward_before": first.get("eval/reward"),
        "reward_after": metrics["eval/reward"],
        "sampled_before": _sampled(first),
        "sampled_after": _sampled(metrics),
        "kl": metrics.get("eval/kl"),
        "entropy": metrics["eval/entropy"],
        "tokens": job.tokens,
        "seconds": round(job.seconds, 3),
        "tokens_per_second": round(job.tokens / max(job.seconds, 1e-9), 1),
        "out": str(out),
        **({"missing_steps": gap} if gap else {}),
        **({"changes": job.changes} if job.changes else {}),
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
    for line in idle_notes(job, rows):
        on_notice(line)
    title += f" (no rows of step {gap})" if gap else ""
    try:
        write_pictures(out, rows, title=title, summary=summary, samples=pairs)
    except ImportError:
        on_notice(
            "no curves.png and report.html: they need matplotlib, pip install 'proxpo[train]'"
        )
    write_summary(out, summary | {"samples": pairs})
    return summary | {"samples": pairs}


def idle_notes(job: Job, rows: list[dict[str, Any]]) -> list[str]:
    """Lines on parts of the method that had no effect, as this run never met their condition."""
    recipe = job.learner.recipe
    lines: list[str] = []
    if "prompt_id" not in recipe.needs():
        return lines
    if job.source.cursor <= len(job.source.problems):
        lines.append(
            f"{job.config.method} learns from problems that come again, and none did: more "
            "train.steps, or a smaller task.problems"
        )
    moved = [row[MOVED] for row in rows if row.get(MOVED) is not None]
    if moved and not any(moved):
        lines.append(
            f"{job.config.method}: its budget never departed from the even share, so this run is "
            "that of the method without it"
        )
    return lines


def _sampled(metrics: dict[str, float]) -> float | None:
    return next((value for name, value in metrics.items() if name.startswith("eval/avg@")), None)


__all__ = ["finish_run"]
