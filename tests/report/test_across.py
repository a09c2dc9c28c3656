"""The scripts that set arms of one comparison beside arms of another."""

import json
import os
import runpy
import shutil
from pathlib import Path

import made
import pytest

from proxpo.report.analysis import analyse
from proxpo.report.read_runs import read_comparison
from proxpo.report.summary import summary

SCRIPTS = Path(__file__).parents[2] / "scripts"


def across(monkeypatch, *words: object, script: str = "across.py") -> None:
    monkeypatch.setattr("sys.argv", [script, *map(str, words)])
    monkeypatch.syspath_prepend(SCRIPTS)
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def summarised(folder: Path) -> None:
    """Writes summary.json, as `proxpo report` does."""
    content = summary(analyse(read_comparison(folder)))
    (folder / "summary.json").write_text(json.dumps(content))


@pytest.mark.parametrize("measure", ["final", "final_other"])
def test_arms_of_two_comparisons_differ_as_those_of_one(tmp_path, monkeypatch, capsys, measure):
    whole = made.comparison(tmp_path / "one", arms={"grpo": 0.6, "isopo p=-1": 0.4})
    analysis = analyse(read_comparison(whole))
    summarised(whole)
    other = shutil.copytree(whole, tmp_path / "other")
    across(monkeypatch, f"{whole}:grpo", f"{other}:isopo p=-1", measure)
    ranked = analysis.other if measure == "final_other" else analysis
    d = ranked.pair("grpo", "isopo p=-1").difference.student
    assert d.mean > 0
    said = f"{d.mean:+.4f} (95 % interval {d.low:+.4f} to {d.high:+.4f}, 3 paired seeds)"
    assert said in capsys.readouterr().out


def test_what_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    folder = made.comparison(tmp_path / "one", arms={"grpo": 0.6, "isopo p=-1": 0.4})
    arm = f"{folder}:grpo"

    def refused(*words: str) -> str:
        with pytest.raises(SystemExit):
            across(monkeypatch, *words)
        return capsys.readouterr().err

    assert "`proxpo report" in refused(arm, arm)
    summarised(folder)
    assert "no arm 'isopo'; there are grpo, isopo p=-1" in refused(arm, f"{folder}:isopo")
    one = made.comparison(tmp_path / "few", arms={"grpo": 0.6}, seeds=(1,))
    summarised(one)
    assert "seeds in common: 1; a difference needs two" in refused(arm, f"{one}:grpo")
    assert "no 'entropy' of each seed; there are start, final" in refused(arm, arm, "entropy")


def test_the_order_of_arms_in_two_comparisons(tmp_path, monkeypatch, capsys):
    arms = {"grpo": 0.6, "p3o": 0.5, "cispo": 0.4, "isopo p=-1": 0.2}
    down = made.comparison(tmp_path / "down", arms=arms)
    turned = dict(zip(arms, reversed(arms.values())))
    up = made.comparison(tmp_path / "up", arms={name: turned[name] for name in ("grpo", "p3o")})
    rest = made.comparison(tmp_path / "rest", arms={"cispo": turned["cispo"]})
    for folder in (down, up, rest):
        summarised(folder)

    def said(*words: object) -> str:
        across(monkeypatch, *words, script="same_order.py")
        return capsys.readouterr().out

    assert "over 4 arms: 1.00 (95 % of the draws of seeds: 1.00 to 1.00)" in said(down, down)
    assert "'kl' over 4 arms" in said(down, down / "summary.json", "kl")
    assert "over 3 arms: -1.00" in said(down, f"{up},{rest}")
    for words, why in (
        ((down, up), "arms in common: 2; an order needs three"),
        ((down, f"{rest},{down}"), f"arm 'cispo' is in {down} and in a folder before it"),
    ):
        with pytest.raises(SystemExit):
            said(*words)
        assert why in capsys.readouterr().err


def test_all_pairs_of_two_folders_are_corrected_as_those_of_one(tmp_path, monkeypatch, capsys):
    arms = {"grpo": 0.6, "p3o": 0.5, "isopo p=-1": 0.2}
    whole = made.comparison(tmp_path / "whole", arms=arms)
    head = made.comparison(tmp_path / "head", arms={name: arms[name] for name in ("grpo", "p3o")})
    rest = made.comparison(tmp_path / "rest", arms={"isopo p=-1": 0.2})
    for folder in (whole, head, rest):
        summarised(folder)

    def said(*words: object) -> str:
        across(monkeypatch, *words, script="all_pairs.py")
        return capsys.readouterr().out

    lines = said(f"{rest},{head}").splitlines()
    assert lines == said(whole).splitlines()
    assert lines[-1].startswith("'final' of 3 arms, 3 pairs: ")
    pair = analyse(read_comparison(whole)).pair("grpo", "isopo p=-1")
    d = pair.difference.student
    line = f"grpo - isopo p=-1: {d.mean:+.4f} ({d.low:+.4f} to {d.high:+.4f}), "
    assert pair.p_holm < 0.05
    assert line + f"Holm's p {pair.p_holm:.4f}" in lines
    with pytest.raises(SystemExit):
        said(rest)
    assert "no two arms have two seeds in common" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["rank_by.py", "across.py", "same_order.py", "all_pairs.py"])
def test_a_reader_that_has_left_ends_a_script_quietly(tmp_path, monkeypatch, script):
    folder = made.comparison(tmp_path / "one", arms={"grpo": 0.6, "p3o": 0.5, "cispo": 0.4})
    summarised(folder)
    words = {"across.py": (f"{folder}:grpo", f"{folder}:p3o"), "same_order.py": (folder, folder)}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", out)
        with pytest.raises(SystemExit) as left:
            across(patched, *words.get(script, (folder,)), script=script)
    assert left.value.code == 1
