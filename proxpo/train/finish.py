"""End of a run: curves.png and report.html, then summary.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxpo.runs.jsonlines import METRICS, OnNotice, missing_steps, read_rows
from proxpo.runs.status import write_summary
from proxpo.train.config import as_dict
from proxpo.train.job import Examined, Job
from proxpo.train.picture import write_pictures
from proxpo.train.run_page import inspect_saved
from proxpo.train.saving import Stopwatch

NO_SIGNAL = "no_signal"  # in the summary: why the run was stopped without having learnt


def finish_run(
    job: Job,
    out: Path,
    examined: Examined,
    *,
    on_notice: OnNotice,
    no_signal: str = "",
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Writes curves.png, report.html, then summary.json from the last evaluation; the summary.

    no_signal: why the run ends early
    wait: returns when the last checkpoint is in its place, which the summary comes after
    """
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
        "seconds": round(job.seconds, 3),
        **job.result(first, metrics),
        "out": str(out),
        **({"missing_steps": gap} if gap else {}),
        **({"changes": job.changes} if job.changes else {}),
        **({NO_SIGNAL: no_signal} if no_signal else {}),
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
    for line in job.closing_notes(rows):
        on_notice(line)
    title += f" (no rows of step {gap})" if gap else ""
    if job.config.log.pictures and not rows:
        on_notice(f"no new curves.png and report.html: {out / METRICS} has no rows")
    elif job.config.log.pictures:
        clock = Stopwatch()
        try:
            write_pictures(
                out,
                rows,
                title=title,
                summary=summary,
                samples=pairs,
                made=job.figure(),
                saved=inspect_saved(out, job.trained_recipe) if job.trained_recipe else (),
            )
            on_notice(f"curves and report drawn in {clock}")
        except ImportError:
            on_notice(
                "no curves.png and report.html: they need matplotlib, pip install 'proxpo[train]'"
            )
        except Exception as error:  # the run is whole without its pictures
            on_notice(f"no curves.png and report.html: {' '.join(f'{error!r}'.split())[:200]}")
    wait()
    write_summary(out, summary | {"samples": pairs})
    return summary | {"samples": pairs}


__all__ = ["NO_SIGNAL", "finish_run"]
