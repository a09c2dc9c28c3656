"""Imports of the package form no circle and point down the layers of scripts/import_circles.py."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "import_circles.py"))


@pytest.fixture(scope="module")
def imports():
    return SCRIPT["read_imports"](SCRIPT["PACKAGE"])


def test_no_import_circle(imports):
    assert SCRIPT["circles"](imports) == []


def test_no_import_points_up(imports):
    assert SCRIPT["upward"](imports) == []


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / "proxpo" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proxpo"


HIDDEN = {
    "a function": "def f():\n    from proxpo.runs.high import x",
    "type checking": "if TYPE_CHECKING:\n    import proxpo.runs.high",
    "a relative import": "from . import high",
    "importlib": "def f():\n    importlib.import_module('proxpo.runs.high')",
}


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_circle_is_found(tmp_path, text):
    package = written(tmp_path, runs__high="from proxpo.runs.low import y", runs__low=text)
    imports = SCRIPT["read_imports"](package)
    assert SCRIPT["circles"](imports) == [["proxpo.runs.high", "proxpo.runs.low"]]


def test_an_import_that_points_up_is_found(tmp_path):
    package = written(tmp_path, errors="def f():\n    from proxpo.cli import app", cli__app="")
    arrows = SCRIPT["upward"](SCRIPT["read_imports"](package))
    assert arrows == [("proxpo.errors", "proxpo.cli.app", 2)]
