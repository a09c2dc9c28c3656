"""The program as a process: start-up time, exit codes, streams."""

import io
import json
import subprocess
import sys

import pytest

from proxpo.cli import main


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
