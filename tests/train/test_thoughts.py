"""Latent thoughts: hidden states fed back before a response, in sampling, scoring and training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.train_runs import batch_of, config_of, job_of, options_of, sample

from proxpo.compose import loss_fn
from proxpo.errors import ProxpoError
from proxpo.models import Policy, load_policy
from proxpo.ops.shapes import Tensor
from proxpo.sampler import LocalSampler, agreement
from proxpo.train.experience import join
from proxpo.train.language import build_language_job
from proxpo.train.observer import SILENT
from proxpo.train.scoring import forward, score
from proxpo.train.update import RolloutUpdates, update
from proxpo.types import Context

# Thoughts stand for the first digits that this model would write.
THINKING = ["thoughts=2", "task.options.last=2", "model.dtype=float64", "samples_per_prompt=8"]
VLPO = ["method=vlpo", "easiest=none", "sigma=0.5", *THINKING]
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11, 12, 13]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("tiny", dtype="float64")


@torch.no_grad()
def slow_response(policy: Policy, prompt: list[int], shifts: Tensor, tokens: int):
    """Thoughts, their means and the greedy tokens after them, each from a pass over everything."""
    model, embed = policy.model, policy.model.get_input_embeddings()
    x, means, ids = embed(torch.tensor([prompt])), [], []
    for shift in shifts:
        means.append(model.model(inputs_embeds=x).last_hidden_state[0, -1])
        x = torch.cat([x, (means[-1] + shift)[None, None]], dim=1)
    while len(ids) < tokens and not (ids and ids[-1] in policy.eos_ids):
        ids.append(int(model(inputs_embeds=x).logits[0, -1].argmax()))
        x = torch.cat([x, embed(torch.tensor([ids[-1:]]))], dim=1)
    return x[0, len(prompt) : len(prompt) + len(shifts)], torch.stack(means), ids


def test_thoughts_are_the_states_of_a_pass_over_everything(policy: Policy) -> None:
    sampler = LocalSampler(policy, thoughts=3, thought_noise=0.7, max_rows=3)
    greedy = sampler.sample(PROMPTS, seeds=[0] * 4, max_tokens=5, temperature=0.0)
    assert (greedy.thought_count, greedy.thoughts.value.shape) == (3, (4, 3, 96))
    assert torch.equal(greedy.thoughts.value, greedy.thoughts.mean)
    assert not greedy.mask[:, :3].any()
    for row, prompt in enumerate(PROMPTS):
        value, _, ids = slow_response(policy, prompt, torch.zeros(3, 96), 5)
        torch.testing.assert_close(greedy.thoughts.value[row], value.float())
        assert greedy.tokens[row][greedy.mask[row]].tolist() == ids
    drawn = sampler.sample(PROMPTS, seeds=[1, 2, 3, 4], max_tokens=5, temperature=1.0)
    value, mean = drawn.thoughts
    alone = sampler.sample(PROMPTS[2:3], seeds=[3], max_tokens=5, temperature=1.0)
    torch.testing.assert_close(alone.thoughts.value[0], value[2])  # whatever else is in the batch
    shifts = value - mean
    assert 0.6 < float(shifts.std()) < 0.8
    assert abs(float(shifts.mean())) < 0.1
    assert len({round(float(x), 5) for x in shifts[:, 0, 0]}) == 4
    slow = slow_response(policy, PROMPTS[1], shifts[1].double(), 1)[1]
    torch.testing.assert_close(mean[1], slow.float(), atol=1e-5, rtol=1e-5)
    gap = agreement(policy, sampler, PROMPTS, max_tokens=5)
    assert gap.largest < 1e-5


def mean_gradient(job, rows) -> tuple[Tensor, Tensor]:
    """Gradient of the loss in the means of thoughts, and the ratios of the thoughts."""
    updates = RolloutUpdates(job, rows, path=("update", 0))
    rollout = updates._prepare(single_update=True)
    fields = forward(job.learner, rollout.data.experience, rollout.options)
    fields["mean"].retain_grad()
    batch = rollout.data.batch.replace(**fields)
    loss_fn(job.learner.recipe)(batch).value.backward()
    job.learner.optimizer.zero_grad()
    ratio = job.learner.recipe.ratio.apply(batch, Context())[0]
    return fields["mean"].grad, ratio[batch.latent].detach()


@pytest.mark.checks(
    "vlpo",
    "noise=0: no gradient through thoughts in the first update on a rollout; noise=1 has one",
)
def test_the_first_update_moves_thoughts_with_noise_alone(tmp_path: Path) -> None:
    sizes = {}
    for noise in (0, 1):
        job = job_of(tmp_path, *VLPO, f"noise={noise}", "kl_coef=0")
        rows = sample(job).experience
        fresh, ratio = mean_gradient(job, rows)
        torch.testing.assert_close(ratio, torch.ones_like(ratio))
        update(job, rows)
        moved, later = mean_gradient(job, rows)  # the sampler's means are those of the old policy
        assert noise or bool((later <= 1).all())
        sizes[noise] = float(fresh.abs().max()), float(moved.abs().max())
        assert not fresh[:, 2:].any()
        job.close()
    assert sizes[0][0] < 1e-7 * sizes[1][0]  # the thoughts are stored in float32
    assert sizes[0][1] > 1e-3 * sizes[1][0]


def test_old_and_reference_means_are_their_own_models(tmp_path: Path) -> None:
    job = job_of(tmp_path, *VLPO, "noise=1", "micro_batch=5")
    rows = sample(job).experience
    fresh = batch_of(job, rows)
    latent = fresh.latent
    assert torch.equal(latent, torch.arange(latent.shape[1]).expand_as(latent) < 2)
    assert bool(rows.mask[:, :2].all())
    assert not fresh.logp[latent].any()
    torch.testing.assert_close(fresh.old_mean[latent], fresh.mean[latent])
    torch.testing.assert_close(fresh.ref_mean[latent], fresh.mean[latent])
    torch.testing.assert_close(fresh.old_mean[latent].float(), rows.thought_means.flatten(0, 1))
    update(job, rows)
    stale = batch_of(job, rows)
    now = score(job.learner, rows, options_of(job, micro_batch=3))
    torch.testing.assert_close(stale.old_mean[latent], rows.thought_means.flatten(0, 1))
    torch.testing.assert_close(stale.ref_mean[latent], fresh.mean[latent])
    assert float((now["mean"] - fresh.mean)[latent].abs().max()) > 1e-4
    both = join([rows, rows.rows(torch.tensor([3, 1]))])
    torch.testing.assert_close(both.thoughts[-1], rows.thoughts[1])
    job.close()


def test_other_methods_read_thoughts_and_do_not_train_on_them(tmp_path: Path) -> None:
    job = job_of(tmp_path, *THINKING, "kl_coef=0.1", method="grpo")
    rows = sample(job).experience
    assert not rows.mask[:, :2].any()
    assert rows.attention_mask[:, -rows.mask.shape[1] :][:, :2].all()
    batch = batch_of(job, rows)
    torch.testing.assert_close(batch.logp.float(), rows.rollout_logp, atol=1e-5, rtol=1e-4)
    other = replace(rows, thoughts=rows.thoughts + 0.5)
    assert float((batch_of(job, other).logp - batch.logp).abs().max()) > 0.01
    metrics, shown = job.examine(SILENT)
    assert metrics["eval/kl"] < 1e-9
    assert metrics["eval/mean_length"] <= 8
    assert shown[0]["completion"].strip().isdigit()
    job.close()
    ablated = job_of(tmp_path, *VLPO, "ablate_latent=true", "kl_coef=0")
    gradient, _ = mean_gradient(ablated, sample(ablated).experience)
    assert not gradient.any()
    ablated.close()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("rollout.backend=vllm",), "backend=vllm feeds tokens alone"),
        (("gradient=isopo",), "gradient=isopo knows no inputs but tokens"),
        (("task=calculator",), "task calculator has several"),
        (("thoughts=0",), "'mean' .*rollout.thoughts is 0"),
        (("rollout.options.thoughts=2",), "it is the setting rollout.thoughts"),
        (("rollout.options.lean=true",), "lean=true feeds tokens alone"),
        (("train.graphs=on",), "latent thoughts enter the model's own modules"),
        (("thoughts=250",), "exceeds the model's context"),
    ],
)
def test_what_thoughts_cannot_be_combined_with(sets, message, tmp_path: Path) -> None:
    config = config_of(tmp_path, "method=vlpo", *sets)
    with pytest.raises(ProxpoError, match=message) as caught:
        sample(build_language_job(config))
    assert "\n" not in str(caught.value)
