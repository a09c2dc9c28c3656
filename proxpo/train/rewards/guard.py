"""The guard: outlives a trainer that was killed, ends its workers' process groups, and goes.

Run as a script. It reads `+PID` and `-PID` lines from the trainer; the end of that stream, or a
new parent, means that the trainer is gone without having closed its pool.
"""

import contextlib
import os
import select
import signal
import sys


def guard(channel: int, parent: int) -> None:
    groups: set[int] = set()
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
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    guard(0, int(sys.argv[1]))
