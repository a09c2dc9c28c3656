"""Texts of an inspection that its table and its page share."""

import math
import re
from collections.abc import Sequence

from proxpo.batch_file import BatchFile
from proxpo.inspection import Inspection
from proxpo.report.text import plural

# metric, heading, meaning; a metric that a method lacks is shown as a dash
FIGURES = (
    (
        "trust/clipped",
        "clipped",
        "share of valid tokens whose trust region binds (clip or cap; not a dual clip's ceiling)",
    ),
    ("inspect/silent", "silent", "share of valid tokens without any gradient"),
    ("inspect/ess", "ESS", "effective sample size of the method's ratio, 1 = on-policy"),
    ("inspect/kl_old", "KL", "KL(π_old‖π), k3 estimate per token"),
    ("inspect/advantage", "|A|", "mean absolute advantage"),
)
SHARES = ("clipped", "silent")


def figure_texts(inspection: Inspection) -> dict[str, str]:
    """The method's figures as short text, by heading."""
    return {
        heading: short(inspection.metrics.get(metric), share=heading in SHARES)
        for metric, heading, _ in FIGURES
    }


def short(value: float | None, *, share: bool = False) -> str:
    """Three significant digits in at most nine characters, a share in per cent, a dash if none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if share:
        return f"{100 * value:.1f}%" if 0 < value < 0.1 else f"{100 * value:.0f}%"
    if value == 0:
        return "0"
    plain = 1e-3 <= abs(value) < 1e4
    return (
        f"{value:.3g}"
        if plain and abs(value) < 1e3
        else f"{value:.0f}"
        if plain
        else f"{value:.1e}"
    )


def batch_line(file: BatchFile, source: str) -> str:
    """One line on the batch: its source and its size."""
    batch = file.batch
    rows, tokens = batch.mask.shape
    count = "" if batch.group is None else plural(batch.group.unique().numel(), "prompt")
    responses = plural(rows, "response") + (f" to {count}" if count else "")
    return f"{source}: {responses}, {int(batch.mask.sum()):,} valid of {rows * tokens:,} tokens"


def batch_notes(file: BatchFile) -> list[str]:
    """A line on log-probabilities above 0, if there are any."""
    batch = file.batch
    above = [
        name
        for name, x in batch.items()
        if name.endswith("logp") and x.shape == batch.mask.shape and bool((x > 0)[batch.mask].any())
    ]
    if not above:
        return []
    return [
        f"{' and '.join(above)}: values above 0, which a density may have and a token's "
        "log-probability never has (is it a negative log-likelihood?)"
    ]


def inspection_notes(inspections: Sequence[Inspection]) -> list[str]:
    """Lines on what a batch of log-probabilities cannot show of a method."""
    return [
        f"{inspection.method}: {note}" for inspection in inspections for note in inspection.notes
    ]


def sentence(summary: str) -> str:
    """A method's summary without the name that opens it."""
    return re.sub(r"^[^:]{1,40}: ", "", summary)


def prompt_labels(file: BatchFile) -> list[str]:
    """Each response's prompt: its text where the file has text, else its number."""
    group, words = file.batch.group, file.text.get("group")
    if group is None:
        return [""] * len(file.batch.mask)
    return [words[i] if words else str(i) for i in group.tolist()]


def shares(inspection: Inspection) -> list[float]:
    """Each response's share of the method's gradient mass; 0 where that is 0 or not finite."""
    mass = inspection.mass
    total = float(mass.sum())
    return [part / total if 0 < total < math.inf else 0.0 for part in mass.tolist()]


def loudest(inspections: Sequence[Inspection]) -> float:
    """The largest share any response has in any method: the full length of a bar."""
    return (
        max((max(shares(inspection), default=0.0) for inspection in inspections), default=0.0)
        or 1.0
    )


__all__ = [
    "FIGURES",
    "batch_line",
    "batch_notes",
    "figure_texts",
    "inspection_notes",
    "loudest",
    "prompt_labels",
    "sentence",
    "shares",
    "short",
]
