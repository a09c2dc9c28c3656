"""A worker process as the pool sees it: start, send a sample, read its outcome, end its tree."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from proxpo.rewards.guard import MARK, end_worker

HERE = Path(__file__).parent
REPLY = 1 << 20


class Guard:
    """A process that ends the workers if this one is killed before it can."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "guard.py"), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def tell(self, sign: str, pid: int, token: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(f"{sign}{pid} {token}\n".encode())
            self._pipe.flush()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()


class Worker:
    """A reward function in a process group of its own, one call at a time."""

    def __init__(self, where: str, guard: Guard) -> None:
        self.token = uuid.uuid4().hex
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, MARK: self.token},
            )
        self.guard = guard
        guard.tell("+", self.process.pid, self.token)
        self.ready = False
        self.batch = False  # the function takes all samples in one call
        self.job: int | None = None
        self.rows = 1  # samples of the job
        self.since = time.monotonic()
        self._pending = b""
        self.send({"where": where, "path": sys.path})

    def send(self, message: dict[str, Any]) -> bool:
        """Sends a message; False if the worker has died."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        self.since = time.monotonic()
        return True

    def receive(self) -> dict[str, Any] | None:
        """A complete message, or None so far; EOFError when there will be none."""
        try:
            chunk = self.socket.recv(1 << 16)
        except OSError:
            chunk = b""
        self._pending += chunk
        line, end, rest = self._pending.partition(b"\n")
        if not end:
            if not chunk or len(line) > REPLY * self.rows:
                raise EOFError
            return None
        self._pending = rest
        try:
            return json.loads(line)
        except ValueError:  # the function wrote to the channel itself
            raise EOFError from None

    def ending(self) -> str:
        """The reason why a dead worker died, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        code = self.process.returncode
        if code is None:
            return "the worker closed its channel"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def kill(self) -> None:
        """Ends the worker and every process it started, also those in sessions of their own."""
        end_worker(self.process.pid, self.token, own=self.process.returncode is None)
        self.process.wait()
        self.socket.close()
        self.guard.tell("-", self.process.pid, self.token)
