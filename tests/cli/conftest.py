"""The command line as a function: `proxpo("inspect", ...)` gives exit code, stdout and stderr.

Tests marked `browser` need Chromium; where there is none they are left out, as the summary says.
"""

import shutil
from typing import NamedTuple

import pytest

from proxpo.cli import main

LEFT_OUT = pytest.StashKey[int]()


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: loads a page in headless Chromium")


def pytest_collection_modifyitems(config, items):
    if chromium():
        return
    out = [one for one in items if one.get_closest_marker("browser")]
    items[:] = [one for one in items if one not in out]
    config.hook.pytest_deselected(items=out)
    config.stash[LEFT_OUT] = len(out)


def pytest_terminal_summary(terminalreporter, config):
    if config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{config.stash[LEFT_OUT]} browser tests left out: no Chromium")


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def proxpo(capsys):
    def run(*arguments):
        code = main([str(one) for one in arguments])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(proxpo):
    """The one line a wrong call earns: exit code 2, nothing on stdout, no traceback."""

    def run(*arguments):
        code, out, err = proxpo(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("proxpo: ")
        assert err.count("\n") == 1
        return err.removeprefix("proxpo: ").rstrip("\n")

    return run
