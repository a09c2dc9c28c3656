"""The command line: a mistake of the user gives one line, never a traceback.

Exit codes: 0 done, 1 something does not work (doctor) or the output has lost its reader, 2 wrong
input, 130 interrupted.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, cast

from proxpo.errors import ProxpoError, resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. Heavy modules load inside the command that needs them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # torch's, where numpy is not installed: no command needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode still gets a table
    try:
        return _run(arguments or ["--help"])
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # typer's exit code for the same
    except ProxpoError as error:
        return _refuse(str(error))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return _refuse(f"{error.filename}: {reason}" if error.filename else reason)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    import typer

    from proxpo.cli.app import app

    # The base of typer's public error: which click it belongs to depends on typer's version.
    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])
    if not arguments[0].startswith("-"):
        names = [command.name for command in app.registered_commands if command.name]
        arguments = [resolve(arguments[0], names, what="command"), *arguments[1:]]
    try:
        code = app(arguments, prog_name="proxpo", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as leave:
        return leave.exit_code
    except usage_error as error:
        return _refuse(_usage(error))
    return code or 0


def _usage(error: Exception) -> str:
    """click's message with the nearest option, or the command to ask for help."""
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):  # no such option
        return _no_such_option(error, context)
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    ending = (
        ""
        if message.endswith("?")
        else f"; see {context.command_path if context else 'proxpo'} --help"
    )
    return f"{message[:1].lower()}{message[1:]}{ending}"


def _no_such_option(error: Any, context: Any) -> str:
    """The nearest options; in a command of settings --steps may be meant as one of those."""
    name, near = error.option_name, error.possibilities or []
    line = f"no such option '{name}'"
    if name.startswith("--") and context and _takes_settings(context):
        near = difflib.get_close_matches(name, near, n=1, cutoff=0.7)
        if not difflib.get_close_matches(name, near, cutoff=0.8):
            setting = f"--set {name[2:].replace('-', '_')}=VALUE"
            if near:
                return f"{line}; did you mean {near[0]} or {setting}?"
            return f"{line}; a setting is written {setting}"
    if near:
        return f"{line}; did you mean '{near[0]}'?"
    return f"{line}; see {context.command_path if context else 'proxpo'} --help"


def _takes_settings(context: Any) -> bool:
    return any("--set" in parameter.opts for parameter in context.command.params)


def _refuse(message: str) -> int:
    print(f"proxpo: {' '.join(message.split())}", file=sys.stderr)
    return 2


__all__ = ["main"]
