"""HTML page of an inspection: a heat map of every token's weight in every method's gradient."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from proxpo.batch_file import BatchFile
from proxpo.inspection import Inspection
from proxpo.ops.masked import row_mean
from proxpo.ops.shapes import Tensor
from proxpo.recipes import methods
from proxpo.report.inspection_text import (
    FIGURES,
    batch_line,
    batch_notes,
    figure_texts,
    inspection_notes,
    loudest,
    prompt_labels,
    sentence,
    shares,
    short,
)
from proxpo.runs.page import escape, fill_page

MOST_ROWS, MOST_TOKENS = 256, 4096
GLOSSARY = (
    ("weight", "−∂loss/∂log π of the token: what one step of gradient descent adds to it"),
    *((heading, meaning) for _, heading, meaning in FIGURES),
    ("left", "the response's reward and its mean advantage in this method"),
    ("right", "the response's share of Σ |∂loss/∂log π|, blue if the step makes it likelier"),
)


def inspect_page(inspections: Sequence[Inspection], file: BatchFile, *, source: str) -> str:
    """The page as HTML. At most 256 responses of 4,096 tokens are drawn, and it says so."""
    names = ", ".join(inspection.method for inspection in inspections)
    text = {"title": f"proxpo inspect: {names}", "batch": batch_line(file, source)}
    markup = {
        "cards": "".join(_card(inspection, i) for i, inspection in enumerate(inspections)),
        "note": _notes(inspections, file),
        "maps": "".join(_map(inspection, i) for i, inspection in enumerate(inspections)),
        "table": _table(inspections, file),
        "glossary": "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in GLOSSARY),
    }
    return fill_page("inspect", text=text, markup=markup, data=_data(inspections, file))


def _card(inspection: Inspection, index: int) -> str:
    texts = figure_texts(inspection)
    facts = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(heading)}</dt><dd>{texts[heading]}</dd></div>'
        for _, heading, meaning in FIGURES
    )
    return (
        f'<a class="card" href="#m{index}"><h2>{escape(inspection.method)}</h2>'
        f'<p class="loss">{short(inspection.loss)}<small>loss</small></p><dl>{facts}</dl></a>'
    )


def _map(inspection: Inspection, index: int) -> str:
    entry = methods().get(inspection.recipe.name)
    what = sentence(entry.summary) if entry else ""
    chain = " → ".join(
        f'<span title="{escape(f"{place}: {stage}")}">{escape(stage.name)}</span>'
        for place, stage in inspection.recipe.stages()
    )
    return (
        f'<section class="map" id="m{index}"><header><h2>{escape(inspection.method)}</h2>'
        f'<p class="what">{escape(what)}</p><p class="chain">{chain}</p></header>'
        '<div class="grid"><div class="labels"></div><div class="wide"></div>'
        '<div class="shares"></div></div></section>'
    )


def _notes(inspections: Sequence[Inspection], file: BatchFile) -> str:
    rows, tokens = file.batch.mask.shape
    notes = [*batch_notes(file), *inspection_notes(inspections)]
    if rows > MOST_ROWS or tokens > MOST_TOKENS:
        shown = f"{min(rows, MOST_ROWS):,} responses and {min(tokens, MOST_TOKENS):,} tokens"
        notes.append(f"Drawn: the first {shown}. Figures are of the whole batch.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _table(inspections: Sequence[Inspection], file: BatchFile) -> str:
    rewards = file.batch.rewards
    lengths = file.batch.mask.sum(dim=1).tolist()
    heads = "".join(f"<th>{escape(inspection.method)}</th>" for inspection in inspections)
    parts = [shares(inspection) for inspection in inspections]
    lines = []
    for i, label in enumerate(prompt_labels(file)[:MOST_ROWS]):
        reward = None if rewards is None or rewards[i].isnan() else float(rewards[i])
        cells = "".join(
            f'<td class="{_direction(float(inspection.push[i]))}">{short(part[i], share=True)}</td>'
            for inspection, part in zip(inspections, parts)
        )
        lines.append(
            f"<tr><td>{escape(label)}</td><td>{i}</td><td>{lengths[i]}</td>"
            f"<td>{short(reward)}</td>{cells}</tr>"
        )
    return (
        f"<table><thead><tr><th>prompt</th><th>response</th><th>tokens</th><th>reward</th>{heads}"
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _direction(push: float) -> str:
    return "up" if push > 0 else "down" if push < 0 else ""


def _data(inspections: Sequence[Inspection], file: BatchFile) -> dict[str, Any]:
    """The data that the script draws; null where there is nothing to draw."""
    batch = file.batch
    mask = batch.mask[:MOST_ROWS, :MOST_TOKENS]
    ratio = None if batch.old_logp is None else batch.logp - batch.old_logp
    return {
        "rows": mask.shape[0],
        "cols": mask.shape[1],
        "mask": ["".join("1" if valid else "0" for valid in row) for row in mask.tolist()],
        "prompts": prompt_labels(file)[:MOST_ROWS],
        "rewards": None if batch.rewards is None else _rounded(batch.rewards[:MOST_ROWS].tolist()),
        "logp": _cells(batch.logp, batch.mask),
        "log_ratio": None if ratio is None else _cells(ratio, batch.mask),
        "tokens": _tokens(file),
        "loudest": loudest(inspections),
        "methods": [_method_data(inspection) for inspection in inspections],
    }


def _method_data(inspection: Inspection) -> dict[str, Any]:
    advantages = inspection.advantages
    per_row = advantages.dim() == 1
    rows = advantages if per_row else row_mean(advantages, inspection.mask)
    return {
        "name": inspection.method,
        "weight": _cells(-inspection.dloss_dlogp, inspection.mask),
        "advantage": _rounded(advantages.tolist()[:MOST_ROWS])
        if per_row
        else _cells(advantages, inspection.mask),
        "adv_row": _rounded(rows.tolist()[:MOST_ROWS]),
        "share": _rounded(shares(inspection)[:MOST_ROWS]),
        "push": _rounded(inspection.push.tolist()[:MOST_ROWS]),
    }


def _cells(value: Tensor, mask: Tensor) -> list[Any]:
    drawn = torch.where(mask, value, torch.nan)[:MOST_ROWS, :MOST_TOKENS]
    return _rounded(drawn.tolist())


def _rounded(value: Any) -> Any:
    """Values of four significant digits, as many as a colour or a tooltip can show."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") + 0.0 if math.isfinite(value) else None


def _tokens(file: BatchFile) -> list[list[str]] | None:
    tokens, words = file.batch.tokens, file.text.get("tokens")
    if tokens is None:
        return None
    drawn = tokens[:MOST_ROWS, :MOST_TOKENS].tolist()
    return [[words[i] if words else str(i) for i in row] for row in drawn]


__all__ = ["inspect_page"]
