"""Reward functions that misbehave in every way: a fault costs its sample, and no process stays."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from reward_items import items, write

from proxpo.errors import ProxpoError
from proxpo.rewards import Outcome, RewardItem, RewardPool, RewardSpec, tally

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
