"""What a comparison says, and what it must not say."""

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import made
import numpy as np
import pytest

from proxpo.report.analysis import analyse
from proxpo.report.comparison import write_comparison
from proxpo.report.figures import thin
from proxpo.report.gallery import figures
from proxpo.report.runs import Comparison, Run, read_comparison
from proxpo.report.wording import caveats, claims, duration, number, ranking_lines

ACCURACY = "proxpo/eval/accuracy"


def run_of(name, seed, scores, *, kl=None, **kind):
    """Scores at steps 0, 10, 20, ..."""
    rows = []
    for i, score in enumerate(scores):
        row = {"step": 10.0 * i, ACCURACY: score}
        row |= {"proxpo/eval/kl": kl[i]} if kl else {}
        row |= {"step_time": 2.0, "proxpo/samples": 64.0} if i else {}
        rows.append(row)
    return Run(name=name, method=name, seed=seed, rows=tuple(rows), folder=f"{name}-{seed}", **kind)


def compared(*runs, **more):
    return analyse(Comparison(folder=Path("."), title="t", runs=runs, **more))


def test_numbers_of_one_run_by_hand():
    run = run_of("a", 0, [0.2, 0.4, 0.8], kl=[0.0, 1.0, 3.0])
    found = compared(run).arms[0]
    (one,) = found.runs
    assert (one.start, one.final, one.kl) == (0.2, 0.8, 3.0)
    assert one.area == pytest.approx((0.3 + 0.6) / 2)
    assert one.step_seconds == 2.0
    assert [r.target for r in one.reach] == pytest.approx([0.74, 0.8])
    near = one.reach[0]  # 0.74 lies 0.85 of the way from step 10 to step 20
    assert near.steps == pytest.approx(18.5)
    assert near.samples == pytest.approx(64 * 18.5)
    assert near.seconds == pytest.approx(2 * 18.5)
    assert near.kl == pytest.approx(1 + 2 * 0.85)


def test_a_steady_difference_is_claimed_and_an_unsteady_one_is_not():
    a = [run_of("a", s, [0.5, 0.7 + 0.05 * s]) for s in range(4)]
    b = [run_of("b", s, [0.5, 0.6 + 0.05 * s + 0.01 * (s % 2)]) for s in range(4)]
    c = [run_of("c", s, [0.5, 0.68 + 0.05 * (3 - s)]) for s in range(4)]
    found = compared(*a, *b, *c)
    assert found.pair("a", "b").winner == "a"
    assert found.pair("a", "c").winner == ""
    text = " ".join(claims(found))
    assert "a beats b in final score by 9.5 points (95 % interval 8.6 to 10.4, 4 paired" in text
    assert "a beats c" not in text
    assert "c beats b" not in text
    assert any("a and c" in line for line in caveats(found))


def test_claims_appear_exactly_where_intervals_exclude_zero():
    draw = np.random.default_rng(0)
    runs = [
        run_of(f"m{arm}", s, [0.5, 0.6 + 0.02 * arm + 0.02 * draw.normal()])
        for arm, s in itertools.product(range(5), range(3))
    ]
    found = compared(*runs)
    texts = claims(found)
    decided = 0
    for pair in found.pairs:
        values = [
            {one.run.seed: getattr(one, pair.measure) for one in result.runs}
            for name in (pair.a, pair.b)
            for result in found.arms
            if result.arm.name == name
        ]
        d = np.array([values[0][s] - values[1][s] for s in range(3)])
        half = 4.302652729911275 * d.std(ddof=1) / math.sqrt(3)
        excludes = abs(d.mean()) > half
        decided += excludes
        named = [t for t in texts if f"{pair.a} beats {pair.b} in" in t]
        words = {"final": "final score", "area": "over training"}[pair.measure]
        assert any(words in t for t in named) == (excludes and d.mean() > 0)
    assert len(texts) == decided > 0


def test_an_arm_that_lost_a_run_wins_nothing():
    a = [run_of("a", s, [0.5, 0.8 + 0.01 * (s % 2)]) for s in range(4)]
    b = [run_of("b", s, [0.5, 0.6]) for s in range(5)]
    lost = run_of("a", 4, [0.5], status="failed", reason="NaN")
    assert compared(*a, *b).pair("a", "b").winner == "a"
    found = compared(*a, lost, *b)
    assert found.pair("a", "b").difference.decides
    assert found.pair("a", "b").winner == ""
    assert not claims(found)
    assert any("1 of 5 runs of a failed" in line for line in caveats(found))
    assert found.arms[0].failed == 1
    assert len(found.arms[0].runs) == 4
    harmed = [replace(r, status="failed") if r.seed == 4 else r for r in b]
    assert compared(*a, *harmed).pair("a", "b").winner == "a"  # the loser's loss flatters no one


def test_tuning_runs_are_never_averaged(tmp_path):
    found = analyse(read_comparison(made.swept(tmp_path)))
    assert {one.run.seed for arm in found.arms for one in arm.runs} == {1, 2, 3}
    assert {arm.arm.name: dict(arm.settings) for arm in found.arms} == {
        "isopo": {"lr": 3e-5}, "grpo": {"lr": 1e-4},
    }  # fmt: skip
    (tuning,) = [one for one in figures(found) if one.key == "tuning"]
    assert tuning.ticks == ["1e-05", "3e-05", "0.0001"]
    assert [(s.arm, s.at) for s in tuning.data if s.chosen] == [
        ("isopo", "3e-05"), ("grpo", "0.0001"),
    ]  # fmt: skip


def test_a_short_tuning_run_shortens_no_budget():
    runs = [run_of("a", 0, [0.5, 0.6, 0.7]), run_of("a", 9, [0.1, 0.99], role="tune")]
    found = compared(*runs)
    assert found.end == 20
    assert max(found.targets) <= 0.7


def test_runs_without_seeds_are_not_paired():
    a = [run_of("a", None, [0.5, 0.9]), run_of("a", None, [0.5, 0.91])]
    b = [run_of("b", None, [0.5, 0.6]), run_of("b", None, [0.5, 0.62])]
    found = compared(*a, *b)
    assert found.pair("a", "b").difference.seeds == 0
    assert not claims(found)
    assert any("cannot be paired" in note for note in found.notes)
    assert len(found.arms[0].runs) == 2


def test_different_lengths_are_compared_at_the_common_step():
    found = compared(run_of("a", 0, [0.5, 0.6, 0.9]), run_of("b", 0, [0.5, 0.7]))
    assert found.end == 10
    assert [one.arm.name for one in found.arms] == ["b", "a"]
    assert max(found.targets) <= 0.7  # what lies past the common step is not asked for
    assert any("compared at step 10" in note for note in found.notes)


def test_nothing_to_rank():
    waiting = Run(name="a", method="a", status="waiting")
    found = compared(waiting)
    assert found.score is None
    assert found.notes == ("No run holds a score: nothing can be ranked.",)
    assert "–" in ranking_lines(found)[0]
    assert figures(found) == []


def test_robustness_is_drawn_along_what_varies(tmp_path):
    found = analyse(read_comparison(made.varied(tmp_path)))
    (one,) = [one for one in figures(found) if one.key == "robust-temperature"]
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
    curve = next(c for c in figures(found)[0].data if c.arm == "a")
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
    assert number(value, share=share) == text


def test_durations():
    assert [duration(s) for s in (0.123, 45.2, 200.0, 1e4, math.inf)] == [
        "0.12 s", "45 s", "3.33 min", "2.78 h", "never",
    ]  # fmt: skip
