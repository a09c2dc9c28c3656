"""A TRL that has moved is named at import, with what changed."""

import subprocess
import sys

from trl import GRPOConfig, GRPOTrainer

from proxpo.adapters.trl import changes
from proxpo.adapters.trl._fit import DECIDED


def test_the_installed_trl_is_the_one_we_know():
    assert changes(GRPOTrainer, GRPOConfig, tuple(DECIDED)) == []


def test_what_has_changed_is_named():
    class Moved(GRPOTrainer):
        loss_is_scaled_for_ga = False

        def _compute_loss(self, model, batch): ...

    Moved._prepare_inputs = None
    assert changes(Moved, GRPOConfig, ("epsilon", "gamma")) == [
        "GRPOTrainer._compute_loss(self, model, batch) was (self, model, inputs) before",
        "GRPOTrainer._prepare_inputs is gone",
        "GRPOTrainer no longer scales its loss for accumulation by itself",
        "GRPOConfig.gamma is gone",
    ]


MOVED = """
import trl
class Moved:
    loss_is_scaled_for_ga = True
trl.GRPOTrainer = Moved
try:
    import proxpo.adapters.trl
except ImportError as error:
    print(error)
"""
ABSENT = "import sys; sys.modules['trl'] = None\n" + MOVED.partition("trl.GRPOTrainer = Moved\n")[2]


def said(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout


def test_import_of_a_moved_trl():
    line = said(MOVED)
    assert line.startswith("proxpo.adapters.trl is written for trl 1.16.*; in trl 1.16")
    assert "GRPOTrainer._compute_loss is gone" in line
    assert line.endswith("pip install 'trl==1.16.*'\n")


def test_import_without_trl():
    assert said(ABSENT).startswith("proxpo.adapters.trl needs trl 1.16.*, which cannot be imported")
