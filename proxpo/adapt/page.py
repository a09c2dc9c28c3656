"""report.html of an adaptation run: the arms at equal tokens, and every problem's answers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxpo.adapt.settings import Settings
from proxpo.report.text import plural
from proxpo.runs.files import write_whole
from proxpo.runs.page import escape, fill_page

MOST_ROWS = 200


def write_page(
    folder: Path, settings: Settings, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Writes report.html; at most 200 problems are listed, and it says so."""
    write_whole(folder / "report.html", adapt_page(settings, summary, rows).encode())


def adapt_page(
    settings: Settings, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    """One self-contained page, in light and dark."""
    arms = list(summary["arms"])
    title = f"{settings.method} on {settings.task}, {settings.model}"
    early = f"in {plural(summary['most_attempts'], 'attempt')}"
    headings = ("arm", "solved", "", early, "attempts", "tokens", "seconds")
    lines = [_arm("first answer", {"accuracy": summary["accuracy_before"]})]
    lines += [_arm(name, summary["arms"][name]) for name in arms]
    shown = rows[:MOST_ROWS]
    cut = f" (the first {MOST_ROWS} of {len(rows)})" if len(rows) > MOST_ROWS else ""
    markup = {
        "arms": _head(headings) + "".join(lines),
        "problems": _head(("prompt", "answer", "first answer", *arms))
        + "".join(_problem(row) for row in shown),
    }
    text = {
        "title": title,
        "lead": (
            f"{len(rows)} held-out problems. Tokens are passes of a token through the model, a "
            "problem on average; resampling and plain gradient steps stop at the method's number."
        ),
        "heading": f"Answers{cut}",
        "config": json.dumps(settings.as_dict(), indent=1),
    }
    return fill_page("adapt", text=text, markup=markup)


def _head(names: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"


def _arm(name: str, numbers: Mapping[str, float]) -> str:
    share = numbers["accuracy"]
    cells = [f"{100 * share:.1f} %", f'<meter value="{share:.4f}"></meter>']
    if "attempts" in numbers:
        cells += [f"{100 * numbers['early']:.1f} %", f"{numbers['attempts']:.1f}"]
        cells += [f"{numbers['tokens']:,.1f}", f"{numbers['seconds']:.2f}"]
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _problem(row: Mapping[str, Any]) -> str:
    prompt = row["prompt"]
    asked = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
    answers = [row["before"], *row["arms"].values()]
    cells = [escape(asked), escape(str(row["answer"])), *map(_answer, answers)]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _answer(numbers: Mapping[str, Any]) -> str:
    mark = "✓" if numbers["right"] else "✗"
    times = f" ({numbers['attempts']})" if "attempts" in numbers else ""
    return f"{mark} <code>{escape(numbers['text'])}</code>{times}"


__all__ = ["adapt_page", "write_page"]
