"""Metric names of TRL and verl: every pair exists in the sources of its host."""

import inspect
import os
from pathlib import Path

import pytest
from trl.trainer import grpo_trainer

from proxpo.adapters.metrics import TRL_TO_VERL, VERL_TO_TRL, to_trl, to_verl
from proxpo.runs.sinks import public_name

# Logged by transformers' Trainer, whose `log` adds them to every row.
TRANSFORMERS = {"grad_norm", "learning_rate", "step", "step_time"}


def test_there_and_back_changes_nothing():
    metrics = {name: float(number) for number, name in enumerate(TRL_TO_VERL)}
    metrics |= {"proxpo/ratio/ess": 0.5, "rewards/accuracy/mean": 0.25, "loss": 3.0}
    there = to_verl(metrics)
    assert there["critic/score/mean"] == metrics["reward"]
    assert there["proxpo/ratio/ess"] == 0.5
    assert there["loss"] == 3.0
    assert to_trl(there) == metrics
    assert len(VERL_TO_TRL) == len(TRL_TO_VERL)


def test_a_metric_under_both_names_is_not_overwritten():
    both = {"reward": 1.0, "critic/score/mean": 2.0}
    assert to_verl(both) == to_trl(both) == both


@pytest.mark.parametrize("name", sorted(set(TRL_TO_VERL) - TRANSFORMERS))
def test_trl_logs_the_metric(name):
    assert f'["{name}"]' in inspect.getsource(grpo_trainer)


def test_verl_logs_the_metrics():
    python = os.environ.get("PROXPO_VERL_PYTHON")
    if not python:
        pytest.fail("set PROXPO_VERL_PYTHON to an environment made with requirements/verl.txt")
    (verl,) = Path(python).parents[1].glob("lib/python*/site-packages/verl")
    folders = ("trainer", "workers", "utils")
    files = [path for folder in folders for path in (verl / folder).rglob("*.py")]
    text = "".join(path.read_text() for path in files)
    for name in TRL_TO_VERL.values():
        prefix, _, last = name.partition("/")
        # What the actor and the timers report gets its prefix later.
        plain = prefix in ("actor", "timing_s") and f'"{last}"' in text
        assert plain or f'"{name}"' in text, name


def test_our_own_names_are_trls():
    assert {public_name(name) for name in TRL_TO_VERL} - set(TRL_TO_VERL) == {"proxpo/policy_loss"}
    assert to_verl({public_name("trust/clipped"): 0.1}) == {"actor/pg_clipfrac": 0.1}
