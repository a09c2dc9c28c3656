"""A comparison once more, on seeds that it has not seen.

    plan = confirmation("comparisons/hot", arms=["reinforce", "isopo q=-1"], seeds=10)

Each arm keeps the setting that was chosen for it: nothing is tuned again, so that only the seeds
are new. The findings of the first comparison go into the plan, and the report says which held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.compare.arms import split_settings
from proxpo.compare.design import first_runs, report_seeds, title_of
from proxpo.compare.plan import RESULTS, Finding, Plan, Seeds, check_runs, read_plan
from proxpo.errors import ProxpoError, resolve
from proxpo.runs.files import read_object


def confirmation(
    folder: str | Path,
    *,
    arms: Sequence[str] = (),
    seeds: int | None = None,
    first_seed: int | None = None,
) -> Plan:
    """The plan of the comparison in `folder`, of these arms or all, on seeds it has not seen.

    seeds: how many, by default as many as it reported; first_seed: by default the one after those.
    """
    stored = read_plan(folder)
    names = [arm.name for arm in stored.arms]
    wanted = {resolve(name, names, what=f"arm of {folder}") for name in arms} or set(names)
    chosen = {choice.arm: split_settings(choice.settings) for choice in stored.chosen}
    open_arms = [name for name in names if stored.sweep and name in wanted and name not in chosen]
    if open_arms:
        raise ProxpoError(
            f"{folder} has chosen no setting for {', '.join(open_arms)}: finish it first, or name "
            "other arms"
        )
    unseen = _unseen_seeds(stored.seeds, folder, seeds, first_seed)
    span = f"{unseen.report[0]} to {unseen.report[-1]}"
    note = f"settings as chosen in {folder}, which has not seen seeds {span}"
    found = read_findings(folder)
    if found is None:
        note += f"; it has no {RESULTS}, so its findings do not stand beside these"
    kept = [arm for arm in stored.arms if arm.name in wanted]
    given = stored.title if stored.title != title_of(stored.arms) else title_of(kept)
    plan = replace(
        stored,
        title=f"{given}, on other seeds",
        arms=tuple(
            replace(arm, settings={**arm.settings, **chosen.get(arm.name, {})}) for arm in kept
        ),
        seeds=unseen,
        sweep={},
        tune_best=None,
        notes=(*stored.notes, note),
        confirms=tuple(each for each in found or () if {each.winner, each.loser} <= wanted),
        chosen=(),
        runs=(),
    )
    return check_runs(replace(plan, runs=tuple(first_runs(plan))))


def _unseen_seeds(before: Seeds, folder: str | Path, count: int | None, first: int | None) -> Seeds:
    """The seeds to report, refused where the comparison in `folder` has seen one."""
    seeds = report_seeds(
        max(before.report, default=-1) + 1 if first is None else first,
        len(before.report) if count is None else count,
    )
    seen = {*before.report, *before.tune, *before.seen}
    if again := sorted(seen & set(seeds)):
        raise ProxpoError(
            f"{folder} has seen seed {again[0]}: begin after those that it reports and tunes on "
            "with --first-seed"
        )
    return Seeds(report=tuple(seeds), seen=tuple(sorted(seen)))


def read_findings(folder: str | Path) -> list[Finding] | None:
    """The differences that the report of a comparison has shown; None where there is none."""
    path = Path(folder) / RESULTS
    summary = read_object(path)
    if summary is None and path.is_file():
        raise ProxpoError(f"{path} is damaged; `proxpo report {folder}` writes it anew")
    try:
        return None if summary is None else [_finding(p) for p in summary["pairs"] if p["winner"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ProxpoError(f"{path} is damaged: {error!r}") from None


def _finding(pair: Mapping[str, Any]) -> Finding:
    """The finding that a pair of summary.json, arm a minus arm b, supports."""
    first = pair["winner"] == pair["a"]
    mean, low, high = (float(pair["student"][name]) for name in ("mean", "low", "high"))
    return Finding(
        winner=pair["winner"],
        loser=pair["b"] if first else pair["a"],
        measure=pair["measure"],
        mean=mean if first else -mean,
        low=low if first else -high,
        high=high if first else -low,
        p_holm=float(pair["p_holm"]),
    )


__all__ = ["confirmation", "read_findings"]
