"""A run that cannot learn says why; one that never could stops after three steps."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
from train.fault_runs import at_phase, command, config_of, curve, rows_of
from train.train_runs import job_of, sample

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe
from proxpo.train.config import load_config
from proxpo.train.learning_signal import LearningSignal, NoSignalError
from proxpo.train.loop import train
from proxpo.train.observer import Observer
from proxpo.train.picture import panels

pytestmark = pytest.mark.long
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None): return {}\n"
CUT = ("--set", "rollout.max_tokens=1", "--set", "checkpoint.every=0")
PHRASES = ("gradient is zero", "every reward", "every response", "no answer", "nothing is learnt")


def reward_of(folder: Path, value: str) -> tuple[str, ...]:
    """Options that make the whole reward this expression."""
    (folder / "own.py").write_text(REWARD.format(value))
    return ("--set", f"task.reward={folder / 'own.py'}:score")


def problems_of(folder: Path) -> tuple[str, ...]:
    """Options of a task whose reward reads what follows ####, which this model never writes."""
    lines = [json.dumps({"prompt": f"{n}+123=", "answer": str(n + 123)}) for n in range(100, 160)]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    return ("--task", str(folder / "problems.jsonl"), "--set", "task.reward=final-answer")


@pytest.mark.parametrize("case", ["cut", "zero", "unparsed", "single"])
def test_a_run_that_never_had_a_gradient_stops_after_three_steps(case, tmp_path, capsys):
    out = tmp_path / "run"
    options, words, remedy = {
        "cut": (CUT, "every response was cut at rollout.max_tokens=1", "a higher rollout.max_tok"),
        "zero": (reward_of(tmp_path, "0.0"), "every reward is 0", "another reward function"),
        "unparsed": (
            problems_of(tmp_path),
            "the reward found no answer in any response",
            "answers in the form that the reward reads",
        ),
        "single": (
            ("--set", "samples_per_prompt=1", "--method", "dr-grpo"),
            "rollout.samples_per_prompt=1 leaves no response to compare with",
            "rollout.samples_per_prompt above 1",
        ),
    }[case]
    drawn = ("--set", f"log.pictures={'true' if case == 'cut' else 'false'}")
    # Of one response to each of twelve prompts some are right and some are wrong.
    prompts = ("--set", f"prompts_per_step={12 if case == 'single' else 2}")
    assert main(command(out, "--set", "steps=50", *options, *drawn, *prompts)) == 2
    said = capsys.readouterr()
    (line,) = (line for line in said.out.splitlines() if "gradient is zero" in line)
    assert line.startswith("step 1: the gradient is zero: ")
    assert words in line
    assert said.err.count("\n") == 1
    assert said.err.startswith("proxpo: nothing is learnt: the gradient was zero in every step")
    assert words in said.err
    assert remedy in said.err
    assert ("another reward function" in said.err) == (case == "zero")
    assert "train.on_no_signal=warn" in said.err
    assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3]
    summary, failure = (
        json.loads((out / f"{name}.json").read_text()) for name in ("summary", "failure")
    )
    assert (summary["steps"], failure["step"]) == (3, 3)
    assert said.err == f"proxpo: {summary['no_signal']}\n" == f"proxpo: {failure['reason']}\n"
    if case == "cut":
        assert (out / "curves.png").stat().st_size > 10_000
        page = (out / "report.html").read_text()
        assert "Without a learning signal" in page
        assert summary["no_signal"] in page


def test_a_run_whose_rewards_are_all_the_best_says_so_once_and_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    options = ("--set", "steps=5", "--set", "checkpoint.keep=0")
    assert main(command(out, *options, *reward_of(tmp_path, "1.0"))) == 0
    said = capsys.readouterr().out
    assert said.count("the gradient is zero: every reward is 1, taken for the best") == 1
    assert said.count("gradient is zero") == 1
    assert [row["proxpo/gradient/zero"] for row in rows_of(out)[1:]] == [1.0] * 5


@pytest.mark.parametrize("value", ['{"score": 1.0, "acc": False}', '{"score": 0.0, "acc": True}'])
def test_the_best_is_what_the_reward_calls_right(value, tmp_path):
    """Not the value, where the function says both."""
    reward_of(tmp_path, value)
    config = config_of(
        tmp_path / "run", "steps=4", "checkpoint.keep=0", f"task.reward={tmp_path / 'own.py'}:score"
    )
    lines: list[str] = []
    if "True" in value:
        assert train(config, observer=Observer(on_notice=lines.append))["steps"] == 4
        assert any(line.endswith("every reward is 0, and every response right") for line in lines)
    else:
        with pytest.raises(NoSignalError, match="every reward is 1\\. What helps"):
            train(config)


