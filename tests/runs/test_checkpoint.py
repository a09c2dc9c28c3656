"""Checkpoints: exact, whole or absent, and never the cause of losing an earlier one."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs.old_form import in_old_form
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.optimizers import make_optimizer
from proxpo.runs import checkpoint
from proxpo.runs.checkpoint import (
    checkpoints,
    load_latest,
    save_checkpoint,
    verify,
)
from proxpo.runs.stop import Overdue, stop_on_signal
from proxpo.runs.trees import flatten, unflatten
from proxpo.runs.writer import CheckpointWriter, HostCopy, Saved


def equal(a, b) -> bool:
    """Same structure, same types, same bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a.hex() == b.hex() if isinstance(a, float) else a == b


def through_json(tree):
    tensors, structure = flatten(tree)
    raw = safetensors.torch.load(safetensors.torch.save(tensors))
    return unflatten(raw, json.loads(json.dumps(structure, allow_nan=False)))


DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.uint8, torch.bool,
)  # fmt: skip
tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(max_size=5)
)
keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.none())
trees = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=200)
def test_any_tree_comes_back_to_the_bit(tree):
    assert equal(through_json(tree), tree)


def test_keys_that_look_alike_are_kept_apart():
    tree = {0: torch.zeros(2), "0": torch.ones(2), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    assert equal(through_json(tree), tree)


def test_special_numbers():
    x = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    tree = {"x": x, "y": [float("nan"), float("-inf"), -0.0, 0.1 + 0.2, 10**40, True]}
    assert equal(through_json(tree), tree)


def test_tied_and_overlapping_tensors():
    base = torch.arange(12.0)
    tree = {"a": base, "tied": base, "part": base[3:7], "turned": base.view(3, 4).T}
    tensors, _ = flatten(tree)
    assert len(tensors) == 3
    assert equal(through_json(tree), {**tree, "turned": tree["turned"].contiguous()})


@pytest.mark.parametrize("bad", [{"a": object()}, {(1, 2): 3}, [{1, 2}], {"x": 1 + 2j}])
def test_what_cannot_be_saved_is_named(bad):
    with pytest.raises(ProxpoError, match=r"optimizer.* cannot be saved"):
        flatten(bad, what="optimizer")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def train(net: nn.Module, optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"), [("adamw", {}), ("adamw", {"amsgrad": True}), ("muon", {})]
)
def test_resumed_optimizer_goes_on_to_the_bit(tmp_path, name, options):
    net = model()
    optimizer = make_optimizer(name, net, 1e-2, **options)
    train(net, optimizer, 3)
    parts = {"weights": net.state_dict(), "optimizer": optimizer.state_dict()}
    save_checkpoint(tmp_path, 3, parts, {})
    saved = optimizer.state_dict()
    found = load_latest(tmp_path)
    assert equal(found.parts["optimizer"], saved)
    train(net, optimizer, 3, start=3)

    other = model()
    again = make_optimizer(name, other, 1e-2, **options)
    other.load_state_dict(found.parts["weights"])
    again.load_state_dict(found.parts["optimizer"])
    train(other, again, 3, start=3)
    assert equal(dict(other.state_dict()), dict(net.state_dict()))
    assert equal(again.state_dict(), optimizer.state_dict())


def test_generator_state(tmp_path):
    g = torch.Generator().manual_seed(5)
    torch.rand(3, generator=g)
    save_checkpoint(tmp_path, 1, {"streams": {"noise": g.get_state()}}, {})
    expected = torch.rand(4, generator=g)
    again = torch.Generator()
    again.set_state(load_latest(tmp_path).parts["streams"]["noise"])
    assert torch.equal(torch.rand(4, generator=again), expected)


def small(step: int) -> dict:
    return {"weights": {"w": torch.full((50, 20), float(step))}, "state": {"ema": step / 3}}


def save(root: Path, step: int, **options) -> Path:
    return save_checkpoint(root, step, small(step), {"cursor": step * 10}, **options)


def test_files_and_info(tmp_path):
    root = tmp_path / "a" / "checkpoints"

    def write_model(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "config.json").write_text("{}")

    path = save(root, 7, write_model=write_model)
    assert path == root / "step-7"
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {
        "manifest.json", "info.json", "weights.safetensors", "weights.json", "state.safetensors",
        "state.json", "model/deep/config.json",
    }  # fmt: skip
    found = load_latest(root)
    assert (found.step, found.path, found.skipped) == (7, path, ())
    assert found.info == {"cursor": 70, "step": 7}
    assert found.model == path / "model"
    assert equal(found.parts, small(7))


def model_in(dtype: torch.dtype, weights: dict):
    """Writes a model as transformers does, under names of its own."""

    def write(folder: Path) -> None:
        named = {f"base.{name}": value.to(dtype) for name, value in weights.items()}
        safetensors.torch.save_file(named, folder / "model.safetensors")

    return write


def test_weights_that_the_model_holds_exactly_are_not_written_twice(tmp_path):
    weights = {"a": torch.randn(40, 50), "b": torch.arange(3.0), "zero": torch.zeros(0)}
    parts = {"weights": weights, "optimizer": {"moment": weights["a"].clone()}}
    for dtype, twice in ((torch.float32, False), (torch.bfloat16, True)):
        root = tmp_path / str(dtype)
        path = save_checkpoint(root, 1, parts, {}, write_model=model_in(dtype, weights))
        own = safetensors.torch.load_file(path / "weights.safetensors")
        # Small whole numbers are exact in bfloat16, but a resumed run wants its own type.
        assert sorted(own) == (["a", "b", "zero"] if twice else ["zero"])
        assert list(safetensors.torch.load_file(path / "optimizer.safetensors")) == ["moment"]
        assert equal(load_latest(root).parts, parts)
    (path / "model/model.safetensors").unlink()
    with pytest.raises(ProxpoError, match=r"step-1: model/model\.safetensors is missing"):
        load_latest(root)


def test_large_parts_go_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGEST", 100)
    parts = {"weights": {str(n): torch.full((20,), float(n)) for n in range(4)}, "w": {"x": 1}}
    path = save_checkpoint(tmp_path, 1, parts, {})
    files = [f"weights{end}.safetensors" for end in ("", ".2", ".3", ".4")]
    assert sorted(file.name for file in path.glob("weights*.safetensors")) == sorted(files)
    assert equal(load_latest(tmp_path).parts, parts)
    (path / files[2]).unlink()
    with pytest.raises(ProxpoError, match=r"weights\.3\.safetensors is missing"):
        load_latest(tmp_path)


def test_a_checkpoint_of_the_old_form_is_read(tmp_path):
    weights = {"a": torch.randn(4, 5)}
    parts = {"weights": weights, "state": {"x": [1, torch.ones(2)]}}
    path = save_checkpoint(tmp_path, 1, parts, {}, write_model=model_in(torch.float32, weights))
    in_old_form(path)
    assert list(safetensors.torch.load_file(path / "weights.safetensors")) == ["a"]
    assert equal(load_latest(tmp_path).parts, parts)


# The writer beside the work ------------------------------------------------------------------


def begin(writer: CheckpointWriter, step: int, weights: torch.Tensor) -> None:
    copied = HostCopy()
    tree = copied({"weights": {"w": weights, "tied": weights}})
    assert tree["weights"]["w"] is tree["weights"]["tied"]
    writer.begin(step, tree, None, keep=1, beside=True)


def test_the_writer_saves_the_state_at_its_beginning(tmp_path):
    done: list[Saved] = []
    writer, weights = CheckpointWriter(tmp_path, on_saved=done.append), torch.zeros(5)
    for step in (1, 2):
        weights.fill_(step)
        begin(writer, step, weights)
        weights.fill_(99)
        writer.commit({"step_of_info": step})
    writer.wait()
    assert [(saved.step, saved.size > 0) for saved in done] == [(1, True), (2, True)]
    found = load_latest(tmp_path)
    assert equal(found.parts["weights"]["tied"], torch.full((5,), 2.0))
    assert (found.info["step_of_info"], os.listdir(tmp_path)) == (2, ["step-2"])


@pytest.mark.parametrize("call", ["check", "wait", "begin"])
def test_an_error_of_the_writer_comes_with_the_next_call_once(call, tmp_path, monkeypatch):
    save(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, on_saved=lambda saved: None)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        begin(writer, 2, torch.ones(2))
        writer.commit({})
        writer._thread.join()
    with pytest.raises(ProxpoError, match="step-2 could not be written: No space left on dev"):
        begin(writer, 3, torch.ones(2)) if call == "begin" else getattr(writer, call)()
    writer.check()
    writer.close()
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_checkpoint_that_is_never_committed_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, on_saved=lambda saved: None)
    begin(writer, 2, torch.ones(2))
    writer.close()
    writer.check()
    assert os.listdir(tmp_path) == ["step-1"]


