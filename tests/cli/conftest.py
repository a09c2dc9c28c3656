"""The command line as a function: `proxpo("inspect", ...)` gives exit code, stdout and stderr."""

from typing import NamedTuple

import pytest

from proxpo.cli import main


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
    """The line that refuses a wrong call: exit code 2, nothing on stdout, no traceback."""

    def run(*arguments):
        code, out, err = proxpo(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("proxpo: ")
        assert err.count("\n") == 1
        return err.removeprefix("proxpo: ").rstrip("\n")

    return run
