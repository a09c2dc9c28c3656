"""Results of a comparison, and verdicts that it must not give."""

import itertools
import math
import re
from dataclasses import replace

import made
import numpy as np
import pytest
from made import ACCURACY, SAMPLED, compared, run_at, run_of

from proxpo.compare.plan import Arm, Choice
from proxpo.report.analysis import analyse
from proxpo.report.caveats import caveats, setting_warnings
from proxpo.report.comparison_page import comparison_page
from proxpo.report.curve_figures import drift_figure
from proxpo.report.figure_list import all_figures
from proxpo.report.findings import (
    claims,
    ranking_heading,
    ranking_lines,
    spoken_claims,
)
from proxpo.report.html_tables import ranking_table
from proxpo.report.read_runs import read_comparison
from proxpo.report.run_data import Run
from proxpo.runs.jsonlines import CUT_TOKENS


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


def test_an_arm_without_seeds_in_common_does_not_lower_what_the_others_are_said_to_have():
    runs = [run_of(arm, seed, [0.5, 0.7]) for arm in ("a", "b") for seed in range(5)]
    alone = run_of("c", 0, [0.5], status="failed", reason="NaN")
    lines = caveats(compared(*runs, alone))
    assert "Nothing is tested between a and c; b and c: fewer than two seeds in common." in lines
    assert not any("paired seed" in line for line in lines)


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


def test_a_terminal_shows_of_many_findings_those_that_hold_after_correction():
    draw = np.random.default_rng(0)
    runs = [
        run_of(f"m{arm}", s, [0.5, 0.5, 0.6 + 0.03 * arm + 0.03 * draw.normal()])
        for arm, s in itertools.product(range(6), range(4))
    ]
    found = compared(*runs)
    every, held = claims(found), [t for t in claims(found) if "not after correction" not in t]
    assert 0 < len(held) <= 12 < len(every)
    *shown, last = spoken_claims(found)
    assert shown == held
    assert last.startswith(f"{len(every) - len(held)} more differences without correction")
    few = compared(*runs[:8])
    assert spoken_claims(few) == claims(few) != []


def test_a_terminal_shows_very_many_findings_by_winner():
    draw = np.random.default_rng(0)
    runs = [
        run_of(f"m{arm}", s, [0.2, 0.2, 0.2 + 0.1 * arm + 0.003 * draw.normal()])
        for arm, s in itertools.product(range(7), range(5))
    ]
    heading, *lines, last = spoken_claims(compared(*runs))
    assert heading.startswith("Differences in final score, after correction")
    assert [line.split(" beats ")[0] for line in lines] == [f"m{arm}" for arm in range(6, 0, -1)]
    assert [line.count("m") - 1 for line in lines] == [6, 5, 4, 3, 2, 1]  # all that are worse
    assert last == "21 more differences in mean score over training: the report lists them."


def test_a_mean_on_the_way_is_tested_only_where_something_lies_on_the_way():
    ends = [("a", s, [0.2, 0.6 + s * s / 90]) for s in range(4)]
    ends += [("b", s, [0.2, 0.5]) for s in range(4)]
    two = compared(*(run_of(*one) for one in ends))
    three = compared(*(run_of(name, s, [0.2, 0.3, last]) for name, s, (_, last) in ends))
    assert {pair.measure for pair in two.pairs} == {"final"}
    assert {pair.measure for pair in three.pairs} == {"final", "area"}


def test_the_other_kind_of_accuracy_stands_beside_the_score():
    noise = [0.001, 0.004, -0.002, 0.0]
    places = {"a": (0.70, 0.6), "b": (0.80, 0.5), "c": (0.71, 0.3)}  # greedy, sampled
    runs = [
        run_at(name, s, {5: greedy + k * noise[s]}, sampled={5: often - k * noise[s]})
        for k, (name, (greedy, often)) in enumerate(places.items())
        for s in range(4)
    ]
    found = compared(*runs, score=SAMPLED)
    first, second, third = ranking_lines(found)
    assert (" a " in first, " b " in second, " c " in third) == (True, True, True)
    assert ("greedy 70." in first, "greedy 80." in second, "greedy 71." in third) == (True,) * 3
    text = said(found)
    assert (
        "In greedy accuracy 2 of 3 differences in final score are not shown: a over b (70." in text
    )
    assert "In greedy accuracy alone there is b over a (80." in text
    assert "sampled 49.9 %" in ranking_lines(compared(*runs))[0]
    greedy_alone = run_at("d", 0, {5: 0.5})
    assert compared(*runs, greedy_alone).other is None


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
    (tuning,) = [one for one in all_figures(found) if one.key == "tuning"]
    assert tuning.ticks == ["1e-05", "3e-05", "0.0001"]
    assert [(s.arm, s.at) for s in tuning.data if s.chosen] == [
        ("isopo", "3e-05"), ("grpo", "0.0001"),
    ]  # fmt: skip


