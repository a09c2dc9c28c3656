"""YAML is read by one set of rules, whatever the file holds."""

import pytest

from proxpo.cli.named import read_method_file
from proxpo.compare.studies import read_study
from proxpo.errors import ProxpoError
from proxpo.runs.yaml_file import dump_yaml, read_yaml
from proxpo.train.config import load_config

NUMBERS = {"1e-6": 1e-6, "1E5": 1e5, "-2.e+3": -2e3, ".5e1": 5.0, "1.5": 1.5, "7": 7, "1_000": 1000}
TEXTS = ("1e", "e5", "0x1g", "1e5x", "grpo", "1.2.3")


@pytest.mark.parametrize("text", [*NUMBERS, *TEXTS])
def test_numbers(text, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"value: {text}\nlist: [{text}]\n")
    value = NUMBERS.get(text, text)
    assert read_yaml(path) == {"value": value, "list": [value]}
    path.write_text(dump_yaml({"value": value, "text": text}))
    assert read_yaml(path) == {"value": value, "text": text}


def test_every_file_has_the_same_numbers(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("method: grpo\nrecipe: {clip_high: 1e-1}\n")
    assert load_config(path).recipe["clip_high"] == 0.1
    path.write_text("method: grpo\nclip_high: 1e-1\nratio: {name: kalman, q: '1e-6'}\n")
    assert read_method_file(path) == (
        "grpo",
        {"clip_high": 0.1, "ratio": {"name": "kalman", "q": 1e-6}},
    )
    path.write_text("arms: [{method: grpo}]\nsweep: {lr: [1e-6, 3e-6]}\n")
    assert read_study(str(path)).sweep == {"lr": (1e-6, 3e-6)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"a\.yaml:2: 'a' is given twice"),
        ("- a", "expected settings as 'name: value' lines"),
        ("1: a", "expected settings as 'name: value' lines"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("a: 0x" + "f" * 17, "number of too many digits"),
        ("a: [", r"a\.yaml:1: "),
    ],
)
def test_refusals(text, message, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ProxpoError, match=message):
        read_yaml(path)


def test_a_value_that_stands_twice_is_written_twice(tmp_path):
    shared = [1, 2]
    assert "&" not in dump_yaml({"a": shared, "b": shared})
