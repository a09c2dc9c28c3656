"""The script that sets an arm of one comparison beside an arm of another."""

import runpy
import shutil
from pathlib import Path

import made
import pytest

from proxpo.report.analysis import analyse
from proxpo.report.read_runs import read_comparison

SCRIPT = str(Path(__file__).parents[2] / "scripts/across.py")


def across(monkeypatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["across.py", *map(str, words)])
    runpy.run_path(SCRIPT, run_name="__main__")


def test_arms_of_two_comparisons_differ_as_those_of_one(tmp_path, monkeypatch, capsys):
    whole = made.comparison(tmp_path / "one", arms={"grpo": 0.6, "isopo p=-1": 0.4})
    pair = analyse(read_comparison(whole)).pair("grpo", "isopo p=-1")
    other = shutil.copytree(whole, tmp_path / "other")
    across(monkeypatch, f"{whole}:grpo", f"{other}:isopo p=-1")
    d = pair.difference.student
    assert d.mean > 0
    said = f"{d.mean:+.4f} (95 % interval {d.low:+.4f} to {d.high:+.4f}, 3 paired seeds)"
    assert said in capsys.readouterr().out


def test_an_arm_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    folder = made.comparison(tmp_path / "one", arms={"grpo": 0.6, "isopo p=-1": 0.4})
    with pytest.raises(SystemExit):
        across(monkeypatch, f"{folder}:grpo", f"{folder}:isopo")
    assert "no arm 'isopo'; there are grpo, isopo p=-1" in capsys.readouterr().err
