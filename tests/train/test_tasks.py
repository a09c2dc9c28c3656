"""Tasks: splits that never mix, problems that never change, complaints that name the place."""

import importlib
import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive, generator
from proxpo.rewards import Outcome, RewardItem, RewardPool, RewardSpec, gym
from proxpo.train.collect import Source
from proxpo.train.tasks import Lazy, Problem, fit_prompts, make_task, take_pool
from proxpo.train.tasks.arithmetic import CHAT_LEVELS, TEXT_LEVELS, Sum, held_out
from proxpo.train.tasks.calculator import calculate, solution
from proxpo.train.tasks.reasoning_gym import _apart

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def tokenizer(**options):
    """One token a character."""
    letters = {chr(code): i for i, code in enumerate(range(32, 127))}
    model = Tokenizer(models.WordLevel({**letters, "[unk]": 95, "[end]": 96}, unk_token="[unk]"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[end]", **options)


def item(problem: Problem, text: str) -> RewardItem:
    return RewardItem(
        prompt=problem.prompt,
        completion=text,
        answer=problem.answer,
        extra=problem.extra,
    )


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
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "hi"}]})
    task = make_task(path, reward="exact", template={"thinking": "yes"})
    chat = tokenizer(chat_template="{{ thinking }}")
    assert "".join(chr(32 + i) for i in task.encode(task.train[0], chat)) == "yes"


def test_a_tokenizer_without_chat_template_is_named():
    task = make_task("arithmetic-chat")
    with pytest.raises(ProxpoError, match="no chat template: take an instruct model"):
        task.encode(task.train[0], tokenizer())


def test_long_prompts(tmp_path):
    rows = [{"prompt": "x" * n, "answer": ""} for n in (5, 9, 30, 6, 7, 8)]
    path, test = jsonl(tmp_path, *rows), jsonl(tmp_path, {"prompt": "yy"}, name="test.jsonl")
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


# GSM8K


def gsm8k_rows(n: int) -> list[dict]:
    return [
        {"question": f"How many are {i} apples?", "answer": f"Count.\n#### {i},000"}
        for i in range(n)
    ]


def test_gsm8k_from_a_folder(tmp_path):
    jsonl(tmp_path, *gsm8k_rows(5), name="train.jsonl")
    jsonl(tmp_path, *gsm8k_rows(3), name="test.jsonl")
    task = make_task(f"gsm8k:{tmp_path}", verifier="numeric")
    assert (len(task.train), len(task.test)) == (5, 3)
    system, user = task.train[2].prompt
    assert (system["role"], user["role"]) == ("system", "user")
    assert "####" in system["content"]
    assert user["content"] == "How many are 2 apples?"
    assert task.train[2].answer == "2000"
    assert task.reward.trusted
    text = make_task(f"gsm8k:{tmp_path}", chat=False).train[0].prompt
    assert text.endswith("Question: How many are 0 apples?\nAnswer:")


def test_gsm8k_from_one_file_is_split(tmp_path):
    path = jsonl(tmp_path, *gsm8k_rows(200))
    task = make_task(f"gsm8k:{path}")
    both = [p.prompt[1]["content"] for p in (*task.train, *task.test)]
    assert len(set(both)) == 200
    assert 5 < len(task.test) < 40


def test_gsm8k_rewards(tmp_path):
    path = jsonl(tmp_path, *gsm8k_rows(20))
    texts = ("so\n#### 3000", r"so \boxed{3,000}", r"so \boxed{\frac{6000}{2}}", "3000", "#### 30")
    for verifier, expected in (("numeric", [1, 1, 0, 0, 0]), ("math-verify", [1, 1, 1, 0, 0])):
        task = make_task(f"gsm8k:{path}", verifier=verifier)
        problem = next(p for p in (*task.train, *task.test) if p.answer == "3000")
        with RewardPool(task.reward, workers=1, timeout=30.0) as pool:
            assert bool(pool._workers) is (verifier == "math-verify")
            outcomes = pool.score([item(problem, text) for text in texts])
        assert [one.reward for one in outcomes] == expected


