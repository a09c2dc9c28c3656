"""Rewards by rule, and user functions that misbehave in every way: the run goes on and says so."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxpo.errors import ProxpoError
from proxpo.rewards import Logged, Outcome, RewardItem, RewardPool, RewardSpec, answers, tally
from proxpo.rewards.worker import call

FAULTS = '''
import ctypes, os, signal, subprocess, sys, time

def score(data_source, solution_str, ground_truth, extra_info):
    """What it does with a sample is the sample's text."""
    exec(solution_str.partition("return ")[0])
    return eval(solution_str.partition("return ")[2] or "1.0")

def _hang():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)

def _flood():
    block = b"x" * (1 << 20)
    for _ in range(100):
        os.write(1, block)
        os.write(2, block)

def _child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(path, "w").write(str(child.pid))
'''


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem(prompt="2+2=", completion=text, answer="4") for text in texts]


def write(folder: Path, source: str, name: str = "reward.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return f"{folder / name}:score"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    spec = RewardSpec(where=write(tmp_path_factory.mktemp("faults"), FAULTS))
    with RewardPool(spec, workers=2, timeout=2.0, max_failed=0.9) as pool:
        yield pool


FAULT_CASES = {
    "hang, deaf to SIGTERM": ("_hang()", "timeout", "no reward after 2 s"),
    "loop": ("while True: pass", "timeout", "no reward after 2 s"),
    "segmentation fault": ("ctypes.string_at(0)", "error", "killed by SIGSEGV"),
    "exit": ("os._exit(3)", "error", "exit code 3"),
    "sys.exit": ("sys.exit('bye')", "error", "SystemExit: bye"),
    "exception": ("raise ValueError('no such unit')", "error", "ValueError: no such unit"),
    "out of memory": ("raise MemoryError", "error", "MemoryError"),
    "endless recursion": ("f = lambda: f(); globals()['f'] = f; f()", "error", "RecursionError"),
    "NaN": ("return float('nan')", "nan", "returned nan"),
    "infinity": ("return float('inf')", "nan", "returned inf"),
    "more than float32 can square": ("return -1e39", "nan", "returned -1e+39, beyond ±1e+15"),
    "a very long integer": ("return 10**400", "nan", "returned 1000000000"),
    "None": ("return None", "nan", "returned None"),
    "text": ("return 'good'", "error", "returned 'good' (str), expected a number"),
    "list": ("return [1.0]", "error", "returned [1.0] (list), expected a number"),
    "dict without score": ("return {'acc': 1}", "error", "dict without 'score'"),
    "closed files": ("os.closerange(0, 100)", "error", "the worker"),
    "kill of its own group": ("os.killpg(0, signal.SIGKILL)", "error", "killed by SIGKILL"),
}


@pytest.mark.parametrize("fault", FAULT_CASES)
def test_a_fault_costs_its_sample_alone(faulty, fault):
    code, status, detail = FAULT_CASES[fault]
    before, bad, after = faulty.score(items("return 0.25", code, "return 0.75"))
    assert (before, after) == (Outcome(0.25), Outcome(0.75))
    assert math.isnan(bad.reward)
    assert (bad.status, bad.correct) == (status, None)
    assert detail in bad.detail
    assert len(bad.detail) < 400


def test_output_is_swallowed(faulty):
    assert faulty.score(items("_flood()", "print('x' * 10**6)")) == [Outcome(1.0), Outcome(1.0)]


def test_input_is_empty(faulty):
    [outcome] = faulty.score(items("return float(len(sys.stdin.read()))"))
    assert outcome == Outcome(0.0)


def test_a_child_that_holds_the_channel_does_not_hide_a_crash(faulty):
    code = "\nif os.fork(): os._exit(5)\nelse: time.sleep(600)"
    bad, good = faulty.score(items(code, "return 0.5"))
    assert (bad.status, good.reward) == ("error", 0.5)
    assert "exit code 5" in bad.detail


def test_order_is_that_of_the_samples(faulty):
    texts = [f"time.sleep({0.02 * (i % 3)}); return {i}.0" for i in range(12)]
    assert [one.reward for one in faulty.score(items(*texts))] == [float(i) for i in range(12)]


def test_a_worker_that_dies_idle_costs_nothing(faulty):
    for one in faulty._workers:
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
    assert faulty.score(items(*["return 0.5"] * 5)) == [Outcome(0.5)] * 5


def test_a_worker_lost_while_loading_is_replaced(tmp_path):
    """Once; a function that can no longer be loaded at all stops the run with the reason."""
    where = write(tmp_path, FAULTS)
    with RewardPool(RewardSpec(where=where), workers=1, timeout=2.0, max_failed=1.0) as pool:
        marker = tmp_path / "marker"
        once = (
            f"import os\nif not os.path.exists({str(marker)!r}):\n    open({str(marker)!r}, 'w')\n"
        )
        write(tmp_path, f"{once}    os._exit(9)\n{FAULTS}")
        lost, good = pool.score(items("os._exit(1)", "return 0.5"))
        assert (lost.status, good) == ("error", Outcome(0.5))
        assert marker.exists()
        write(tmp_path, "import no_such_module_here")
        with pytest.raises(ProxpoError, match="No module named 'no_such_module_here'"):
            pool.score(items("os._exit(1)", "return 0.5"))


def test_progress_and_tally(faulty):
    seen = []
    texts = ("return 1", "_hang()", "raise KeyError", "return None", "return 2")
    outcomes = faulty.score(items(*texts), progress=lambda *done: seen.append(done))
    assert seen == [(i, 5) for i in range(1, 6)]
    assert tally(outcomes) == {"timeout": 1, "error": 1, "nan": 1}
    assert faulty.score([]) == []


def test_odd_text_travels(faulty):
    text = "\ud83d lone surrogate, \x00, \N{GREEK SMALL LETTER PI}, \u2028"
    [one] = faulty.score(
        [RewardItem(prompt="p", completion="return len(ground_truth)", answer=text)]
    )
    assert one.reward == len(text)


def test_over_half_failed_stops_with_the_commonest_reason(tmp_path):
    spec = RewardSpec(where=write(tmp_path, FAULTS))
    with RewardPool(spec, workers=2, timeout=5.0) as pool:
        half = items("return 1", "raise ValueError('a')", "return 1", "raise ValueError('a')")
        assert tally(pool.score(half))["error"] == 2
        bad = ["raise KeyError('b')", *["raise ValueError('a')"] * 3, "return 1"]
        with pytest.raises(ProxpoError, match=r"commonest \(\d times\): error: ValueError: a"):
            pool.score(items(*bad))
        assert pool.score(items("return 3")) == [Outcome(3.0)], "and the pool can go on"


def group_members(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def gone(pid: int, within: float = 20.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


def test_a_fork_that_comes_back_ends_there(tmp_path):
    """Child and parent both return from the function; the child must not become a worker too."""
    with RewardPool(RewardSpec(where=write(tmp_path, FAULTS)), workers=2) as pool:
        texts = [f"os.fork(); return {i}.0" for i in range(6)]
        assert [one.reward for one in pool.score(items(*texts))] == [float(i) for i in range(6)]
        groups = [one.process.pid for one in pool._workers]
        end = time.monotonic() + 20
        while any(len(group_members(group)) > 1 for group in groups):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_closing_leaves_no_process(tmp_path):
    spec = RewardSpec(where=write(tmp_path, FAULTS))
    pool = RewardPool(spec, workers=2, timeout=5.0)
    child = tmp_path / "child"
    pool.score(items(f"_child({str(child)!r})", "os.fork() or time.sleep(600)"))
    processes = [one.process for one in pool._workers] + [pool._guard._process]
    groups = [one.process.pid for one in pool._workers]
    assert sum(len(group_members(group)) for group in groups) >= 4
    pool.close()
    assert all(process.returncode is not None for process in processes), "zombies are left"
    assert gone(int(child.read_text()))
    assert [pid for group in groups for pid in group_members(group)] == []
    with pytest.raises(ProxpoError, match="closed"):
        pool.score(items("return 1"))


def test_a_timed_out_function_takes_its_children_along(tmp_path):
    spec = RewardSpec(where=write(tmp_path, FAULTS))
    child = tmp_path / "child"
    with RewardPool(spec, workers=1, timeout=1.5, max_failed=1.0) as pool:
        [one] = pool.score(items(f"_child({str(child)!r}); _hang()"))
        assert one.status == "timeout"
        assert gone(int(child.read_text()))


# A process in a session of its own, without a parent: `sleep` started by a child that ends at once.
AWAY = """
    import os, subprocess, sys, time

    def score(data_source, solution_str, ground_truth, extra_info):
        if os.fork() == 0:
            os.setsid()
            with open(ground_truth, "w") as file:
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                file.write(str(child.pid))
            os._exit(0)
        os.wait()
        exec(solution_str)
        return 1.0
"""


@pytest.mark.parametrize("ending", ["pass", "time.sleep(60)", "os._exit(3)", "os.killpg(0, 9)"])
def test_a_child_in_a_session_of_its_own_ends_with_its_worker(tmp_path, ending):
    """Closed pool, timeout, and a worker that ends by itself and leaves its children to init."""
    where, child = write(tmp_path, AWAY), tmp_path / "child"
    sample = RewardItem(prompt="", completion=ending, answer=str(child))
    with RewardPool(RewardSpec(where=where), workers=1, timeout=3.0, max_failed=1.0) as pool:
        [outcome] = pool.score([sample])
        assert (outcome.status == "ok") == (ending == "pass")
        pid = int(child.read_text())
        assert gone(pid, within=0.1) == (ending != "pass")
    assert gone(pid)


def test_a_child_in_a_session_of_its_own_ends_with_a_killed_trainer(tmp_path):
    where, child = write(tmp_path, AWAY), tmp_path / "child"
    code = f"""
        from proxpo.rewards import RewardItem, RewardPool
        from proxpo.rewards import RewardSpec
        pool = RewardPool(RewardSpec(where={where!r}), workers=1)
        pool.score([RewardItem(prompt="", completion="pass", answer={str(child)!r})])
        print("scored", flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout.readline() == "scored\n"
        assert not gone(int(child.read_text()), within=0.1)
        trainer.kill()
    assert gone(int(child.read_text()))


GREEDY = """
    import os, time

    def score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "below":
            return 1.0
        if solution_str == "child" and os.fork():
            os.wait()
        held = b"x" * (400 << 20)
        time.sleep(60)
"""


@pytest.mark.parametrize("text", ["worker", "child"])
def test_a_worker_over_its_memory_limit_costs_its_sample_alone(tmp_path, text):
    spec = RewardSpec(where=write(tmp_path, GREEDY))
    with RewardPool(spec, workers=1, timeout=50.0, max_failed=0.9, memory=0.25) as pool:
        over, below = pool.score(items(text, "below"))
    assert (over.status, over.detail) == (
        "error", "used over 0.25 GiB of memory (task.reward_memory)"
    )  # fmt: skip
    assert below == Outcome(1.0)


def test_pages_that_forks_share_count_once(tmp_path):
    source = """
        import os, time
        held = b"x" * (150 << 20)

        def score(data_source, solution_str, ground_truth, extra_info):
            for _ in range(4):
                if os.fork() == 0:
                    time.sleep(60)
            time.sleep(1.0)
            return 1.0
    """
    spec = RewardSpec(where=write(tmp_path, source))
    with RewardPool(spec, workers=1, memory=0.25) as pool:
        assert pool.score(items("")) == [Outcome(1.0)]


def test_a_function_over_its_memory_limit_is_refused_while_loading(tmp_path):
    source = f"import time\nheld = b'x' * (400 << 20)\ntime.sleep(30)\n{textwrap.dedent(AWAY)}"
    with pytest.raises(ProxpoError, match=r"used over 0.25 GiB of memory .* while loading it"):
        RewardPool(RewardSpec(where=write(tmp_path, source)), workers=1, memory=0.25)


def test_killing_the_trainer_leaves_no_process(tmp_path):
    """kill -9 while one worker hangs with a child and the other is idle."""
    where = write(tmp_path, FAULTS)
    code = f"""
        from proxpo.rewards import RewardItem, RewardPool
        from proxpo.rewards import RewardSpec
        pool = RewardPool(RewardSpec(where={where!r}), workers=2, timeout=600)
        pids = [one.process.pid for one in pool._workers] + [pool._guard._process.pid]
        print(*pids, flush=True)
        text = "_child({str(tmp_path / "child")!r}); _hang()"
        pool.score([RewardItem(prompt="", completion=text)])
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    end = time.monotonic() + 60
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    for pid in (*pids, int((tmp_path / "child").read_text())):
        assert gone(pid), pid


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


# Answers


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