@pytest.mark.parametrize(("final", "doubted"), [(0.51, True), (0.53, False)])
def test_a_choice_that_the_reported_seeds_do_not_confirm_is_doubted(final, doubted):
    small, large = {"lr": 1e-5}, {"lr": 1e-4}
    choice = Choice(arm="a", settings=large, scores=((small, 0.52), (large, 0.55), ({}, None)))
    found = compared(*(run_of("a", s, [0.4, final]) for s in range(2)), chosen=(choice,))
    text = (
        "The choice for a is in doubt: with lr=0.0001 it had 55.0 % on the tuning seeds and has "
        "51.0 % here, below the 52.0 % that lr=1e-05 had there."
    )
    assert any(text in line for line in caveats(found)) is doubted


def test_settings_that_failed_and_could_not_be_chosen_are_named():
    small, middle, large = ({"lr": rate} for rate in (1e-5, 1e-4, 1e-3))
    some = ((small, None), (middle, 0.5), (large, None))
    chosen = (
        *(Choice(arm=arm, settings=middle, scores=some) for arm in "ab"),
        Choice(arm="c", settings=middle, scores=((small, 0.4), (middle, 0.5), (large, 0.4))),
    )
    found = compared(*(run_of(name, 0, [0.4, 0.9]) for name in "abc"), chosen=chosen)
    assert [line for line in caveats(found) if "without" in line] == [
        "The choice for a, b was made without lr=1e-05; lr=0.001, whose runs failed."
    ]


def test_a_choice_at_an_end_of_what_was_tried_is_named():
    rates, runs = (1e-5, 1e-4, 1e-3), [run_of(name, 0, [0.4, 0.9]) for name in "abc"]
    scores = tuple(({"lr": rate}, 0.5) for rate in rates)
    taken = {"a": 1e-3, "b": 1e-4, "c": 1e-3}
    chosen = [Choice(arm=arm, settings={"lr": lr}, scores=scores) for arm, lr in taken.items()]
    found = compared(*runs, chosen=tuple(chosen))
    said = "lr=0.001, chosen for a, c, is the largest that was tried: a better one may lie beyond."
    assert [line for line in caveats(found) if "tried" in line] == [said]
    few = [replace(choice, scores=scores[1:]) for choice in chosen]
    assert not any("tried" in line for line in caveats(compared(*runs, chosen=tuple(few))))


def test_micro_batches_that_memory_cut_unlike_are_named_where_the_method_depends_on_them():
    def cut(name, seed, *tokens):
        run = run_of(name, seed, [0.4, 0.5 + 0.1 * seed, 0.9])
        cuts = [{CUT_TOKENS: n} for n in tokens] + [{}] * (len(run.rows) - 1 - len(tokens))
        later = (row | own for row, own in zip(run.rows[1:], cuts))
        return replace(run, rows=(run.rows[0], *later))

    def said(*runs):
        found = compared(*runs, *(run_of("c", seed, [0.4, 0.5, 0.6]) for seed in range(2)))
        return [line for line in caveats(found) if "micro-batch" in line]

    alike = [cut("a", seed, 8192.0, 8192.0) for seed in range(2)]
    unlike = [cut("b", 0, 8192.0, 8192.0), cut("b", 1, 2048.0)]
    assert not said(*alike)
    (line,) = said(*alike, *unlike)
    words = "a at 8,192 tokens; b at 2,048 to 8,192 tokens, in part not at all. A number for"
    assert words in line
    (line,) = said(*alike, *(cut("b", seed, 2048.0, 2048.0) for seed in range(2)))
    assert "a at 8,192 tokens; b at 2,048 tokens." in line


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


def said(found):
    return " ".join([*setting_warnings(found), *claims(found), *caveats(found), *found.notes])