def test_a_warning_is_enough_where_that_is_set(tmp_path, capsys):
    options = ("--set", "steps=5", "--set", "on_no_signal=warn")
    assert main(command(tmp_path / "run", *options, *CUT)) == 0
    assert capsys.readouterr().out.count("gradient is zero") == 1


def test_a_method_that_learns_without_rewards_goes_on(tmp_path, capsys):
    """Its gradient comes from the entropy bonus; the responses are all cut all the same."""
    stage = "regularisers+=entropy_bonus", "regularisers.entropy_bonus.coef=0.01"
    bonus = [word for setting in stage for word in ("--set", setting)]
    assert main(command(tmp_path / "run", "--set", "steps=5", *bonus, *CUT)) == 0
    said = capsys.readouterr().out
    assert "gradient is zero" not in said
    assert said.count("step 1: every reward is 0; every response was cut at rollout.max_tok") == 1
    assert said.count("every response was cut") == 1
    assert all(row["grad_norm"] > 0 for row in rows_of(tmp_path / "run")[1:])


@pytest.mark.parametrize("method", ["isopo", "grpo"])
def test_a_healthy_run_says_nothing_of_the_kind(method, tmp_path, capsys):
    """And, once, what grad_clip does to a transformed gradient."""
    out = tmp_path / "run"
    healthy = ["--set", "steps=4", "--set", "prompts_per_step=8", "--set", "evaluate.k=0"]
    words = [*healthy, "--set", "checkpoint.keep=0", "--set", "log.pictures=false"]
    assert main(["train", "--method", method, "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    assert not [phrase for phrase in PHRASES if phrase in said]
    clip = [line for line in said.splitlines() if "grad_clip" in line]
    norm, clipped = (rows_of(out)[1][name] for name in ("grad_norm", "proxpo/gradient/clipped"))
    assert clipped == float(norm > 1.0)
    if method == "isopo":
        assert norm > 100  # lengths are normalised, and 64 responses add up
        assert clip == [
            f"step 1: grad_norm={norm:.4g} is the norm after gradient=isopo; where that is above "
            "train.grad_clip=1, an update gets a gradient of norm 1"
        ]
    else:
        assert clip == []


def test_a_resumed_run_stops_at_the_same_step_and_repeats_no_line(tmp_path):
    sets = ("steps=9", "rollout.max_tokens=1")
    with pytest.raises(NoSignalError) as whole:
        train(config_of(tmp_path / "whole", *sets))
    out, lines = tmp_path / "killed", list[str]()
    hook = at_phase("sampling", lambda: os.kill(os.getpid(), signal.SIGTERM), step=2)
    assert train(config_of(out, *sets), observer=hook)["steps"] == 2
    notices = Observer(on_notice=lines.append)
    for _ in range(2):  # the second time from the checkpoint of the step that ended the run
        with pytest.raises(NoSignalError) as resumed:
            train(config_of(out, *sets), resume=True, observer=notices)
        assert str(resumed.value) == str(whole.value)
        assert curve(out) == curve(tmp_path / "whole")
    assert not [line for line in lines if "gradient is zero" in line]
    assert train(config_of(out, *sets, "on_no_signal=warn"), resume=True)["steps"] == 9
    assert not (out / "failure.json").exists()


def test_the_folder_of_a_run_without_checkpoints_that_learnt_nothing_is_free(tmp_path):
    sets = ("steps=4", "checkpoint.keep=0")
    with pytest.raises(NoSignalError):
        train(config_of(tmp_path, *sets, "rollout.max_tokens=1"))
    summary = train(config_of(tmp_path, *sets, "prompts_per_step=8"))
    assert (summary["steps"], "no_signal" in summary) == (4, False)
    with pytest.raises(ProxpoError, match="finished run without checkpoints"):
        train(config_of(tmp_path, *sets, "prompts_per_step=8"))


def seen(*steps: dict[str, float], learnt: bool = False) -> tuple[LearningSignal, list[str]]:
    """The signal after steps with these metrics, and the lines that it gave."""
    watched, config = LearningSignal(learnt=learnt), load_config(None, ["steps=100"])
    lines = [
        line
        for number, metrics in enumerate(steps)
        for line in watched.see(number + 1, metrics, config, make_recipe("grpo"))
    ]
    return watched, lines


ZERO = {"grad_norm": 0.0, "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
LEARNS = {"grad_norm": 0.5, "reward": 0.3, "reward_std": 0.4, "frac_reward_zero_std": 0.2}
UNEQUAL = ZERO | {"reward": 0.5, "reward_std": 0.5}


def test_a_run_that_has_learnt_goes_on_and_says_each_fact_once():
    signal, lines = seen(ZERO, ZERO, LEARNS, ZERO, ZERO, ZERO, UNEQUAL, ZERO, UNEQUAL)
    signal.check()
    assert lines == [
        "step 1: the gradient is zero: every reward is 0",
        "step 7: the gradient is zero: no prompt has responses with different rewards",
    ]


def test_chance_is_no_cause_that_remains():
    """Groups may be equal by chance; the count of idle steps begins again."""
    seen(ZERO, ZERO, UNEQUAL, ZERO, ZERO)[0].check()
    with pytest.raises(NoSignalError):
        seen(ZERO, ZERO, UNEQUAL, ZERO, ZERO, ZERO)[0].check()
    signal, lines = seen(*[LEARNS | {"grad_norm": 0.0}] * 4)
    signal.check()
    assert lines == ["step 1: the gradient is zero, though rewards differ"]


def test_a_gradient_that_is_not_finite_is_neither_a_signal_nor_none():
    broken = ZERO | {"grad_norm": math.nan}
    signal, _ = seen(ZERO, broken, ZERO)
    assert (signal.learnt, signal.idle) == (False, 2)


def test_missing_rewards_are_no_constant():
    signal, lines = seen(*[ZERO | {"reward": math.nan}] * 3)
    assert lines == ["step 1: the gradient is zero: no response has a reward"]
    with pytest.raises(NoSignalError):
        signal.check()


def test_other_domains_stop_too_or_refuse_the_setting(tmp_path, capsys):
    """In MountainCar no episode of a new policy reaches the top, so all returns are -200."""
    pytest.importorskip("gymnasium")
    words = ["--task", "gym:MountainCar-v0", "--set", "steps=9", "--set", "evaluate.size=1"]
    quiet = ["--set", "log.pictures=false", "--set", "updates_per_rollout=1"]
    whole = ["--set", "mini_batches=1", "--out", str(tmp_path / "run"), *quiet]
    assert main(["train", "--method", "grpo", *words, *whole]) == 2
    said = capsys.readouterr()
    assert "step 1: the gradient is zero: every reward is -200" in said.out
    assert "nothing is learnt" in said.err
    assert main(["train", "--method", "avg", *words, "--set", "on_no_signal=warn"]) == 2
    assert "train.on_no_signal=warn has no effect" in capsys.readouterr().err


def test_prompts_that_are_all_dropped_are_explained(tmp_path, capsys):
    filtered = ("--set", "prompts=informative", "--set", "steps=1")
    assert main(command(tmp_path / "run", *filtered, *CUT)) == 2
    assert "(every reward is 0; every response was cut at rollout" in capsys.readouterr().err


def test_metrics_of_the_signal_have_trls_names_and_are_drawn(tmp_path):
    job = job_of(tmp_path, method="grpo")
    drawn = sample(job)
    metrics, rows = drawn.metrics, drawn.experience
    job.close()
    cut, logp = rows.truncated.double().mean(), rows.rollout_logp.double()[rows.mask]
    assert metrics["completions/clipped_ratio"] == pytest.approx(float(cut))
    assert metrics["entropy"] == pytest.approx(-float(logp.mean()))
    row = {"step": 1, **metrics, "proxpo/gradient/zero": 0.0}
    names = {name for _, _, curves in panels([row]) for name, _ in curves}
    wanted = {
        "completions/clipped_ratio",
        "frac_reward_zero_std",
        "entropy",
        "proxpo/gradient/zero",
    }
    assert wanted <= names


def test_a_reward_says_whether_it_found_an_answer(tmp_path):
    """A share of the responses; nothing where the function does not say."""
    reward_of(tmp_path, '{"score": 0.0, "parsed": "3" in solution_str}')
    sets = (f"task.reward={tmp_path / 'own.py'}:score", "prompts_per_step=8")
    job = job_of(tmp_path / "run", *sets, method="grpo")
    drawn = sample(job)
    job.close()
    texts = [line["completion"] for line in drawn.lines]
    found = sum("3" in text for text in texts) / len(texts)
    assert 0 < found < 1
    assert drawn.metrics["proxpo/parsed"] == found
    job = job_of(tmp_path / "exact", method="grpo")
    assert "proxpo/parsed" not in sample(job).metrics
    job.close()
