"""A TRL that has moved is named at import, with what changed."""

import importlib
import sys

import pytest
from trl import GRPOConfig, GRPOTrainer

from proxpo.adapters.trl import api_changes, check_trl
from proxpo.adapters.trl._arguments import ARGUMENTS


def test_the_installed_trl_is_the_one_we_know():
    assert api_changes(GRPOTrainer, GRPOConfig, tuple(ARGUMENTS)) == []


def test_what_has_changed_is_named():
    class Moved(GRPOTrainer):
        loss_is_scaled_for_ga = False

        def _compute_loss(self, model, batch): ...

    Moved._prepare_inputs = None
    assert api_changes(Moved, GRPOConfig, ("epsilon", "gamma")) == [
        "GRPOTrainer._compute_loss(self, model, batch) was (self, model, inputs) before",
        "GRPOTrainer._prepare_inputs is gone",
        "GRPOTrainer no longer scales its loss for accumulation by itself",
        "GRPOConfig.gamma is gone",
    ]


def test_import_of_a_moved_trl(monkeypatch):
    class Moved:
        loss_is_scaled_for_ga = True

    monkeypatch.setattr("trl.GRPOTrainer", Moved)
    monkeypatch.delitem(sys.modules, "proxpo.adapters.trl")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("proxpo.adapters.trl")
    line = str(caught.value)
    assert line.startswith("proxpo.adapters.trl is written for trl 1.15 or 1.16; in trl 1.1")
    assert "GRPOTrainer._compute_loss is gone" in line
    assert line.endswith("pip install 'trl==1.16.*'")


def test_a_trl_newer_than_the_tested_ones_is_told(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.99.0")
    line = r"trl 1\.99\.0 is newer than those it was tested with \(1\.15 or 1\.16\)"
    with pytest.warns(UserWarning, match=line):
        check_trl()


def test_import_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="which cannot be imported") as caught:
        check_trl()
    assert str(caught.value).endswith("pip install 'proxpo[trl]'")
