"""Figures, files and numbers of a report."""

import csv
import itertools
import json
import math
import re

import made
import numpy as np
import pytest
from made import compared, run_of

from proxpo.report.analysis import analyse
from proxpo.report.comparison_report import write_comparison
from proxpo.report.figure_images import Style, draw_figure
from proxpo.report.figure_list import all_figures
from proxpo.report.figures import thin
from proxpo.report.findings import (
    duration,
    format_number,
)
from proxpo.report.read_runs import read_comparison


def test_many_arms_look_different_and_their_names_do_not_cover_the_plot():
    arms = [f"arm {i}" for i in range(20)]
    style = Style(arms)
    assert len({(style.colour(arm), style.marker(arm)) for arm in arms}) == 20

    def width(number):
        runs = [run_of(arm, 0, [0.2, 0.4, 0.5]) for arm in arms[:number]]
        score = next(one for one in all_figures(compared(*runs)) if one.key == "score")
        image = draw_figure(score, arms)["svg"].decode()
        assert all(f">{arm}</text>" in image for arm in arms[:number])
        return float(re.search(r'width="([\d.]+)pt"', image)[1])

    assert width(3) == width(8) < width(9) < width(20) * 1.01


def test_robustness_is_drawn_along_what_varies(tmp_path):
    found = analyse(read_comparison(made.varied(tmp_path)))
    (one,) = [one for one in all_figures(found) if one.key == "robust-temperature"]
    assert one.ticks == ["0.8", "1", "1.2"]
    assert {(s.group, s.at) for s in one.data} == {
        *itertools.product(("grpo", "p3o"), ("0.8", "1", "1.2")), ("reinforce", ""),
    }  # fmt: skip


def test_thinned_curves_keep_their_mean_and_their_end():
    x, y = np.arange(1001.0), np.random.default_rng(0).normal(size=(3, 1001))
    few = thin(x, y, 101)
    assert few.values.shape == (3, 101)
    np.testing.assert_array_equal(few.values[:, -1], y[:, -1])
    np.testing.assert_allclose(few.values[:, 0], y[:, :10].mean(axis=1))
    np.testing.assert_allclose(few.values[:, :-1].mean(axis=1), y[:, :-1].mean(axis=1))
    assert thin(x, y, 2000).values is y


def test_bands_of_the_drawn_score_are_over_finished_runs(tmp_path):
    made.comparison(tmp_path, arms={"a": 0.3, "b": 0.2}, steps=20, every=5, failed=[("a", 2)])
    found = analyse(read_comparison(tmp_path))
    curve = next(c for c in all_figures(found)[0].data if c.arm == "a")
    assert len(curve.runs) == 3  # the failed one is drawn
    finals = [one.final for one in next(r for r in found.arms if r.arm.name == "a").runs]
    assert curve.mean[-1] == np.mean(finals)  # and not averaged; exact at the end
    assert len(finals) == 2


def test_files(tmp_path):
    made.comparison(tmp_path, arms={"a": 0.3, "b": 0.2}, steps=20, every=5, bare=True)
    page = write_comparison(tmp_path)
    assert page == tmp_path / "report.html"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [one["arm"] for one in summary["arms"]] == ["a", "b"]
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["final"]) == summary["arms"][0]["final"]["mean"]
    assert rows[0]["finished"] == "3"
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"score.png", "score.svg", "drift.png", "differences.svg", "cost.png"} <= drawn
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "figures" / "old.png").write_bytes(b"")
    write_comparison(tmp_path)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after  # the same files, byte for byte


@pytest.mark.parametrize(
    ("value", "share", "text"),
    [
        (0.8234, True, "82.3"), (-0.0, True, "0.0"), (0.0002, True, "0.02"), (math.nan, True, "–"),
        (12345.6, False, "12,346"), (0.00012, False, "1.20e−04"), (-1.2345, False, "−1.23"),
        (math.inf, False, "never"), (0.0, False, "0"),
    ],
)  # fmt: skip
def test_numbers(value, share, text):
    assert format_number(value, share=share) == text


def test_durations():
    assert [duration(s) for s in (0.123, 45.2, 200.0, 1e4, math.inf)] == [
        "0.12 s", "45 s", "3.33 min", "2.78 h", "never",
    ]  # fmt: skip
