"""Notes of an analysis: scores that are missing or named otherwise, steps that are not common."""

import math
from collections.abc import Mapping, Sequence

from proxpo.report.common_steps import CommonSteps
from proxpo.report.metrics import PickedVariant, Series
from proxpo.report.run_data import Comparison, Run
from proxpo.report.statistics import value_at


def analysis_notes(
    comparison: Comparison,
    used: Mapping[int, Series],
    common: CommonSteps,
    score: PickedVariant | None,
    kl: PickedVariant | None,
    drift: Mapping[int, Series],
) -> list[str]:
    """Lines on what the analysis left out, took under another name or interpolated.

    used: curves of the score by position of the run; drift: those of the KL divergence
    """
    runs = comparison.runs
    if score is None:
        return ["No run holds a score: nothing can be ranked."]
    notes = [*_score_notes(comparison, used, score), *_step_notes(runs, used, common)]
    unseeded = [runs[i].folder for i in used if runs[i].seed is None]
    if unseeded:
        notes.append(f"No seed is known for {listed(unseeded)}: they cannot be paired.")
    end = common.steps[-1] if len(common.steps) else math.nan
    between = [i for i in used if i in drift and end not in drift[i].steps]
    between = [i for i in between if not math.isnan(value_at(*drift[i], float(end)))]
    if between:
        folders = listed([runs[i].folder for i in between])
        notes.append(f"KL at step {end:.0f} is interpolated between evaluations for {folders}.")
    for picked in (score, kl):
        for i, name in picked.names.items() if picked else ():
            if name in runs[i].broken:
                at = runs[i].broken[name]
                notes.append(f"{name} of {runs[i].folder} is no number at step {at:.0f}.")
    return notes


def _score_notes(
    comparison: Comparison, used: Mapping[int, Series], score: PickedVariant
) -> list[str]:
    """Notes on runs without the score, on several names of it, and on another score than asked."""
    notes: list[str] = []
    runs = comparison.runs
    wanted = comparison.score
    if wanted and wanted not in score.variant.names:
        notes.append(f"No run holds {wanted!r}: ranked by {score.variant.label} instead.")
    without = [run.folder for i, run in enumerate(runs) if run.counts and i not in used]
    if without:
        notes.append(f"No '{score.variant.label}' in {listed(without)}: left out of the ranking.")
    names = {score.names[i] for i in used}
    if len(names) > 1:
        notes.append(f"The score is logged under different names: {listed(sorted(names))}.")
    return notes


def _step_notes(runs: Sequence[Run], used: Mapping[int, Series], common: CommonSteps) -> list[str]:
    """A note on the steps of the comparison where the runs were evaluated at different ones."""
    if not used:
        return []
    shortest = min(used, key=lambda i: used[i].steps[-1])
    last = used[shortest].steps[-1]
    if not len(common.steps):
        latest = max(used, key=lambda i: used[i].steps[0])
        return [
            f"No step lies within all runs: {runs[shortest].folder} ends at step {last:.0f}, "
            f"{runs[latest].folder} begins at step {used[latest].steps[0]:.0f}. Nothing can be "
            "ranked."
        ]
    end = common.steps[-1]
    if common.interpolated:
        return [
            "The runs share no evaluation step after their first: scores are interpolated at step "
            f"{end:.0f} and nothing is claimed."
        ]
    if len({curve.steps[-1] for curve in used.values()}) > 1:
        return [
            f"Runs end at different steps, {runs[shortest].folder} at step {last:.0f}; they are "
            f"compared at step {end:.0f}, the last at which all were evaluated."
        ]
    if any(len(curve.steps) != len(common.steps) for curve in used.values()):
        return [
            f"Runs were evaluated at different steps: the {len(common.steps)} common ones count."
        ]
    return []


def listed(names: Sequence[str]) -> str:
    """The first four names, and the number of the others."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


__all__ = ["analysis_notes", "listed"]
