"""No tensor of rows x tokens x vocabulary: evaluation and the KL to the reference, tile by tile."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train.train_runs import job_of, options_of, sample

from proxpo.logp import _kl, model_states
from proxpo.ops.kl import kl_exact
from proxpo.train.episodes import Episodes, play
from proxpo.train.evaluate import distance
from proxpo.train.scoring import reference_kl, vocabulary_logp

WORDS = 20_000  # of the widened vocabulary, so that logits are the largest tensors by far
BUDGET = 1 << 15


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operation makes; views do not count."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        made = [x for x in tensors(result) if x.untyped_storage().data_ptr() not in given]
        self.entries = max([self.entries, *(x.numel() for x in made)])
        return result


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def widest_activation(job, ids) -> int:
    """Entries of the model's own largest tensor: the inner states of a feed-forward layer."""
    return ids.numel() * job.policy.model.config.intermediate_size


@pytest.fixture
def job(tmp_path, monkeypatch):
    made = job_of(tmp_path, "evaluate.k=4", method="reinforce")
    monkeypatch.setattr(_kl, "tile_budget", lambda chunk, hidden: BUDGET)
    yield made
    made.close()


def widen(job) -> None:
    """Gives policy and reference a large vocabulary, and makes them differ."""
    for model in (job.policy.model, job.initial):
        model.resize_token_embeddings(WORDS, mean_resizing=False)
    with torch.no_grad():
        for p in job.learner.trainable():
            p.add_(0.02 * torch.randn_like(p))
    for model in (job.policy.model, job.initial):  # so that its map behind the head is known
        model_states(model, torch.ones(1, 2, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))


def answers(job, repeats: int) -> Episodes:
    prompts = [job.task.encode(p, job.policy.tokenizer) for p in job.exam.problems] * repeats
    return play(
        job.policy,
        job.sampler,
        job.task,
        prompts,
        seeds=lambda row, turn: row,
        max_tokens=8,
        temperature=1.0,
    )


def slow_distance(job, episodes) -> tuple[float, float]:
    """KL per response and entropy per token from all logits at once, in float64."""
    inputs, mask = episodes.inputs(job.policy.pad_id), episodes.samples.mask
    places = (inputs.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)

    def logp(model):
        out = model(inputs.input_ids, attention_mask=inputs.attention_mask, position_ids=places)
        kept = out.logits[:, -mask.shape[1] - 1 : -1].double() / job.exam.temperature
        return kept.log_softmax(-1)

    with torch.no_grad():
        p, q = logp(job.policy.model), logp(job.initial)
    kl, entropy = (p.exp() * (p - q)).sum(-1), -(p.exp() * p).sum(-1)
    return float(kl[mask].sum()) / len(mask), float(entropy[mask].mean())


@pytest.mark.parametrize("repeats", [4, 16])
def test_evaluation_never_holds_the_logits_of_all_tokens(job, repeats):
    """All rows in one pass: no tensor is larger than the model's own and a tile."""
    episodes = answers(job, repeats)
    widen(job)
    with Largest() as seen:
        found = distance(job.policy, job.initial, episodes, job.exam)
    ids = episodes.inputs(job.policy.pad_id).input_ids
    assert seen.entries <= max(widest_activation(job, ids), BUDGET)
    assert seen.entries < episodes.samples.mask.sum() * WORDS / 25
    assert found == pytest.approx(slow_distance(job, episodes), rel=1e-4)


def test_kl_to_the_reference_never_holds_the_logits_of_all_tokens(job):
    rows, options = sample(job).experience, options_of(job, micro_batch=16)
    widen(job)
    job.learner.reference = job.initial
    with Largest() as seen:
        found = reference_kl(job.learner, rows, options)
    assert seen.entries <= max(widest_activation(job, rows.input_ids), BUDGET)
    with torch.no_grad():
        p, q = (vocabulary_logp(model, rows, 1.0) for model in (job.policy.model, job.initial))
    expected = torch.where(rows.mask, kl_exact(p, q), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
