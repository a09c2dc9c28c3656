"""Stages that follow every optimizer step, and the numbers that only both policies can give."""

from dataclasses import replace

import pytest
import torch
from train.train_runs import job_of, options_of, sample

import proxpo.train.update as update_module
from proxpo.errors import ProxpoError
from proxpo.ops.kl import kl_exact
from proxpo.stages import STAGES
from proxpo.stages.schedule import Rescale
from proxpo.train.batch import TrainingBatch
from proxpo.train.minibatch import gradients
from proxpo.train.scoring import reference_kl, vocabulary_logp
from proxpo.train.update import RolloutUpdates, update

MOMENTS = "select.curvature_mask"
BETA = "regularisers.kl_dual"


def moments(job, place: str = MOMENTS) -> dict[str, torch.Tensor]:
    return job.learner.state[place]


@pytest.mark.checks("capo", "the moments move once per optimizer step, from the tokens it kept")
def test_moments_follow_every_optimizer_step(tmp_path) -> None:
    job = job_of(tmp_path, "updates_per_rollout=3", method="capo")
    seen = []
    original = update_module.optimizer_step

    def counted(job, **options):
        seen.append(float(moments(job)["steps"]))
        return original(job, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_module, "optimizer_step", counted)
        update(job, sample(job).experience)
    assert seen == [0.0, 1.0, 2.0]
    assert float(moments(job)["steps"]) == 3.0
    job.close()


def test_moments_in_double_precision(tmp_path) -> None:
    """The second update reads the moments of the first, beside hidden states kept in float32."""
    job = job_of(tmp_path, "model.dtype=float64", "updates_per_rollout=2", method="capo")
    update(job, sample(job).experience)
    assert float(moments(job)["steps"]) == 2.0
    job.close()


def test_moments_are_those_of_the_whole_mini_batch(tmp_path) -> None:
    """Cut into micro-batches or not; rows of different lengths are padded to one width."""
    found = []
    for size in ("none", 4):
        job = job_of(tmp_path / str(size), f"micro_batch={size}", method="capo")
        rows = sample(job).experience
        short = (rows.group == rows.group[0])[:, None] & (torch.arange(rows.mask.shape[1]) > 2)
        update(job, replace(rows, mask=rows.mask & ~short))  # one prompt's: a micro-batch of four
        found.append(moments(job))
        job.close()
    assert torch.equal(found[0]["token_id"], found[1]["token_id"])
    for name in ("first", "second"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-6)
    assert found[0]["first"].abs().max() > 0


def test_a_step_that_is_left_out_moves_no_memory(tmp_path, monkeypatch) -> None:
    job = job_of(tmp_path, method="capo")
    rows = sample(job).experience
    monkeypatch.setattr(update_module, "get_total_norm", lambda _: torch.tensor(torch.inf))
    update(job, rows)
    assert job.skipped == 1
    assert float(moments(job)["steps"]) == 0.0
    job.close()


@pytest.mark.checks("fixpo", "the multiplier moves after every step of both phases")
def test_the_multiplier_follows_every_step(tmp_path) -> None:
    sets = ("updates_per_rollout=3", "train.lr=1e-3", "radius=1e-6", "max_fixup_passes=2")
    job = job_of(tmp_path, *sets, method="fixpo")
    metrics = update(job, sample(job).experience)
    assert metrics["fixup/steps"] > 0
    assert float(moments(job, BETA)["t"]) == 3 + metrics["fixup/steps"]
    job.close()


