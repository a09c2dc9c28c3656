"""Faults in the middle of a run: one line that explains each, and nothing lost by it."""

import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from fault_runs import at_phase, command, config_of, rows_of, same_run, weights_of

import proxpo.train.update as update_module
from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.ops.memory import is_out_of_memory
from proxpo.runs.checkpoint import load_latest
from proxpo.runs.folder import hold_folder
from proxpo.sampler._vllm import _explained
from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.observer import Observer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Four steps without interruption."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(config_of(out, "steps=4"))
    return out


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, straight) -> Path:
    """The same run, stopped after two steps."""
    out = tmp_path_factory.mktemp("halfway") / "run"
    hook = at_phase("sampling", lambda: os.kill(os.getpid(), signal.SIGTERM), step=2)
    assert train(config_of(out, "steps=4"), observer=hook)["stopped"] == "SIGTERM"
    return out


# The disk ------------------------------------------------------------------------------------


class Limit:
    """The kernel refuses to let any file grow beyond a size."""

    full = "File too large"

    def __init__(self, place: Path) -> None:
        self.place, self.before = place, resource.getrlimit(resource.RLIMIT_FSIZE)

    def squeeze(self, free: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, self.before[1]))

    def relax(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)

    close = relax


class Mounted:
    """A file system of its own, with little room."""

    full = "No space left on device"

    def __init__(self, place: Path) -> None:
        self.place = place
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)

    def squeeze(self, free: int) -> None:
        room = os.statvfs(self.place)
        with (self.place / "ballast").open("wb") as file:
            file.write(b"x" * (room.f_bavail * room.f_frsize - free))

    def relax(self) -> None:
        (self.place / "ballast").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.place], check=True)


