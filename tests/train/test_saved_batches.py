"""Batches that a run saves are those its losses saw."""

import pytest
import torch
from train.train_runs import job_of, sample

from proxpo.batch_file import BatchRecorder, load_batch, saved_steps
from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.inspection import inspect_batch
from proxpo.train.config import load_config
from proxpo.train.update import update

TWO = ["mini_batches=2", "updates_per_rollout=4", "train.lr=1e-3", "model.dtype=float64"]


def test_each_response_has_the_numbers_of_its_last_update(tmp_path):
    job, fields, seen = job_of(tmp_path, "method=grpo", *TWO), {}, []
    rollout = sample(job).experience
    rescored = BatchRecorder.see

    def watch(self, rows, now):
        seen.append((rows, now["logp"].clone()))
        rescored(self, rows, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchRecorder, "see", watch)
        update(job, rollout, on_batch=fields.update)
    job.close()
    logp = torch.zeros_like(fields["logp"])
    for rows, now in seen[2:]:  # the second pass over both mini-batches
        logp[rows, : now.shape[1]] = now
    assert torch.equal(fields["logp"][rollout.mask], logp[rollout.mask])
    assert not torch.equal(fields["logp"][rollout.mask], fields["old_logp"][rollout.mask])
    assert torch.equal(fields["mask"], rollout.mask)
    assert torch.equal(fields["rewards"], rollout.rewards)
    assert "advantages" not in fields  # another method computes its own


def test_a_saved_batch_has_the_loss_and_metrics_of_its_step(tmp_path):
    job = job_of(tmp_path, "method=grpo", "log.batch_every=1", "model.dtype=float64")
    job.waiting.append(sample(job).experience)
    metrics = job.update(job.waiting.pop())
    job.close()
    found = inspect_batch(job.learner.recipe, load_batch(saved_steps(tmp_path)[1]))
    assert found.loss == pytest.approx(metrics["loss"], abs=1e-12)
    assert found.metrics["trust/clipped"] == metrics["trust/clipped"]


def test_saving_changes_no_weight(tmp_path):
    ends = []
    for every in (0, 1):
        job = job_of(tmp_path / str(every), "method=grpo", *TWO, f"log.batch_every={every}")
        job.update(sample(job).experience)
        ends.append([p.detach().clone() for p in job.learner.trainable()])
        job.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_inspect_takes_a_step_of_a_run(tmp_path, capsys):
    job = job_of(tmp_path, "method=grpo", "log.batch_every=1")
    assert main(["inspect", "grpo", "--run", str(tmp_path)]) == 2
    assert "--set log.batch_every=N saves one every N steps" in capsys.readouterr().err
    job.update(sample(job).experience)
    job.step = 2
    job.update(sample(job).experience)
    assert main(["inspect", "grpo", "p3o", "--run", str(tmp_path), "--step", "3"]) == 0
    words = " ".join(capsys.readouterr().out.split())  # lines break where the folder's name ends
    assert ", step 3: 16 responses to 4 prompts" in words
    assert main(["inspect", "grpo", "--run", str(tmp_path), "--step", "2"]) == 2
    assert "no batch of step 2; there are those of 1, 3" in capsys.readouterr().err
    assert main(["inspect", "grpo", "--batch", "sample", "--step", "2"]) == 2
    assert main(["inspect", "grpo"]) == 2
    job.load(job.parts(), job.info())  # resumed after step 2, the third is made again
    job.close()
    assert list(saved_steps(tmp_path)) == [1]


def test_another_domain_refuses_it():
    with pytest.raises(ProxpoError, match=r"log\.batch_every.*language model"):
        load_config(None, ["log.batch_every=2", "task=gym:CartPole-v1"])
