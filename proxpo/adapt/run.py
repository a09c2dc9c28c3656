"""A run of test-time adaptation: problem after problem, a row for each, a summary and a page."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from proxpo.adapt.page import write_page
from proxpo.adapt.resampling import resample
from proxpo.adapt.responder import Responder, output_layer
from proxpo.adapt.settings import CONFIG, Settings, read_settings
from proxpo.adapt.types import Adaptation, Adapter, Trial
from proxpo.errors import ProxpoError
from proxpo.models import load_policy
from proxpo.ops.streams import derive
from proxpo.report.text import plural
from proxpo.rewards import RewardPool
from proxpo.runs.files import write_whole
from proxpo.runs.folder import hold_folder
from proxpo.runs.jsonlines import JsonLines, OnNotice, read_rows
from proxpo.runs.status import clear_end, write_failure, write_summary
from proxpo.runs.yaml_file import dump_yaml
from proxpo.sampler import LocalSampler
from proxpo.train._schema import TaskConfig
from proxpo.train.sources import check_sources, fingerprints, write_sources
from proxpo.train.tasks import Problem, Task, make_task

ROWS = "problems.jsonl"
MAY_CHANGE = ("problems", "device")  # when a run is resumed
SIGNIFICANT = 0.05  # largest p of a sign test that names a winner
Row = dict[str, Any]
OnRow = Callable[[int, int, Row], None]  # rows done, rows in all, the latest


def adapt(
    settings: Settings,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_row: OnRow = lambda done, total, row: None,
    on_notice: OnNotice = lambda line: None,
) -> dict[str, Any]:
    """Answers every problem with the method, and with both baselines within the method's tokens.

    Leaves config.yaml, problems.jsonl, summary.json and report.html in `out`; returns the summary.
    With `resume`, problems that have a row are not done again, and other weights, problems or
    another reward file under the same name are refused. Input that cannot be used is refused before
    anything is written.
    """
    folder = Path(out or settings.folder)
    with hold_folder(folder, on_notice=on_notice):
        rows, files = _rows_done(folder, settings, resume=resume), _files(settings)
        if rows:
            check_sources(files, folder)
        with _ready(settings) as (problems, solve):
            left = (solve(number) for number in range(len(rows), len(problems)))
            begun = [row for row in [next(left, None)] if row is not None]
            clear_end(folder)
            write_whole(folder / CONFIG, dump_yaml(settings.as_dict()).encode())
            if not rows:
                write_sources(files, folder)
            with JsonLines(folder / ROWS, resume_at=len(rows) - 1, on_notice=on_notice) as lines:
                try:
                    for row in chain(begun, left):
                        lines.append(row)
                        rows.append(row)
                        on_row(len(rows), len(problems), row)
                except Exception as error:
                    reason = " ".join(str(error).split())
                    kind, step = type(error).__name__, len(rows)
                    with suppress(OSError):  # a full disk: the error is raised all the same
                        write_failure(folder, reason=reason, step=step, phase="adapt", kind=kind)
                    raise
        summary = summarise(settings, rows)
        for line in idle_notes(summary):
            on_notice(line)
        write_page(folder, settings, summary, rows)
        write_summary(folder, summary)
    return summary | {"out": str(folder)}


@contextmanager
def _ready(settings: Settings) -> Iterator[tuple[Sequence[Problem], Callable[[int], Row]]]:
    """Problems, and the function that makes the row of one by its number."""
    adaptation, task = settings.adaptation(), adapt_task(settings)
    problems = task.test[settings.first : settings.first + settings.problems]
    policy = load_policy(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        lora=None if adaptation.lora is None else dict(adaptation.lora),
        seed=derive(settings.seed, "init"),
    )
    output_layer(policy)
    if adaptation.prepare is not None:
        adaptation.prepare(policy.bare)
    with RewardPool(task.reward) as pool:
        responder = Responder(
            policy=policy,
            sampler=LocalSampler(policy),
            task=task,
            pool=pool,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )
        adapter = adaptation.start(responder)
        yield (
            problems,
            lambda number: _solve(
                number, problems[number], settings.method, responder, adapter, adaptation
            ),
        )


def _solve(
    number: int,
    problem: Problem,
    method: str,
    responder: Responder,
    adapter: Adapter,
    adaptation: Adaptation,
) -> Row:
    """The row of one problem: first answer, then every arm from it, each with a model reset."""
    adapter.reset()
    started, responder.tokens = time.perf_counter(), 0.0
    first = adapter.first(problem)
    asked, seconds = responder.tokens, time.perf_counter() - started

    def arm(answer: Callable[[], Trial]) -> Row:
        adapter.reset()
        started, responder.tokens = time.perf_counter(), asked
        trial = answer()
        return {
            "right": trial.answer.right,
            "text": trial.answer.text,
            "attempts": trial.attempts,
            "tokens": round(trial.tokens, 3),
            "ended": trial.ended,
            "updates": trial.updates,
            "seconds": round(seconds + time.perf_counter() - started, 3),
        }

    own = arm(lambda: adapter.adapt(problem, first))
    limit, threshold = own["tokens"], adaptation.threshold
    return {
        "step": number,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "before": {"right": first.right, "text": first.text},
        "arms": {
            method: own,
            "resample": arm(
                lambda: resample(
                    responder, adapter, problem, first, limit=limit, threshold=threshold
                )
            ),
            "sgd": arm(lambda: adapter.sgd(problem, first, limit)),
        },
    }


def summarise(settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Means over problems of every arm; discordant pairs and sign test against each baseline.

    steps: problems done, by which a finished run is known; early: solved within `most_attempts`,
    the most that the method used on any problem
    """
    own = settings.method
    most = max(row["arms"][own]["attempts"] for row in rows)

    def mean(values: Sequence[int | float]) -> float:
        return sum(values) / len(values)

    def arm(results: Sequence[Row]) -> Row:
        return {
            "accuracy": mean([result["right"] for result in results]),
            "early": mean([result["right"] and result["attempts"] <= most for result in results]),
            **{k: mean([r[k] for r in results]) for k in ("attempts", "tokens", "seconds")},
            "updates": sum(len(result["updates"]) for result in results),
            "ended": dict(Counter(result["ended"] for result in results)),
        }

    arms = {name: arm([row["arms"][name] for row in rows]) for name in rows[0]["arms"]}
    return {
        "method": own,
        "model": settings.model,
        "task": settings.task,
        "seed": settings.seed,
        "steps": len(rows),
        "accuracy_before": mean([row["before"]["right"] for row in rows]),
        "accuracy_after": arms[own]["accuracy"],
        "most_attempts": most,
        "arms": arms,
        "against": {name: _against(rows, own, name) for name in arms if name != own},
        "settings": settings.as_dict(),
    }


