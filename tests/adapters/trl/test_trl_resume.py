"""Save, kill, resume: the same losses and weights, with what the recipe remembers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl.trainer.utils import RepeatSampler
from trl_killed import RECIPE, RUN
from trl_runs import losses, seen, trainer

from proxpo.adapters.trl import ProxpoTrainer
from proxpo.adapters.trl._checkpoint import read_memory
from proxpo.adapters.trl._sampler import EpochSampler
from proxpo.errors import ProxpoError

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("killed")
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_killed.py"), str(out)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return out / "checkpoint-4"


def run_of(out: Path, **changes):
    slug, options = RECIPE
    return trainer(out, slug, options=options, **{**RUN, **changes})


def test_a_killed_run_goes_on_where_it_was(killed, tmp_path):
    whole = run_of(tmp_path, save_strategy="no")
    whole.train()
    resumed = run_of(killed.parent)
    resumed.train(resume_from_checkpoint=str(killed))
    assert len(losses(resumed)) == 8
    assert losses(resumed) == losses(whole)
    assert seen(whole, "epoch")[3] > 1
    assert seen(resumed, "proxpo/reward/kl_coef") == seen(whole, "proxpo/reward/kl_coef")
    assert len(set(seen(whole, "proxpo/reward/kl_coef"))) > 2  # it did adapt
    for one, other in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(one, other)
    mine, theirs = resumed._transform.state_dict(), whole._transform.state_dict()
    assert mine == theirs
    assert theirs["steps"] == 8


@pytest.mark.parametrize("shuffle", [True, False])
def test_orders_of_epochs(shuffle):
    """They are TRL's, and a run that begins in a later epoch finds the one of that epoch."""

    def sampler() -> RepeatSampler:
        given = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2}
        return RepeatSampler(range(7), shuffle=shuffle, seed=5, **given)

    one = sampler()
    want = [list(one) for _ in range(3)]
    for epoch in (0, 1, 2):
        order = EpochSampler(sampler(), lambda epoch=epoch: epoch)
        assert list(order) == list(order) == want[epoch]
        assert len(order) == len(want[epoch])
    assert (want[0] != want[1]) == shuffle


class Interrupted(ProxpoTrainer):
    """A trainer that is interrupted once, before its micro-batch number `at`."""

    at = -1

    def _compute_loss(self, model, inputs):
        if self._step == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return super()._compute_loss(model, inputs)


def test_a_run_interrupted_in_a_notebook_goes_on_in_the_same_trainer(tmp_path):
    """Half an optimizer step was done: the resumed run makes it whole, from a new rollout."""
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3}
    given = {**cut, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    given["options"] = {"overlap": "all", "p": -1.0, "q": -1.0, "reg": 1.0}
    whole = trainer(tmp_path / "a", "isopo", kind=Interrupted, **given)
    whole.train()
    halted = trainer(tmp_path / "b", "isopo", kind=Interrupted, **given)
    halted.at = 6
    with pytest.raises(KeyboardInterrupt):
        halted.train()
    halted.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))
    assert losses(halted) == losses(whole)
    for one, other in zip(halted.model.parameters(), whole.model.parameters()):
        assert torch.equal(one, other)
    assert halted._transform.state_dict() == whole._transform.state_dict()


def test_memory_matters(killed, tmp_path):
    """Without the transform's averages the resumed run would be another one."""
    copy = Path(shutil.copytree(killed, tmp_path / "checkpoint-4"))
    right, wrong = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    wrong._load_optimizer_and_scheduler = super(
        type(wrong), wrong
    )._load_optimizer_and_scheduler  # TRL's own, which knows nothing of recipes
    for run in (right, wrong):
        run.args.max_steps, run.args.save_strategy = 6, "no"
        run.train(resume_from_checkpoint=str(copy))
    assert losses(right)[5] != losses(wrong)[5]


def test_resuming_from_a_stranger(killed, tmp_path):
    other = trainer(tmp_path, "grpo")
    with pytest.raises(ProxpoError, match="was saved by recipe rloo, this is grpo"):
        read_memory(killed, other.recipe, None)
    bare = Path(shutil.copytree(killed, tmp_path / "bare"))
    (bare / "proxpo_recipe.json").unlink()
    with pytest.raises(ProxpoError, match="the recipe's state is missing"):
        run_of(tmp_path / "c").train(resume_from_checkpoint=str(bare))


def test_a_synced_reference_model_is_resumed(tmp_path):
    """TRL saves no reference model; one that follows the policy would begin anew."""
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    kept = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    given = {**synced, **kept, "options": {"kl_coef": 0.3}, "max_steps": 4}
    whole = trainer(tmp_path, "grpo", **given)
    whole.train()
    resumed = trainer(tmp_path, "grpo", **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen(resumed, "kl") == seen(whole, "kl")
    assert seen(whole, "kl")[3] > 0
    for one, other in zip(resumed.ref_model.parameters(), whole.ref_model.parameters()):
        assert torch.equal(one, other)
    (tmp_path / "checkpoint-2" / "proxpo_reference.safetensors").unlink()
    with pytest.raises(ProxpoError, match="sync_ref_model=True: the reference model is missing"):
        trainer(tmp_path, "grpo", **given).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )
