"""Problems from elsewhere: GSM8K, reasoning-gym, one's own files, and what is wrong with them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_items import item, jsonl

from proxpo.errors import ProxpoError
from proxpo.rewards import Outcome, RewardPool, RewardSpec, gym
from proxpo.train.collect import Source
from proxpo.train.tasks import Lazy, Problem, make_task, take_pool
from proxpo.train.tasks.reasoning_gym import _apart

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
    path = jsonl(tmp_path, *({"prompt": word, "answer": 1} for word in "aabbccdd"))
    test = jsonl(tmp_path, {"prompt": "x", "answer": 1}, name="t.jsonl")
    task = make_task(path, reward="exact", test=test)
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
        path = jsonl(folder, *({"prompt": prompt, "answer": 1} for prompt in order))
        task = make_task(path, reward="exact", held_out=0.5)
        splits.append({p.prompt for p in task.test})
        assert task.train
        assert task.test
        assert splits[-1].isdisjoint(p.prompt for p in task.train)
    if 0 < len(splits[0]) < len(prompts) and len(splits[0]) > 1:
        assert splits[0] == splits[1]


def test_spellings_of_one_question_stay_on_one_side(tmp_path):
    words = ("What is", "what  IS")
    rows = [{"prompt": f"{word} {i}", "answer": i} for i in range(60) for word in words]
    task = make_task(jsonl(tmp_path, *rows), reward="exact", held_out=0.3)
    assert task.overlap() == 0
    assert len(task.test) == 2 * len(task.held_out)
    assert 20 < len(task.test) < 60


def test_problems_in_both_files_are_counted(tmp_path):
    train = jsonl(tmp_path, *({"prompt": f"Say {i}", "answer": i} for i in range(10)))
    asked = ["say 3", "Say 4", "Say 4", "Say 99"]
    test = jsonl(tmp_path, *({"prompt": text, "answer": 1} for text in asked), name="test.jsonl")
    task = make_task(train, reward="exact", test=test)
    assert (task.overlap(), len(task.held_out)) == (2, 3)
    one = jsonl(tmp_path, {"prompt": "a", "answer": 1})
    assert make_task(one, reward="exact").overlap() == 1


def test_the_byte_order_mark_of_some_editors_is_passed_over(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8-sig")
    assert make_task(str(path), reward="exact").train[0].prompt == "a"


BAD_FILES = {
    "no answer": (
        ['{"prompt": "a", "answer": "b"}', '{"prompt": "c"}'],
        "reward=exact needs an answer, and it has none",
    ),
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


def test_what_follows_the_colon_is_an_option():
    assert {problem.answer for problem in make_task("arms:4").test} == {1, 2, 3, 4}
    for name in ("arithmetic", "arithmetic-chat", "calculator", "column-sums"):
        with pytest.raises(ProxpoError, match=f"unknown level of {name} 'hrad'"):
            make_task(name, level="hrad")
    assert make_task("arithmetic:easy", level="easy").name == "arithmetic:easy"
    with pytest.raises(
        ProxpoError, match=r"arithmetic:easy and task\.options\.level=hard contradict"
    ):
        make_task("arithmetic:easy", level="hard")


UNKNOWN = {
    "arithmatic": "unknown task 'arithmatic'; did you mean 'arithmetic'?",
    "arithmetic:hrad": "unknown level of arithmetic 'hrad'; did you mean 'hard'?",
    "gsm8k:/no/such/place": "/no/such/place cannot be read: No such file or directory",
    "data.jsonl": "data.jsonl cannot be read: No such file or directory",
    "sums.csv": "task sums.csv: not a file of JSON lines (.jsonl), one problem a line; the package "
    'datasets writes one: load_dataset("csv", data_files="sums.csv", split="train")'
    '.to_json("problems.jsonl")',
    "openai/sums": "task openai/sums: not a file of JSON lines (.jsonl), one problem a line; the "
    'package datasets writes one: load_dataset("openai/sums", split="train")'
    '.to_json("problems.jsonl")',
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_tasks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProxpoError) as caught:
        make_task(name, **({"reward": "exact"} if name.endswith("jsonl") else {}))
    assert str(caught.value) == UNKNOWN[name]
