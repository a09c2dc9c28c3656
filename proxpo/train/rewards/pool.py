"""Rewards with a deadline: user functions run in worker processes that can be killed.

    with RewardPool(task.reward, workers=2, timeout=10.0) as pool:
        outcomes = pool.score([RewardItem(prompt=..., completion=..., answer=...), ...])

A function that hangs, crashes, raises, forks or returns nonsense costs its sample, not the run:
the outcome says what happened and its reward is NaN, which advantages take as missing. A function
in TRL's signature is called once for all samples, as in TRL: a call that fails costs all of them.
"""

import math
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from proxpo.errors import ProxpoError
from proxpo.train.rewards import worker
from proxpo.train.rewards._process import Guard, Worker
from proxpo.train.rewards.guard import over_limit
from proxpo.train.tasks._types import Messages, RewardSpec

Status = Literal["ok", "timeout", "error", "nan"]
FAILURES: tuple[Status, ...] = ("timeout", "error", "nan")
START_TIMEOUT = 120.0
STILLBORN = 3
TICK = 0.05
WATCH = 0.25  # seconds between looks at the workers' memory


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One response as decoded text, and what is known about its prompt; plain data only."""

    prompt: str | Messages
    completion: str
    answer: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What a function in TRL's signature has logged: means by name, and values of each sample."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A reward, or NaN with the reason; `correct` where the function tells right from wrong.

    seconds: how long the function took; spans: (start, end, value) of the characters it marked
    """

    reward: float
    correct: bool | None = None
    status: Status = "ok"
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)
    spans: tuple[tuple[int, int, float], ...] = ()


