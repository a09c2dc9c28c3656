"""Batch files: what is written is what is read, and every mistake is named with its place."""

import json
import math
import runpy
import struct
from pathlib import Path

import pytest
import torch

from proxpo.batch_file import SAMPLE, load_batch, read_batch, save_batch
from proxpo.errors import ProxpoError
from proxpo.types import FIELDS

ROOT = Path(__file__).parent.parent


def small(**changes):
    """Two responses of three tokens as JSON data; None in `changes` removes a field."""
    data = {
        "logp": [[-0.1, -0.2, -0.3], [-0.4, -0.5, None]],
        "old_logp": [[-0.1, -0.1, -0.1], [-0.4, -0.4, math.nan]],
        "mask": [[1, 1, 1], [1, 1, 0]],
        "rewards": [1, None],
        "group": ["sum", "sum"],
    }
    data.update(changes)
    return {name: value for name, value in data.items() if value != "gone"}


@pytest.fixture
def write(tmp_path):
    def write(data, name="batch.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write


def refusal(path):
    with pytest.raises(ProxpoError) as caught:
        load_batch(path)
    message = str(caught.value)
    assert message.startswith(f"batch {path}: ")
    assert "\n" not in message
    return message


def test_json_becomes_float64_with_missing_rewards_and_numbered_text(write):
    file = read_batch(write(small(tokens=[["a", "b", "a"], ["b", "c", None]])))
    batch = file.batch
    assert batch.logp.dtype == torch.float64
    assert batch.mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.rewards[0] == 1
    assert batch.rewards[1].isnan()
    assert batch.group.tolist() == [0, 0]
    assert file.text["group"] == ["sum"]
    assert batch.tokens.tolist() == [[0, 1, 0], [1, 2, 0]]
    assert file.text["tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_saved_batches_come_back(tmp_path, suffix):
    batch = load_batch("sample")
    path = tmp_path / f"batch{suffix}"
    save_batch(batch, path)
    again = load_batch(path)
    assert [name for name, _ in again.items()] == [name for name, _ in batch.items()]
    for name, value in batch.items():
        assert torch.equal(getattr(again, name), value), name
    assert list(tmp_path.iterdir()) == [path]  # no half-written file stays behind


def test_impossible_tokens_come_back_or_are_refused(tmp_path):
    batch = load_batch("sample")
    vocab = torch.full((*batch.logp.shape, 3), -1.0, dtype=torch.float64)
    vocab[0, 0, 1] = -torch.inf
    batch = batch.replace(vocab_logp=vocab)
    save_batch(batch, tmp_path / "batch.safetensors")
    assert torch.equal(load_batch(tmp_path / "batch.safetensors").vocab_logp, vocab)
    with pytest.raises(ProxpoError, match=r"vocab_logp holds -∞, .* save it as \.safetensors"):
        save_batch(batch, tmp_path / "batch.json")
    assert not (tmp_path / "batch.json").exists()


def test_saving_in_another_format_is_refused(tmp_path):
    with pytest.raises(ProxpoError, match=r"\.json or \.safetensors"):
        save_batch(load_batch("sample"), tmp_path / "batch.pt")
    assert not list(tmp_path.iterdir())


def test_advantages_may_be_per_response_or_per_token(write):
    assert load_batch(write(small(advantages=[1, -1]))).advantages.shape == (2,)
    assert load_batch(write(small(advantages=[[1, 2, 3], [4, 5, 6]]))).advantages.shape == (2, 3)


def test_every_batch_field_can_be_read(write):
    """One file with all fields: a field added to Batch must be given a shape here too."""
    rows, tokens = 2, 3
    data = {}
    for name in FIELDS:
        sizes = {"seq": rows, "tok": tokens, "[tok]": tokens}
        value = 1
        for axis in reversed(FIELDS[name].axes.split()):
            value = [value] * sizes.get(axis, 2)
        data[name] = value
    batch = load_batch(write(data))  # Batch's own annotations check shapes and dtypes
    assert {name for name, _ in batch.items()} == set(FIELDS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logp": "gone"}, "field 'logp' is missing"),
        ({"mask": "gone"}, "field 'mask' is missing"),
        ({"old_lopg": [[0.0] * 3] * 2}, "unknown field 'old_lopg'; did you mean 'old_logp'?"),
        ({"logp": [[-0.1, -0.2], [-0.4, -0.5, 0.0]]}, "row 1 has 3 values, row 0 has 2 values"),
        ({"logp": []}, "the batch is empty"),
        ({"logp": [[], []]}, "the batch is empty"),
        ({"logp": [0.1, 0.2]}, "logp is a list of 2, expected responses x tokens"),
        ({"logp": 3}, "logp is the number 3, expected a list"),
        ({"logp": [[-0.1, "x", 0], [0, 0, 0]]}, "logp[0][1] is text, expected a number"),
        ({"logp": [[-0.1, 0, 0], 7]}, "logp[1] is the number 7, expected a list"),
        ({"old_logp": [[0.0, 0.0]] * 2}, "old_logp is 2 x 2, expected 2 x 3"),
        ({"rewards": [1, 2, 3]}, "rewards is a list of 3, expected a list of 2"),
        ({"vocab_logp": [[0.0] * 3] * 2}, "vocab_logp is 2 x 3, expected 2 x 3 x vocabulary"),
        ({"advantages": [1]}, "advantages is a list of 1, expected 2 x 3 or a list of 2"),
        ({"mask": [[1, 1, 0.5], [1, 1, 0]]}, "mask at row 0, column 2 (counted from 0) is 0.5"),
        ({"mask": [[1, 1, None], [1, 1, 0]]}, "expected 0 or 1"),
        (
            {"logp": [[-0.1, math.nan, 0], [0, 0, 0]]},
            "logp at row 0, column 1 (counted from 0) is null or NaN, expected a finite number",
        ),
        ({"old_logp": [[0, 0, 0], [0, -math.inf, 0]]}, "old_logp at row 1, column 1"),
        ({"advantages": [math.nan, 0]}, "advantages at row 0"),
        ({"rewards": [math.inf, 0]}, "rewards at row 0"),
        ({"group": [0, None]}, "group at row 1 (counted from 0) is null or NaN"),
        ({"group": [0, 0.5]}, "is 0.5, expected an integer"),
        ({"truncated": [0, 2]}, "truncated at row 1"),
        ({"rewards": [10**400, 0]}, "too large"),
    ],
)
def test_mistakes_are_named(write, changes, expected):
    assert expected in refusal(write(small(**changes)))


def test_a_field_given_twice_is_refused(write):
    assert "'mask' is given twice" in refusal(write('{"mask": [[1]], "mask": [[1]]}'))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a batch"),
        ("[1, 2]", "not a batch"),
        ("{not json", "not valid JSON"),
        ('{"logp": ' + "[" * 100_000, "nested too deeply"),
        ('{"logp": [[' + "9" * 5000 + "]]}", "not valid JSON"),
    ],
)
def test_what_is_not_json_is_refused(write, text, expected):
    assert expected in refusal(write(text))


