"""Rewards by rule: which answers count as right."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxpo.rewards import answers
from proxpo.rewards.worker import call


@pytest.mark.parametrize(
    ("text", "right"),
    [("579", 1), (" 579\n", 1), ("579.", 1), ("0579", 0), ("579 apples", 0), ("", 0), ("57", 0)],
)
def test_exact(text, right):
    assert answers.exact(text, "579") == {"score": float(right), "acc": bool(right)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so\n#### 18", "18"),
        ("#### 17\nno:\n#### 18 \n", "18"),
        (r"thus \boxed{18}", "18"),
        (r"\boxed{\frac{1}{2}} is \boxed{{1}{2}} yes", "{1}{2}"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{3} #### 5", "5"),
        ("no mark 18", None),
        ("####", None),
        ("", None),
    ],
)
def test_extract(text, found):
    assert answers.extract(text) == found


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        ("#### $1,000.00", "1000", True),
        ("#### 1000.", "1,000", True),
        ("#### -3", "3", False),
        ("#### 18 apples", "18", True),
        ("#### 18 or 19", "18", False),
        ("#### 1/2", "1", False),
        (r"\boxed{18\text{ km}}", "18", True),
        (r"\boxed{18 \mathrm{km} a day}", "18", True),
        (r"\boxed{18\text{ to }19}", "18", False),
        (r"\boxed{18 \pi}", "18", False),
        (r"\boxed{18 \sqrt{x}}", r"18 \pi", False),
        ("#### $ 18 .", "18", True),
        ("#### 20%", "20", True),
        ("#### 1e1", "10", True),
        ("#### nan", "nan", True),
        ("#### 1e999999999", "10", False),
        ("18", "18", False),
    ],
)
def test_final_answer(given, truth, right):
    assert answers.final_answer(given, truth)["acc"] is right


def test_final_answer_without_a_mark():
    assert answers.final_answer("it is 1,018, yes", "1018", strict=False)["acc"]
    assert not answers.final_answer("none at all", "1018", strict=False)["acc"]


def test_an_answer_that_is_not_there_is_told_from_a_wrong_one():
    found = {"score": 0.0, "acc": False, "parsed": True}
    assert answers.final_answer("#### 17", "18") == found
    assert answers.final_answer("it is 17", "18") == found | {"parsed": False}
    assert answers.final_answer("it is 17", "18", strict=False) == found
    assert answers.final_answer("it is", "18", strict=False) == found | {"parsed": False}
    assert call(lambda item: answers.final_answer("it is 17", "18"), {})["parsed"] is False
    assert "parsed" not in call(lambda item: {"score": 1.0, "parsed": "17"}, {})


@pytest.mark.parametrize(
    "value", ["False", "true", "", math.nan, math.inf, 0.5, 2, -1, [], [True], {}, b"1"]
)
def test_correctness_that_is_no_truth_value_counts_as_neither_right_nor_wrong(value):
    """Python takes "False" and NaN for true: the answer would count as correct."""
    outcome = call(lambda item: {"score": 1.0, "acc": value}, {})
    assert (outcome["status"], outcome["reward"], outcome["correct"]) == ("error", None, None)
    assert "expected true or false" in outcome["detail"]


@pytest.mark.parametrize(
    ("value", "right"),
    [(True, True), (False, False), (1, True), (0.0, False), (np.bool_(False), False),
     (np.float32(1), True), (torch.tensor(0), False), (None, None)],
)  # fmt: skip
def test_truth_values_of_any_library_tell_right_from_wrong(value, right):
    assert call(lambda item: {"score": 0.5, "acc": value}, {})["correct"] is right


def test_math_verify_accepts_other_forms():
    for text, truth in ((r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{2\sqrt{2}}", r"\sqrt{8}")):
        assert not answers.final_answer(text, truth)["acc"]
        assert answers.final_answer(text, truth, verifier="math-verify")["acc"]
    assert not answers.final_answer(r"\boxed{3}", "4", verifier="math-verify")["acc"]


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_numbers_compare_as_numbers(a, b):
    assert answers.same(f"{a:,}", f"${b}.00") is (a == b)


@given(st.text(alphabet="0123456789#\\boxed{}-,.$% \n\0e∞٣"))
def test_no_text_breaks_the_rules(text):
    for rule in (answers.exact, answers.final_answer):
        assert rule(text, "4")["score"] in (0.0, 1.0)
