"""The end of a run: what was reached, in numbers and pictures; summary.json comes last."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxpo.train.config import as_dict
from proxpo.train.folder import write_summary
from proxpo.train.job import Job
from proxpo.train.picture import write_pictures
from proxpo.train.sinks import missing_steps, read_rows

Examined = tuple[dict[str, float], list[dict]]


def finish(
    job: Job, out: Path, examined: Examined, *, noted: Callable[[str], None]
) -> dict[str, Any]:
    """curves.png, report.html, then summary.json from the last evaluation; the summary."""
    metrics, answers = examined
    first = job.before["metrics"]
    rows = read_rows(out / "metrics.jsonl")
    gap = missing_steps(rows, job.step)
    if gap:
        noted(f"{out / 'metrics.jsonl'} has no row of step {gap}: the curves have a gap there")
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
    title += f" (no rows of step {gap})" if gap else ""
    try:
        write_pictures(out, rows, title=title, summary=summary, samples=pairs)
    except ImportError:
        noted("no curves.png and report.html: they need matplotlib, pip install 'proxpo[train]'")
    write_summary(out, summary | {"samples": pairs})
    return summary | {"samples": pairs}


def _sampled(metrics: dict[str, float]) -> float | None:
    return next((value for name, value in metrics.items() if name.startswith("eval/avg@")), None)


__all__ = ["finish"]
