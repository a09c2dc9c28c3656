"""What reward functions get and may return: TRL's and verl's signatures, verdicts, refusals."""

import importlib
from dataclasses import replace

import pytest
from reward_items import items, write

from proxpo.errors import ProxpoError
from proxpo.rewards import Logged, Outcome, RewardItem, RewardPool, RewardSpec

TRL = """
    import math, time
    def score(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric,
              unit=None, **kwargs):
        assert len(prompts) == len(completions) == len(answer) == len(completion_ids)
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        if "many" in texts:
            return [1.0, 2.0]
        if "number" in texts:
            return 1.0
        if "error" in texts:
            raise ValueError("no such unit")
        if "state" in texts:
            return [trainer_state.global_step / trainer_state.max_steps] * len(texts)
        if "momentum" in texts:
            return [trainer_state.momentum] * len(texts)
        if "hang" in texts:
            time.sleep(60)
        log_metric("mean_length", sum(map(len, completion_ids)) / len(texts))
        log_extra("seen", texts)
        special = {"columns": lambda i: float(kwargs["level"][i]), "none": lambda i: None,
                   "text": lambda i: "good", "rank": lambda i: len(texts)}
        return [special[t](i) if t in special else float(t == answer[i])
                for i, t in enumerate(texts)]
"""


def test_a_trl_function_gets_the_whole_batch_and_what_trl_gives(tmp_path):
    """One call for all; rows without a usable reward fail alone; what it logs is kept."""
    spec = RewardSpec(where=write(tmp_path, TRL))
    with RewardPool(spec, workers=2, max_failed=1.0) as pool:
        seen = []
        texts = ("4", "5", "none", "text", "rank")
        ids = [replace(one, completion_ids=[7, 8]) for one in items(*texts)]
        outcomes = pool.score(ids, progress=lambda *done: seen.append(done))
        right, wrong, none, text, rank = outcomes
        assert (right, wrong, rank) == (Outcome(1.0), Outcome(0.0), Outcome(5.0))
        assert (none.status, text.status) == ("nan", "error")
        assert "returned 'good' (str), expected a number" in text.detail
        assert seen == [(i, 5) for i in range(1, 6)]
        assert pool.logged == Logged(metrics={"mean_length": 2.0}, columns={"seen": list(texts)})
        chat = RewardItem(prompt=[{"role": "user", "content": "2+2"}], completion="4", answer="4")
        columns = RewardItem(prompt="", completion="columns", extra={"level": 7})
        assert [one.reward for one in pool.score([chat, columns])] == [1.0, 7.0]
        half = pool.score(items("4", "state"), state={"global_step": 3, "max_steps": 6})
        assert half == [Outcome(0.5), Outcome(0.5)]
        [lost, _] = pool.score(items("momentum", "4"), state={"global_step": 3})
        assert "trainer_state has global_step here, and no 'momentum'" in lost.detail
        assert pool.score([]) == []


FAILED_CALLS = {
    "many": "ValueError: returned 2 rewards for 3 completions",
    "number": "TypeError: returned 1.0 (float), expected a list of 3 rewards",
    "error": "ValueError: no such unit (reward.py:12), in one call for 3 completions",
    "hang": "no reward after 3 s, in one call for 3 completions",
}


def test_a_failed_call_in_trls_signature_has_no_reward_for_any_row(tmp_path):
    """As in TRL, where it ends the run; with less than all allowed to fail it does so here too."""
    spec = RewardSpec(where=write(tmp_path, TRL))
    with RewardPool(spec, workers=1, timeout=1.0, max_failed=1.0) as pool:
        for text, detail in FAILED_CALLS.items():
            outcomes = pool.score(items("4", text, "5"))
            assert {(one.status == "timeout", detail in one.detail) for one in outcomes} == {
                (text == "hang", True)
            }, outcomes[0].detail
        pool.max_failed = 0.9
        with pytest.raises(
            ProxpoError, match=r"3 of 3 rewards .* failed, .*no such unit"
        ) as caught:
            pool.score(items("4", "error", "5"))
        assert "\n" not in str(caught.value)


def test_a_large_batch_in_one_call(tmp_path):
    source = "def score(completions, **kw): return [float(len(c)) for c in completions]"
    with RewardPool(RewardSpec(where=write(tmp_path, source)), workers=1) as pool:
        outcomes = pool.score(items(*["x" * 500] * 9000))
    assert outcomes == [Outcome(500.0)] * 9000


VERDICTS = """
    def score(solution_str):
        return {"4": 0.1, "5": {"score": 0.1, "acc": True}, "6": {"score": 1, "correct": 0},
                "7": {"score": 1, "acc": "False"}, "8": {"score": 1, "acc": float("nan")},
                "9": {"score": 1, "acc": None}}[solution_str]
"""