def test_different_evaluation_steps_give_no_false_winner():
    """grpo is ahead at every step; at its step 4 it is behind the other's step 6."""
    grpo = [run_at("grpo", s, {0: 0.1, 4: 0.3 + s / 100, 8: 0.9}) for s in range(3)]
    p3o = [run_at("p3o", s, {0: 0.1, 3: 0.2, 6: 0.5}) for s in range(3)]
    found = compared(*grpo, *p3o)
    assert not claims(found)
    assert found.end == 6
    assert found.interpolated
    assert [one.arm.name for one in found.arms] == ["grpo", "p3o"]
    assert found.arms[0].runs[0].final == pytest.approx(0.6)
    assert "interpolated at step 6 and nothing is claimed" in said(found)
    assert ranking_heading(found).startswith("greedy accuracy, held out, step 6, interpolated")


def test_scores_are_compared_at_the_last_step_that_all_were_evaluated_at():
    a = [run_at("a", s, {0: 0.1, 4: 0.3, 8: 0.6 + s / 100, 12: 0.9}) for s in range(3)]
    b = [run_at("b", s, {0: 0.1, 2: 0.2, 4: 0.3, 8: 0.5, 10: 0.99}) for s in range(3)]
    found = compared(*a, *b)
    assert found.end == 8
    assert not found.interpolated
    text = said(found)
    assert "a beats b in final score by 11.0 points" in text
    assert "3 paired seeds, step 8" in text
    assert "a beats b in mean score over training" in text
    assert "3 paired seeds, steps 0 to 8" in text
    assert "compared at step 8, the last at which all were evaluated" in text


def test_a_finer_grid_of_evaluations_is_no_better_mean_over_training():
    """The same concave curve, seen at every step and at three: a trapezoid cuts its top off."""
    curve = lambda step: 1 - math.exp(-step / 3)  # noqa: E731
    fine = [run_at("fine", s, {t: curve(t) for t in range(21)}) for s in range(3)]
    coarse = [run_at("coarse", s, {t: curve(t) for t in (0, 10, 20)}) for s in range(3)]
    found = compared(*fine, *coarse)
    assert found.arms[0].mean("area") == found.arms[1].mean("area")
    assert [one.reach for one in found.arms[0].runs] == [one.reach for one in found.arms[1].runs]


def test_a_run_that_is_first_evaluated_late_gets_no_better_mean_over_training():
    a = run_at("a", 0, {0: 0.0, 10: 0.5, 20: 1.0})
    b = run_at("b", 0, {10: 0.5, 20: 1.0})
    found = compared(a, b)
    assert [one.mean("area") for one in found.arms] == [0.75, 0.75]
    assert [one.runs[0].start for one in found.arms] == [0.5, 0.5]


def test_drift_and_pace_are_taken_at_the_compared_step():
    a = run_at("a", 0, {0: 0.1, 8: 0.5}, kl={0: 0.0, 4: 1.0, 8: 2.0})
    b = run_at("b", 0, {0: 0.1, 8: 0.5}, kl={0: 0.0, 6: 3.0, 10: 5.0})
    found = compared(a, b)
    drift = {one.arm.name: one.mean("kl") for one in found.arms}
    assert drift == {"a": 2.0, "b": 4.0}  # b's 3.0 is of step 6
    assert "KL at step 8 is interpolated between evaluations for b-0" in said(found)
    assert {(p["x"], p["y"]) for one in drift_figure(found)[0].data for p in one.points} == {
        (2.0, 0.5), (4.0, 0.5),
    }  # fmt: skip
    rows = tuple({"step": float(t), "reward": 0.5, "step_time": 9.0 if t > 2 else 1.0}
                 for t in range(1, 5))  # fmt: skip
    long = Run(name="a", method="a", seed=0, rows=rows)
    paced = compared(long, replace(long, name="b", rows=rows[:2]))
    assert {one.mean("step_seconds") for one in paced.arms} == {1.0}


def test_logs_without_a_step_in_common_are_not_ranked():
    rewards = lambda steps: tuple({"step": float(t), "reward": t / 30} for t in steps)  # noqa: E731
    short = [Run(name="a", method="a", seed=s, rows=rewards(range(1, 6))) for s in (0, 1)]
    long = [Run(name="b", method="b", seed=s, rows=rewards((10, 20, 30))) for s in (0, 1)]
    found = compared(*short, *long)
    assert not claims(found)
    assert math.isnan(found.end)
    assert "No step lies within all runs" in said(found)
    assert ranking_heading(found) == "training reward, no step in common, Student's 95 % interval:"
    assert all_figures(found)
    mixed = [replace(short[0], name="c"), replace(long[1], name="c")]  # within one arm
    assert all_figures(compared(*mixed))


