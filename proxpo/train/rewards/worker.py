"""One worker: loads a reward function, then scores one sample per line of JSON.

Run as a script by the pool, with the standard library alone, so that it starts in a moment. It
talks over a socket of its own; whatever the function prints goes nowhere. `load` and `call` also
serve the trusted functions that run inside the trainer.
"""

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
DETAIL = 300
LARGEST = 1e15  # reward; the squares of a batch must fit float32


class Unusable(Exception):
    """The reward function cannot be loaded or called; the message is for the user."""


def load(where: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function named "module:function" or "file.py:function", as a function of one sample."""
    place, _, name = where.rpartition(":")
    try:
        function = getattr(_module(place), name, None)
    except SyntaxError as error:
        raise Unusable(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except BaseException as error:
        raise Unusable(f"{place} cannot be imported: {describe(error)}") from None
    if not callable(function):
        raise Unusable(f"{place} has no function '{name}'")
    return per_sample(function, where)


def call(score: Callable[[Mapping[str, Any]], Any], item: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of one sample as plain data, and how long it took; never raises."""
    started = time.perf_counter()
    try:
        value = score(item)
        found = _judged(*_value(value)) | _marks(value)
    except BaseException as error:
        found = _failed("error", describe(error))
    return found | {"seconds": time.perf_counter() - started}


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


def per_sample(function: Callable[..., Any], where: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function in TRL's or verl's signature, told apart by its parameters, as one of a sample."""
    parameters = inspect.signature(function).parameters
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "completions" in parameters:
        arguments = _trl_arguments
    elif "solution_str" in parameters:
        arguments = _verl_arguments
    else:
        raise Unusable(
            f"{where} takes ({', '.join(parameters)}); expected TRL's signature (prompts, "
            "completions, **kwargs) or verl's (data_source, solution_str, ground_truth, extra_info)"
        )

    def score(item: Mapping[str, Any]) -> Any:
        given = arguments(item)
        chosen = given if rest else {k: v for k, v in given.items() if k in parameters}
        value = _settled(function(**chosen, **item["kwargs"]))
        return _single(value) if arguments is _trl_arguments else value

    return score


def _settled(value: Any) -> Any:
    """The result of a function that may be a coroutine."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _trl_arguments(item: Mapping[str, Any]) -> dict[str, list]:
    """Lists of one sample each; chat prompts get chat completions, as in TRL."""
    chat = not isinstance(item["prompt"], str)
    text = item["completion"]
    completion = [{"role": "assistant", "content": text}] if chat else text
    columns = {"answer": item["answer"], **item["extra"]}
    columns |= {"prompts": item["prompt"], "completions": completion}
    return {name: [value] for name, value in columns.items()}


def _verl_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    values = (item["source"], item["completion"], item["answer"], item["extra"])
    return dict(zip(VERL, values))


def _single(value: Any) -> Any:
    """The one reward of TRL's list of rewards; arrays and tensors count as lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"returned {_shown(value)}, expected a list of one reward")
    if len(value) != 1:
        raise ValueError(f"returned {len(value)} rewards for 1 completion")
    return value[0]


def _value(value: Any) -> tuple[Any, bool | None]:
    """The reward, and whether the answer was right where the function says so."""
    if not isinstance(value, Mapping):
        return value, None
    if "score" not in value:
        raise KeyError(f"returned a dict without 'score': {', '.join(map(str, value))}"[:DETAIL])
    right = value.get("acc")
    return value["score"], None if right is None else bool(right)


def _marks(value: Any) -> dict[str, Any]:
    """What the function marked in the text: [[start, end, value], ...] in characters."""
    if not isinstance(value, Mapping) or not value.get("spans"):
        return {}
    spans = [(int(a), int(b), float(x)) for a, b, x in value["spans"]]
    for start, end, mark in spans:
        if not (0 <= start <= end and math.isfinite(mark)):
            raise ValueError(f"span [{start}, {end}, {mark}] is not [start, end, value]")
    return {"spans": spans}


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
    """Read samples until the trainer closes the channel; it is then gone, and so is this."""
    own = os.getpid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    lines = channel.makefile("r", encoding="ascii")
    first = json.loads(lines.readline() or "null")
    if first is None:
        return
    sys.path[:] = first["path"]
    try:
        score = load(first["where"])
        _send(channel, {"ready": True})
    except Unusable as error:
        _send(channel, {"ready": False, "detail": str(error)})
        return
    for line in lines:
        item = json.loads(line)
        outcome = call(score, item)
        if os.getpid() != own:  # the function forked, and this is the child coming back
            os._exit(0)
        _send(channel, {"id": item["id"], **outcome})


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads the function left behind must not keep the process
