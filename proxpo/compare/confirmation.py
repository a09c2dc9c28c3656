"""A comparison once more, on seeds that it has not seen.

    plan = confirmation("comparisons/hot", arms=["reinforce", "isopo q=-1"], seeds=10)

Each arm keeps the setting that was chosen for it: nothing is tuned again, so that only the seeds
are new.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from proxpo.compare.arms import split_settings
from proxpo.compare.design import first_runs, report_seeds
from proxpo.compare.plan import Plan, Seeds, check_runs, read_plan
from proxpo.errors import ProxpoError, resolve


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
    report = report_seeds(
        max(stored.seeds.report, default=-1) + 1 if first_seed is None else first_seed,
        len(stored.seeds.report) if seeds is None else seeds,
    )
    seen = sorted({*stored.seeds.report, *stored.seeds.tune} & set(report))
    if seen:
        raise ProxpoError(
            f"{folder} has seen seed {seen[0]}: begin after those that it reports and tunes on "
            "with --first-seed"
        )
    note = f"settings as chosen in {folder}, which has not seen seeds {report[0]} to {report[-1]}"
    plan = replace(
        stored,
        title=f"{stored.title}, on other seeds",
        arms=tuple(
            replace(arm, settings={**arm.settings, **chosen.get(arm.name, {})})
            for arm in stored.arms
            if arm.name in wanted
        ),
        seeds=Seeds(report=tuple(report)),
        sweep={},
        tune_best=None,
        notes=(*stored.notes, note),
        chosen=(),
        runs=(),
    )
    return check_runs(replace(plan, runs=tuple(first_runs(plan))))


__all__ = ["confirmation"]