def config_of(task="arithmetic", **sections):
    return {"method": "x", "task": {"name": task}, **sections}


def pair_of(left, right, *, arms=(), chosen=()):
    runs = [run_of("a", s, [0.5, 0.8 + s / 100], config=left) for s in range(3)]
    runs += [run_of("b", s, [0.5, 0.6], config=right) for s in range(3)]
    return compared(*runs, arms=arms, chosen=chosen)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (config_of("gsm8k"), "task.name: arithmetic (a), gsm8k (b)"),
        (config_of(model={"name": "smollm2"}), "model.name: tiny (a), smollm2 (b)"),
        (config_of(train={"lr": 1e-3}), "train.lr: 0.0005 (a), 0.001 (b)"),
        (config_of(train={"steps": 7}), "train.steps: 100 (a), 7 (b)"),
        (config_of(train={"mini_batches": 2}), "train.mini_batches: 1 (a), 2 (b)"),
        (config_of(evaluate={"size": 8}), "evaluate.size: 256 (a), 8 (b)"),
        (config_of(rollout={"prompts_per_step": 8}), "samples a step: 512 (a), 64 (b)"),
        (config_of() | {"task": {"name": "arithmetic", "options": {"digits": 2}}},
         'task.options: {} (a), {"digits": 2} (b)'),
    ],
)  # fmt: skip
def test_runs_that_differ_beyond_the_arms_get_no_verdict(other, line):
    check_no_verdict(pair_of(config_of(), other), line)
    assert pair_of(other, other).pair("a", "b").winner == "a"


def test_runs_that_read_other_files_under_one_path_get_no_verdict():
    runs = [
        replace(run_of(name, s, [0.5, end + s / 100], config=config_of()), files={"model.name": f})
        for name, end, f in (("a", 0.8, "12ab"), ("b", 0.6, "34cd"))
        for s in range(3)
    ]
    check_no_verdict(compared(*runs), "files.model.name: 12ab (a), 34cd (b)")


def check_no_verdict(found, line):
    assert not claims(found)
    first, *lines = setting_warnings(found)
    assert first.startswith("Not comparable")
    assert line in lines
    assert "Nothing is claimed between a and b: their settings differ in" in said(found)
    assert "Read this first" in (page := comparison_page(found, []))
    assert page.index("Not comparable") < page.index("What the runs show") < page.index("Ranking")


@pytest.mark.parametrize(
    "other",
    [
        config_of() | {"method": "y", "recipe": {"clip_high": 0.3}, "seed": 3, "out": "x"},
        config_of(log={"samples": 0}, checkpoint={"every": 1}, evaluate={"every": 3}),
        config_of(train={"lr": 5e-4}, rollout={"prompts_per_step": 64}),  # defaults, written out
    ],
)
def test_what_changes_no_comparison_forbids_none(other):
    found = pair_of(config_of(), other)
    assert found.pair("a", "b").winner == "a"
    assert not setting_warnings(found)


def test_settings_that_arms_are_compared_for_may_differ():
    rate = config_of(train={"lr": 1e-3})
    arms = (Arm(name="a", method="x"), Arm(name="b", method="x", settings={"lr": 1e-3}))
    assert pair_of(config_of(), rate, arms=arms).pair("a", "b").winner == "a"
    plain = tuple(Arm(name=name, method="x") for name in "ab")
    rates = (("a", 3e-5), ("b", 1e-3))
    tuned = tuple(Choice(arm=name, settings={"lr": lr}, scores=()) for name, lr in rates)
    assert pair_of(config_of(), rate, arms=plain, chosen=tuned).pair("a", "b").winner == "a"
    untuned = pair_of(config_of(), rate, arms=plain, chosen=tuned[:1])
    assert untuned.pair("a", "b").winner == ""  # one was tuned, the other was not
    task = (arms[0], replace(arms[1], settings={"task": "gsm8k"}))
    assert pair_of(config_of(), config_of("gsm8k"), arms=task).pair("a", "b").winner == ""
    shape = {"prompts_per_step": 8, "samples_per_prompt": 64}  # as many samples as 64 x 8
    shaped = (arms[0], replace(arms[1], settings=shape))
    assert pair_of(config_of(), config_of(rollout=shape), arms=shaped).pair("a", "b").winner == "a"


