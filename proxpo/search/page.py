"""search.html: the claims, the frontier of score and drift, finalists' recipes, all candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxpo.compare.plan import PLAN, Arm
from proxpo.report.findings import format_number, span
from proxpo.report.text import plural
from proxpo.runs.files import write_whole
from proxpo.runs.page import escape, fill_page
from proxpo.search.halving import Result, best, bracket_results, confirmations, tried
from proxpo.search.plan import SearchPlan, SearchState, read_search
from proxpo.search.recipe_file import config_text, python_text
from proxpo.search.space import LEFT_OUT, Space, make_space
from proxpo.search.verdict import Confirmation, Verdict, judge, winner
from proxpo.train.config import load_config

PAGE, WINNER = "search.html", "winner.yaml"
WIDTH, HEIGHT, MARGIN = 640.0, 360.0, 48.0  # of the figure


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that the page shows, read from the search's folder."""

    plan: SearchPlan
    state: SearchState
    space: Space
    candidates: list[Result]
    named: list[Result]
    finalists: list[Arm]
    task: Confirmation | None = None
    unseen: Confirmation | None = None

    @property
    def winner(self) -> str | None:
        both = self.task is not None and self.unseen is not None
        return winner(self.task, self.unseen) if both else None  # type: ignore[arg-type]


def search_space(plan: SearchPlan) -> Space:
    """The space of a search."""
    return make_space(load_config(dict(plan.base)), plan.sweep)


def read_findings(folder: Path) -> Findings:
    """The findings of a search, finished or not."""
    plan, state = read_search(folder)
    results, places = tried(state, folder), confirmations(state, folder)
    finalists = [result.arm for result in best(results, plan, families=False)]
    names = [arm.name for arm in finalists]
    judged = {key: judge(place, names) for key, place in places.items() if (place / PLAN).is_file()}
    return Findings(
        plan=plan,
        state=state,
        space=search_space(plan),
        candidates=results,
        named=bracket_results(folder / "named"),
        finalists=finalists,
        task=judged.get("confirm"),
        unseen=judged.get("unseen"),
    )


def write_search_page(folder: Path) -> tuple[Path, list[str]]:
    """Writes search.html, and winner.yaml if there is a winner; the page and its first lines."""
    findings = read_findings(folder)
    write_whole(folder / PAGE, search_page(findings).encode())
    (folder / WINNER).unlink(missing_ok=True)
    for arm in findings.finalists:
        if arm.name == findings.winner:
            text = f"# {conclusions(findings)[0]}\n# proxpo train {WINNER} --model M --task T\n"
            write_whole(folder / WINNER, (text + config_text(arm)).encode())
    return folder / PAGE, conclusions(findings)


def conclusions(findings: Findings) -> list[str]:
    """Sentences that say what the search has shown, the main one first."""
    if findings.task is None or findings.unseen is None:
        return ["The search is not finished: no finalist has been confirmed."]
    named = ", ".join(name for name, _ in findings.task.verdicts[0].against)
    best_name = findings.winner
    if best_name is None:
        lines = [f"Nothing that was found is shown to beat the best named methods ({named})."]
    else:
        lines = [f"{best_name} beats the best named methods ({named}) on the task of the search."]
    for where, confirmation in (
        ("task of the search", findings.task),
        ("unseen task", findings.unseen),
    ):
        lines += [_sentence(verdict, where) for verdict in confirmation.verdicts]
    return lines


def search_page(findings: Findings) -> str:
    """The page as HTML."""
    plan, state = findings.plan, findings.state
    brackets = len(state.brackets)
    text = {
        "title": f"Search over stages: {plan.base['task']['name']}, {plan.base['model']['name']}",
        "lead": (
            f"{plural(findings.space.size, 'composition')} of stages in the space, "
            f"{plural(len(findings.candidates), 'candidate')} tried ({plan.proposer} proposals, "
            f"{plural(brackets, 'bracket')}), {plural(len(plan.named), 'named arm')}; "
            f"{sum(state.seconds) / 60:.0f} minutes."
        ),
        "method": (
            "Each bracket is halved: "
            + ", ".join(
                f"{plural(steps, 'step')} on {plural(len(s), 'seed')}" for steps, s in plan.rungs
            )
            + "; the named methods likewise. The best "
            f"{plural(plan.finalists, 'candidate')} and the best named methods are then run on "
            f"{plan.seeds} fresh seeds, on the task of the search and on one it has "
            "not seen. Fresh seeds make the estimates unbiased by the choice. A "
            "finalist is said to beat the named methods if it beats each of them (largest paired "
            "Student p), with Holm's correction for the number of finalists."
        ),
    }
    markup = {
        "conclusions": _items([*conclusions(findings), *plan.notes]),
        "figure": _figure(findings),
        "confirmations": "".join(
            _confirmation(confirmation, title)
            for confirmation, title in (
                (findings.task, "Fresh seeds, the task of the search"),
                (findings.unseen, f"Fresh seeds, unseen task: {_task(plan)}"),
            )
            if confirmation is not None
        ),
        "recipes": "".join(map(_recipe, findings.finalists)),
        "tried": _results(findings.candidates),
        "named": _results(findings.named),
        "left_out": _items([f"{stage}: {reason}" for stage, reason in LEFT_OUT.items()]),
    }
    return fill_page("search", text=text, markup=markup)


