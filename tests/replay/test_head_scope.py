"""ISOPO with one weight per response for the whole model, from the head's lengths."""

from functools import partial

import pytest
import torch
from recorder import record
from replay.test_prefix import make_model, make_rows
from replay.test_replayed_transforms import GROUPS, make_graphs, ordinary, replayed, updates
from torch import Tensor
from torch.testing import assert_close
from train.test_cuts import trained
from train.train_runs import job_of, options_of

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo
from proxpo.gradients.isopo import lengths2
from proxpo.logp import model_logp
from proxpo.train.minibatch import gradients as mini_batch
from proxpo.train.scoring import prompts_run_once

EXACT = {"rtol": 1e-9, "atol": 1e-11}
head = partial(isopo, scope="head", overlap="all")


def explicit(model, rows, advantages, weights) -> tuple[list[Tensor], Tensor]:
    """Σ_i A_i F_i^-1 N_i^-0.5 ∂ Σ_t u_it log π_it: a gradient for each response and each token."""
    inner = {"attention_mask": rows.attention_mask, "use_cache": False}
    places = (rows.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    hidden = model.model(rows.input_ids, position_ids=places, **inner).last_hidden_state
    tokens = rows.mask.shape[1]
    hidden, targets = hidden[:, -tokens - 1 : -1], rows.input_ids[:, -tokens:]

    def objective(states: Tensor, matrix: Tensor) -> Tensor:
        logp = (states @ matrix.T / 0.7).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return torch.where(rows.mask, weights * logp, 0.0)

    matrix = model.get_output_embeddings().weight
    leaf = matrix.detach().clone().requires_grad_()
    each = objective(hidden.detach(), leaf)[rows.mask]
    G = torch.stack([torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in each])
    F2, N2 = lengths2(G, rows.mask.nonzero()[:, 0], torch.arange(len(G)))
    s = F2.sqrt().pow(-1) * N2.sqrt().pow(-0.5)
    loss = (advantages * s * objective(hidden, matrix).sum(1)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters()))), advantages * s


@pytest.mark.checks("isopo", "scope=head: every layer's Σ_i A_i s_i V_i with the head's s_i")
@pytest.mark.parametrize("name", ["qwen3", "llama"])  # head tied to the embedding, and of its own
def test_all_parameters_get_the_heads_weights(name):
    model, rows = make_model(name), make_rows(**GROUPS, lengths=[2, 5, 1, 4], tool=(2, 3))
    draw = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(rows.mask), generator=draw, dtype=torch.float64)
    weights = torch.rand(rows.mask.shape, generator=draw, dtype=torch.float64)
    expected, scales = explicit(model, rows, advantages, weights)
    numbers = torch.where(rows.attention_mask, torch.arange(len(rows.mask))[:, None], -1)
    seen: dict[str, dict[str, Tensor]] = {}
    block = head(q=-0.5, eps=0.0).applied(
        model, sequences=numbers, advantages=advantages, observe=seen.__setitem__
    )
    with block:
        logp = model_logp(
            model, rows.input_ids, rows.mask, attention_mask=rows.attention_mask, temperature=0.7
        )
        (logp * weights).sum().backward()
    assert_close([p.grad for p in model.parameters()], expected, **EXACT)
    assert_close(seen["head"]["weights"], scales, **EXACT)


@pytest.mark.parametrize("samples", [[2, 3, 1], [1, 1, 1]], ids=["prompts once", "rows alone"])
def test_recorded_passes(samples, monkeypatch):
    """Prompts run once where that saves much; trailing averages and means count real rows."""
    monkeypatch.setattr("proxpo.replay.inputs.rounded", lambda count: count + 1)
    from replay.test_replayed_transforms import make_model

    rule = partial(head, preset="figure4", reg=0.3, scale="mean")
    model, plain, ours = make_model("qwen3"), rule(), rule()
    groups = {"prompts": [13, 5, 14], "samples": samples}
    lengths = ([2, 5, 1, 4, 3, 5], [5, 1, 2, 2, 4, 3])
    graphs = make_graphs(model, ours)
    shape = {"groups": groups, "lengths": lengths}
    expected = updates(model, plain, partial(ordinary, model, plain), **shape)
    result = updates(model, ours, partial(replayed, graphs), **shape)
    assert_close(result, expected, **EXACT)
    kinds = {(kind[0], run.recorded) for (kind, _), run in graphs._runs.items()}
    assert kinds == {("prompts" if sum(samples) == 6 else "rows", True)}
    drawn = []
    for recorder in (None, record):
        transform = isopo(scope="head", overlap=8)
        graphs = make_graphs(model, transform, recorder)
        drawn.append(updates(model, transform, partial(replayed, graphs), **shape))
    assert_close(*drawn, **EXACT)


def test_the_trainer_runs_prompts_once(tmp_path, monkeypatch):
    """And gives the gradient of whole sequences in the model's own modules."""
    job = job_of(
        tmp_path, "recipe.scope=head", "recipe.overlap=all", "recipe.regularisers=kl_to_ref",
        method="isopo",
    )  # fmt: skip
    learner, data = job.learner, trained(job)
    assert prompts_run_once(learner, job.policy.model, data.experience)
    outcomes = []
    for shared in (True, False):
        monkeypatch.setattr("proxpo.train.scoring.shares_prompts", lambda model: shared)  # noqa: B023
        learner.optimizer.zero_grad()
        metrics, _ = mini_batch(
            learner, learner.recipe, data, options_of(job, micro_batch=8), seed=0
        )
        learner.transform.step(skipped=True)
        outcomes.append((metrics, [p.grad.clone() for p in learner.trainable()]))
    assert_close(*outcomes, rtol=1e-3, atol=1e-5)
    job.close()


def test_what_cannot_take_effect_is_refused():
    with pytest.raises(ProxpoError, match="scope=head has no effect while p, q and r are 0"):
        head(preset="reinforce")
    model, rows = make_model(), make_rows(**GROUPS, lengths=[2, 5])
    numbers = torch.where(rows.attention_mask, torch.arange(len(rows.mask))[:, None], -1)
    block = {"sequences": numbers, "advantages": torch.ones(len(rows.mask))}
    with (
        pytest.raises(ProxpoError, match="the model's head was called for logits"),
        head().applied(model, **block),
    ):
        model(rows.input_ids)
    with (
        pytest.raises(ProxpoError, match="and none ran in this block"),
        head().applied(model, **block),
    ):
        model.model(rows.input_ids).last_hidden_state.sum().backward()
    with (
        pytest.raises(ProxpoError, match="the head is used more than once"),
        head().applied(model, **block),
    ):
        [model_logp(model, rows.input_ids, rows.mask).sum().backward() for _ in range(2)]
