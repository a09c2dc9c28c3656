"""Findings of a comparison beside the same differences on seeds that it had not seen."""

from dataclasses import replace

import pytest
from made import compared, comparison, run_of

from proxpo.compare.confirmation import read_findings
from proxpo.compare.plan import Finding
from proxpo.errors import ProxpoError
from proxpo.report.analysis import analyse
from proxpo.report.comparison_page import comparison_page
from proxpo.report.comparison_report import write_comparison
from proxpo.report.confirmed import confirmed_lines, spoken_confirmed
from proxpo.report.findings import claims
from proxpo.report.read_runs import read_comparison
from proxpo.report.summary import summary

FOUND = {"measure": "final", "mean": 0.038, "low": 0.034, "high": 0.041, "p_holm": 0.001}
NEAR = [0.02, 0.03, 0.01, 0.025]  # paired differences to b, all above 0


def confirmed(winner="a", loser="b", *, gaps=NEAR, **changes):
    """Arms a and b, a ahead by `gaps` on its seeds, after `winner` was seen ahead of `loser`."""
    runs = [run_of("a", s, [0.3, 0.5 + gap]) for s, gap in enumerate(gaps)]
    runs += [run_of("b", s, [0.3, 0.5]) for s in range(4)]
    finding = Finding(winner=winner, loser=loser, **{**FOUND, **changes})
    return compared(*runs, confirms=(finding,))


def test_both_differences_stand_in_one_sentence_with_the_verdict():
    (line,) = confirmed_lines(confirmed())
    assert line == (
        "a over b in final score: 3.8 points (3.4 to 4.1) before, 2.1 (0.8 to 3.5) on these seeds: "
        "held."
    )
    (weak,) = confirmed_lines(confirmed(p_holm=0.2))
    assert "(3.4 to 4.1, not after correction) before" in weak


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (confirmed(), "held"),
        (confirmed(gaps=[0.02, -0.03, 0.01, 0.0]), "not shown"),
        (confirmed("b", "a"), "turned around"),
        (confirmed("a", "c"), "not tested"),
        (confirmed(measure="area"), "not tested"),  # nothing lies on the way
    ],
)
def test_verdicts(case, verdict):
    (line,) = confirmed_lines(case)
    assert line.endswith(f": {verdict}.")
    assert spoken_confirmed(case) == ["What was to be confirmed:", line]
    assert summary(case)["confirmed"] == [line]
    assert "What was to be confirmed" in comparison_page(case, [])


def test_what_correction_withdraws_is_said():
    arms = {name: [0.3, 0.5] for name in "bcdefgh"}
    runs = [run_of(name, s, scores) for name, scores in arms.items() for s in range(4)]
    runs += [run_of("a", s, [0.3, 0.5 + gap]) for s, gap in enumerate(NEAR)]
    (line,) = confirmed_lines(compared(*runs, confirms=(Finding(winner="a", loser="b", **FOUND),)))
    assert line.endswith(": held, not after correction.")


def test_a_terminal_counts_the_verdicts_of_many():
    case = confirmed()
    (final,) = case.comparison.confirms
    others = [replace(final, measure="area", mean=0.01 * n) for n in range(1, 13)]
    many = compared(*case.comparison.runs, confirms=(final, *others))
    assert spoken_confirmed(many) == [
        "What was to be confirmed:",
        confirmed_lines(case)[0],
        "Others: 12 not tested. The report lists them.",
    ]
    assert spoken_confirmed(compared(*case.comparison.runs)) == []


def test_findings_are_those_of_the_first_report(tmp_path):
    folder = comparison(tmp_path, seeds=(1, 2, 3, 4), arms={"grpo": 0.3, "p3o": 0.28, "isopo": 0.1})
    assert read_findings(folder) is None
    write_comparison(folder)
    analysis = analyse(read_comparison(folder))
    found = read_findings(folder)
    assert len(found) == len(claims(analysis)) > 0
    assert all(0 < each.low < each.mean < each.high for each in found)
    again = compared(*analysis.comparison.runs, confirms=tuple(found))  # the same seeds again
    assert {line.partition("before, ")[0].count("(") for line in confirmed_lines(again)} == {1}
    for line, each in zip(confirmed_lines(again), found):
        assert line.endswith(": held." if each.p_holm < 0.05 else ": held, not after correction.")
    (folder / "summary.json").write_text('{"pairs": [{"winner": "a"}]}')
    with pytest.raises(ProxpoError, match=r"summary.json is damaged"):
        read_findings(folder)