@pytest.mark.checks("st-ppo", "the policy's gradient is divided, the critic's is left alone")
def test_rescaling_spares_the_critic(tmp_path) -> None:
    job = job_of(tmp_path, "critic=true", "variant=turn-ppo", method="st-ppo", task="calculator")
    learner, rows, grads = job.learner, sample(job).experience, []
    data = TrainingBatch(rows, RolloutUpdates(job, rows, path=("test",)).batch())
    trust = STAGES["trust"]["unclipped"]()
    tenth = Rescale(learner.recipe.replace(trust=trust, value=None), lambda norm: 0.1)
    options = options_of(job, micro_batch=7)
    for rescale in (None, tenth):
        learner.optimizer.zero_grad()
        gradients(learner, learner.recipe, data, options, seed=0, rescale=rescale)
        own = torch.cat([p.grad.flatten() for p in job.policy.model.parameters()])
        grads.append((own.clone(), learner.critic.weight.grad.clone()))
    (plain, critic), (scaled, spared) = grads
    torch.testing.assert_close(scaled, 0.1 * plain, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(spared, critic, rtol=1e-4, atol=1e-7)
    assert critic.abs().max() > 0
    job.close()


def test_divergence_from_the_reference_over_the_vocabulary(tmp_path) -> None:
    """0 as long as the policy is the reference; then KL(π‖π_ref), whatever the micro-batches."""
    job = job_of(tmp_path, "kl_coef=0.1", "train.lr=1e-3", method="grpo")
    learner, rows = job.learner, sample(job).experience
    start = reference_kl(learner, rows, options_of(job, micro_batch=99))
    assert start[rows.mask].abs().max() < 1e-6
    update(job, rows)
    found = reference_kl(learner, rows, options_of(job, micro_batch=5))
    with torch.no_grad():
        both = [vocabulary_logp(m, rows, 1.0) for m in (job.policy.model, job.initial)]
    torch.testing.assert_close(found[rows.mask], kl_exact(*both)[rows.mask], rtol=1e-3, atol=1e-6)
    assert found[rows.mask].max() > 1e-4
    job.close()


def weights_after(out, *sets: str, **overrides) -> tuple[list[torch.Tensor], dict]:
    job = job_of(out, *sets, **overrides)
    metrics = update(job, sample(job).experience)
    found = [p.detach().clone() for p in job.learner.trainable()]
    job.close()
    return found, metrics


def test_a_transform_sees_each_layer_once(tmp_path) -> None:
    """A mask that drops nothing reads states and vocabulary, and leaves ISOPO's step as it was."""
    off = ("select+=curvature_mask", "select.tau_policy=0", "select.tau_objective=0")
    plain, _ = weights_after(tmp_path / "a", method="isopo")
    masked, metrics = weights_after(tmp_path / "b", *off, method="isopo")
    assert metrics["select/kept"] == 1.0
    for a, b in zip(plain, masked):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_regularisers_report_under_a_transform(tmp_path) -> None:
    """Their backward is their own; their metrics and the state they feed are the recipe's."""
    job = job_of(tmp_path, "regularisers+=kl_dual", "updates_per_rollout=2", method="isopo")
    metrics = update(job, sample(job).experience)
    assert metrics["kl/beta"] == pytest.approx((1.0 + 0.99) / 2)
    assert float(moments(job, BETA)["t"]) == 2
    job.close()


def test_more_mini_batches_than_prompts_are_refused(tmp_path) -> None:
    job = job_of(tmp_path, "prompts_per_step=2", method="rapid")
    with pytest.raises(ProxpoError, match=r"rapid: 4 mini-batches want .*prompts_per_step is 2"):
        update(job, sample(job).experience)
    job.close()


def test_a_field_that_one_form_reads_is_provided(tmp_path) -> None:
    """The repository's ReMax has a KL to the reference, so the run has a reference."""
    job = job_of(tmp_path, "form=official", "kl_coef=0.05", method="remax")
    metrics = update(job, sample(job).experience)
    assert job.learner.reference is not None
    assert metrics["loss"] == pytest.approx(metrics["loss"])
    job.close()


def test_the_clock_of_an_update_has_its_rate(tmp_path, monkeypatch) -> None:
    job, rates = job_of(tmp_path, "train.lr=1e-3", "warmup_steps=4", method="grpo"), []
    gradients_of = update_module.gradients

    def watched(*args, clock, **options):
        rates.append(clock.learning_rate)
        return gradients_of(*args, clock=clock, **options)

    monkeypatch.setattr(update_module, "gradients", watched)
    for job.step in range(3):
        update(job, sample(job).experience)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])
    job.close()
