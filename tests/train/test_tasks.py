"""Tasks: splits that never mix, problems that never change, complaints that name the place."""

import importlib
import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_items import item, jsonl, tokenizer

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive, generator
from proxpo.rewards import RewardPool
from proxpo.train.tasks import fit_prompts, make_task
from proxpo.train.tasks.arithmetic import CHAT_LEVELS, TEXT_LEVELS, Sum, held_out
from proxpo.train.tasks.calculator import calculate, solution

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


# Streams


def test_streams_are_fixed_for_ever():
    """Changing these changes every run anyone has made."""
    assert derive(0) == 4429783136828819033
    assert derive(0, "data", 3) == 1997284916079413276
    assert derive(-1, 2**70, "π") == 5717927302149093230


paths = st.lists(st.one_of(st.integers(), st.text("ab1:is", max_size=3)), max_size=4)


@given(st.integers(), paths, st.integers(), paths)
def test_streams_differ_where_their_paths_do(seed, path, other_seed, other_path):
    same = (seed, path) == (other_seed, other_path)
    assert (derive(seed, *path) == derive(other_seed, *other_path)) is same
    assert 0 <= derive(seed, *path) < 2**63


def test_generators_repeat():
    draws = [generator(3, "x", 1).get_state().tolist() for _ in range(2)]
    assert draws[0] == draws[1] != generator(3, "x", 2).get_state().tolist()


# Arithmetic


@pytest.mark.parametrize("level", TEXT_LEVELS)
def test_arithmetic_is_right_and_in_range(level):
    task = make_task(f"arithmetic:{level}")
    digits = range(TEXT_LEVELS[level]["digits"][0], TEXT_LEVELS[level]["digits"][1] + 1)
    for problem in [*islice(task.train, 200), *task.test]:
        assert problem.prompt.endswith("=")
        assert problem.answer == str(eval(problem.prompt[:-1]))
        assert not problem.answer.startswith("-")
        operands = problem.prompt[:-1].replace("-", "+").split("+")
        assert all(len(operand) in digits for operand in operands)
    signs = {sign for p in islice(task.train, 200) for sign in "+-" if sign in p.prompt}
    assert signs == set(TEXT_LEVELS[level]["operations"])


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic:easy", "arithmetic-chat:easy"])
def test_no_test_problem_is_trained_on(name):
    """Nor its mirror image: 12+34 is held out with 34+12."""
    task = make_task(name)

    def operands(problem):
        text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]
        return tuple(sorted("".join(c if c.isdigit() else " " for c in text).split()))

    trained = {operands(task.train[i]) for i in range(1000)}
    tested = {operands(problem) for problem in task.test}
    assert trained.isdisjoint(tested)
    assert len({json.dumps(p.prompt) for p in task.test}) == len(task.test) >= 10


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-"))
def test_held_out_is_symmetric(a, b, sign):
    assert held_out(Sum(a, sign, b), 0.3) == held_out(Sum(b, sign, a), 0.3)


def test_held_out_is_the_share_it_says():
    pairs = [Sum(a, "+", b) for a in range(100, 200) for b in range(a, 200)]
    share = sum(held_out(pair, 0.1) for pair in pairs) / len(pairs)
    assert abs(share - 0.1) < 0.015


def test_problems_do_not_depend_on_the_order_of_asking():
    first, second = make_task("arithmetic").train, make_task("arithmetic").train
    forwards = [first[i] for i in range(20)]
    assert [second[i] for i in reversed(range(20))] == forwards[::-1]
    assert first[5:8] == forwards[5:8]
    assert first[-1] == first[len(first) - 1]
    assert len({p.prompt for p in forwards}) > 15
    with pytest.raises(IndexError):
        first[len(first)]


def test_the_shipped_problems_are_fixed():
    """The model in the box was trained on this split."""
    task = make_task("arithmetic")
    assert [p.prompt for p in task.train[:3]] == ["673+504=", "384+891=", "743+172="]
    assert [p.prompt for p in task.test[:3]] == ["305+255=", "977+847=", "215+588="]


def test_chat_levels():
    for level, bounds in CHAT_LEVELS.items():
        task = make_task(f"arithmetic-chat:{level}")
        problem = task.train[7]
        [message] = problem.prompt
        _, _, a, _, b = message["content"].partition("?")[0].split()
        assert bounds["low"] <= int(a) <= bounds["high"]
        assert bounds["low"] <= int(b) <= bounds["high"]
        assert message == {
            "role": "user",
            "content": f"What is {a} + {b}? Answer with the number only.",
        }
        assert problem.answer == str(int(a) + int(b))


