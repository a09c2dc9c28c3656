"""Process that runs checks, [[module, check], ...] as JSON, and prints a line of JSON for each."""

import importlib
import json
import os
import sys
import warnings

from proxpo.rewards.worker import describe


def main(hosts: list[list[str]]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print as they like
    warnings.simplefilter("ignore")
    for module, check in hosts:
        print(json.dumps(run_check(module, check)), file=answers, flush=True)


def run_check(module: str, check: str) -> dict[str, str]:
    """{"detail": result}, or {"error": one line} where it did not work."""
    try:
        if not check:
            importlib.import_module(module)
            return {"detail": "imported"}
        place, _, name = check.rpartition(":")
        return {"detail": getattr(importlib.import_module(place), name)()}
    except BaseException as error:
        return {"error": describe(error)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # threads that a host has left behind must not keep the process
