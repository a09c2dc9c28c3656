"""Runs that read other files under the same paths: no verdict, and the file is named."""

import json
from dataclasses import replace

import pytest
from made import compared, config, run_of, write_run

from proxpo.report.read_runs import read_run
from proxpo.train.sources import SOURCES


def six_runs(left, right):
    return [
        replace(run_of(name, seed, [0.5, end], config=config(name, seed, 1)), files=files)
        for name, ends, files in (
            ("grpo", (0.8, 0.81, 0.82), left),
            ("isopo", (0.6, 0.6, 0.6), right),
        )
        for seed, end in enumerate(ends)
    ]


def test_a_file_that_differs_is_named_also_beside_runs_without_a_record():
    name = "m3/model.safetensors"
    runs = six_runs({name: "12ab"}, {name: "34cd"})
    runs[0] = replace(runs[0], files={})  # of before the record
    found = compared(*runs)
    assert found.differing == (f"files.{name}: 12ab (grpo), 34cd (isopo)",)
    assert not found.pair("grpo", "isopo").winner


def test_seeds_of_one_arm_that_read_different_files_get_no_verdict():
    runs = six_runs({"a.jsonl": "12ab"}, {"a.jsonl": "12ab"})
    runs[1] = replace(runs[1], files={"a.jsonl": "34cd"})
    assert compared(*runs).differing == ("files.a.jsonl: 12ab (grpo, isopo), 34cd (grpo)",)


@pytest.mark.parametrize("right", [{"a.jsonl": "12ab"}, {}, {"b.jsonl": "34cd"}])
def test_equal_files_and_files_of_one_side_forbid_nothing(right):
    assert compared(*six_runs({"a.jsonl": "12ab"}, right)).pair("grpo", "isopo").winner == "grpo"


def test_the_record_of_a_run_is_read(tmp_path):
    write_run(tmp_path, config("grpo", 0, 1), [{"step": 0}])
    assert read_run(tmp_path).files == {}
    (tmp_path / SOURCES).write_text(json.dumps({"a.jsonl": "12ab"}))
    assert read_run(tmp_path).files == {"a.jsonl": "12ab"}
    (tmp_path / SOURCES).write_text("{")
    assert read_run(tmp_path).notes[0].endswith("sources.json is damaged and left out")