def test_arithmetic_options():
    assert make_task("arithmetic", digits=5).train[0].prompt[5] == "+"
    assert "-" in make_task("arithmetic", digits=[2, 3], operations="-").train[0].prompt
    low = make_task("arithmetic-chat", low=70, high=75).train[0].prompt[0]["content"]
    assert low[8] == "7"
    assert make_task("Arithmetic:EASY").name == "arithmetic:easy"


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic-chat"])
def test_arithmetic_rewards(name):
    task = make_task(name)
    problem = task.train[0]
    with RewardPool(task.reward) as pool:
        texts = (problem.answer, f"{problem.answer}0", f"It is {problem.answer}")
        outcomes = pool.score([item(problem, text) for text in texts])
        assert [one.correct for one in outcomes] == [True, False, name == "arithmetic-chat"]
        assert pool._workers == []


# Prompts as tokens


def test_encoding_text_and_chat():
    task = make_task("arithmetic")
    plain = tokenizer()
    assert plain.decode(task.encode(task.train[0], plain)).replace(" ", "") == task.train[0].prompt
    chat = make_task("arithmetic-chat")
    ids = chat.encode(chat.train[0], tokenizer(chat_template=TEMPLATE))
    text = "".join(chr(32 + i) for i in ids)
    assert text == f"<user>{chat.train[0].prompt[0]['content']}<assistant>"


def test_template_options_reach_the_template(tmp_path):
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "hi"}], "answer": "yes"})
    task = make_task(path, reward="exact", template={"thinking": "yes"})
    chat = tokenizer(chat_template="{{ thinking }}")
    assert "".join(chr(32 + i) for i in task.encode(task.train[0], chat)) == "yes"


def test_a_tokenizer_without_chat_template_is_named():
    task = make_task("arithmetic-chat")
    with pytest.raises(
        ProxpoError, match=r"take an instruct model, or .* task\.options\.chat=false"
    ):
        task.encode(task.train[0], tokenizer())


def test_long_prompts(tmp_path):
    rows = [{"prompt": "x" * n, "answer": ""} for n in (5, 9, 30, 6, 7, 8)]
    path, test = jsonl(tmp_path, *rows), jsonl(tmp_path, *rows[:1], name="test.jsonl")
    task = make_task(path, reward="exact", test=test)
    with pytest.raises(ProxpoError, match=r"problem 2 has 30 tokens, the limit is 10: raise"):
        task.encode(task.train[2], tokenizer(), limit=10)
    with pytest.raises(ProxpoError, match=r"1 of 6 train prompts are longer than 10 tokens"):
        fit_prompts(task, tokenizer(), limit=10)
    kept = fit_prompts(task, tokenizer(), limit=10, drop=True)
    assert [len(p.prompt) for p in kept.train] == [5, 9, 6, 7, 8]
    with pytest.raises(ProxpoError, match=r"no train prompt has 3 tokens or fewer \(the shortest"):
        fit_prompts(task, tokenizer(), limit=3, drop=True)
    generated = make_task("arithmetic")
    assert fit_prompts(generated, tokenizer(), limit=20).train is generated.train


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digit": 3}, "unknown option of task arithmetic 'digit'; did you mean 'digits'?"),
        ({"digits": 0}, "digits is a number from 1 to 8"),
        ({"digits": [3, 2]}, "digits is a number from 1 to 8"),
        ({"operations": "*"}, "operations are '+', '-' or '+-', got '*'"),
        ({"held_out": 1.0}, "held_out is a share between 0 and 1"),
        ({"test_size": 0}, "test_size is at least 1"),
        ({"seed": "a"}, "takes int, got 'a'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ProxpoError, match="task arithmetic") as caught:
        make_task("arithmetic", **options)
    assert message in str(caught.value)


def test_chat_arithmetic_takes_the_last_number_unless_told_to_be_strict():
    said = "12 + 34 = 46."
    for strict, right in ((False, 1.0), (True, 0.0)):
        spec = make_task("arithmetic-chat", strict=strict).reward
        module, name = spec.where.split(":")
        score = getattr(importlib.import_module(module), name)
        assert score(said, "46", **spec.kwargs)["score"] == right
        assert score("46", "46", **spec.kwargs)["score"] == 1.0
        assert score("34 + 12 = 47", "46", **spec.kwargs)["score"] == 0.0


def test_calculator_replies_to_calls_alone():
    assert calculate("[17+26]") == ("=43\n", False)
    assert calculate("[17-26]") == ("=-9\n", False)
    assert calculate("43") == ("", False)
    assert calculate("[17+26") == ("", True)
    assert calculate("[17+26] ") == ("", True)
    assert solution([17, 26, 35]) == ["[17+26]", "[43+35]", "78"]


@pytest.mark.parametrize("level", ["default", "chain"])
def test_calculator_problems_are_split_and_reproducible(level):
    task = make_task(f"calculator:{level}")
    trained = {task.train[i].prompt for i in range(2000)}
    assert not trained & {p.prompt for p in task.test}
    assert make_task(f"calculator:{level}").train[7] == task.train[7]
    assert all(
        sum(map(int, p.prompt.rstrip("?").split("+"))) == int(p.answer) for p in task.test[:50]
    )
