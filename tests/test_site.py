"""The documentation: the site builds strictly, and what its pages tell to run runs."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer

from proxpo.cli.app import app
from proxpo.train.config import load_config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import tutorial_pages  # noqa: E402

# Pages whose snippets run as pasted, each by itself; CONTRIBUTING.md has a test of its own.
PAGES = [
    "README.md",
    *("docs/start.md", "docs/from-trl.md", "docs/concepts/batch.md", "docs/concepts/recipes.md"),
    *("docs/concepts/gradients.md", "docs/reference/files.md", "docs/howto/task.md"),
]
COMMANDS = sorted(
    {
        line.strip().partition("#")[0].strip()
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", path.read_text(), re.M | re.S)
        for line in block.replace("\\\n", "").splitlines()
        if line.strip().startswith("proxpo ") and not re.search(r"\.\.\.|NAME|\$", line)
    }
)


def snippets() -> list[tuple[str, str]]:
    """(page, code) of every different snippet; one that two pages show is run once."""
    pages: dict[str, str] = {}
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
            pages.setdefault(code, page)
    return [(page, code) for code, page in pages.items()]


def test_the_site_builds_strictly(tmp_path):
    build = runpy.run_path(str(ROOT / "scripts/build_site.py"))
    assert build["main"](tmp_path / "site") == 0
    assert (tmp_path / "site/index.html").exists()


def test_faults_are_named(tmp_path):
    build = runpy.run_path(str(ROOT / "scripts/build_site.py"))
    faults: list[str] = []
    text = "[a](../nowhere.md) [b](../README.md#x) `[c](d.md)` [e](https://f.org)"
    linked = build["with_links"](text, "docs/start.md", faults)
    assert faults == ["docs/start.md: links to ../nowhere.md, which does not exist"]
    assert "/blob/main/README.md#x" in linked
    (tmp_path / "a.html").write_text('<a href="b.html">b</a><a href="#x">x</a><p id="y">')
    (tmp_path / "c.html").write_text('<a href="a.html#y">fine</a><a href="a.html#z">not</a>')
    dead = build["dead_links"](tmp_path)
    assert dead == ["a.html: b.html", "a.html: #x", "c.html: a.html#z"]


@pytest.mark.parametrize(("page", "code"), snippets())
def test_snippets_run_as_pasted(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line):
    """Options and settings of every command on the site exist; nothing is run."""
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]
    given = command.make_context(name, arguments).params
    presets = (ROOT / "proxpo/configs").glob("*.yaml")
    if name == "train" and given["config"] in (None, *(path.stem for path in presets)):
        names = ("method", "model", "task", "seed")
        load_config(given["config"], given["settings"] or (), {n: given[n] for n in names})


@pytest.mark.long
@pytest.mark.parametrize(
    "script", sorted(tutorial_pages.SCRIPTS.glob("*.py")), ids=lambda path: path.stem
)
def test_tutorials_print_what_their_pages_show(script):
    """The same text, and numbers in the same places; how the numbers end depends on the machine."""
    shown = tutorial_pages.SHOWN.findall(tutorial_pages.page_path(script).read_text())
    printed = tutorial_pages.run(script)
    assert [lines(text) for text in printed] == [lines(text) for _, text in shown]
    rewards = [float(x) for x in re.findall(r"^step \d+: reward ([\d.]+)", "".join(printed), re.M)]
    assert not rewards or max(rewards[-2:]) > rewards[0]


def lines(text: str) -> list[str]:
    """The lines without numbers, sorted: runs of a comparison end in any order."""
    plain = re.sub(r"-?\d[\d.,e+-]*", "#", re.sub(r"[ \t]+", " ", text))
    return sorted(line for line in plain.splitlines() if "runs done" not in line)
