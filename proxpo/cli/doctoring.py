"""`proxpo doctor`: a table of what works here, and the lines that install the rest."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import proxpo
from proxpo.doctor import HOSTS, Finding, examine
from proxpo.report.terminal import console

STYLE = {"works": "green", "broken": "red", "missing": "dim"}


def run_doctor(*, as_json: bool) -> int:
    """Try every host; the exit code: 1 if something that is installed does not work."""
    if as_json:
        findings = examine()
        ok = not any(one.status == "broken" for one in findings)
        about = {"proxpo": proxpo.__version__, "python": platform.python_version(), "ok": ok}
        print(json.dumps(about | {"findings": [asdict(one) for one in findings]}))
        return int(not ok)
    screen = console()
    screen.print(
        f"proxpo {proxpo.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    with screen.status("") as status:
        findings = examine(HOSTS, on_start=lambda name: status.update(f"trying {name}"))
    screen.print(table(findings))
    for line in advice(findings):
        screen.print(line, soft_wrap=True)
    return int(any(one.status == "broken" for one in findings))


def table(findings: Sequence[Finding]) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("what", "version", "state"):
        made.add_column(heading, no_wrap=True)
    made.add_column("for, and what was seen", ratio=1, overflow="fold")
    for one in findings:
        seen = Text.assemble(one.purpose, (f"\n{one.detail}" if one.detail else "", "dim"))
        state = Text(one.status, STYLE[one.status])
        made.add_row(Text(one.name, "bold"), one.version or "-", state, seen)
    return made


def advice(findings: Sequence[Finding]) -> list[str]:
    """What to do: the lines that install what is missing, each once, and what is broken."""
    lines = []
    for status, heading in (("broken", "Broken"), ("missing", "Missing")):
        several: dict[str, list[str]] = {}
        for one in findings:
            if one.status == status and (one.install or status == "broken"):
                several.setdefault(one.install, []).append(one.name)
        for install, names in several.items():
            lines.append(f"{heading}: {', '.join(names)}" + (f": {install}" if install else ""))
    return lines or ["Everything works here."]


__all__ = ["advice", "run_doctor", "table"]
