"""`proxpo doctor`: a table of what works on this machine, and lines that install the rest."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import proxpo
from proxpo.adapters.versions import TESTED
from proxpo.doctor import HOSTS, Finding, examine
from proxpo.report.terminal import console

STYLE = {"works": "green", "broken": "red", "missing": "dim"}


def run_doctor(*, as_json: bool) -> int:
    """Tries every host; exit code 1 if something that is installed does not work."""
    if as_json:
        findings = examine()
        ok = not any(finding.status == "broken" for finding in findings)
        about = {"proxpo": proxpo.__version__, "python": platform.python_version(), "ok": ok}
        tested = [{"command": env.command, **env.packages} for env in TESTED]
        rows = [asdict(finding) for finding in findings]
        print(json.dumps(about | {"findings": rows, "tested": tested}))
        return int(not ok)
    screen = console()
    screen.print(
        f"proxpo {proxpo.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    with screen.status("") as status:
        findings = examine(HOSTS, on_start=lambda name: status.update(f"trying {name}"))
    screen.print(table(findings))
    for line in (*advice(findings), *version_lines()):
        screen.print(line, soft_wrap=True)
    return int(any(finding.status == "broken" for finding in findings))


def table(findings: Sequence[Finding]) -> Table:
    """A row for each host: version, state, purpose and detail."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("what", "version", "state"):
        made.add_column(heading, no_wrap=True)
    made.add_column("for, and what was seen", ratio=1, overflow="fold")
    for finding in findings:
        detail = Text.assemble(
            finding.purpose, (f"\n{finding.detail}" if finding.detail else "", "dim")
        )
        state = Text(finding.status, STYLE[finding.status])
        made.add_row(Text(finding.name, "bold"), finding.version or "-", state, detail)
    return made


def advice(findings: Sequence[Finding]) -> list[str]:
    """Lines on what is broken, and that install what is missing, each once."""
    lines = []
    for status, heading in (("broken", "Broken"), ("missing", "Missing")):
        several: dict[str, list[str]] = {}
        for finding in findings:
            if finding.status == status and (finding.install or status == "broken"):
                several.setdefault(finding.install, []).append(finding.name)
        for install, names in several.items():
            lines.append(f"{heading}: {', '.join(names)}" + (f": {install}" if install else ""))
    return lines or ["Everything works here."]


def version_lines() -> list[str]:
    """Lines on the versions that proxpo was tested with."""
    return ["Tested with:", *(f"  {env} ({env.command})" for env in TESTED)]


__all__ = ["advice", "run_doctor", "table", "version_lines"]
