"""Reward functions cross from TRL to verl and back, and score what they scored before."""

import math

import pytest

from proxpo.adapters.rewards import as_trl, as_verl
from proxpo.errors import ProxpoError

PROMPTS = ["1+1=", "2+2=", "3+3="]
TEXTS = ["2", "5", "6 "]
ANSWERS = ["2", "4", "6"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl wants it: a dict, with the source and a further column in it."""
    right = solution_str.strip() == ground_truth
    bonus = 0.25 if data_source == "sums" else 0.0
    return {"score": right + bonus + (extra_info or {}).get("weight", 0), "acc": right}


def accuracy_reward(prompts, completions, answer, **kwargs):
    """As TRL wants it: lists in, a list out."""
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


def test_a_verl_function_in_trl():
    reward = as_trl(compute_score, source="sums")
    assert reward.__name__ == "compute_score"  # TRL logs it as rewards/compute_score/mean
    found = reward(
        prompts=PROMPTS,
        completions=TEXTS,
        completion_ids=[[1], [2], [3]],
        answer=ANSWERS,
        weight=[10.0, 20.0, 30.0],
        trainer_state=object(),
        log_metric=print,
    )
    assert found == [11.25, 20.25, 31.25]


def test_verl_columns_are_read_as_verl_has_them():
    columns = {
        "data_source": ["sums", "other", "sums"],
        "reward_model": [{"style": "rule", "ground_truth": a} for a in ANSWERS],
        "extra_info": [{"weight": 1.0}, {}, {"weight": 3.0}],
        "answer": ["wrong"] * 3,
    }
    assert as_trl(compute_score)(PROMPTS, TEXTS, **columns) == [2.25, 0.0, 4.25]
    assert as_trl(compute_score, answer_field="answer")(PROMPTS, TEXTS, **columns)[0] == 1.25


def test_chat_completions_are_read_as_text():
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    assert as_trl(compute_score)(asked, chats, answer=ANSWERS) == [1.0, 0.0, 1.0]


def test_a_trl_function_in_verl():
    score = as_verl(accuracy_reward)
    assert score.__name__ == "accuracy_reward"
    assert [score("s", t, a, {"index": 3}) for t, a in zip(TEXTS, ANSWERS)] == [1.0, 0.0, 1.0]
    named = {"data_source": "s", "solution_str": "2", "ground_truth": "2", "extra_info": None}
    assert score(**named) == 1.0


def test_there_and_back_is_the_same():
    both = as_trl(as_verl(accuracy_reward))
    assert both(PROMPTS, TEXTS, answer=ANSWERS) == accuracy_reward(PROMPTS, TEXTS, ANSWERS)
    back = as_verl(as_trl(compute_score))
    assert back("sums", "2", "2", {"weight": 1.0}) == compute_score("", "2", "2")["score"] + 1.0


def test_trl_functions_keep_their_lists_and_coroutines():
    async def slow(completions, **kwargs):
        return [len(text) / 2 for text in completions]

    assert as_trl(accuracy_reward)(PROMPTS, TEXTS, answer=ANSWERS) == [1.0, 0.0, 1.0]
    assert as_verl(slow)("s", "abc", None) == 1.5


def test_a_trl_function_keeps_the_whole_batch_in_trl():
    """And all that TRL hands over; not lists of one, in which no response can be ranked."""

    def rank(completions, completion_ids, trainer_state, **kwargs):
        assert trainer_state == "state"
        assert len(completion_ids) == len(completions)
        return [float(sorted(completions).index(text)) for text in completions]

    more = {"completion_ids": [[1], [2], [3]], "trainer_state": "state", "log_metric": print}
    assert as_trl(rank)(PROMPTS, ["b", "c", "a"], answer=ANSWERS, **more) == [1.0, 2.0, 0.0]


def test_a_missing_reward_is_none_in_trl_and_must_be_named_in_verl():
    def unsure(completions, **kwargs):
        return [None if text == "?" else math.nan if text == "!" else 1.0 for text in completions]

    assert as_trl(unsure)(PROMPTS, ["?", "!", "x"]) == [None, None, 1.0]
    assert as_verl(unsure, missing=-1.0)("s", "?", "2") == -1.0
    with pytest.raises(ProxpoError, match=r"reward 'unsure' gave none .* missing=0.0"):
        as_verl(unsure)("s", "?", "2")


def test_mistakes_get_one_line():
    def broken(completions, **kwargs):
        raise ValueError("no such\nthing")

    with pytest.raises(ProxpoError, match="reward 'broken', completion 0: ValueError: no such thi"):
        as_trl(broken)(PROMPTS, TEXTS)
    with pytest.raises(ProxpoError, match="reward 'broken': ValueError"):
        as_verl(broken)("s", "2", "2")
    with pytest.raises(ProxpoError, match=r"reward 'sorted' takes .*expected TRL's signature"):
        as_trl(sorted)