def test_odd_paths_are_refused(tmp_path, write):
    (tmp_path / "folder.json").mkdir()
    assert "is a directory" in refusal(tmp_path / "folder.json")
    assert "proxpo.save_batch(proxpo.Batch(...), FILE) writes one" in refusal(write("", "b.npz"))
    with pytest.raises(FileNotFoundError):
        load_batch(tmp_path / "none.json")


def two_gigabytes(path, start=b""):
    with path.open("wb") as file:
        file.write(start)
        file.truncate(2 * 2**30)  # sparse: takes no space
    return path


@pytest.mark.parametrize("name", ["batch.json", "batch.safetensors"])
def test_two_gigabytes_of_nonsense_are_not_read(tmp_path, monkeypatch, name):
    path = two_gigabytes(tmp_path / name, b"nonsense")
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("read the whole file"))
    message = refusal(path)
    assert "2048 MiB of JSON, the limit is 256 MiB" in message or "not a safetensors" in message


def test_broken_safetensors_are_refused(tmp_path):
    path = tmp_path / "batch.safetensors"
    path.write_bytes(struct.pack("<Q", 5) + b"{abc}")
    assert "not a safetensors file" in refusal(path)
    path.write_bytes(b"")
    assert "not a safetensors file" in refusal(path)


def test_safetensors_are_checked_like_json(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "batch.safetensors"
    save_file({"logp": torch.zeros(2, 3), "mask": torch.full((2, 3), 2)}, path)
    assert "mask at row 0, column 0 (counted from 0) is 2, expected 0 or 1" in refusal(path)
    save_file({"logp": torch.zeros(2, 3), "mask": torch.ones(2, 3), "group": torch.ones(())}, path)
    assert "group is a single number, expected a list of 2" in refusal(path)
    mask = torch.ones(2, 3, dtype=torch.uint8)
    save_file({"logp": torch.zeros(2, 3, dtype=torch.bfloat16), "mask": mask}, path)
    assert load_batch(path).logp.dtype == torch.float64


def test_values_at_masked_positions_do_not_matter(write):
    changed = small(logp=[[-0.1, -0.2, -0.3], [-0.4, -0.5, math.inf]])
    assert load_batch(write(changed)).logp[0].tolist() == [-0.1, -0.2, -0.3]


def test_sample_is_what_its_script_makes():
    script = runpy.run_path(str(ROOT / "scripts" / "make_sample_batch.py"))
    assert SAMPLE.read_text(encoding="utf-8") == script["render"]()