def test_none_is_none(tmp_path):
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "never") is None


def test_the_last_few_are_kept(tmp_path):
    for step in (1, 2, 10, 20):
        save(tmp_path, step, keep_last=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-20"]
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-20"]
    with pytest.raises(ProxpoError, match="at least 1"):
        save(tmp_path, 30, keep_last=0)


def test_the_same_step_again(tmp_path):
    save(tmp_path, 5)
    save_checkpoint(tmp_path, 5, {"weights": {"w": torch.ones(1)}}, {})
    assert equal(load_latest(tmp_path).parts, {"weights": {"w": torch.ones(1)}})
    assert os.listdir(tmp_path) == ["step-5"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step-4").rename(tmp_path / "step-4.previous")
    assert load_latest(tmp_path).step == 4
    save(tmp_path, 4)
    save(tmp_path, 5, keep_last=1)
    assert os.listdir(tmp_path) == ["step-5"]


FILES = ("manifest.json", "info.json", "weights.safetensors", "weights.json", "state.json")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGE = {"truncated": _truncate, "empty": _empty, "a bit flipped": _flip, "missing": os.remove}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(tmp_path, file, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    DAMAGE[damage](tmp_path / "step-2" / file)
    if (damage, file) == ("a bit flipped", "manifest.json"):
        # Some bits of the manifest are only spaces; the hashes inside it guard the rest.
        text = (tmp_path / "step-2" / file).read_text(errors="replace")
        (tmp_path / "step-2" / file).write_text(text.replace('"files"', '"fils"'))
    found = load_latest(tmp_path)
    assert found.step == 1
    assert equal(found.parts, small(1))
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step-2: ")
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(ProxpoError, match=r"no usable checkpoint in .*step-2: "):
        load_latest(tmp_path)


MANIFESTS = {
    "list": lambda m: [],
    "null": lambda m: None,
    "number": lambda m: 3,
    "list of files": lambda m: list(m["files"]),
    "no format": lambda m: {k: v for k, v in m.items() if k != "format"},
    "another format": lambda m: m | {"format": 99},
    "files as a list": lambda m: m | {"files": list(m["files"].items())},
    "a file without its hash": lambda m: m | {"files": m["files"] | {"info.json": 3}},
    "no files": lambda m: m | {"files": {}},
    "a file left out": lambda m: m | {"files": dict(list(m["files"].items())[1:])},
    "a part left out": lambda m: m | {"parts": m["parts"][1:]},
    "parts as text": lambda m: m | {"parts": "weights"},
    "a file elsewhere": lambda m: m | {"files": m["files"] | {"../step-1/info.json": [1, ""]}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_of_another_form_is_damage(tmp_path, case):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    path.write_text(json.dumps(MANIFESTS[case](json.loads(path.read_text()))))
    checkpoint = load_latest(tmp_path)
    assert (checkpoint.step, len(checkpoint.skipped)) == (1, 1)
    assert equal(checkpoint.parts, small(1))
    assert "\n" not in checkpoint.skipped[0]


@pytest.mark.parametrize("file", ["manifest.json", "info.json", "state.json"])
def test_json_nested_too_deep_is_damage(tmp_path, file):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / file).write_text("[" * 100_000)
    if file != "manifest.json":  # as if it had been written so
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][file] = [100_000, checkpoint._hash(path / file)]
        (path / "manifest.json").write_text(json.dumps(manifest))
    found = load_latest(tmp_path)
    assert (found.step, found.skipped) == (1, (f"step-2: {file} is damaged: nested too deep",))


def test_a_damaged_later_step_never_displaces_a_good_one(tmp_path):
    """It would be the newest in number, and pruning keeps the newest."""
    save(tmp_path, 4)
    save(tmp_path, 9)
    (tmp_path / "step-9" / "info.json").write_bytes(b"")
    assert load_latest(tmp_path).step == 4
    save(tmp_path, 5, keep_last=1)
    assert os.listdir(tmp_path) == ["step-5"]
    assert load_latest(tmp_path).step == 5


def test_half_written_directories_are_not_checkpoints(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / ".unfinished-9")
    (tmp_path / "step-x").mkdir()
    assert load_latest(tmp_path).step == 1
    save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-x"]


@pytest.mark.parametrize("stage", ["save_file", "_sync", "_hash", "_move_into_place"])
def test_a_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch, stage):
    save(tmp_path, 1, keep_last=1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, stage, full)
        with pytest.raises(
            ProxpoError, match=r"step-2 could not be written: No space left on device$"
        ):
            save(tmp_path, 2, keep_last=1)
    assert os.listdir(tmp_path) == ["step-1"]
    assert equal(load_latest(tmp_path).parts, small(1))


def test_a_limit_on_file_size_is_a_clear_error(tmp_path):
    """The kernel itself refuses the write, in the middle of a file."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(ProxpoError, match=r"step-2 could not be written: File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["step-1"]


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProxpoError, match=r"could not be written: (Not a directory|File exists)"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_the_trainers_own_mistakes_pass_through(tmp_path):
    def broken(folder: Path) -> None:
        raise RuntimeError("model")

    with pytest.raises(RuntimeError, match="model"):
        save(tmp_path, 1, write_model=broken)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProxpoError, match=r"'\.\./x' cannot be the name of a part"):
        save_checkpoint(tmp_path, 1, {"../x": {}}, {})


WRITER = """
    import sys, torch
    from pathlib import Path
    from proxpo.runs.checkpoint import load_latest, save_checkpoint
    from proxpo.runs.writer import CheckpointWriter, HostCopy
    def say(saved):
        print("saved", saved.step, flush=True)
    root = Path(sys.argv[1])
    found = load_latest(root)
    step = 0 if found is None else found.step
    print("at", step, flush=True)
    w, writer = torch.zeros(300, 300), CheckpointWriter(root, on_saved=say)
    while True:
        step += 1
        parts = {"weights": {"w": w.fill_(step)}, "state": {"n": step}}
        writer.begin(step, HostCopy()(parts), None, keep=2, beside=sys.argv[2] == "beside")
        writer.commit({"n": step})
        if step % 3 == 0:  # a step saved twice, as on a SIGTERM right after a checkpoint
            writer.wait()
            save_checkpoint(root, step, parts, {"n": step}, keep_last=2)
"""


@pytest.mark.parametrize("how", ["beside", "between"])
def test_kill_9_at_any_moment_loses_at_most_the_step_being_written(how, tmp_path):
    moments = random.Random(0)
    newest = 0
    with subprocess.Popen(  # one interpreter that forks writers: importing torch takes seconds
        [
            sys.executable,
            "-c",
            textwrap.dedent(FORKING),
            str(tmp_path),
            textwrap.dedent(WRITER),
            how,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        for _ in range(20):
            parent.stdin.write(f"{moments.uniform(0.02, 0.3)}\n")
            parent.stdin.flush()
            saved = json.loads(parent.stdout.readline())
            found = load_latest(tmp_path)
            newest = max(newest, saved)
            for path in checkpoints(tmp_path):
                verify(path)
            assert found is not None or newest == 0
            if found is not None:
                assert found.step in (newest, newest + 1)
                assert found.skipped == ()
                assert found.parts["state"]["n"] == found.info["n"] == found.step
                assert bool((found.parts["weights"]["w"] == found.step).all())
                newest = found.step
        parent.stdin.close()
    assert newest >= 5, "too few were written for this to mean anything"


FORKING = """
    import json, os, signal, sys, time
    import proxpo.runs.checkpoint, proxpo.runs.writer, torch
    torch.set_num_threads(1)
    root, writer, how = sys.argv[1:]
    for line in sys.stdin:
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(w, 1)
            sys.argv = ["writer", root, how]
            exec(compile(writer, "writer", "exec"), {"__name__": "__main__"})
        os.close(w)
        reader = os.fdopen(r)
        first = reader.readline().split()
        time.sleep(float(line))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines = [text.split() for text in reader.read().splitlines()]
        print(json.dumps(int(([first] + [l for l in lines if len(l) == 2])[-1][1])), flush=True)
"""


def test_sigterm_sets_a_flag_and_a_second_one_ends():
    code = """
        import os, signal, sys, time
        from proxpo.runs.stop import stop_on_signal
        with stop_on_signal() as stop:
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested and stop.by == "SIGTERM"
            print("still here", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("still here\n", -signal.SIGTERM)


def test_a_block_that_does_not_end_is_ended_after_the_grace():
    asked = []

    def hang() -> None:
        with stop_on_signal(grace=0.05, may_end=lambda: asked.append(0) or len(asked) > 1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with pytest.raises(Overdue):
        hang()
    assert len(asked) == 2, "asked again a second later"
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal(signal.SIGTERM, signal.SIGUSR1) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)
        assert stop.by == "SIGUSR1"
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
