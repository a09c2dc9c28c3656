"""Rewards with a deadline: user functions run in worker processes that can be killed.

    with RewardPool(task.reward, workers=2, timeout=10.0) as pool:
        outcomes = pool.score([RewardItem(prompt=..., completion=..., answer=...), ...])

A function that hangs, crashes, raises, forks or returns nonsense costs its sample, not the run:
the outcome says what happened and its reward is NaN, which advantages take as missing. A function
in TRL's signature is called once for all samples, as in TRL: a call that fails costs all of them.
"""

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.rewards import worker
from proxpo.rewards._calls import RewardCalls
from proxpo.rewards._process import Guard, Worker
from proxpo.rewards._types import Logged, Outcome, RewardItem, RewardSpec, Status
from proxpo.rewards.guard import over_limit

START_TIMEOUT = 120.0
MAX_START_FAILURES = 3  # in a row, of workers that replace others
TICK = 0.05
WATCH = 0.25  # seconds between looks at the workers' memory


class RewardPool:
    """Scores samples in worker processes; outcomes come back in the order of the samples.

    memory: GiB that a worker and its children may hold; beyond it the sample has failed. Functions
        that are trusted run in this process, without limits.
    judges: True if the function tells right from wrong; None before its first reward
    logged: values that it logged in the last call of `score`
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
        self._memory_checked = time.monotonic()
        self._size = workers
        self._workers: list[Worker] = []
        self._guard: Guard | None = None
        self._owner = os.getpid()
        self._start_failures = 0
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
        """Ends every worker and the processes it started."""
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
        """Scores samples, one outcome each; calls `progress(done, total)` as they come in.

        state: fields of the `trainer_state` that functions in TRL's signature may ask for. Stops
        the run when more than `max_failed` of the samples could not be scored.
        """
        calls = RewardCalls(items, self.spec, self.max_failed, progress, self._batch, state or {})
        if self._local is not None:
            for job in list(calls.queue):
                calls.settle(job, self._local.answer(calls.message(job)))
        else:
            self._score_in_workers(calls)
        outcomes = calls.outcomes()
        self.logged, self.judges = calls.logged, self._check_verdicts(outcomes)
        return outcomes

    def _check_verdicts(self, outcomes: Sequence[Outcome]) -> bool | None:
        """True if the function tells right from wrong, which it must do for all samples or none."""
        verdicts = {outcome.correct is not None for outcome in outcomes if outcome.status == "ok"}
        verdicts |= set() if self.judges is None else {self.judges}
        if len(verdicts) == 2:
            raise ProxpoError(
                f"reward {self.spec.where} says of some responses whether they are right ('acc' or "
                "'correct') and not of others: say it of all, or set task.correct_above"
            )
        return verdicts.pop() if verdicts else None

    def _start(self) -> None:
        """Loads the function once, so that an unusable one is refused before the run begins."""
        if self.spec.trusted:
            try:
                self._local = worker.load(self.spec.where)
                self._batch = self._local.batch
            except worker.Unusable as error:
                raise unusable(str(error)) from None
            return
        self._guard = Guard()
        self._workers = [self._new_worker() for _ in range(self._size)]
        with selectors.DefaultSelector() as selector:
            for member in self._workers:
                selector.register(member.socket, selectors.EVENT_READ, member)
            while not all(member.ready for member in self._workers):
                for key, _ in selector.select(TICK):
                    self._greet(key.data)
                for member in self._workers:
                    self._check_start(member)
                self._over_memory()

    def _new_worker(self) -> Worker:
        assert self._guard is not None
        return Worker(self.spec.where, self._guard)

    def _greet(self, member: Worker) -> None:
        try:
            message = member.receive()
        except EOFError:
            raise unusable(f"{self.spec.where}: {member.ending()} while loading it") from None
        if message is not None:
            if not message["ready"]:
                raise unusable(message["detail"])
            member.ready, self._batch = True, message["batch"]

    def _greet_replacement(self, member: Worker, selector: selectors.BaseSelector) -> None:
        """Greets a worker that replaces another; its start may fail a few times in a row."""
        try:
            self._greet(member)
            self._start_failures = 0
        except ProxpoError:
            self._start_failures += 1
            if self._start_failures > MAX_START_FAILURES:
                raise
            self._replace(member, selector)

    def _check_start(self, member: Worker) -> None:
        if not member.ready and time.monotonic() - member.since > START_TIMEOUT:
            raise unusable(f"{self.spec.where} took over {START_TIMEOUT:g} s to import")

    def _over_memory(self) -> list[Worker]:
        """Workers over the memory limit; looks a few times a second."""
        if self.memory is None or time.monotonic() - self._memory_checked < WATCH:
            return []
        self._memory_checked = time.monotonic()
        pids = over_limit(
            [member.process.pid for member in self._workers], int(self.memory * (1 << 30))
        )
        large = [member for member in self._workers if member.process.pid in pids]
        if any(not member.ready for member in large):  # another worker would not fare better
            raise unusable(f"{self.spec.where} {self._limit()} while loading it")
        return large

    def _limit(self) -> str:
        return f"used over {self.memory:g} GiB of memory (task.reward_memory)"

    def _score_in_workers(self, calls: RewardCalls) -> None:
        if self._guard is None:
            raise ProxpoError("this reward pool is closed")
        try:
            with selectors.DefaultSelector() as selector:
                for member in self._workers:
                    selector.register(member.socket, selectors.EVENT_READ, member)
                while not calls.done:
                    self._assign(calls, selector)
                    for key, _ in selector.select(TICK):
                        self._receive(key.data, calls, selector)
                    self._enforce_limits(calls, selector)
        except BaseException:
            # Neither half-scored samples nor broken workers may reach the next batch.
            for member in [
                member for member in self._workers if member.job is not None or not member.ready
            ]:
                self._workers[self._workers.index(member)] = self._new_worker()
                member.kill()
            raise

    def _assign(self, calls: RewardCalls, selector: selectors.BaseSelector) -> None:
        for member in list(self._workers):
            if calls.queue and member.ready and member.job is None:
                job = calls.queue.popleft()
                member.rows = len(calls.jobs[job])
                if member.send(calls.message(job)):
                    member.job = job
                else:  # died while idle: no fault of this sample
                    calls.queue.appendleft(job)
                    self._replace(member, selector)

    def _receive(
        self, member: Worker, calls: RewardCalls, selector: selectors.BaseSelector
    ) -> None:
        if not member.ready:
            return self._greet_replacement(member, selector)
        try:
            message = member.receive()
        except EOFError:
            return self._fail_call(member, calls, selector, "error", member.ending())
        if message is not None and message.get("id") == member.job and member.job is not None:
            calls.settle(member.job, message)
            member.job = None

    def _enforce_limits(self, calls: RewardCalls, selector: selectors.BaseSelector) -> None:
        for member in list(self._workers):
            self._check_start(member)
            if member.job is None:
                continue
            if time.monotonic() - member.since > self.timeout * member.rows:
                limit = f"{self.timeout * member.rows:g} s"
                self._fail_call(member, calls, selector, "timeout", f"no reward after {limit}")
            elif member.process.poll() is not None and not _readable(member):
                # A child of the function may hold the channel open, so there is no EOF to wait for.
                self._fail_call(member, calls, selector, "error", member.ending())
        for member in self._over_memory():
            self._fail_call(member, calls, selector, "error", self._limit())

    def _fail_call(
        self,
        member: Worker,
        calls: RewardCalls,
        selector: selectors.BaseSelector,
        status: Status,
        detail: str,
    ) -> None:
        job, rows, seconds = member.job, member.rows, time.monotonic() - member.since
        self._replace(member, selector)
        if job is not None:
            detail += f", in one call for {rows} completions" if rows > 1 else ""
            lost = {"reward": None, "status": status, "detail": detail, "seconds": seconds / rows}
            calls.settle(job, {"outcomes": [lost] * rows})

    def _replace(self, member: Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(member.socket)
        member.kill()
        fresh = self._new_worker()
        self._workers[self._workers.index(member)] = fresh
        selector.register(fresh.socket, selectors.EVENT_READ, fresh)


def _readable(member: Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(member.socket, selectors.EVENT_READ)
        return bool(selector.select(0))


def unusable(detail: str) -> ProxpoError:
    return ProxpoError(f"reward function: {detail}")


__all__ = ["RewardPool"]