@pytest.fixture(params=["mounted", "limit"])
def disk(request, tmp_path):
    """A disk that can be made to run full; where nothing may be mounted, a limit stands in."""
    made: Limit | Mounted = Limit(tmp_path)
    if request.param == "mounted":
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            made = Mounted(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("where", ["metrics", "checkpoint"])
def test_a_full_disk(where, disk, halfway, straight, capsys):
    """Said what could not be written and what is safe; with room again, the run goes on."""
    out = disk.place / "run"
    shutil.copytree(halfway, out)
    before = {file: file.read_bytes() for file in (out / "checkpoints").rglob("*.*")}
    more = ["--set", "steps=4"] if where == "checkpoint" else ["--set", "steps=200"]
    saved = "checkpoint.every=1" if where == "checkpoint" else "checkpoint.keep=0"
    disk.squeeze(300_000 if where == "checkpoint" else 24_576)
    code = main([*command(out), "--resume", *more, "--set", saved])
    disk.relax()
    told = capsys.readouterr().err
    assert (code, told.count("\n")) == (2, 1)
    if where == "checkpoint" and isinstance(disk, Mounted):  # seen before a step is made
        assert f"checkpoints in {out}/checkpoints take about 2.9 MiB, and " in told
        assert "KiB are free: make room, choose another --out, or set checkpoint.every=0" in told
        assert [row["step"] for row in rows_of(out)] == [0, 1, 2]
    else:
        what = "step-3 could not" if where == "checkpoint" else r".jsonl cannot"
        assert f"{what} be written: {disk.full}" in told
        assert "checkpoints up to step 2 are intact, --resume continues from there" in told
    assert all(file.read_bytes() == text for file, text in before.items())
    assert load_latest(out / "checkpoints").step == 2
    assert main([*command(out), "--resume", "--set", "steps=4"]) == 0
    assert same_run(out, straight, 4)
    assert not (out / "failure.json").exists()


def test_a_disk_that_was_made_read_only(tmp_path, halfway, capsys):
    out = tmp_path / "run"
    shutil.copytree(halfway, out)
    try:
        subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    except (OSError, subprocess.CalledProcessError):  # no right to mount, so permissions count
        out.chmod(0o555)
        (out / ".lock").chmod(0o444)
        expected = "Permission denied"
    else:
        subprocess.run(["mount", "-o", "remount,ro,bind", tmp_path], check=True)
        expected = "Read-only file system"
    try:
        assert main([*command(out), "--resume", "--set", "steps=4"]) == 2
    finally:
        out.chmod(0o755) if expected == "Permission denied" else subprocess.run(
            ["umount", "-l", tmp_path], check=True
        )
    assert capsys.readouterr().err == f"proxpo: out: {out} cannot be written: {expected}\n"
    assert load_latest(out / "checkpoints").step == 2


# Writing beside the steps -------------------------------------------------------------------


def _run_and_die(out: str, step: int) -> None:
    """A run that is killed while the checkpoint of a step is being written beside the next one."""
    from proxpo.runs import checkpoint

    whole = checkpoint._hash
    checkpoint._hash = lambda path: time.sleep(0.3) or whole(path)

    def on_progress(phase: str, *_: int) -> None:
        if phase == "sampling" and (Path(out) / f"checkpoints/.unfinished-{step}").is_dir():
            os.kill(os.getpid(), signal.SIGKILL)

    train(config_of(Path(out), "steps=4"), observer=Observer(on_progress=on_progress))


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_beside_the_writing_leaves_the_checkpoint_before(step, straight, tmp_path):
    """Before the first checkpoint the run begins anew; to the same bits in any case."""
    out = tmp_path / "run"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["proxpo.train.loop", "transformers.models.qwen3"])
    process = context.Process(target=_run_and_die, args=(str(out), step))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    newest = load_latest(out / "checkpoints")
    assert (newest and newest.step) == (step - 1 or None)
    config, notes = config_of(out, "steps=4"), list[str]()
    if newest is None:
        with pytest.raises(ProxpoError, match="holds a run, without a checkpoint: --resume beg"):
            train(config)
    train(config, resume=True, observer=Observer(on_notice=notes.append))
    begun = f"continues after step {step - 1} of 4" if newest else f"{out} has no checkpoint: it b"
    assert any(note.startswith(begun) for note in notes)
    assert same_run(out, straight, 4)
    assert (out / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()
    assert not list((out / "checkpoints").glob(".unfinished*"))


def test_a_checkpoint_is_that_of_its_step_though_it_is_written_later(
    straight, tmp_path, monkeypatch
):
    """The writer of step 3 begins to read its tensors when step 4 has changed the weights."""
    from proxpo.runs import checkpoint

    whole, later = checkpoint.flatten, threading.Event()

    def late(tree, *, what):
        assert later.wait(120)
        return whole(tree, what=what)

    def on_step(step: int, _: dict) -> None:
        if step == 4:
            assert not (tmp_path / "checkpoints/step-3").exists()
            later.set()

    monkeypatch.setattr(checkpoint, "flatten", late)
    notes: list[str] = []
    config = config_of(tmp_path, "steps=5", "checkpoint.every=3")
    train(config, observer=Observer(on_step=on_step, on_notice=notes.append))
    expected, saved = weights_of(straight, 3), weights_of(tmp_path, 3)
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    written = [note.split(" written")[0] for note in notes if "written in" in note]
    assert written == [f"checkpoint of step {step}: 2.9 MiB" for step in (3, 5)]


# Memory --------------------------------------------------------------------------------------


FIRST = {
    "rollout": "a lower rollout.options.max_rows (now 512), a lower rollout.max_tokens (now 5), ",
    "update": "train.micro_batch=auto, or a lower number (now none, that is 8 rows), model.gradie",
    "evaluate": "train.micro_batch=auto, or a lower number (now none, that is 8 rows), a lower ro",
}


@pytest.mark.parametrize("ask", [torch.empty, bytearray], ids=["torch", "python"])
@pytest.mark.parametrize(
    ("phase", "word"), [("sampling", "rollout"), ("updating", "update"), ("evaluating", "evaluate")]
)
def test_out_of_memory_names_the_phase_and_the_knobs(phase, word, ask, tmp_path):
    """A real allocation, of a pebibyte, that the machine refuses in the middle of a phase."""
    out = tmp_path / "run"
    sets = ("steps=3", "evaluate.every=1")
    with pytest.raises(ProxpoError) as caught:
        train(config_of(out, *sets), observer=at_phase(phase, lambda: ask(1 << 50), step=1))
    error = str(caught.value)
    assert error.startswith(f"out of memory in the {word} of step 2")
    assert ("more wanted" in error) == (ask is torch.empty)
    assert f"in this order: {FIRST[word]}" in error
    assert error.endswith("; checkpoints up to step 1 are intact, --resume continues from there")
    assert "\n" not in error
    record = json.loads((out / "failure.json").read_text())
    assert (record["step"], record["phase"]) == (1, word)
    assert record["reason"] in error
    assert load_latest(out / "checkpoints").step == 1
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize(("free", "lacks"), [(30 << 20, True), (4 << 30, False)])
def test_an_error_of_cudnn_on_a_full_gpu_is_a_lack_of_memory(monkeypatch, free, lacks):
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert not is_out_of_memory(error)  # no GPU is in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 140 << 30))
    assert is_out_of_memory(error) is lacks
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def test_knobs_that_are_at_their_end_are_not_offered():
    from proxpo.train.faults import Progress, out_of_memory

    sets = ["micro_batch=1", "gradient_checkpointing=true", "model.dtype=float64"]
    config = load_config(None, sets)
    told = out_of_memory(MemoryError(), config, Progress(phase="update", step=6))
    assert told == (
        "out of memory in the update of step 7; what helps, in this order: "
        "a lower rollout.options.max_rows (now 512), a lower rollout.max_tokens (now 8), "
        "model.dtype=auto (now float64), model.lora.r=16 (now no adapter)"
    )


def test_vllm_s_share_of_the_memory_is_offered():
    from proxpo.train.faults import Progress, out_of_memory

    at = Progress(phase="update", step=6)
    vllm = ["rollout.backend=vllm", "micro_batch=1"]
    knob = "rollout.options.sleep=true, or a lower rollout.options.memory (now 0.3)"
    assert knob in out_of_memory(MemoryError(), load_config(None, vllm), at)
    asleep = load_config(None, [*vllm, "rollout.options.sleep=true"])
    assert "rollout.options.memory" not in out_of_memory(MemoryError(), asleep, at)


def test_a_sampler_that_dies_leaves_a_run_to_resume(straight, tmp_path):
    out = tmp_path / "run"

    def die() -> None:
        with _explained("sample"):
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    with pytest.raises(ProxpoError) as caught:
        train(config_of(out, "steps=4"), observer=at_phase("sampling", die, step=2))
    assert str(caught.value) == (
        "rollout 'vllm': vLLM could not sample: RuntimeError: CUDA error: an illegal memory access "
        "was encountered; checkpoints up to step 2 are intact, --resume continues from there"
    )
    train(config_of(out, "steps=4"), resume=True)
    assert same_run(out, straight, 4)


# Numbers -------------------------------------------------------------------------------------


def test_one_bad_gradient_is_left_out_counted_and_told(tmp_path, monkeypatch):
    notes: list[str] = []
    whole, made = update_module.gradients, []

    def spoilt(learner, *args, **options):
        made.append(whole(learner, *args, **options))
        if len(made) in (3, 6):
            learner.trainable()[-1].grad[0] = torch.inf
        return made[-1]

    monkeypatch.setattr(update_module, "gradients", spoilt)
    train(config_of(tmp_path / "run", "steps=8"), observer=Observer(on_notice=notes.append))
    rows = rows_of(tmp_path / "run")[1:]
    skipped = [row["step"] for row in rows if row["proxpo/skipped"]]
    assert skipped == [3, 6]
    assert [n.split(":")[0] for n in notes if "not finite" in n] == [f"step {s}" for s in skipped]
    assert all(w.isfinite().all() for w in weights_of(tmp_path / "run", 8).values())


def test_a_run_that_has_lost_its_numbers_stops_with_the_reason(tmp_path, capsys):
    out = tmp_path / "run"
    code = main([*command(out), "--set", "lr=1e30", "--set", "grad_clip=none"])
    told = capsys.readouterr().err
    assert (code, told.count("\n")) == (2, 1)
    assert "log-probabilities are not finite: it has diverged" in told
    assert json.loads((out / "failure.json").read_text())["phase"] == "rollout"


# Files of the run ----------------------------------------------------------------------------


def _spoil(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"step": 1, "lo\n' + "\0\0\n" + "[1]\n" + "".join(lines[1:]))


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\0 {[")


DAMAGED = {
    ("metrics.jsonl", _spoil): "metrics.jsonl: 3 damaged lines left out",
    ("samples.jsonl", _spoil): "samples.jsonl: 3 damaged lines left out",
    ("metrics.jsonl", os.remove): "metrics.jsonl is missing: the new one begins after step 2",
    ("config.yaml", _garble): "config.yaml: not UTF-8 text; written anew from step-2",
    ("config.yaml", os.remove): "config.yaml cannot be read: No such file or directory; written",
}


@pytest.mark.parametrize("case", DAMAGED, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def test_damaged_files_are_told_and_mended(case, halfway, straight, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(halfway, out)
    name, damage = case
    damage(out / name)
    (out / "summary.json").write_bytes(b"{ half")
    (out / "failure.json").write_bytes(b"")
    assert main(["train", "--out", str(out), "--resume", "--set", "steps=4"]) == 0
    told = capsys.readouterr()
    assert DAMAGED[case] in told.out
    assert told.err == ""
    if damage is os.remove and name == "metrics.jsonl":
        assert [row["step"] for row in rows_of(out)] == [3, 4]
    else:
        assert same_run(out, straight, 4)
    assert (out / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()
    assert json.loads((out / "summary.json").read_text())["steps"] == 4
    assert not (out / "failure.json").exists()


@pytest.mark.parametrize("setting", ["model.lora.r=2", "optimizer=muon", "method=isopo"])
def test_settings_that_do_not_fit_the_checkpoint_are_refused(setting, halfway, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(halfway, out)
    before = (out / "config.yaml").read_text()
    resume = ["train", "--out", str(out), "--resume", "--set", "steps=4", "--set", setting]
    assert main(resume) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"proxpo: {out}/checkpoints/step-2 does not fit these settings (")
    assert told.count("\n") == 1
    assert (out / "config.yaml").read_text() == before


def _hold(out: str, ready) -> None:
    with hold_folder(Path(out)):
        ready.set()
        signal.pause()


def test_two_processes_in_one_folder(halfway, tmp_path, capsys):
    """The second is refused while the first lives; a killed one's lock is taken over and told."""
    out = tmp_path / "run"
    shutil.copytree(halfway, out)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["proxpo.train.loop", "transformers.models.qwen3"])
    ready = context.Event()
    first = context.Process(target=_hold, args=(str(out), ready))
    first.start()
    assert ready.wait(60)
    assert main([*command(out), "--resume", "--set", "steps=3"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"proxpo: out: {out} is in use by process {first.pid} on ")
    assert told.count("\n") == 1
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert main([*command(out), "--resume", "--set", "steps=3"]) == 0
    assert f"(process {first.pid} on " in capsys.readouterr().out
    assert main([*command(out), "--resume", "--set", "steps=3"]) == 0
    assert "lock" not in capsys.readouterr().out


# Signals and moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize("phase", ["sampling", "updating", "evaluating", "saving"])
def test_a_signal_in_any_phase_saves_and_the_run_goes_on(phase, number, straight, tmp_path):
    sets = ("steps=4", "evaluate.every=2" if phase == "evaluating" else "evaluate.every=0")
    sets = (*sets, "checkpoint.every=0") if phase != "saving" else sets
    out = tmp_path / "run"
    hook = at_phase(phase, lambda: os.kill(os.getpid(), number), step=1)
    ended = train(config_of(out, *sets), observer=hook)
    assert ended == {
        "stopped": number.name,
        "steps": 1 if phase in ("sampling", "saving") else 2,
        "out": str(out),
    }
    assert load_latest(out / "checkpoints").step == ended["steps"]
    assert not (out / "summary.json").exists()
    assert not (out / "failure.json").exists()
    train(config_of(out, *sets), resume=True)
    expected, found = weights_of(straight, 4), weights_of(out, 4)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3, 4]
    assert (out / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()


def test_the_exit_code_tells_a_stopped_run_from_a_finished_one(tmp_path, capsys):
    """The signal comes from outside, in the middle of a rollout."""
    file = tmp_path / "reward.py"
    file.write_text(
        textwrap.dedent("""
        import os, signal
        from pathlib import Path
        calls = Path(__file__).with_name("calls")
        def score(solution_str, ground_truth):
            with calls.open("a") as file:
                file.write("x")
            if calls.stat().st_size == 30:
                os.kill(os.getppid(), signal.SIGTERM)
            return float(len(solution_str))
        """)
    )
    own = ["--set", f"task.reward={file}:score", "--set", "steps=50"]
    assert main([*command(tmp_path / "run"), *own]) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in capsys.readouterr().out


@pytest.mark.parametrize("by", ["config", "out"])
def test_a_folder_can_be_moved(by, halfway, straight, tmp_path):
    shutil.copytree(halfway, tmp_path / "old")
    new = tmp_path / "elsewhere" / "run"
    new.parent.mkdir()
    (tmp_path / "old").rename(new)
    how = [str(new / "config.yaml")] if by == "config" else ["--out", str(new)]
    assert main(["train", *how, "--resume"]) == 0
    assert same_run(new, straight, 4)
    assert not (tmp_path / "old").exists()


def test_the_last_word_is_the_current_one(tmp_path):
    """summary.json at the true end; failure.json for the last attempt only."""
    out = tmp_path / "run"

    def fail() -> None:
        raise RuntimeError("the machine\nsays no")

    with pytest.raises(RuntimeError, match="says no"):
        train(config_of(out, "steps=3"), observer=at_phase("updating", fail, step=1))
    assert json.loads((out / "failure.json").read_text()) == {
        "reason": "RuntimeError: the machine says no",
        "step": 1,
        "phase": "update",
        "type": "RuntimeError",
    }
    train(config_of(out, "steps=3"), resume=True)
    assert json.loads((out / "summary.json").read_text())["steps"] == 3
    assert not (out / "failure.json").exists()
    hook = at_phase("sampling", lambda: os.kill(os.getpid(), signal.SIGTERM), step=4)
    train(config_of(out, "steps=5"), resume=True, observer=hook)
    assert not (out / "summary.json").exists()
