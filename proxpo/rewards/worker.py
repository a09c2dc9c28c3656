"""A worker process: loads a reward function, then scores one call per line of JSON.

Run as a script by the pool, with the standard library alone, so that it starts in a moment. It
talks over a socket of its own; what the function prints is dropped. `load`, `call` and
`call_batch` also serve the trusted functions that run inside the trainer.

A function in verl's signature is called for each sample, one in TRL's for all samples at once.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
DETAIL = 300
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
LARGEST = 1e15  # reward; the squares of a batch must fit float32


class Unusable(Exception):
    """The reward function cannot be loaded or called; the message is for the user."""


class TrainerState:
    """The `trainer_state` that functions in TRL's signature may ask for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has {', '.join(vars(self))} here, and no '{name}'")


class Loaded(NamedTuple):
    """A loaded reward function, as a function of the pool's messages.

    batch: it has TRL's signature and is called once for all items of a message
    answer: message {"items", "state"} -> {"outcomes"}, with what was logged
    """

    batch: bool
    answer: Callable[[Mapping[str, Any]], dict[str, Any]]


def load(where: str) -> Loaded:
    """Loads the reward function named "module:function" or "file.py:function"."""
    function = load_function(where)
    if takes_batch(function, where):
        return Loaded(
            True, lambda message: call_batch(function, message["items"], message["state"])
        )
    score = per_sample(function, where)
    return Loaded(
        False, lambda message: {"outcomes": [call(score, item) for item in message["items"]]}
    )


