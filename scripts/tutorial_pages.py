"""Pages of the tutorials: text, code and output of the scripts in examples/tutorials.

A script is cut into cells by lines that begin with `# %%` (`# %% [markdown]` opens one of text), as
editors and Jupyter read it. A page keeps what each cell of code printed when the page was written:
a script whose code has not changed since is not run again.
"""

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"
SHOWN = re.compile(r"```python\n(.*?)\n```\n(?:\n``` {\.text \.output}\n(.*?)```\n)?", re.S)
LOG_LINE = re.compile(r"^\[\d{4}-[^\n]*\n", re.M)  # of libraries, on being loaded


class Cell(NamedTuple):
    """Text, or code that begins on line `line` of its script."""

    text: bool
    source: str
    line: int


def pages() -> dict[Path, str]:
    """Text of every tutorial's page, by path."""
    return {page_path(script): page(script) for script in sorted(SCRIPTS.glob("*.py"))}


def page_path(script: Path) -> Path:
    return PAGES / f"{script.stem.replace('_', '-')}.md"


def page(script: Path) -> str:
    """The page with the output it has, where that belongs to this code, else with that of a run."""
    path = page_path(script)
    shown = SHOWN.findall(path.read_text()) if path.exists() else []
    code = [cell.source for cell in cells(script) if not cell.text]
    same = code == [source for source, _ in shown]
    return render(script, [output for _, output in shown] if same else run(script))


def cells(script: Path) -> list[Cell]:
    lines = script.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("# %%")]
    cut: list[Cell] = []
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        text, body = "[markdown]" in lines[start], lines[start + 1 : end]
        if text:
            body = [line.removeprefix("#").removeprefix(" ") for line in body]
        cut.append(Cell(text, "\n".join(body).strip("\n"), start + 1))
    return cut


def run(script: Path) -> list[str]:
    """Runs the script in an empty folder; what each cell of code has printed."""
    namespace: dict = {"__name__": "__main__", "__file__": str(script)}
    outputs: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in cells(script):
            if cell.text:
                continue
            code = compile("\n" * cell.line + cell.source, str(script), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, namespace)
            outputs.append(LOG_LINE.sub("", printed.getvalue()))
    return outputs


def render(script: Path, outputs: list[str]) -> str:
    """The page; `outputs` are those of the cells of code, in order."""
    left, parts = iter(outputs), []
    for cell in cells(script):
        parts.append(f"{cell.source}\n" if cell.text else f"```python\n{cell.source}\n```\n")
        printed = "" if cell.text else next(left, "")
        if printed:
            parts.append(f"``` {{.text .output}}\n{printed}```\n")
    name = script.relative_to(ROOT).as_posix()
    parts.append(f"The script: [`{name}`](../../{name}), run by the tests.\n")
    return "\n".join(parts)