def test_right_is_what_the_function_or_the_threshold_says(tmp_path):
    """A reward above 0 alone is no verdict; a verdict is true, false, 1 or 0."""
    spec = RewardSpec(where=write(tmp_path, VERDICTS))
    with RewardPool(spec, workers=1, max_failed=1.0) as pool:
        assert pool.judges is None
        assert pool.score(items("5", "6")) == [Outcome(0.1, True), Outcome(1.0, False)]
        assert pool.judges
        odd, nan = pool.score(items("7", "8"))
        assert "'acc' is 'False' (str), expected true or false" in odd.detail
        assert "'acc' is nan (float), expected true or false" in nan.detail
        with pytest.raises(ProxpoError, match=r"of some responses .* and not of others") as caught:
            pool.score(items("4"))
        assert "\n" not in str(caught.value)
    with RewardPool(spec, workers=1) as pool:
        assert pool.score(items("4", "9")) == [Outcome(0.1), Outcome(1.0)]
        assert pool.judges is False
    with RewardPool(replace(spec, correct_above=0.5), workers=1) as pool:
        assert [one.correct for one in pool.score(items("4", "5", "6"))] == [False, False, True]


VERL = """
    def score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
        right = solution_str == ground_truth and data_source == "sums" and extra_info["level"] == 3
        return {"score": scale * right, "acc": right}
"""


def test_verl_signature_and_keyword_arguments(tmp_path):
    spec = RewardSpec(where=write(tmp_path, VERL), kwargs={"scale": 2.5}, source="sums")
    right = RewardItem(prompt="", completion="4", answer="4", extra={"level": 3, "other": 1})
    foreign = replace(right, extra={"level": 3, "data_source": "tales"})
    with RewardPool(spec, workers=1) as pool:
        assert pool.score([right, foreign]) == [Outcome(2.5, True), Outcome(0.0, False)]


def test_async_function_and_numpy_result(tmp_path):
    source = """
        import asyncio, numpy
        async def score(completions, **kwargs):
            await asyncio.sleep(0)
            return numpy.array([0.5], dtype=numpy.float32)
    """
    with RewardPool(RewardSpec(where=write(tmp_path, source)), workers=1) as pool:
        assert pool.score(items("4")) == [Outcome(0.5)]


def test_neighbouring_modules_can_be_imported(tmp_path):
    write(tmp_path, "VALUE = 3", "constants_beside.py")
    source = "from constants_beside import VALUE\ndef score(completions): return [VALUE]"
    with RewardPool(RewardSpec(where=write(tmp_path, source)), workers=1) as pool:
        assert pool.score(items("4")) == [Outcome(3.0)]


UNUSABLE = {
    "import fails": ("import no_such_module_here", "ModuleNotFoundError: No module named"),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("import os; os._exit(1)", "exit code 1 while loading it"),
    "signature": ("def score(a, b): return 1", "takes (a, b); expected TRL's signature"),
    "no function": ("score = 3", "has no function 'score'"),
    "syntax": ("def score(:", "line 1: invalid syntax"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_functions_are_refused_at_the_start(tmp_path, case):
    source, message = UNUSABLE[case]
    with pytest.raises(ProxpoError) as caught:
        RewardPool(RewardSpec(where=write(tmp_path, source)), workers=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_trusted_functions_run_in_this_process():
    spec = RewardSpec(where="proxpo.rewards.answers:exact", trusted=True)
    with RewardPool(spec) as pool:
        assert pool._workers == []
        right, wrong = pool.score(items("4", "5"))
        assert (right, wrong) == (Outcome(1.0, True), Outcome(0.0, False))


def test_the_pool_checks_its_memory_limit():
    with pytest.raises(ProxpoError, match=r"a memory limit above 0 GiB or none, got 0\.0"):
        RewardPool(RewardSpec(where="a.py:b"), memory=0.0)


def test_the_pool_checks_its_options():
    spec = RewardSpec(where="proxpo.rewards.answers:exact", trusted=True)
    for options in ({"workers": 0}, {"timeout": 0.0}):
        with pytest.raises(ProxpoError, match="at least 1 worker and a timeout above 0"):
            RewardPool(spec, **options)


def test_workers_start_without_torch(tmp_path):
    """A worker that is killed must be back in a moment, not after an import of seconds."""
    source = """
        import sys
        from proxpo.rewards.answers import final_answer
        def score(completions): return [float("torch" in sys.modules)]
    """
    with RewardPool(RewardSpec(where=write(tmp_path, source)), workers=1) as pool:
        assert pool.score(items("4")) == [Outcome(0.0)]


def test_reasoning_gym_is_imported_with_its_rewards():
    """Its import takes seconds, which would count for the first reward if it came with that."""
    assert importlib.import_module("proxpo.rewards.gym").reasoning_gym.create_dataset