def load_function(where: str) -> Callable[..., Any]:
    """The function named "module:function" or "file.py:function", or `Unusable`."""
    place, _, name = where.rpartition(":")
    try:
        function = getattr(_module(place), name, None)
    except SyntaxError as error:
        raise Unusable(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except BaseException as error:
        raise Unusable(f"{place} cannot be imported: {describe(error)}") from None
    if not callable(function):
        raise Unusable(f"{place} has no function '{name}'")
    return function


def call(score: Callable[[Mapping[str, Any]], Any], item: Mapping[str, Any]) -> dict[str, Any]:
    """Scores one sample; its outcome and duration as plain data. Never raises."""
    started = time.perf_counter()
    try:
        outcome = _outcome(score(item))
    except BaseException as error:
        outcome = _failed("error", describe(error))
    return outcome | {"seconds": time.perf_counter() - started}


def call_batch(
    function: Callable[..., Any], items: Sequence[Mapping[str, Any]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Scores all samples in one call in TRL's signature. Never raises.

    A row without a usable reward fails alone; a call that raises has no reward for any row. Each
    row took its share of the time.
    """
    started = time.perf_counter()
    metrics: dict[str, list[float]] = {}
    columns: dict[str, list[Any]] = {}
    arguments = _trl_arguments(items) | {
        "completion_ids": [item["completion_ids"] for item in items],
        "trainer_state": TrainerState(state),
        "log_extra": lambda name, values: columns.setdefault(str(name), []).extend(values),
        "log_metric": lambda name, value: metrics.setdefault(str(name), []).append(float(value)),
    }
    outcomes = batch_outcomes(function, arguments, len(items), items[0]["kwargs"])
    seconds = (time.perf_counter() - started) / len(items)
    shown = {name: [_plain(value) for value in values] for name, values in columns.items()}
    return {
        "outcomes": [outcome | {"seconds": seconds} for outcome in outcomes],
        "metrics": {name: sum(values) / len(values) for name, values in metrics.items()},
        "columns": {name: values for name, values in shown.items() if len(values) == len(items)},
    }


def batch_outcomes(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    count: int,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Outcomes of the `count` samples of one call in TRL's signature. Never raises."""
    try:
        values = _listed(_settled(function(**_accepted(function)(arguments), **kwargs)), count)
        return [_row(value) for value in values]
    except BaseException as error:
        detail = describe(error) + (f", in one call for {count} completions" if count > 1 else "")
        return [_failed("error", detail) for _ in range(count)]


def _row(value: Any) -> dict[str, Any]:
    try:
        return _outcome(value)
    except Exception as error:
        return _failed("error", describe(error))


def _outcome(value: Any) -> dict[str, Any]:
    """The value that a function returned for one sample, as plain data."""
    return _judged(*_value(value)) | _marks(value)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def describe(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`, cut to a line that can be shown."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    at = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:
        text = type(error).__name__
    return text.removesuffix(": ")[:DETAIL] + at


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(place).parent))  # its neighbours can be imported, as in a script
    spec.loader.exec_module(module)
    return module


def takes_batch(function: Callable[..., Any], where: str) -> bool:
    """True for TRL's signature, for all samples at once; False for verl's."""
    parameters = inspect.signature(function).parameters
    if "completions" not in parameters and "solution_str" not in parameters:
        raise Unusable(
            f"{where} takes ({', '.join(parameters)}); expected TRL's signature (prompts, "
            "completions, **kwargs) or verl's (data_source, solution_str, ground_truth, extra_info)"
        )
    return "completions" in parameters


def per_sample(function: Callable[..., Any], where: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function in either signature as a function of one sample; TRL's gets lists of one."""
    batch, accepted = takes_batch(function, where), _accepted(function)

    def score(item: Mapping[str, Any]) -> Any:
        arguments = _trl_arguments([item]) if batch else _verl_arguments(item)
        value = _settled(function(**accepted(arguments), **item["kwargs"]))
        return _listed(value, 1)[0] if batch else value

    return score


def _accepted(function: Callable[..., Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Chooses those of the arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda arguments: arguments
    return lambda arguments: {
        name: value for name, value in arguments.items() if name in parameters
    }


def _settled(value: Any) -> Any:
    """The result of a function that may be a coroutine."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _trl_arguments(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lists over the samples; chat prompts get chat completions, as in TRL.

    A column that some samples lack is None there.
    """
    rows = [{"answer": item["answer"], **item["extra"]} for item in items]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": [item["prompt"] for item in items],
        "completions": [_completion(item) for item in items],
    }


def _completion(item: Mapping[str, Any]) -> Any:
    text = item["completion"]
    return text if isinstance(item["prompt"], str) else [{"role": "assistant", "content": text}]


def _verl_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    values = (item["source"], item["completion"], item["answer"], item["extra"])
    return dict(zip(VERL, values))


def _listed(value: Any, count: int) -> Sequence[Any]:
    """TRL's list of rewards; arrays and tensors count as lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    wanted = "one reward" if count == 1 else f"{count} rewards"
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"returned {_shown(value)}, expected a list of {wanted}")
    if len(value) != count:
        s = "" if count == 1 else "s"
        raise ValueError(f"returned {len(value)} rewards for {count} completion{s}")
    return value


def _value(value: Any) -> tuple[Any, bool | None]:
    """The reward, and right or wrong if the function tells."""
    if not isinstance(value, Mapping):
        return value, None
    if "score" not in value:
        raise KeyError(f"returned a dict without 'score': {', '.join(map(str, value))}"[:DETAIL])
    named = [key for key in ("correct", "acc") if value.get(key) is not None]
    return value["score"], _verdict(named[0], value[named[0]]) if named else None


def _verdict(key: str, right: Any) -> bool:
    """Right or wrong as True or False, from true, false, 1 or 0."""
    plain = right.item() if hasattr(right, "item") else right
    if not isinstance(plain, (bool, int, float)) or plain not in (0, 1):
        raise ValueError(f"'{key}' is {_shown(right)}, expected true or false")
    return bool(plain)


def _marks(value: Any) -> dict[str, Any]:
    """Feasibility of the response, whether an answer was found, and spans marked in the text.

    Spans are [[start, end, value], ...] in characters.
    """
    if not isinstance(value, Mapping):
        return {}
    allowed = value.get("feasible")
    marks = {} if allowed is None else {"feasible": _verdict("feasible", allowed)}
    if isinstance(value.get("parsed"), bool):  # functions of others may mean another thing
        marks["parsed"] = value["parsed"]
    if not value.get("spans"):
        return marks
    spans = [(int(a), int(b), float(x)) for a, b, x in value["spans"]]
    for start, end, mark in spans:
        if not (0 <= start <= end and math.isfinite(mark)):
            raise ValueError(f"span [{start}, {end}, {mark}] is not [start, end, value]")
    return marks | {"spans": spans}


def _judged(value: Any, correct: bool | None) -> dict[str, Any]:
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return _failed("nan", "returned None")
    if not isinstance(value, (int, float)):
        return _failed("error", f"returned {_shown(value)}, expected a number")
    if isinstance(value, float) and not math.isfinite(value):
        return _failed("nan", f"returned {value}")
    if abs(value) > LARGEST:
        return _failed("nan", f"returned {repr(value)[:60]}, beyond ±{LARGEST:g}")
    return {"reward": float(value), "correct": correct, "status": "ok", "detail": ""}


def _failed(status: str, detail: str) -> dict[str, Any]:
    return {"reward": None, "correct": None, "status": status, "detail": detail}


def _shown(value: Any) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})"


def serve(channel: socket.socket) -> None:
    """Scores samples until the trainer closes the channel."""
    own = os.getpid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    _adopt_orphans()
    lines = channel.makefile("r", encoding="ascii")
    first = json.loads(lines.readline() or "null")
    if first is None:
        return
    sys.path[:] = first["path"]
    try:
        loaded = load(first["where"])
        _send(channel, {"ready": True, "batch": loaded.batch})
    except Unusable as error:
        _send(channel, {"ready": False, "detail": str(error)})
        return
    for line in lines:
        message = json.loads(line)
        answer = loaded.answer(message)
        if os.getpid() != own:  # the function forked, and this is the child coming back
            os._exit(0)
        _send(channel, {"id": message["id"], **answer})


def _adopt_orphans() -> None:
    """Makes this process the parent of orphans below it, so that they can be ended with it.

    When the machine runs out of memory, the kernel chooses this process before the trainer.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads the function left behind must not keep the process
