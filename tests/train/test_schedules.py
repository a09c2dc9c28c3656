"""Schedules on the model in the box: what they promise about weights, regions and data."""

import copy
from dataclasses import replace

import pytest
import torch
from train.train_runs import job_of, sample

import proxpo.train.minibatch as minibatch_module
import proxpo.train.scoring as scoring_module
import proxpo.train.update as update_module
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.ops.kl import kl_exact
from proxpo.stages.schedule import Updates
from proxpo.train.experience import kept_rollouts, mixture
from proxpo.train.update import RolloutUpdates, update
from proxpo.types import MOST_SKIPPED

pytestmark = pytest.mark.long


def weights(job) -> list[torch.Tensor]:
    return [p.detach().clone() for p in job.learner.trainable()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def after(out, *sets: str, steps: int = 1, **overrides) -> list[torch.Tensor]:
    job = job_of(out, *sets, **overrides)
    for _ in range(steps):
        update(job, sample(job).experience)
        job.sampler.sync()
        job.step += 1
    job.close()
    return weights(job)


def test_the_trainer_offers_what_a_schedule_may_use(tmp_path) -> None:
    job = job_of(tmp_path, method="grpo")
    assert isinstance(RolloutUpdates(job, sample(job).experience, path=("x",)), Updates)
    job.close()


@pytest.mark.checks("sfpo", "α = 0 on a real model: the weights of one ordinary GRPO step")
def test_sfpo_without_a_share_is_one_step(tmp_path) -> None:
    plain = after(tmp_path / "a", method="grpo", steps=2)
    assert same(plain, after(tmp_path / "b", "alpha=0", method="sfpo", steps=2))
    assert not same(plain, after(tmp_path / "c", "alpha=0.5", method="sfpo", steps=2))


@pytest.mark.checks("sfpo", "α = 1 on a real model: K + 1 ordinary steps on the batch")
def test_sfpo_with_the_whole_share(tmp_path) -> None:
    four = ("schedule=inner_steps", "schedule.steps=4")
    assert same(
        after(tmp_path / "a", *four, method="grpo"),
        after(tmp_path / "b", "alpha=1", "fast_steps=3", method="sfpo"),
    )


@pytest.mark.checks("fixpo", "after the update max KL ≤ ε for every token of the batch")
@pytest.mark.parametrize("radius", [10.0, 0.1])
def test_fixpo_keeps_its_region(radius, tmp_path) -> None:
    sets = ("updates_per_rollout=4", "train.lr=3e-4", f"radius={radius}", "micro_batch=6")
    job = job_of(tmp_path, *sets, method="fixpo")
    rows = sample(job).experience
    updates = RolloutUpdates(job, rows, path=("look",))
    old = updates.batch().old_vocab_logp
    metrics = update(job, rows)
    batch = updates.now(torch.arange(len(rows.mask)))
    kl = kl_exact(old, batch.vocab_logp)[batch.mask]
    assert metrics["fixup/reached"] == 1.0
    assert float(kl.max()) <= radius * (1 + 1e-4)
    assert metrics["fixup/kl_max"] == pytest.approx(float(kl.max()), rel=1e-3)
    assert (metrics["fixup/steps"] > 0) == (radius < 1)
    job.close()


def test_fixpo_gives_up_with_the_weights_it_came_with(tmp_path) -> None:
    sets = ("train.lr=1e-3", "radius=1e-9", "max_fixup_passes=1")
    job = job_of(tmp_path, *sets, method="fixpo")
    before = weights(job)
    metrics = update(job, sample(job).experience)
    assert metrics["fixup/reached"] == 0.0
    assert metrics["fixup/kl_max"] == pytest.approx(0.0, abs=1e-6)
    assert same(weights(job), before)
    assert float(job.learner.state["regularisers.kl_dual"]["t"]) == 2  # a step of each phase
    job.close()


@pytest.mark.checks(
    "trpo", "on the model in the box: inside the ball, a larger surrogate, or nothing"
)
def test_trpo_takes_one_searched_step(tmp_path) -> None:
    job = job_of(tmp_path, "cg_iterations=3", "delta=0.005", method="trpo")
    rows, before = sample(job).experience, weights(job)
    updates = RolloutUpdates(job, rows, path=("look",))
    start = updates.batch()
    metrics = update(job, rows)
    assert metrics["trust/accepted"] == 1.0
    assert 0 < metrics["kl/old"] < 0.005
    now = updates.now(torch.arange(len(rows.mask)))
    ratio = (now.logp - start.old_logp).exp()
    gain = ((ratio - 1) * start.advantages)[start.mask].mean()
    assert metrics["trust/gain"] == pytest.approx(float(gain), rel=1e-3, abs=1e-6)
    assert float(gain) > 0
    assert not same(weights(job), before)
    assert job.learner.version == 1
    flat = rows.rewards * 0
    moved = weights(job)
    assert update(job, replace(rows, rewards=flat))["trust/accepted"] == 0.0
    assert same(weights(job), moved)
    job.close()


def test_remix_reuses_rollouts_and_then_starts_anew(tmp_path) -> None:
    sets = ("share=0.9", "window=2", "reset_at=4", "passes=2", "prompts_per_step=6")
    job = job_of(tmp_path, *sets, method="remix")
    centres, kept = [], []
    for _ in range(4):
        metrics = update(job, sample(job).experience)
        job.sampler.sync()
        job.step += 1
        centres.append(metrics["trust/centre"])
        kept.append(len(job.past))
    assert kept == [1, 2, 0, 0]
    assert centres[0] == pytest.approx(1.0, abs=1e-4)
    assert abs(centres[1] - 1) > 1e-4  # data of another policy
    assert centres[2] == pytest.approx(1.0, abs=1e-4)
    state = job.learner.state["schedule"]
    assert bool(state["reborn"])
    first = [job.initial.get_parameter(name) for name, _ in job.policy.model.named_parameters()]
    assert not same([state[f"base.{i}"] for i in range(len(first))], first)
    job.close()


def test_rollouts_are_mixed_by_prompt(tmp_path) -> None:
    job = job_of(tmp_path, "prompts_per_step=8", method="grpo")
    fresh = sample(job).experience
    job.step = 1
    past = [sample(job).experience]
    draw = torch.Generator().manual_seed(0)
    mixed = mixture(fresh, past, 0.5, draw)
    old = torch.isin(mixed.group, past[0].group)
    new = torch.isin(mixed.group, fresh.group)
    assert bool((old ^ new).all())
    assert len(mixed.group.unique()) == 8
    assert 0 < len(mixed.group[old].unique()) < 8
    assert mixture(fresh, [], 0.5, draw) is fresh
    job.close()


def test_what_is_remembered(tmp_path) -> None:
    job = job_of(tmp_path, "prompts_per_step=2", method="grpo")
    one = sample(job).experience
    assert kept_rollouts([], one) == []
    assert len(kept_rollouts([one, one], one, rollouts=2)) == 2
    assert len(kept_rollouts([one] * 5, one, samples=3 * len(one.mask))) == 3
    assert len(kept_rollouts([], one, samples=1)) == 1  # the newest is kept whole
    job.close()


@pytest.mark.parametrize(("on", "rows"), [("whole", 16), ("parts", 8)])
def test_inner_steps(on, rows, tmp_path, monkeypatch) -> None:
    sets = ("schedule=inner_steps", "schedule.steps=2", f"schedule.on={on}")
    job, seen = job_of(tmp_path, *sets, method="grpo"), []
    gradients = update_module.gradients

    def counted(learner, recipe, data, *args, **options):
        seen.append(len(data.batch.mask))
        return gradients(learner, recipe, data, *args, **options)

    monkeypatch.setattr(update_module, "gradients", counted)
    update(job, sample(job).experience)
    assert seen == [rows] * 2
    job.close()


def everything(job) -> dict:
    """All that a checkpoint keeps of the learning side."""
    learner = job.learner
    parts = {"weights": weights(job), "optimizer": learner.optimizer.state_dict()}
    parts |= {"memory": learner.state, "version": learner.version}
    if learner.transform is not None:
        parts["transform"] = learner.transform.state_dict()
    return copy.deepcopy(parts)


@pytest.mark.parametrize(
    ("method", "sets"),
    [
        ("isopo", ("reg=1.0", "micro_batch=4")),
        ("isopo-ntk", ("updates_per_rollout=2",)),
        ("proma", ("micro_batch=4",)),
        ("fixpo", ()),
        ("dcpo", ()),
        ("sfpo", ()),
        ("ppo", ("reward.controller=horizon", "reward.coef=0.1")),
    ],
)
def test_an_update_that_is_not_finite_leaves_no_trace(method, sets, tmp_path, monkeypatch) -> None:
    """Neither in weights, optimizer and transform nor in the memory of a stage; then all move."""
    job = job_of(tmp_path, *sets, method=method)
    update(job, sample(job).experience)
    rows, before = sample(job).experience, everything(job)
    forward = minibatch_module.forward

    def spoilt(*args, **options):
        found = forward(*args, **options)
        factor = torch.where(torch.arange(found["logp"].shape[1]) == 0, torch.inf, 1.0)
        return found | {"logp": found["logp"] * factor}

    with monkeypatch.context() as patch:
        patch.setattr(minibatch_module, "forward", spoilt)
        update(job, rows)
    assert job.skipped > 0
    torch.testing.assert_close(everything(job), before, rtol=0, atol=0)
    update(job, rows)
    assert job.skipped == 0
    after_it = everything(job)
    assert not same(after_it["weights"], before["weights"])
    moved = ("memory" if before["memory"] else "version", *before.keys() & {"transform"})
    assert all(str(after_it[name]) != str(before[name]) for name in moved)
    job.close()


def test_a_transform_that_meets_infinity_skips_the_step(tmp_path, monkeypatch) -> None:
    """Counted as under any other method, the weights untouched; too many in a row end the run."""
    job = job_of(tmp_path, method="isopo")
    rows, before = sample(job).experience, weights(job)
    whole = scoring_module._whole_sequences

    def spoilt(*args, **options):
        found, states = whole(*args, **options)
        return found * torch.where(torch.arange(found.shape[1]) == 0, torch.inf, 1.0), states

    with monkeypatch.context() as patch:
        patch.setattr(scoring_module, "_whole_sequences", spoilt)
        metrics = update(job, rows)
        assert not torch.isfinite(torch.tensor(metrics["grad_norm"]))
        assert job.skipped == 1
        assert same(weights(job), before)
        for _ in range(MOST_SKIPPED - 2):
            update(job, rows)
        with pytest.raises(ProxpoError, match=f"not finite in {MOST_SKIPPED} updates in a row"):
            update(job, rows)
    job.skipped = 1
    assert torch.isfinite(torch.tensor(update(job, rows)["grad_norm"]))
    assert job.skipped == 0
    assert issubclass(NotFiniteError, ProxpoError)
    assert not same(weights(job), before)
    job.close()
