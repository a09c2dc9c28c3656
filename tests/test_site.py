"""The documentation: the site builds strictly, and its tutorials print what they show."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import docstring_lists  # noqa: E402
import tutorial_pages  # noqa: E402


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


def test_described_names_of_a_docstring_become_a_list():
    text = "Sum.\n\na: one\nb, c: two,\n    three\n\nNote: no name"
    wanted = "Sum.\n\n\n- `a`: one\n- `b`, `c`: two,\n    three\n\nNote: no name"
    assert docstring_lists.as_list(text, {"a", "b", "c"}) == wanted


@pytest.mark.long
@pytest.mark.usefixtures("registry")
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