def frontier(results: Sequence[Result]) -> list[Result]:
    """Results that no other one surpasses in score at a KL as small, by rising KL."""
    best_score, kept = -math.inf, list[Result]()
    known = [r for r in results if r.score is not None and r.kl is not None]
    for result in sorted(known, key=lambda r: (r.kl, -(r.score or 0.0))):
        if result.score is not None and result.score > best_score:
            best_score = result.score
            kept.append(result)
    return kept


def _sentence(verdict: Verdict, where: str) -> str:
    name, difference = verdict.closest
    words = "beats all named methods" if verdict.beats else "is not shown to beat all named methods"
    return (
        f"{where}: {verdict.finalist} {words}; against {name} "
        f"{format_number(difference.student.mean, signed=True)} "
        f"({span(difference.student, signed=True)}), corrected p "
        f"{format_number(verdict.p)}."
    )


def _figure(findings: Findings) -> str:
    """Score against KL of the arms that finished the last rung; the frontier as a line."""
    last = len(findings.plan.rungs) - 1
    shown = [
        (result, kind)
        for kind, results in (("candidate", findings.candidates), ("named", findings.named))
        for result in results
        if result.rung == last and result.score is not None and result.kl is not None
    ]
    if not shown:
        return "<p>No arm has finished the last rung.</p>"
    places = _places([result for result, _ in shown])
    points = "".join(
        f'<circle class="{kind}" cx="{places[r.arm.name][0]:.1f}" cy="{places[r.arm.name][1]:.1f}" '
        f'r="4"><title>{escape(r.arm.name)}: score {r.score:.4g}, KL {r.kl:.4g}</title></circle>'
        for r, kind in shown
    )
    best_ones = frontier([result for result, _ in shown])
    line = " ".join("{:.1f},{:.1f}".format(*places[result.arm.name]) for result in best_ones)
    drifts = [result.kl or 0.0 for result, _ in shown]
    scores = [result.score or 0.0 for result, _ in shown]
    ticks = (
        f'<text x="{MARGIN}" y="{HEIGHT - 14}">{min(drifts):.3g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 14}" text-anchor="end">{max(drifts):.3g}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">KL to the start</text>'
        f'<text x="4" y="{HEIGHT - MARGIN}">{min(scores):.3g}</text>'
        f'<text x="4" y="{MARGIN / 2 + 5}">{max(scores):.3g}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="score against KL">'
        f'<polyline points="{line}"/>{points}{ticks}</svg>'
        '<p><span class="candidate">●</span> candidates, <span class="named">●</span> named '
        "methods, after the last rung, on tuning seeds. The line is the frontier: no arm has a "
        "higher score at a KL as small. These scores were chosen from, so the highest are too "
        "high; those of fresh seeds are not.</p>"
    )


def _places(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """Coordinates in the figure by name: KL to the right, score upwards."""
    drifts = [result.kl or 0.0 for result in results]
    scores = [result.score or 0.0 for result in results]
    xs = _scaled(drifts, MARGIN, WIDTH - MARGIN)
    ys = _scaled(scores, HEIGHT - MARGIN, MARGIN / 2)
    return {result.arm.name: (x, y) for result, x, y in zip(results, xs, ys)}


def _scaled(values: Sequence[float], first: float, last: float) -> list[float]:
    """The values with their smallest at `first` and their largest at `last`."""
    low, width = min(values), (max(values) - min(values)) or 1.0
    return [first + (value - low) / width * (last - first) for value in values]


def _confirmation(confirmation: Confirmation, title: str) -> str:
    verdicts = {verdict.finalist: verdict for verdict in confirmation.verdicts}
    rows = []
    for arm in confirmation.arms:
        verdict = verdicts.get(arm.arm)
        words = "named method" if verdict is None else ("yes" if verdict.beats else "not shown")
        p = "" if verdict is None else format_number(verdict.p)
        cells = (
            arm.arm,
            format_number(arm.score.mean),
            span(arm.score),
            format_number(arm.kl),
            str(arm.seeds),
            words,
            p,
        )
        rows.append(_row(cells))
    head = _row(
        ("arm", "score", "95 % interval", "KL", "seeds", "beats all named", "corrected p"), "th"
    )
    return f"<h2>{escape(title)}</h2><table>{head}{''.join(rows)}</table>"


def _results(results: Sequence[Result]) -> str:
    head = _row(("arm", "rung", "steps", "seeds", "score", "KL", "settings"), "th")
    rows = [
        _row(
            (
                result.arm.name,
                str(result.rung),
                str(result.steps),
                str(result.seeds),
                "failed" if result.score is None else format_number(result.score),
                "" if result.kl is None else format_number(result.kl),
                ", ".join(
                    f"{key.removeprefix('recipe.')}={value}"
                    for key, value in result.arm.settings.items()
                ),
            )
        )
        for result in results
    ]
    return head + "".join(rows)


def _recipe(arm: Arm) -> str:
    return (
        f"<h3>{escape(arm.name)}</h3><pre>{escape(config_text(arm))}</pre>"
        f"<details><summary>in Python</summary><pre>{escape(python_text(arm))}</pre></details>"
    )


def _task(plan: SearchPlan) -> str:
    task = plan.unseen["task"]
    options = ", ".join(f"{key}={value}" for key, value in task["options"].items())
    return f"{task['name']}{f' ({options})' if options else ''}"


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


__all__ = [
    "Findings",
    "conclusions",
    "frontier",
    "read_findings",
    "search_space",
    "write_search_page",
]
