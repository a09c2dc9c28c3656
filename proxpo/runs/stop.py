"""Stop signals: a run is asked to save and stop, and ended if it does not."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StopRequest:
    """A signal's request to save and stop."""

    requested: bool = False
    by: str = field(default="")


class Overdue(BaseException):
    """Raised in work that has no safe point within the seconds allowed after a stop signal."""


@contextlib.contextmanager
def stop_on_signal(
    *signals: signal.Signals,
    grace: float | None = None,
    may_end: Callable[[], bool] = lambda: True,
    on_wait: Callable[[str], None] = lambda name: None,
) -> Iterator[StopRequest]:
    """Sets a flag on SIGTERM, to be read between steps; a second one ends the process at once.

    With `grace`, a block that still runs so many seconds after the signal gets Overdue, wherever
    it is, unless `may_end` returns False at that moment; it is called again every second.
    `on_wait` gets the signal's name, in another thread, if the block still runs a second after it
    (or half of `grace`).
    Outside the main thread, where Python takes no signals, the flag stays down.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers: dict[signal.Signals, Any] = {}
    inside = True
    waits: list[threading.Timer] = []

    def request_stop(number: int, frame: Any) -> None:
        request.requested, request.by = True, signal.Signals(number).name
        signal.signal(number, handlers[signal.Signals(number)])
        waits.append(threading.Timer(min(1.0, (grace or 2.0) / 2), on_wait, [request.by]))
        waits[-1].daemon = True
        waits[-1].start()
        # An alarm that was set elsewhere stays.
        if grace is not None and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, max(grace, 0.01), 1.0)

    def end(number: int, frame: Any) -> None:
        if inside and may_end():
            raise Overdue

    for number in signals or (signal.SIGTERM,):
        handlers[number] = signal.signal(number, request_stop)
    try:
        yield request
    finally:
        inside = False
        for wait in waits:
            wait.cancel()
        if signal.SIGALRM in handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


__all__ = ["Overdue", "StopRequest", "stop_on_signal"]
