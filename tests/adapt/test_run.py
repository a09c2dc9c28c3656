"""`proxpo adapt`: rows, budget, resuming, the page, and input that cannot be used."""

import errno
import json

import pytest

from proxpo.adapt.run import ROWS, adapt, finding, sign_test
from proxpo.adapt.seeds import adapt_seeds
from proxpo.adapt.settings import load_settings, resumed_settings
from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.runs.jsonlines import JsonLines, read_rows
from proxpo.runs.yaml_file import dump_yaml

METHODS = {"rosa": ["parameters=hidden", "turns=3"], "latentseek": ["fraction=0.6", "lr=0.3"]}


def timeless(rows):
    """Rows without the seconds that they took."""
    return [
        row | {"arms": {k: arm | {"seconds": None} for k, arm in row["arms"].items()}}
        for row in rows
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_goes_on_with_the_next_problem(tmp_path, method):
    """Equal rows, whether made in one go or resumed after a kill in the middle of a line."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = load_settings(method, METHODS[method], problems=4, task="arithmetic:hard")
    summary = adapt(settings, out=whole)
    rows = read_rows(whole / ROWS)
    assert [row["step"] for row in rows] == list(range(4))
    check_arms(rows)

    lines = (whole / ROWS).read_bytes().splitlines(keepends=True)
    parts.mkdir()
    (parts / ROWS).write_bytes(b"".join(lines[:3]) + lines[3][:40])
    (parts / "config.yaml").write_bytes((whole / "config.yaml").read_bytes())
    with pytest.raises(ProxpoError, match="--resume continues it"):
        adapt(settings, out=parts)
    again = resumed_settings(parts, method, [])
    assert again == settings
    done = []
    resumed = adapt(again, out=parts, resume=True, on_row=lambda n, total, row: done.append(n))
    assert done == [4]
    assert timeless(read_rows(parts / ROWS)) == timeless(rows)
    for key in ("accuracy_before", "accuracy_after", "against", "steps"):
        assert resumed[key] == summary[key]
    assert (parts / "summary.json").exists()
    changed = resumed_settings(parts, method, ["temperature=0.5"])
    with pytest.raises(ProxpoError, match=r"temperature: 1\.0 -> 0\.5"):
        adapt(changed, out=parts, resume=True)


def test_a_run_does_not_go_on_with_another_file(tmp_path):
    problems, out = tmp_path / "own.jsonl", tmp_path / "run"
    problems.write_text(12 * '{"prompt": "1+1=", "answer": "2"}\n')
    sets = [*METHODS["latentseek"], "task.reward=exact", "task.options.held_out=0.5"]
    settings = load_settings("latentseek", sets, problems=1, task=str(problems))
    adapt(settings, out=out)
    adapt(settings, out=out, resume=True)
    problems.write_text(12 * '{"prompt": "1+2=", "answer": "3"}\n')
    with pytest.raises(ProxpoError, match=r"own\.jsonl has changed since this run began; --out"):
        adapt(settings, out=out, resume=True)


def test_options_of_a_task_in_blocks_are_those_of_a_training_run(tmp_path):
    from proxpo.train.config import load_config

    sets = ["task.options.a.b=1", "task.options.a.c=2", "task.options.d=3"]
    settings = load_settings("latentseek", sets)
    assert settings.task_options == {"a": {"b": 1, "c": 2}, "d": 3}
    assert settings.task_options == load_config(None, sets).task.options
    (tmp_path / "config.yaml").write_text(dump_yaml(settings.as_dict()))
    again = resumed_settings(tmp_path, "latentseek", ["task.options.a.c=4"])
    assert again.task_options == {"a": {"b": 1, "c": 4}, "d": 3}
    with pytest.raises(ProxpoError, match=r"'task.options.d.e' cannot be set: 'd' is 3, not a"):
        load_settings("latentseek", [*sets, "task.options.d.e=1"])


def test_a_full_disk_ends_a_run_in_the_line_of_the_rows(tmp_path, monkeypatch):
    """The file that says why the run failed cannot be written either."""

    def full(target, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    def full_rows(lines, row):
        raise ProxpoError(f"{lines.path} cannot be written: No space left on device")

    monkeypatch.setattr("proxpo.runs.status.write_whole", full)
    monkeypatch.setattr(JsonLines, "append", full_rows)
    with pytest.raises(ProxpoError, match=r"problems\.jsonl cannot be written: No space left"):
        adapt(load_settings("latentseek", problems=1), out=tmp_path / "run")


def check_arms(rows):
    """Baselines stay within the method's tokens; a right first answer is everyone's answer."""
    for row in rows:
        own, *_ = row["arms"].values()
        for arm in row["arms"].values():
            assert arm["right"] or not row["before"]["right"]
            assert arm["tokens"] <= own["tokens"]
            assert (arm["ended"] in ("right", "reward")) == arm["right"]
            assert arm["attempts"] == 1 or not row["before"]["right"]
    assert any(arm["attempts"] > 1 for row in rows for arm in row["arms"].values())


def test_the_command_prints_every_arm_and_writes_a_page(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--problems", "2", "--out", str(out), "--set", "parameters=hidden"]
    assert main(["adapt", "rosa", *arguments]) == 0
    shown = capsys.readouterr().out
    for word in ("first answer", "resample", "sgd", "at equal tokens", "passes of a token"):
        assert word in shown
    page = (out / "report.html").read_text()
    assert "rosa on arithmetic, tiny" in page
    assert "{{" not in page
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    assert set(summary["arms"]) == {"rosa", "resample", "sgd"}
    assert main(["adapt", "rosa", "--out", str(out), "--resume", "--problems", "1"]) == 2
    assert "has done 2 problems already" in capsys.readouterr().err


def test_seeds_have_problems_of_their_own(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["adapt", "latentseek", "--problems", "2", "--out", str(out), "--seeds", "2"]
    assert main([*arguments, "--set", "fraction=0.6"]) == 0
    shown = capsys.readouterr().out
    assert "4 problems, 2 seeds" in shown
    assert "± is the standard deviation" in shown
    rows = [read_rows(out / f"seed{k}" / ROWS) for k in range(2)]
    assert len({row["prompt"] for part in rows for row in part}) == 4
    right = [[row["arms"]["resample"]["right"] for row in part] for part in rows]
    shares = [sum(part) / 2 for part in right]
    accuracy = json.loads((out / "summary.json").read_text())["arms"]["resample"]["accuracy"]
    assert accuracy["mean"] == pytest.approx(sum(shares) / 2)
    assert accuracy["sd"] == pytest.approx(abs(shares[0] - shares[1]) / 2**0.5)
    assert main([*arguments, "--seed", "1"]) == 2
    assert "leave --seed out" in capsys.readouterr().err
    assert main([*arguments, "--problems", "300", "--resume"]) == 2
    assert "500 held-out problems; first=300" in capsys.readouterr().err


def test_seeds_do_not_go_into_a_run_of_one(tmp_path):
    settings = load_settings("latentseek", problems=1)
    adapt(settings, out=tmp_path)
    before = (tmp_path / "summary.json").read_bytes()
    for resume in (False, True):
        with pytest.raises(ProxpoError, match="already holds a run with one seed"):
            adapt_seeds(settings, 2, out=tmp_path, resume=resume)
    assert (tmp_path / "summary.json").read_bytes() == before


def test_a_winner_is_named_where_the_sign_test_says_so():
    def told(own, other):
        pair = {"only_method": own, "only_baseline": other, "p": sign_test(own, other)}
        return finding({"method": "rosa", "against": {"sgd": pair}}, "sgd")

    assert told(6, 0).startswith("rosa wins over sgd at equal tokens: solved only by rosa 6, ")
    assert told(0, 6).startswith("rosa loses to sgd at equal tokens")
    for own, other in ((5, 0), (0, 0), (4, 7)):
        assert told(own, other).startswith("no difference between rosa and sgd is shown")


def test_sign_test():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(3, 9) == pytest.approx(2 * (1 + 12 + 66 + 220) / 4096)


def test_a_method_without_effect_says_so(tmp_path):
    """A tenth of an answer of four tokens is no block."""
    notices = []
    adapt(load_settings("latentseek", problems=2), out=tmp_path, on_notice=notices.append)
    (line,) = notices
    assert "latentseek made no update (answers ended by" in line
    assert "no block" not in line or "a larger fraction" in line


REFUSED = {
    "adapt: unknown method 'rossa'; did you mean 'rosa'": ["rossa"],
    "did you mean 'beta'": ["rosa", "--set", "betta=1"],
    "its reward does not say what is right": ["rosa", "--set", "task.reward={reward}"],
    "calls a tool": ["rosa", "--task", "calculator"],
    "500 held-out problems": ["rosa", "--problems", "501"],
    "context=dialogue needs chat messages": ["rosa", "--set", "context=dialogue"],
    "judge=self asks the model in chat": ["latentseek", "--set", "judge=self"],
    "unknown model 'tinny'": ["rosa", "--model", "tinny"],
    "takes float32, float64": ["rosa", "--set", "dtype=3"],
    "is answered over several turns": ["rosa", "--task", "arms"],
    "--problems 3 and --set problems=2": ["rosa", "--problems", "3", "--set", "problems=2"],
    "seed is at least 0, got -1": ["rosa", "--seed", "-1"],
    "leave --seed out": ["rosa", "--seeds", "2", "--set", "seed=7"],
    "finite and at least 0, got inf": ["latentseek", "--set", "lr=inf"],
    "sgd_lr is finite": ["rosa", "--set", "sgd_lr=inf"],
    "at most 1,000, got inf": ["rosa", "--set", "temperature=inf"],
    "correct_above is a number": ["rosa", "--set", "task.correct_above=inf"],
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_in_one_line(tmp_path, capsys, line):
    """Exit code 2, one line, and no folder left behind."""
    reward, out = tmp_path / "mine.py", tmp_path / "run"
    reward.write_text("def score(solution_str, ground_truth):\n    return 0.5\n")
    arguments = [word.format(reward=f"{reward}:score") for word in REFUSED[line]]
    assert main(["adapt", *arguments, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_training_with_them_is_refused(capsys):
    assert main(["train", "--method", "rosa"]) == 2
    assert "rosa is a method for test time (proxpo adapt rosa)" in capsys.readouterr().err


def test_a_model_without_a_known_head_is_refused(tmp_path, monkeypatch):
    from proxpo.adapt import run
    from proxpo.models import load_policy

    def headless(*args, **options):
        policy = load_policy(*args, **options)
        monkeypatch.setattr(type(policy.bare), "get_output_embeddings", lambda self: None)
        return policy

    monkeypatch.setattr(run, "load_policy", headless)
    with pytest.raises(ProxpoError, match="output layer must be a plain linear layer, got none"):
        adapt(load_settings("latentseek"), out=tmp_path / "run")
