"""proxpo inside verl 0.9.1: runs the tests in `inside/` with verl's own interpreter."""

import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[3]
ENGINE = {
    "VERL_ENGINE_VENDOR": "proxpo",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
}


def interpreter() -> str:
    python = os.environ.get("PROXPO_VERL_PYTHON", "")
    if not python or not Path(python).exists():
        pytest.fail(
            "proxpo inside verl needs verl's own environment: run `make test`, or set "
            "PROXPO_VERL_PYTHON to the interpreter of one built from requirements/verl.txt"
            + (f" ('{python}' does not exist)" if python else ""),
            pytrace=False,
        )
    return python


def run(files: list[str], folder: Path, **env: str) -> list[ElementTree.Element]:
    """The outcome of every test in `files`, run in a process of verl's."""
    python, report = interpreter(), folder / "report.xml"
    own = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    found = subprocess.run(
        [python, "-m", "pytest", "-q", "-c", "pytest.ini", f"--junitxml={report}", *files],
        cwd=HERE,
        env={**own, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "TINY_MODEL": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if found.returncode:
        pytest.fail(f"{found.stdout[-6000:]}\n{found.stderr[-2000:]}", pytrace=False)
    return list(ElementTree.parse(report).iter("testcase"))


@pytest.mark.parametrize(
    ("files", "env", "least"),
    [
        (["inside_config.py", "inside_loading.py", "inside_losses.py"], {}, 200),
        (["inside_engine.py", "inside_ulysses.py"], ENGINE, 40),
    ],
    ids=["losses", "engine"],
)
def test_inside_verl(files, env, least, tmp_path):
    outcomes = run(files, tmp_path, **env)
    assert len(outcomes) >= least
    assert not [case.get("name") for case in outcomes if list(case.iter("skipped"))]