class RewardPool:
    """Scores samples; outcomes come back in the order of the samples, whoever was first.

    memory: GiB that a worker and its children may hold; beyond it the sample has failed. Functions
        that are trusted run in this process, without limits.
    judges: whether the function tells right from wrong, once it has been seen
    logged: what it has logged in the last call of `score`
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        workers: int = 2,
        timeout: float = 10.0,
        max_failed: float = 0.5,
        memory: float | None = None,
    ) -> None:
        if workers < 1 or not timeout > 0:
            raise ProxpoError(
                f"rewards need at least 1 worker and a timeout above 0, got {workers} and {timeout}"
            )
        if memory is not None and not memory > 0:
            raise ProxpoError(f"rewards need a memory limit above 0 GiB or none, got {memory}")
        self.spec, self.timeout, self.max_failed = spec, timeout, max_failed
        self.memory = memory
        self._watched = time.monotonic()
        self._size = workers
        self._workers: list[Worker] = []
        self._guard: Guard | None = None
        self._owner = os.getpid()
        self._stillborn = 0
        self._local: worker.Loaded | None = None
        self._batch = False
        self.judges: bool | None = None
        self.logged = Logged()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            self.close()

    def close(self) -> None:
        """End every worker and whatever it started."""
        while self._workers:
            self._workers.pop().kill()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def score(
        self,
        items: Sequence[RewardItem],
        *,
        progress: Callable[[int, int], None] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> list[Outcome]:
        """One outcome per sample; `progress(done, total)` is called as they come in.

        state: fields of the `trainer_state` that functions in TRL's signature may ask for. Stops
        the run when more than `max_failed` of the samples could not be scored.
        """
        batch = _Batch(items, self.spec, self.max_failed, progress, self._batch, state or {})
        if self._local is not None:
            for job in list(batch.queue):
                batch.settle(job, self._local.answer(batch.message(job)))
        else:
            self._score_in_workers(batch)
        outcomes = batch.outcomes()
        self.logged, self.judges = batch.logged, self._judging(outcomes)
        return outcomes

    def _judging(self, outcomes: Sequence[Outcome]) -> bool | None:
        """Whether the function tells right from wrong: for all samples of a run, or for none."""
        said = {outcome.correct is not None for outcome in outcomes if outcome.status == "ok"}
        said |= set() if self.judges is None else {self.judges}
        if len(said) == 2:
            raise ProxpoError(
                f"reward {self.spec.where} says of some responses whether they are right ('acc' or "
                "'correct') and not of others: say it of all, or set task.correct_above"
            )
        return said.pop() if said else None

    def _start(self) -> None:
        """Load the function once, so that one that cannot be used is refused at once."""
        if self.spec.trusted:
            try:
                self._local = worker.load(self.spec.where)
                self._batch = self._local.batch
            except worker.Unusable as error:
                raise unusable(str(error)) from None
            return
        self._guard = Guard()
        self._workers = [self._fresh() for _ in range(self._size)]
        with selectors.DefaultSelector() as selector:
            for one in self._workers:
                selector.register(one.socket, selectors.EVENT_READ, one)
            while not all(one.ready for one in self._workers):
                for key, _ in selector.select(TICK):
                    self._greet(key.data)
                for one in self._workers:
                    self._check_start(one)
                self._check_size()

    def _fresh(self) -> Worker:
        assert self._guard is not None
        return Worker(self.spec.where, self._guard)

    def _greet(self, one: Worker) -> None:
        try:
            message = one.receive()
        except EOFError:
            raise unusable(f"{self.spec.where}: {one.ending()} while loading it") from None
        if message is not None:
            if not message["ready"]:
                raise unusable(message["detail"])
            one.ready, self._batch = True, message["batch"]

    def _greet_again(self, one: Worker, selector: selectors.BaseSelector) -> None:
        """The function was loaded before, so a worker lost while loading is given another try."""
        try:
            self._greet(one)
            self._stillborn = 0
        except ProxpoError:
            self._stillborn += 1
            if self._stillborn > STILLBORN:
                raise
            self._replace(one, selector)

    def _check_start(self, one: Worker) -> None:
        if not one.ready and time.monotonic() - one.since > START_TIMEOUT:
            raise unusable(f"{self.spec.where} took over {START_TIMEOUT:g} s to import")

    def _check_size(self) -> list[Worker]:
        """The workers over the memory limit, looked for a few times a second."""
        if self.memory is None or time.monotonic() - self._watched < WATCH:
            return []
        self._watched = time.monotonic()
        pids = over_limit([one.process.pid for one in self._workers], int(self.memory * (1 << 30)))
        large = [one for one in self._workers if one.process.pid in pids]
        if any(not one.ready for one in large):  # another worker would not fare better
            raise unusable(f"{self.spec.where} {self._limit()} while loading it")
        return large

    def _limit(self) -> str:
        return f"used over {self.memory:g} GiB of memory (task.reward_memory)"

    def _score_in_workers(self, batch: "_Batch") -> None:
        if self._guard is None:
            raise ProxpoError("this reward pool is closed")
        try:
            with selectors.DefaultSelector() as selector:
                for one in self._workers:
                    selector.register(one.socket, selectors.EVENT_READ, one)
                while not batch.done:
                    self._hand_out(batch, selector)
                    for key, _ in selector.select(TICK):
                        self._take(key.data, batch, selector)
                    self._enforce(batch, selector)
        except BaseException:
            # Neither half-scored samples nor broken workers may reach the next batch.
            for one in [one for one in self._workers if one.job is not None or not one.ready]:
                self._workers[self._workers.index(one)] = self._fresh()
                one.kill()
            raise

    def _hand_out(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        for one in list(self._workers):
            if batch.queue and one.ready and one.job is None:
                job = batch.queue.popleft()
                one.rows = len(batch.jobs[job])
                if one.send(batch.message(job)):
                    one.job = job
                else:  # died while idle: no fault of this sample
                    batch.queue.appendleft(job)
                    self._replace(one, selector)

    def _take(self, one: Worker, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        if not one.ready:
            return self._greet_again(one, selector)
        try:
            message = one.receive()
        except EOFError:
            return self._lose(one, batch, selector, "error", one.ending())
        if message is not None and message.get("id") == one.job and one.job is not None:
            batch.settle(one.job, message)
            one.job = None

    def _enforce(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        for one in list(self._workers):
            self._check_start(one)
            if one.job is None:
                continue
            if time.monotonic() - one.since > self.timeout * one.rows:
                limit = f"{self.timeout * one.rows:g} s"
                self._lose(one, batch, selector, "timeout", f"no reward after {limit}")
            elif one.process.poll() is not None and not _readable(one):
                # A child of the function may hold the channel open, so there is no EOF to wait for.
                self._lose(one, batch, selector, "error", one.ending())
        for one in self._check_size():
            self._lose(one, batch, selector, "error", self._limit())

    def _lose(
        self,
        one: Worker,
        batch: "_Batch",
        selector: selectors.BaseSelector,
        status: Status,
        detail: str,
    ) -> None:
        job, rows, seconds = one.job, one.rows, time.monotonic() - one.since
        self._replace(one, selector)
        if job is not None:
            detail += f", in one call for {rows} completions" if rows > 1 else ""
            lost = {"reward": None, "status": status, "detail": detail, "seconds": seconds / rows}
            batch.settle(job, {"outcomes": [lost] * rows})

    def _replace(self, one: Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(one.socket)
        one.kill()
        fresh = self._fresh()
        self._workers[self._workers.index(one)] = fresh
        selector.register(fresh.socket, selectors.EVENT_READ, fresh)


class _Batch:
    """The samples of one call of `score`: which are waiting, which have their outcome.

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
        self._found: dict[int, Outcome] = {}
        self._failed = 0

    @property
    def done(self) -> bool:
        return len(self._found) == len(self.items)

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
        )
        self._found[number] = outcome
        self._failed += status != "ok"
        if self.progress is not None:
            self.progress(len(self._found), len(self.items))
        if self._failed > self.max_failed * len(self.items):
            raise self._too_many()

    def outcomes(self) -> list[Outcome]:
        return [self._found[number] for number in range(len(self.items))]

    def _too_many(self) -> ProxpoError:
        seen = [one for one in self._found.values() if one.status != "ok"]
        (status, detail), times = Counter((o.status, o.detail) for o in seen).most_common(1)[0]
        return ProxpoError(
            f"{self._failed} of {len(self._found)} rewards of {self.spec.where} failed, over "
            f"{self.max_failed:.0%} of the batch of {len(self.items)}; "
            f"commonest ({times} times): {status}: {detail}"
        )


def _readable(one: Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(one.socket, selectors.EVENT_READ)
        return bool(selector.select(0))


def unusable(detail: str) -> ProxpoError:
    return ProxpoError(f"reward function: {detail}")


def tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many samples had no reward, by reason: {"timeout": 0, "error": 2, "nan": 0}."""
    seen = Counter(one.status for one in outcomes)
    return {status: seen[status] for status in FAILURES}


__all__ = ["FAILURES", "Logged", "Outcome", "RewardItem", "RewardPool", "tally"]
