"""The guard process: ends the workers of a trainer that was killed, with all they started.

Run as a script. It reads `+PID TOKEN` and `-PID TOKEN` lines from the trainer; the end of that
stream, or a new parent, means that the trainer is gone without having closed its pool. The trainer
uses `end_worker` and `over_limit` too; both need the standard library alone.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping

MARK = "PROXPO_REWARD_WORKER"  # environment variable that a worker's processes inherit
PATIENCE = 5.0  # seconds after which a process that SIGKILL does not end is left to the kernel
UNREADABLE = (OSError, ValueError, IndexError)  # of a process that is just ending
PAGE = os.sysconf("SC_PAGE_SIZE")


def end_worker(pid: int, token: str, *, own: bool) -> None:
    """Sends SIGKILL to a worker, its group, its descendants and all that carry its token.

    A live worker adopts its orphans (see `worker.serve`), so that a child in a session of its own
    is still below it; one that has died leaves them to init, where the token finds them. `own`:
    the worker is a child of this process, so that its number cannot have gone to another.
    """
    marked = _marked(token)
    if own or pid in marked:
        _signal(pid, signal.SIGSTOP)  # it starts nothing more, and adopts until the end
        end = time.monotonic() + PATIENCE
        while (alive := _below(pid, _children()) - {pid}) and time.monotonic() < end:
            for other in alive:
                _signal(other, signal.SIGKILL)
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _signal(pid, signal.SIGKILL)
    for stray in marked | _marked(token):
        _signal(stray, signal.SIGKILL)


def over_limit(pids: Iterable[int], limit: int) -> set[int]:
    """The processes that, with their descendants, hold more than `limit` bytes in memory.

    Forked processes share pages, which a plain sum counts for each; only where that is over the
    limit are they counted exactly, a page of n processes as 1/n for each.
    """
    children = _children()
    trees = {pid: _below(pid, children) for pid in pids}
    large = {pid for pid, tree in trees.items() if sum(map(_resident, tree)) > limit}
    return {pid for pid in large if sum(map(_proportional, trees[pid])) > limit}


def _children() -> dict[int, list[int]]:
    """The processes that have not ended, by parent; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(*UNREADABLE):
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(pid)
    return children


def _below(root: int, children: Mapping[int, list[int]]) -> set[int]:
    """The process and all its descendants."""
    below: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        below.add(pid)
        waiting += [child for child in children.get(pid, ()) if child not in below]
    return below


def _marked(token: str) -> set[int]:
    """The processes that were started with this token, this one excepted."""
    wanted, marked = f"{MARK}={token}\0".encode(), set()
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read():
                marked.add(pid)
    return marked - {os.getpid()}


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _resident(pid: int) -> int:
    with contextlib.suppress(*UNREADABLE), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(*UNREADABLE), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return _resident(pid)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def guard(channel: int, parent: int) -> None:
    workers: dict[int, str] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([channel], [], [], 1.0)
        if not ready:
            if os.getppid() != parent:
                break
            continue
        chunk = os.read(channel, 65536)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            pid, token = line[1:].decode().split()
            if line[:1] == b"+":
                workers[int(pid)] = token
            else:
                workers.pop(int(pid), None)
    for number, token in workers.items():
        end_worker(number, token, own=False)


if __name__ == "__main__":
    guard(0, int(sys.argv[1]))