def test_an_arm_whose_own_runs_differ_wins_nothing():
    found = pair_of(config_of(), config_of())
    runs = [one.run for arm in found.arms for one in arm.runs]
    runs[1] = replace(runs[1], config=config_of() | {"recipe": {"clip_high": 0.9}})
    mixed = compared(*runs)
    assert mixed.pair("a", "b").winner == ""
    assert 'recipe: {} (a, b), {"clip_high": 0.9} (a)' in setting_warnings(mixed)


def test_logs_without_settings_are_said_to_be_so():
    runs = [run_of("a", s, [0.5, 0.8 + s / 100], source="trl") for s in range(3)]
    runs += [run_of("b", s, [0.5, 0.6], config=config_of()) for s in range(3)]
    assert "Settings unknown: the logs of a do not hold them" in said(compared(*runs))
    known = [
        replace(run, config={"max_steps": 5 + (run.name == "b")}, source="trl") for run in runs
    ]
    assert "max_steps: 5 (a), 6 (b)" in setting_warnings(compared(*known))


def test_scores_of_different_names_get_no_verdict():
    rows = lambda name, y: ({"step": 1.0, f"val-core/{name}/acc/mean@1": y},)  # noqa: E731
    runs = [Run(name="a", method="a", seed=s, rows=rows("gsm8k", 0.8 + s / 9)) for s in range(3)]
    runs += [Run(name="b", method="b", seed=s, rows=rows("math", 0.1)) for s in range(3)]
    found = compared(*runs)
    assert not claims(found)
    assert "their score is logged under different names" in said(found)


def test_equal_differences_are_not_said_to_hold_zero():
    """0.8 - 0.7 and 0.7 - 0.6 are one difference up to rounding: no spread, so no interval."""
    a = [run_of("a", s, [0.5, 0.6 + s / 10]) for s in range(3)]
    b = [run_of("b", s, [0.5, 0.5 + s / 10]) for s in range(3)]
    found = compared(*a, *b)
    text = said(found)
    assert not claims(found)
    assert "holds zero" not in text
    assert "differs by the same amount on every seed" in text
    assert "No method is shown to be better" not in comparison_page(found, [])
    same = compared(*a, *[replace(run, name="b") for run in a])
    assert "every interval holds zero" in said(same)
    alone = compared(a[0], b[0])
    assert "holds zero" not in said(alone)
    assert "Fewer than two seeds in common" in said(alone)


def test_the_ranking_shows_the_runs_before_the_costs_and_sorts_numbers():
    found = compared(*[run_of(name, s, [0.5, 0.6, 0.7]) for name in "ab" for s in range(2)])
    table = ranking_table(found)
    heads = re.findall(r"<th[^>]* scope=\"col\".*?</th>", table)
    cells = re.findall(r"<t[dh][^>]*>", table.partition("<tbody>")[2].partition("</tr>")[0])
    assert len(cells) == len(heads)
    names = [re.sub("<.*?>", "", head) for head in heads]
    assert names.index("runs") < names.index("samples")
    for head, cell in zip(heads, cells):
        column = re.search(r'data-column="(\d+)"', head)
        assert (column is not None) == ("data-v" in cell)
        assert column is None or cells[int(column[1])] is cell


def test_one_arm_is_compared_with_nothing():
    found = compared(*[run_of("a", s, [0.5, 0.6]) for s in range(2)])
    assert "One arm: there is nothing to compare it with." in comparison_page(found, [])


def test_a_score_that_became_nan_is_said_and_wins_nothing():
    a = [run_of("a", s, [0.5, 0.8 + s / 100]) for s in range(3)]
    b = [run_of("b", s, [0.5, 0.6]) for s in range(3)]
    a[0] = replace(a[0], broken={ACCURACY: 20.0})
    found = compared(*a, *b)
    assert found.pair("a", "b").winner == ""
    assert f"{ACCURACY} of a-0 is no number at step 20" in said(found)


def test_a_score_that_no_run_has_is_said():
    found = compared(run_of("a", 0, [0.5, 0.6]), score="mine")
    assert "No run holds 'mine': ranked by greedy accuracy, held out instead." in found.notes


def test_nothing_to_rank():
    waiting = Run(name="a", method="a", status="waiting")
    found = compared(waiting)
    assert found.score is None
    assert found.notes == ("No run holds a score: nothing can be ranked.",)
    assert "–" in ranking_lines(found)[0]
    assert all_figures(found) == []
