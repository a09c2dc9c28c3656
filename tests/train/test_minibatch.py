"""The update on a mini-batch: whole, or cut into micro-batches."""

import pytest
import torch
from train.train_runs import job_of, options_of, sample

from proxpo.train.batch import TrainingBatch
from proxpo.train.minibatch import gradients
from proxpo.train.update import RolloutUpdates


@pytest.mark.long
@pytest.mark.parametrize(
    ("slug", "sets"),
    [
        ("dpo", ()),
        ("gtpo", ()),
        ("ppo", ("value.coef=0.5",)),
        ("st-ppo", ("critic=true", "variant=turn-ppo", "task=calculator")),
        ("isopo", ("p=0", "regularisers+=kl_to_ref")),
    ],
)
def test_micro_batches_give_the_metrics_and_the_gradient_of_the_whole(tmp_path, slug, sets) -> None:
    """Three rows at a time: every group of four is cut, and so is every pair of DPO."""
    job = job_of(tmp_path, "train.lr=1e-3", *sets, method=slug)
    learner, rows, found = job.learner, sample(job).experience, []
    rows.rewards.copy_(torch.arange(len(rows.rewards)) % 4)  # no two of a group alike
    with torch.no_grad():
        for p in learner.trainable():
            p.add_(0.02 * torch.randn_like(p))  # away from the policy that has sampled
    data = TrainingBatch(rows, RolloutUpdates(job, rows, path=("test",)).batch())
    for size in (99, 3):
        learner.optimizer.zero_grad()
        options = options_of(job, micro_batch=size)
        metrics, _ = gradients(learner, learner.recipe, data, options, seed=0)
        grads = [p.grad.flatten() for p in learner.trainable() if p.grad is not None]
        found.append((metrics, torch.cat(grads).clone()))
    job.close()
    (whole, gradient), (cut, pieces) = found
    assert cut.keys() == whole.keys()
    for name, value in whole.items():
        assert float(cut[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name
    torch.testing.assert_close(pieces, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
    assert gradient.abs().max() > 0