def test_gsm8k_uses_math_verify_where_it_is(tmp_path, monkeypatch):
    path = jsonl(tmp_path, *gsm8k_rows(20))
    assert make_task(f"gsm8k:{path}").reward.kwargs["verifier"] == "math-verify"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_task(f"gsm8k:{path}").reward.kwargs["verifier"] == "numeric"
    with pytest.raises(ProxpoError, match="pip install math-verify"):
        make_task(f"gsm8k:{path}", verifier="math-verify")


def test_gsm8k_without_datasets(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ProxpoError, match=r"pip install datasets.*gsm8k:FOLDER"):
        make_task("gsm8k")


# reasoning-gym


def test_reasoning_gym():
    task = make_task("reasoning-gym:leg_counting", size=50, test_size=20)
    assert (len(task.train), len(task.test)) == (50, 20)
    assert task.train[3] == task.train[3]
    assert {p.prompt[1]["content"] for p in task.train}.isdisjoint(
        p.prompt[1]["content"] for p in task.test
    )
    problem = task.test[4]
    texts = (f"<answer>{problem.answer}</answer>", "<answer>-1</answer>", problem.answer)
    with RewardPool(task.reward, workers=1, timeout=60.0) as pool:
        outcomes = pool.score([item(problem, text) for text in texts])
    assert [one.correct for one in outcomes] == [True, False, False]
    assert [one.status for one in outcomes] == ["ok"] * 3


@pytest.mark.parametrize("name", ["coin_flip", "prime_factorization", "caesar_cipher", "lcm"])
def test_no_question_of_a_small_gym_dataset_is_trained_on_and_held_out(name):
    """Their questions come again: the splits' seeds alone keep none of them apart."""
    task = make_task(f"reasoning-gym:{name}")
    assert len(task.held_out) == len(task.test) >= 20
    trained = {problem.question for problem in task.train[:3000]}
    assert len(trained) >= 100
    assert trained.isdisjoint(task.held_out)
    assert task.train[7] == make_task(f"reasoning-gym:{name}").train[7]
    assert Source(problems=task.train, seed=0, held_out=task.held_out).take(20)
    replaced = next(p for i, p in enumerate(task.train) if p.index != i)  # scored as what it is
    text = f"<answer>{replaced.answer}</answer>"
    assert gym.score(text, replaced.extra, **task.reward.kwargs)["acc"]


def test_a_gym_dataset_too_small_to_hold_questions_out_is_refused():
    for name, options, message in (
        ("tower_of_hanoi", {}, "19 can be held out of training, 20 are needed"),
        ("coin_flip", {"test_size": 300}, "can be held out of training, 300 are needed"),
        ("leg_counting", {"test_size": 0}, "test_size in 1.."),
    ):
        with pytest.raises(ProxpoError, match=f"task reasoning-gym:{name}: .*{message}") as caught:
            make_task(f"reasoning-gym:{name}", **options)
        assert "\n" not in str(caught.value)
    only = {"min_trials": 3, "max_trials": 3}
    task = make_task("reasoning-gym:coin_flip", test_size=2, size=1, config=only)
    asked = {problem.question for problem in task.test}
    with pytest.raises(ProxpoError, match="every training question is held out"):
        _apart(Lazy(lambda i: task.test[0], 5), asked, "coin_flip")


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic-chat", "calculator"])
def test_a_generated_problem_that_is_held_out_never_reaches_training(name):
    task = make_task(name)
    source = Source(problems=task.train, seed=0, held_out=task.held_out)
    assert len(source.take(300)) == 300
    spoilt = Source(problems=Lazy(lambda i: task.test[i], 5), seed=0, held_out=task.held_out)
    with pytest.raises(ProxpoError, match="held-out problem given to training"):
        spoilt.take(1)


