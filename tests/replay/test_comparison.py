"""The gradients of the first recording beside those of the model's own modules."""

import pytest
import torch
from recorder import record
from torch.testing import assert_close
from train.test_cuts import trained
from train.train_runs import job_of, options_of, sample

import proxpo.replay.graphs as graphs_module
import proxpo.train.update as update_module
from proxpo import gradients
from proxpo.errors import ProxpoError
from proxpo.replay.graphs import PolicyGraphs
from proxpo.train.minibatch import gradients as mini_batch
from proxpo.types import MOST_SKIPPED

TRANSFORMS = {
    "none": ("grpo", lambda: None),
    "head": ("isopo", lambda: gradients.isopo(scope="head")),
    "layer": ("isopo", lambda: gradients.isopo(overlap=8)),
    "ntk": ("isopo-ntk", gradients.isopo_ntk),
}


def spoilt(name, change):
    """A function of recorded passes whose log-probabilities have another gradient."""
    real = getattr(graphs_module, name)

    def run(*args, **options):
        logp, *rest = real(*args, **options)
        return [change(logp), *rest]

    return run


def spoil(monkeypatch, change) -> None:
    for name in ("prompts_once", "rows_alone", "whole_rows"):
        monkeypatch.setattr(graphs_module, name, spoilt(name, change))


class _NotANumber(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


def made(tmp_path, name: str):
    job = job_of(tmp_path, method=TRANSFORMS[name][0])
    with_graphs(job, name)
    return job


def with_graphs(job, name: str) -> None:
    job.learner.transform = TRANSFORMS[name][1]()
    job.learner.graphs = PolicyGraphs(job.policy, transform=job.learner.transform, record=record)


def update(job, data):
    learner = job.learner
    learner.optimizer.zero_grad()
    metrics, _ = mini_batch(learner, learner.recipe, data, options_of(job, micro_batch=8), seed=0)
    if learner.transform is not None:
        learner.transform.step()
    return metrics, [p.grad.clone() for p in learner.trainable()]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_equal_gradients_stay_recorded_and_are_compared_once(name, tmp_path, recwarn):
    job = made(tmp_path, name)
    graphs, data = job.learner.graphs, trained(job)
    update(job, data)
    assert job.learner.graphs is graphs
    assert graphs.compared
    assert any(run.recorded for run in graphs._runs.values())
    passes = graphs.passes
    update(job, data)
    assert graphs.passes - passes == 2  # of 16 rows: no further pass
    assert not recwarn.list
    job.close()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * 1.5 - (0.5 * x).detach(), "differ from unrecorded ones, by 4.% at "),
        (_NotANumber.apply, r"micro-batch is not finite from \S+ back if recorded"),
    ],
    ids=["scaled", "nan"],
)
def test_other_gradients_leave_the_run_unrecorded(name, change, said, tmp_path, monkeypatch):
    job = made(tmp_path, name)
    data, job.learner.graphs = trained(job), None
    expected = update(job, data)
    with_graphs(job, name)
    spoil(monkeypatch, change)
    with pytest.warns(UserWarning, match=f"train.graphs: passes run unrecorded .*{said}") as told:
        result = update(job, data)
    assert len(told) == 1
    assert job.learner.graphs is None
    assert_close(result, expected, rtol=1e-5, atol=1e-7)
    job.close()


def test_a_difference_in_one_parameter_is_seen(tmp_path, monkeypatch):
    """Its gradient is a small part of the whole one."""
    job = made(tmp_path, "none")
    weight = job.policy.model.model.layers[0].self_attn.q_proj.weight
    real = graphs_module.PolicyPass._backward

    def backward(run):
        real(run)
        weight.grad.mul_(torch.nan)

    monkeypatch.setattr(graphs_module.PolicyPass, "_backward", backward)
    said = r"not finite from model\.layers\.0\.self_attn\.q_proj\.weight back if recorded"
    with pytest.warns(UserWarning, match=said):
        update(job, trained(job))
    assert job.learner.graphs is None
    job.close()


def test_modules_that_fail_alone_are_said_and_not_taken(tmp_path, monkeypatch):
    import proxpo.train.minibatch as minibatch_module

    job = made(tmp_path, "none")
    real = minibatch_module.forward

    def forward(learner, *args, **options):
        fields = real(learner, *args, **options)
        wrong = learner.graphs is None
        return {n: _NotANumber.apply(x) if wrong else x for n, x in fields.items()}

    monkeypatch.setattr(minibatch_module, "forward", forward)
    with pytest.warns(UserWarning, match="in the unrecorded pass alone; passes stay recorded"):
        _, found = update(job, trained(job))
    assert job.learner.graphs is not None
    assert all(x.isfinite().all() for x in found)
    job.close()


@pytest.mark.parametrize("name", ["none", "layer"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_gradient_that_is_not_finite_names_parameter_and_pass(
    name, recorded, tmp_path, monkeypatch
):
    job = made(tmp_path, name)
    if not recorded:
        job.learner.graphs = None
    rows = sample(job).experience
    rows.rewards.copy_(torch.arange(len(rows.rewards)) % 4)
    job.update(rows)
    assert job.learner.fault == ""
    weight = job.policy.model.model.layers[0].mlp.down_proj.weight
    weight.data[0, 0] = torch.inf
    for _ in range(MOST_SKIPPED - 1):
        job.update(rows)
    with pytest.raises(ProxpoError) as refused:
        job.update(rows)
    kind = "recorded" if recorded else "unrecorded"
    assert f"in {MOST_SKIPPED} updates in a row (from " in str(refused.value)
    assert f" back, in the {kind} pass); the last checkpoint" in str(refused.value)
    assert job.fault == job.learner.fault
    job.close()


def test_the_name_is_of_the_layer_where_it_came_from(tmp_path, monkeypatch):
    job = made(tmp_path, "none")
    job.learner.graphs = None
    real = update_module.gradients
    names = dict(job.policy.model.named_parameters())

    def gradients_of(*args, **options):
        result = real(*args, **options)
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
            names[name].grad[0] = torch.nan
        return result

    monkeypatch.setattr(update_module, "gradients", gradients_of)
    job.update(sample(job).experience)
    told = " (from model.layers.1.self_attn.q_proj.weight back, in the unrecorded pass)"
    assert job.fault == told
    job.close()
