"""The program as a process: start-up time, exit codes, streams."""

import io
import json
import subprocess
import sys
from typing import get_type_hints

import pytest
from rich.console import Console
from typer.models import OptionInfo

from proxpo.cli import main, training
from proxpo.cli.app import app


def run(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "proxpo.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


def test_help_loads_nothing_heavy():
    program = (
        "import sys; from proxpo.cli import main\n"
        "code = main(['inspect', '--help']) + main(['adapt', '--help'])\n"
        "heavy = {'torch', 'numpy', 'yaml', 'safetensors', 'transformers', 'jaxtyping'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert "--batch" in done.stdout


def test_json_alone_on_stdout():
    done = run("inspect", "p3o", "clip-cov", "--batch", "sample", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == ["p3o", "clip-cov"]


def test_a_mistake_is_one_line_and_exit_code_2():
    done = run("inspect", "grpp", "--batch", "sample")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "proxpo: unknown method 'grpp'; did you mean 'grpo'?\n"


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "train --steps 5": "no such option '--steps'; a setting is written --set steps=VALUE",
        "train --output x": "no such option '--output'; did you mean --out or --set output=VALUE?",
        "train --k-x 1": "no such option '--k-x'; a setting is written --set k_x=VALUE",
        "compare grpo p3o --sed 3": "no such option '--sed'; did you mean '--seeds'?",
        "compare grpo --lr=1": "no such option '--lr'; a setting is written --set lr=VALUE",
        "train --seeds 5": "no such option '--seeds'; did you mean '--seed'?",
        "report --oot x": "no such option '--oot'; did you mean '--out'?",
    }.items(),
)
def test_an_option_that_does_not_exist(words, line, proxpo):
    assert proxpo(*words.split()) == (2, "", f"proxpo: {line}\n")


def test_help_shows_no_value_for_a_flag(proxpo):
    rows = [line.split() for line in proxpo("train", "--help").out.splitlines()]
    assert next(row for row in rows if "--resume" in row)[2] == "Continue"


def test_options_are_named_where_their_value_has_the_same_name():
    # typer 0.27 names an option --MODEL otherwise; a name is the first argument of typer.Option
    for command in app.registered_commands:
        for name, kind in get_type_hints(command.callback, include_extras=True).items():
            for option in getattr(kind, "__metadata__", ()):
                if isinstance(option, OptionInfo) and option.metavar == name.upper():
                    assert isinstance(option.default, str), (command.name, name)


def test_a_terminal_without_unicode_gets_a_table(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["inspect", "grpo", "--batch", "sample"]) == 0
    screen.flush()
    assert b"grpo" in screen.buffer.getvalue()


def test_a_reader_that_stops_early_hears_no_complaint():
    command = f"{sys.executable} -m proxpo.cli methods --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{", "")


def test_version_help_and_no_arguments(proxpo):
    assert proxpo("--version").out == "proxpo 0.1.0\n"
    assert proxpo("--help").code == 0
    nothing = proxpo()
    assert nothing.code == 0
    assert "inspect" in nothing.out
    assert "methods" in nothing.out


def test_ctrl_c_exits_130(proxpo, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("proxpo.cli.catalogue.show_methods", interrupt)
    assert proxpo("methods") == (130, "", "")


def test_a_bug_is_not_hidden(proxpo, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr("proxpo.cli.catalogue.show_methods", fail)
    with pytest.raises(RuntimeError, match="ours"):
        proxpo("methods")


def test_live_view_of_a_run():
    """Bar, scores, course of the reward and speed on a terminal; plain words in a log."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with training._bar(console, 3) as (on_progress, on_step):
        on_progress("sampling", 0, 1)
        for step in (1, 2, 3):
            score = {"proxpo/eval/accuracy": 0.5, "proxpo/eval/kl": 0.25} if step == 3 else {}
            numbers = {"reward": step / 4, "num_tokens": 100 * step, "step_time": 0.5}
            on_step(step, numbers | score)
    end = shown.getvalue()
    for expected in ("3/3", "reward 0.750", "accuracy 0.500", "KL 0.250", "▁▄█", "200 tokens/s"):
        assert expected in end
    plain = io.StringIO()
    with training._log(Console(file=plain), 1) as (_, on_step):
        on_step(1, {"reward": 0.5})
    assert plain.getvalue().split()[:2] == ["step", "1/1"]
    assert "\x1b" not in plain.getvalue()


def test_compare_asks_for_its_packages_before_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = tmp_path / "comparison"
    assert main(["compare", "grpo", "reinforce", "--out", str(folder)]) == 2
    assert "comparisons need matplotlib: pip install 'proxpo[train]'" in capsys.readouterr().err
    assert not folder.exists()