def test_a_problem_has_one_identity_wherever_it_comes():
    """That of its prompt: not its place in the stream, and the same in every run."""
    task = make_task("calculator")
    numbers: dict[str, set[int]] = {}
    for problem in task.train[:3000]:
        numbers.setdefault(problem.prompt, set()).add(problem.id)
    assert 2000 < len(numbers) < 3000
    assert all(len(found) == 1 for found in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
    assert Problem("17+26?", "43", 5).id == 3949673448668615179
    assert Problem("a", None, 0).id != Problem("A", None, 0).id
    assert Problem("a  b", None, 0).question == Problem("A b\n", None, 0).question


def test_a_pool_holds_different_problems(tmp_path):
    pool = take_pool(make_task("calculator"), 50).train
    assert len({problem.id for problem in pool}) == len(pool) == 50
    path = jsonl(tmp_path, *({"prompt": word} for word in "aabbccdd"))
    task = make_task(path, reward="exact", test=jsonl(tmp_path, {"prompt": "x"}, name="t.jsonl"))
    assert [p.prompt for p in take_pool(task, 3).train] == ["a", "b", "c"]
    assert [p.prompt for p in take_pool(task, 9).train] == ["a", "b", "c", "d"]


def test_reasoning_gym_errors():
    for name, options, message in (
        ("reasoning-gym", {}, "needs a name: reasoning-gym:NAME"),
        ("reasoning-gym:leg_countin", {}, "did you mean 'leg_counting'"),
        ("reasoning-gym:leg_counting", {"config": {"legs": 3}}, "unexpected keyword argument"),
    ):
        with pytest.raises(ProxpoError, match=message):
            make_task(name, **options)


def test_reasoning_gym_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ProxpoError, match=r"pip install 'proxpo\[reasoning-gym\]'"):
        make_task("reasoning-gym:leg_counting")


# Your own file


def jsonl(folder: Path, *rows, name: str = "data.jsonl") -> str:
    text = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / name).write_text("\n".join(text))
    return str(folder / name)


def test_own_file_with_a_trl_reward(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompts, completions, level, **kw): return [level[0] * 1.0]")
    rows = [{"prompt": f"Say {i}", "answer": i, "level": i} for i in range(40)]
    task = make_task(jsonl(tmp_path, *rows), reward=f"{reward}:score")
    assert len(task.train) + len(task.test) == 40
    assert 1 <= len(task.test) < 15
    assert not task.reward.trusted
    problem = task.train[0]
    with RewardPool(task.reward, workers=1) as pool:
        assert pool.score([item(problem, "x")]) == [Outcome(float(problem.answer))]


def test_own_file_in_verls_layout(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert (data_source, extra_info['index']) == ('sums', 5)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "2+2"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 5},
    }
    task = make_task(jsonl(tmp_path, row), reward=f"{reward}:compute_score")
    with RewardPool(task.reward, workers=1) as pool:
        assert pool.score([item(task.train[0], "4")]) == [Outcome(1.0)]


def test_own_fields_and_test_file(tmp_path):
    train = jsonl(tmp_path, {"ask": "a", "reply": "b"})
    test = jsonl(tmp_path, {"ask": "c", "reply": "d"}, name="test.jsonl")
    task = make_task(train, reward="exact", test=test, prompt_field="ask", answer_field="reply")
    assert [(p.prompt, p.answer) for p in (*task.train, *task.test)] == [("a", "b"), ("c", "d")]
    assert task.reward.trusted