def idle_notes(summary: Row) -> list[str]:
    """A line on a method that had no effect, with the ways its answers ended."""
    own = summary["arms"][summary["method"]]
    if own["updates"]:
        return []
    ends = ", ".join(f"{why}: {count}" for why, count in own["ended"].items())
    hint = "; a larger fraction makes blocks of short answers" if "no block" in own["ended"] else ""
    return [f"{summary['method']} made no update (answers ended by {ends}){hint}"]


def _against(rows: Sequence[Row], own: str, other: str) -> dict[str, Any]:
    """Problems that only one of two arms solves, and the two-sided sign test of their numbers."""
    pairs = [(row["arms"][own]["right"], row["arms"][other]["right"]) for row in rows]
    wins, losses = pairs.count((True, False)), pairs.count((False, True))
    return {"only_method": wins, "only_baseline": losses, "p": sign_test(wins, losses)}


def sign_test(wins: int, losses: int) -> float:
    """P of a split of wins + losses fair coins at least as uneven."""
    n, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    return min(1.0, 2 * tail)


def finding(summary: dict[str, Any], baseline: str) -> str:
    """One sentence on the method against a baseline with the same tokens.

    It names a winner where the sign test has p <= 0.05.
    """
    own, pair = summary["method"], summary["against"][baseline]
    wins = pair["only_method"] > pair["only_baseline"]
    verdict = f"{own} {'wins over' if wins else 'loses to'} {baseline} at equal tokens"
    if pair["p"] > SIGNIFICANT:
        verdict = f"no difference between {own} and {baseline} is shown at equal tokens"
    return (
        f"{verdict}: solved only by {own} {pair['only_method']}, "
        f"only by {baseline} {pair['only_baseline']} (sign test p = {pair['p']:.2g})"
    )


def _rows_done(folder: Path, settings: Settings, *, resume: bool) -> list[Row]:
    """Rows of the problems that were finished, from the first without a gap."""
    path = folder / ROWS
    stored = {row["step"]: row for row in read_rows(path)} if path.exists() else {}
    if not stored:
        return []
    if not resume:
        raise ProxpoError(
            f"{folder} already holds a run: --resume continues it, --out starts another"
        )
    earlier, now = read_settings(folder) or {}, settings.as_dict()
    changed = [
        f"{name}: {earlier.get(name)} -> {value}"
        for name, value in now.items()
        if name not in MAY_CHANGE and earlier.get(name) != value
    ]
    if changed:
        raise ProxpoError(
            f"{folder} does not fit these settings ({'; '.join(changed)}): a run keeps what it was "
            "started with; --out starts another"
        )
    count = next(k for k in range(len(stored) + 1) if k not in stored)
    if settings.problems < count:
        raise ProxpoError(
            f"{folder} has done {plural(count, 'problem')} already; "
            f"problems={settings.problems} asks for fewer"
        )
    return [stored[k] for k in range(count)]


def _files(settings: Settings) -> dict[str, str]:
    """Fingerprints of the local files that a run reads."""
    task = TaskConfig(
        name=settings.task, options=settings.task_options, reward=settings.task_reward
    )
    return fingerprints(settings.model, task)


def adapt_task(settings: Settings) -> Task:
    """The task of a run; refused where it calls a tool or has too few held-out problems."""
    task = make_task(
        settings.task,
        reward=settings.task_reward,
        correct_above=settings.correct_above,
        **settings.task_options,
    )
    if task.tool is not None or task.environment is not None:
        over = "calls a tool" if task.environment is None else "is answered"
        raise ProxpoError(
            f"task {task.name} {over} over several turns; adapt takes tasks that are answered in "
            "one"
        )
    last = settings.first + settings.problems
    if last > len(task.test):
        raise ProxpoError(
            f"task {task.name} has {len(task.test)} held-out problems; first={settings.first} and "
            f"problems={settings.problems} ask for {last}"
        )
    return task


__all__ = ["ROWS", "adapt", "adapt_task", "finding", "idle_notes", "sign_test", "summarise"]
