"""Several runs of an adaptation, each with a seed and problems of its own: means and spreads."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.adapt.run import ROWS, OnRow, adapt, adapt_task, sign_test
from proxpo.adapt.settings import CONFIG, Settings
from proxpo.errors import ProxpoError
from proxpo.runs.jsonlines import OnNotice
from proxpo.runs.status import write_summary

MEASURED = ("accuracy", "early", "attempts", "tokens", "seconds")
Spread = dict[str, float]  # mean, sd


def adapt_seeds(
    settings: Settings,
    seeds: int,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_row: OnRow = lambda done, total, row: None,
    on_notice: OnNotice = lambda line: None,
) -> dict[str, Any]:
    """Runs seed k = 0, 1, ... on the k-th block of problems; returns the summary over them.

    Run k is `adapt` with seed=k and first=k·problems, in the folder `out`/seedk.
    """
    if seeds < 2:
        raise ProxpoError(f"adapt: seeds is at least 2, got {seeds}; --seed is for one run")
    folder = Path(out or settings.folder.removesuffix(f"-seed{settings.seed}"))
    blocks = [
        replace(settings, seed=k, first=settings.first + k * settings.problems)
        for k in range(seeds)
    ]
    if any((folder / name).exists() for name in (ROWS, CONFIG)):
        raise ProxpoError(f"{folder} already holds a run with one seed: --out starts another")
    adapt_task(blocks[-1])  # too few problems are refused before the first run
    summaries = [
        adapt(
            block,
            out=seed_folder(folder, block.seed),
            resume=resume,
            on_row=on_row,
            on_notice=on_notice,
        )
        for block in blocks
    ]
    summary = over_seeds(summaries)
    write_summary(folder, summary)
    return summary | {"out": str(folder)}


def seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed{seed}"


def over_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs and standard deviations between them; discordant pairs of all problems.

    The runs have no problem in common, so the sign test takes all of their pairs together.
    """
    head = summaries[0]

    def arm(name: str) -> dict[str, Any]:
        runs = [summary["arms"][name] for summary in summaries]
        return {
            **{key: _spread([run[key] for run in runs]) for key in MEASURED},
            "updates": sum(run["updates"] for run in runs),
        }

    def against(name: str) -> dict[str, Any]:
        pairs = [summary["against"][name] for summary in summaries]
        wins, losses = (
            sum(pair[key] for pair in pairs) for key in ("only_method", "only_baseline")
        )
        return {"only_method": wins, "only_baseline": losses, "p": sign_test(wins, losses)}

    return {
        **{key: head[key] for key in ("method", "model", "task")},
        "seeds": len(summaries),
        "steps": sum(summary["steps"] for summary in summaries),
        "accuracy_before": _spread([summary["accuracy_before"] for summary in summaries]),
        "accuracy_after": _spread([summary["accuracy_after"] for summary in summaries]),
        "most_attempts": max(summary["most_attempts"] for summary in summaries),
        "arms": {name: arm(name) for name in head["arms"]},
        "against": {name: against(name) for name in head["against"]},
        "settings": head["settings"],
    }


def _spread(values: Sequence[float]) -> Spread:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values)}


__all__ = ["adapt_seeds", "over_seeds", "seed_folder"]
