"""The calls of a reward function that one `RewardPool.score` makes, and their outcomes."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.rewards._types import Logged, Outcome, RewardItem, RewardSpec, Status

FAILURES: tuple[Status, ...] = ("timeout", "error", "nan")


class RewardCalls:
    """Pending and finished calls of the function for one `RewardPool.score`.

    A job is a call of the function: for one sample, or (`whole`) for all of them.
    """

    def __init__(
        self,
        items: Sequence[RewardItem],
        spec: RewardSpec,
        max_failed: float,
        progress: Callable[[int, int], None] | None,
        whole: bool,
        state: Mapping[str, Any],
    ) -> None:
        self.items, self.spec, self.max_failed, self.progress = items, spec, max_failed, progress
        numbers = list(range(len(items)))
        self.whole, self.state = whole, dict(state)
        self.jobs = [numbers] if whole and numbers else [[number] for number in numbers]
        self.queue = deque(range(len(self.jobs)))
        self.logged = Logged()
        self._outcomes: dict[int, Outcome] = {}
        self._failed = 0

    @property
    def done(self) -> bool:
        return len(self._outcomes) == len(self.items)

    def message(self, job: int) -> dict[str, Any]:
        items = [self._plain(self.items[number]) for number in self.jobs[job]]
        return {"id": job, "items": items, "state": self.state}

    def _plain(self, item: RewardItem) -> dict[str, Any]:
        return {
            "prompt": item.prompt,
            "completion": item.completion,
            "answer": item.answer,
            "extra": dict(item.extra),
            "source": item.extra.get("data_source", self.spec.source),
            "kwargs": dict(self.spec.kwargs),
            **({"completion_ids": list(item.completion_ids)} if self.whole else {}),
        }

    def settle(self, job: int, answer: Mapping[str, Any]) -> None:
        if self.whole:
            self.logged = Logged(
                metrics=answer.get("metrics", {}), columns=answer.get("columns", {})
            )
        for number, message in zip(self.jobs[job], answer["outcomes"], strict=True):
            self._settle(number, message)

    def _settle(self, number: int, message: Mapping[str, Any]) -> None:
        reward = math.nan if message["reward"] is None else message["reward"]
        status, correct = message["status"], message.get("correct")
        if self.spec.correct_above is not None and status == "ok":
            correct = reward > self.spec.correct_above
        outcome = Outcome(
            reward,
            correct,
            status,
            message["detail"],
            message.get("seconds", 0.0),
            tuple((a, b, x) for a, b, x in message.get("spans", ())),
            message.get("feasible"),
            message.get("parsed"),
        )
        self._outcomes[number] = outcome
        self._failed += status != "ok"
        if self.progress is not None:
            self.progress(len(self._outcomes), len(self.items))
        if self._failed > self.max_failed * len(self.items):
            raise self._too_many()

    def outcomes(self) -> list[Outcome]:
        return [self._outcomes[number] for number in range(len(self.items))]

    def _too_many(self) -> ProxpoError:
        failed = [outcome for outcome in self._outcomes.values() if outcome.status != "ok"]
        (status, detail), times = Counter((o.status, o.detail) for o in failed).most_common(1)[0]
        return ProxpoError(
            f"{self._failed} of {len(self._outcomes)} rewards of {self.spec.where} failed, over "
            f"{self.max_failed:.0%} of the batch of {len(self.items)}; "
            f"commonest ({times} times): {status}: {detail}"
        )


def tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Number of samples without a reward, by reason: {"timeout": 0, "error": 2, "nan": 0}."""
    counts = Counter(outcome.status for outcome in outcomes)
    return {status: counts[status] for status in FAILURES}


__all__ = ["FAILURES", "RewardCalls", "tally"]
