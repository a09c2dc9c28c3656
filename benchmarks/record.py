"""Results of a benchmark in a JSON file: written after every entry, continued by the next run."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, str]:
    """The device and the version of torch that figures depend on."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    return {"device": device, "torch": torch.__version__}


def synchronised() -> float:
    """The time after everything that was launched has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Record:
    """Entries by name. With a path, a file {"machine", "commands", "entries"} that always holds
    all entries so far; without one, nothing is written.

    A file that is there is continued: entries in it need not be measured again.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {"machine": machine(), "commands": [], "entries": {}}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text())
            if self.data["machine"] != machine():
                sys.exit(f"{path} was measured on another machine: {self.data['machine']}")
        command = " ".join(["python", *sys.argv])
        if command not in self.data["commands"]:
            self.data["commands"].append(command)

    def __contains__(self, name: str) -> bool:
        return name in self.data["entries"]

    def __getitem__(self, name: str) -> Any:
        return self.data["entries"][name]

    def items(self) -> Iterator[tuple[str, Any]]:
        yield from self.data["entries"].items()

    def add(self, name: str, entry: Any) -> None:
        self.data["entries"][name] = entry
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(draft, self.path)


class Deadline:
    """A limit of seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end


__all__ = ["Deadline", "Record", "machine", "synchronised"]