@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=30, unique=True))
@settings(max_examples=30)
def test_the_split_does_not_depend_on_the_order_of_lines(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("split")
    splits = []
    for order in (prompts, prompts[::-1]):
        path = jsonl(folder, *({"prompt": prompt} for prompt in order))
        task = make_task(path, reward="exact", held_out=0.5)
        splits.append({p.prompt for p in task.test})
        assert task.train
        assert task.test
        assert splits[-1].isdisjoint(p.prompt for p in task.train)
    if 0 < len(splits[0]) < len(prompts) and len(splits[0]) > 1:
        assert splits[0] == splits[1]


def test_spellings_of_one_question_stay_on_one_side(tmp_path):
    rows = [{"prompt": f"{word} {i}"} for i in range(60) for word in ("What is", "what  IS")]
    task = make_task(jsonl(tmp_path, *rows), reward="exact", held_out=0.3)
    assert task.overlap() == 0
    assert len(task.test) == 2 * len(task.held_out)
    assert 20 < len(task.test) < 60


def test_problems_in_both_files_are_counted(tmp_path):
    train = jsonl(tmp_path, *({"prompt": f"Say {i}"} for i in range(10)))
    asked = ["say 3", "Say 4", "Say 4", "Say 99"]
    test = jsonl(tmp_path, *({"prompt": text} for text in asked), name="test.jsonl")
    task = make_task(train, reward="exact", test=test)
    assert (task.overlap(), len(task.held_out)) == (2, 3)
    assert make_task(jsonl(tmp_path, {"prompt": "a"}), reward="exact").overlap() == 1


BAD_FILES = {
    "empty": ([""], "is empty: expected one JSON object per line"),
    "not json": (['{"prompt": "a"}', "{'prompt'"], "data.jsonl:2: not JSON: "),
    "not an object": (["[1]"], "data.jsonl:1: expected a JSON object, got list"),
    "no prompt": (['{"promt": "a"}'], "data.jsonl:1: no field prompt or question or problem"),
    "number": (['{"prompt": 3}'], "'prompt' should be text or a list of messages"),
    "bad messages": (['{"prompt": [{"text": "a"}]}'], "messages with role and content"),
    "later line": (['{"prompt": "a"}', '{"x": 1}'], "problem 1: the field 'prompt' is missing"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path, case):
    lines, message = BAD_FILES[case]
    with pytest.raises(ProxpoError) as caught:
        make_task(jsonl(tmp_path, *lines), reward="exact")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_REWARDS = {
    "none": (None, "needs a reward: --set task.reward=FILE.py:FUNCTION, or exact or final-answer"),
    "no colon": ("reward.py", "should read FILE.py:FUNCTION"),
    "missing file": ("nowhere.py:score", "nowhere.py cannot be read: No such file"),
    "misspelt": ("{}:scor", "has no function 'scor'; did you mean 'score'?"),
    "syntax": ("{bad}:score", "bad.py, line 2: "),
    "module": ("no_such_pkg.mod:score", "'no_such_pkg.mod' is not installed"),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_bad_rewards_are_refused_before_anything_runs(tmp_path, case):
    good, bad = tmp_path / "reward.py", tmp_path / "bad.py"
    good.write_text("def score(completions): return [1.0]\nraise SystemExit('must not run')")
    bad.write_text("x = 1\ndef score(:\n")
    reward, message = BAD_REWARDS[case]
    reward = reward and reward.format(good, bad=bad)
    with pytest.raises(ProxpoError) as caught:
        make_task(jsonl(tmp_path, {"prompt": "a"}), reward=reward)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reward_of_ones_own_for_a_named_task(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("from math import sqrt as score")
    task = make_task("arithmetic", reward=f"{reward}:score")
    assert task.reward == RewardSpec(where=f"{reward}:score", source="arithmetic")


UNKNOWN = {
    "arithmatic": "unknown task 'arithmatic'; did you mean 'arithmetic'?",
    "arithmetic:hrad": "unknown level of arithmetic 'hrad'; did you mean 'hard'?",
    "gsm8k:/no/such/place": "/no/such/place cannot be read: No such file or directory",
    "data.jsonl": "data.jsonl cannot be read: No such file or directory",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_tasks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProxpoError) as caught:
        make_task(name, **({"reward": "exact"} if name.endswith("jsonl") else {}))
    assert str(caught.value) == UNKNOWN[name]


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
