"""Tries the hosts named on its command line; a line of JSON for each, nothing else on stdout."""

import importlib
import json
import os
import sys
import warnings

from proxpo.doctor._hosts import HOSTS, Host
from proxpo.train.rewards.worker import describe


def main(names: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print as they like
    warnings.simplefilter("ignore")
    known = {host.name: host for host in HOSTS}
    for name in names:
        print(json.dumps(tried(known[name])), file=answers, flush=True)


def tried(host: Host) -> dict[str, str]:
    """{"detail": what was seen}, or {"error": one line} where it did not work."""
    try:
        if not host.check:
            importlib.import_module(host.module or host.name)
            return {"detail": "imported"}
        checks = importlib.import_module("proxpo.doctor._checks")
        return {"detail": getattr(checks, host.check)()}
    except BaseException as error:
        return {"error": describe(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads that a host has left behind must not keep the process
