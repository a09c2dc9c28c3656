"""Fuzzed configs and damaged run files: used rightly or refused in one line, never in between."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from train.train_runs import job_of

from proxpo.errors import ProxpoError
from proxpo.runs.checkpoint import load_latest, save_checkpoint
from proxpo.runs.jsonlines import JsonLines, missing_steps
from proxpo.train.config import Config, as_dict, build_config, explain, load_config, to_yaml
from proxpo.train.language import RESERVED
from proxpo.train.resume import own_config

PATHS = [one.path for one in explain()]
WORDS = (
    "",
    "none",
    "nan",
    "1e5",
    "adamw",
    "grpo",
    "tiny",
    "wandb",
    "../x",
    "a\nb",
    "\0",
    "é",
    "x" * 5000,
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, -1, 0, 1 << 20]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "r", "lr", "p", "clip_high"]), inner, max_size=3),
        st.dictionaries(scalars, inner, max_size=2),
    ),
    max_leaves=5,
)
names = st.one_of(
    st.sampled_from(PATHS),
    st.sampled_from(
        ["lr", "model", "train", "ratio", "recipe.ratio", "filter+", "p", "every", "."]
    ),
    st.builds("{}.{}".format, st.sampled_from(PATHS), st.sampled_from(["r", "x.y", "", "0"])),
    st.text(max_size=6),
)
pairs = st.lists(st.tuples(names, values), min_size=1, max_size=3)


def one_line(error: ProxpoError) -> bool:
    return "\n" not in str(error) and len(str(error)) < 2000


def nested(entries: list) -> dict:
    """Entries of an override list as the nested blocks of a file."""
    tree: dict = {}
    for name, value in entries:
        *blocks, last = name.split(".") if isinstance(name, str) else [name]
        inner = tree
        for block in blocks:
            inner = inner.setdefault(block, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[last] = value
    return tree


def holds(config: Config) -> None:
    """A config that was accepted is within its types and comes back from its file."""
    assert build_config(as_dict(config)) == config
    assert build_config(yaml.safe_load(to_yaml(config))) == config
    numbers = [v for section in as_dict(config).values() if isinstance(section, dict)
               for v in section.values() if isinstance(v, (int, float))]  # fmt: skip
    assert all(math.isfinite(number) for number in numbers)
    assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt <= 1 << 20
    assert config.evaluate.size * config.evaluate.k <= 1 << 20


@given(pairs)
@settings(max_examples=150)
def test_fuzzed_settings_load_or_are_refused(entries):
    try:
        config = load_config(sets=entries)
    except ProxpoError as error:
        assert one_line(error), error  # noqa: PT017
        return
    holds(config)


@given(pairs, st.booleans())
@settings(max_examples=100)
def test_fuzzed_config_files_load_or_are_refused(tmp_path_factory, entries, blocks):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(yaml.dump(nested(entries) if blocks else dict(entries)))
    try:
        config = load_config(path)
    except ProxpoError as error:
        assert one_line(error), error  # noqa: PT017
        return
    holds(config)


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
@settings(max_examples=50)
def test_config_files_of_noise_load_or_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "noise.yaml"
    path.write_bytes(content)
    try:
        holds(load_config(path))
    except ProxpoError as error:
        assert one_line(error), error  # noqa: PT017


TEXTS = {
    "nested deep": "recipe: " + "[" * 5000,
    "an alias of itself": "recipe: &a {x: *a}",
    "aliases that double": "".join(
        ["recipe:\n  a0: &a0 [1, 1]\n"]
        + [f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)]
    ),
    "a long integer": f"seed: {'9' * 9000}",
    "a date": "recipe: {p: 2020-01-01}",
    "binary": "task: {options: {x: !!binary aGk=}}",
    "a set": "recipe: !!set {a, b}",
    "a null key": "train: {~: 1}",
    "a list as key": "? [1, 2]\n: 3",
    "merge": "a: &a {lr: 1}\ntrain:\n  <<: *a",
    "two documents": "seed: 1\n---\nseed: 2",
}


@pytest.mark.parametrize("case", TEXTS)
def test_hostile_yaml_is_refused_in_one_line(case, tmp_path):
    (tmp_path / "run.yaml").write_text(TEXTS[case])
    with pytest.raises(ProxpoError) as caught:
        load_config(tmp_path / "run.yaml")
    assert one_line(caught.value)


BLOCKS = {
    "model.device": ("meta", "mps", "cuda:99", "xyz", "cpu:7", ""),
    "model.name": ("", "x" * 5000, "a/b/c/d", "."),
    "model.lora": ({"r": 0}, {"r": "x"}, {"target_modules": 3}, {"bias": "z"}, {"r": None}),
    "rollout.options": ({"max_rows": "x"}, {"max_rows": 1.5}, {"max_rows": None}, {"lean": 3}),
    "task.options": ({"digits": 10**6}, {"held_out": 10**12}, {"held_out": 1.5}, {"level": 3}),
    "task.reward": ("", ":", "x.py", "x.py:", ":y", "x" * 5000),
    "task.name": ("", ":", "gsm8k:/nowhere", "x.jsonl", "/"),
    "log.sinks": ([3], ["wandbb"], [[]]),
    "train.optimizer_options": ({"betas": 3}, {"params": 1}, {"": 1}),
}


@pytest.mark.long
@pytest.mark.parametrize("path", BLOCKS)
def test_options_that_cannot_be_are_refused_before_a_job_is_built(path, tmp_path):
    taken = [{name: 1} for name in RESERVED.get(path, ())]
    for value in (*BLOCKS[path], *taken):
        with pytest.raises(ProxpoError) as caught:
            job_of(tmp_path, (path, value), method="grpo")
        assert one_line(caught.value), (value, caught.value)
        if value in taken:
            assert f"{path} takes no '{next(iter(value))}': it is the setting" in str(caught.value)


# Checkpoints ---------------------------------------------------------------------------------


def parts_of(step: int) -> dict:
    weights = {"w": torch.full((4, 3), float(step)), "v": torch.arange(5) * step}
    return {"weights": weights, "state": {"ema": [step / 3, {"n": step}]}}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        config = as_dict(load_config(sets=[("seed", step)]))
        save_checkpoint(root, step, parts_of(step), {"config": config, "before": {"x": step}})
    return root


FILES = ("manifest.json", "info.json", "weights.safetensors", "weights.json", "state.json")
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 10**20), st.floats(), st.text(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
damage = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 5000), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 5000), st.just(0)),
    st.tuples(st.just("grow"), st.just(0), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("node"), st.integers(0, 60), json_values),
    st.tuples(st.just("delete node"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("rewrite"), st.just(0), json_values),
    st.tuples(st.just("deep"), st.integers(1, 20000), st.just(0)),
    st.tuples(st.just("remove"), st.just(0), st.just(0)),
    st.tuples(st.just("folder"), st.just(0), st.just(0)),
    st.tuples(st.just("other step's"), st.just(0), st.just(0)),
)


def places(tree) -> list:
    """(container, key) of every value inside a JSON tree."""
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    )
    return [place for key in keys for place in [(tree, key), *places(tree[key])]]


def damaged(path: Path, kind: str, where: int, what) -> None:
    content = path.read_bytes() if path.is_file() else b""
    if kind == "flip" and content:
        raw = bytearray(content)
        raw[where % len(raw)] ^= what
        path.write_bytes(raw)
    elif kind == "cut" and path.is_file():
        path.write_bytes(content[: where % (len(content) or 1)])
    elif kind == "grow" and path.is_file():
        path.write_bytes(content + what)
    elif kind in ("node", "delete node") and path.suffix == ".json" and content:
        _edit(path, content, where, what, delete=kind == "delete node")
    elif kind == "rewrite" and path.is_file():
        path.write_text(json.dumps(what))
    elif kind == "deep" and path.is_file():
        path.write_text("[" * where)
    elif kind == "other step's" and path.is_file():
        shutil.copyfile(path.parents[1] / "step-1" / path.name, path)
    elif path.is_file():
        path.unlink()
        if kind == "folder":
            path.mkdir()


def _edit(path: Path, content: bytes, where: int, what, *, delete: bool) -> None:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # damaged by the step before
        return
    found = places(tree)
    if found:
        container, key = found[where % len(found)]
        if delete:
            del container[key]
        else:
            container[key] = what
        path.write_text(json.dumps(tree))


@given(st.lists(st.tuples(st.sampled_from(FILES), damage), min_size=1, max_size=2))
@settings(max_examples=200)
def test_a_damaged_checkpoint_is_whole_or_passed_over(saved, tmp_path_factory, damages):
    """The state that comes back is one that was saved, to the bit."""
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(saved, root, dirs_exist_ok=True)
    for file, (kind, where, what) in damages:
        damaged(root / "step-2" / file, kind, where, what)
    checkpoint = load_latest(root)
    assert checkpoint.step == int(checkpoint.info["before"]["x"])
    assert same(checkpoint.parts, parts_of(checkpoint.step))
    assert build_config(checkpoint.info["config"]).seed == checkpoint.step
    assert len(checkpoint.skipped) == (checkpoint.step == 1)
    assert all("\n" not in line for line in checkpoint.skipped)
    shutil.rmtree(root / "step-1")
    if checkpoint.step == 1:
        with pytest.raises(ProxpoError) as caught:
            load_latest(root)
        assert one_line(caught.value)
    shutil.rmtree(root)


def test_an_unreadable_config_is_written_from_an_intact_checkpoint_alone(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    (tmp_path / "checkpoints/step-2/info.json").write_text("[" * 90_000)
    (tmp_path / "config.yaml").write_text("recipe: " + "[" * 5000)
    notes: list[str] = []
    own_config(None, {"out": str(tmp_path)}, on_notice=notes.append)
    assert load_config(tmp_path / "config.yaml").seed == 1
    [note] = notes
    assert note.endswith("written anew from step-1")
    assert "\n" not in note


# Metrics -------------------------------------------------------------------------------------

lines = st.one_of(
    st.binary(max_size=12),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda step, x: json.dumps({"step": step, "x": x}).encode(), json_values, json_values
    ),
    st.integers(1, 9000).map(lambda n: b"[" * n),
)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 9), lines),
        st.tuples(st.just("delete"), st.integers(0, 9), st.just(b"")),
        st.tuples(st.just("double"), st.integers(0, 9), st.just(b"")),
        st.tuples(st.just("cut"), st.integers(0, 9), st.just(b"")),
    ),
    min_size=1,
    max_size=4,
)


@given(edits, st.integers(0, 8), st.booleans())
@settings(max_examples=100)
def test_damaged_metrics_keep_what_they_can_and_name_the_rest(
    tmp_path_factory, edits, resume_at, newline
):
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    rows = [json.dumps({"step": step, "x": step * 2}).encode() for step in range(9)]
    for kind, where, what in edits:
        number = where % (len(rows) or 1)
        if kind == "insert":
            rows.insert(number, what)
        elif rows and kind == "delete":
            del rows[number]
        elif rows and kind == "double":
            rows.insert(0, rows[number])
        elif rows:
            rows[number] = rows[number][: len(rows[number]) // 2]
    path.write_bytes(b"\n".join(rows) + b"\n" * newline)
    notes: list[str] = []
    JsonLines(path, resume_at=resume_at, each_step=True, on_notice=notes.append).close()
    kept = [json.loads(line) for line in path.read_bytes().splitlines()]
    steps = [row["step"] for row in kept]
    assert steps == sorted(set(steps))
    assert all(0 <= step <= resume_at for step in steps)
    # A whole row may stand anywhere; what was written for a step and is still whole is kept.
    whole = {step for step in range(resume_at + 1) for row in rows if row in (_row(step),)}
    assert whole <= set(steps)
    gap = missing_steps(kept, resume_at)
    assert any(f"has no row of step {gap}:" in note for note in notes) == bool(gap)
    assert all("\n" not in note for note in notes)


def _row(step: int) -> bytes:
    return json.dumps({"step": step, "x": step * 2}).encode()
