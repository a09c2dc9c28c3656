"""Runs the checks in processes of their own: a host that hangs or crashes costs only its own line.

A process is given the names of hosts and answers with a line of JSON for each. When an answer does
not come in time the process is killed, and another one goes on with the hosts after it.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from proxpo.adapters.versions import newer_than_tested
from proxpo.doctor._hosts import HOSTS, Host, required_versions, satisfies


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of the check of one host.

    detail: what was done and seen, or what went wrong; install: the command that would help
    """

    name: str
    purpose: str
    status: Literal["works", "broken", "missing"]
    version: str = ""
    detail: str = ""
    install: str = ""
    seconds: float = 0.0


def examine(
    hosts: Sequence[Host] = HOSTS,
    *,
    limit: float | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Returns a finding for every host, in their order.

    limit: the most seconds for each, where smaller than its own
    on_start: called with the name of a host before it is tried
    """
    findings: list[Finding] = []
    for _, group in groupby(hosts, key=lambda host: host.process):
        waiting = [replace(h, limit=min(h.limit, limit or h.limit)) for h in group]
        findings += [_missing(host) for host in waiting if host.installed is None]
        waiting = [host for host in waiting if host.installed is not None]
        while waiting:
            tried = _in_a_process(waiting, on_start)
            findings += tried
            waiting = waiting[len(tried) :]
    order = [host.name for host in hosts]
    return sorted(findings, key=lambda finding: order.index(finding.name))


def _missing(host: Host) -> Finding:
    if host.name == "triton":
        return Finding(
            name=host.name,
            purpose=host.purpose,
            status="missing",
            detail="comes with torch's builds for GPUs; everything runs without it",
        )
    return Finding(name=host.name, purpose=host.purpose, status="missing", install=host.install)


def _in_a_process(hosts: list[Host], on_start: Callable[[str], None]) -> list[Finding]:
    """Findings of the first hosts of the list: all of them, unless the process is lost."""
    findings: list[Finding] = []
    checks = json.dumps([[host.module or host.name, host.check] for host in hosts])
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "proxpo.doctor._worker", checks],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            answers = _lines(process.stdout)  # type: ignore[arg-type]
            for host in hosts:
                on_start(host.name)
                start = time.monotonic()
                try:
                    line = answers.get(timeout=host.limit)
                    lost = "" if line else _ending(process, stderr)
                except queue.Empty:
                    line, lost = None, f"no answer within {host.limit:g} s"
                answer = json.loads(line) if line else {"error": lost}
                findings.append(_finding(host, answer, time.monotonic() - start))
                if lost:
                    break
        finally:
            _kill(process)
    return findings


def _finding(host: Host, answer: dict[str, str], seconds: float) -> Finding:
    package, version = host.installed or ("", "")
    required = required_versions(package)
    refused = bool(required) and not satisfies(version, required)
    newest = newer_than_tested(package, version)
    finding = Finding(
        name=host.name,
        purpose=host.purpose,
        status="broken" if "error" in answer else "works",
        version=version,
        detail=answer.get("error") or answer.get("detail", ""),
        seconds=round(seconds, 1),
    )
    if finding.status == "broken":
        return replace(
            finding, install=f"pip install '{package}{required}'" if refused else host.install
        )
    notes = [
        f"proxpo requires {required}" if refused else "",
        f"newer than {newest}, the newest that was tested" if newest else "",
    ]
    return replace(finding, detail="; ".join(filter(None, [finding.detail, *notes])))


def _lines(stream: Iterable[str]) -> "queue.Queue[str | None]":
    """Queue of the lines as they come, then None."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _ending(process: subprocess.Popen, stderr: Any) -> str:
    """Signal or exit code of the process, and the last line on its stderr."""
    code = process.wait()
    stderr.seek(0)
    lines = stderr.read().strip().splitlines()
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process ended with {reason}" + (f": {lines[-1][:200]}" if lines else "")


def _kill(process: subprocess.Popen) -> None:
    """Kills the process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


__all__ = ["Finding", "examine"]
