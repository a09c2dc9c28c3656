"""DPOK: the chain of Gaussian steps, the loss of single transitions, the buffer and the critic."""

from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler
from helpers import close, make_batch, method
from methods.loops import number, tokens

from proxpo import Batch, loss_fn, prepare
from proxpo.generative.denoising_job import build_denoising_job
from proxpo.generative.diffusion import (
    TRAINED,
    DenoisingPolicy,
    log_density,
    make_chain,
    make_scheduler,
    sample,
)
from proxpo.generative.networks import TimeField
from proxpo.train.config import load_config
from proxpo.train.experience import join
from proxpo.train.update import RolloutUpdates

SLUG = "dpok"
F64 = torch.float64


def policy(size: int = 3, steps: int = 5) -> DenoisingPolicy:
    torch.manual_seed(0)
    return DenoisingPolicy(TimeField(size, size, hidden=8).double(), make_chain(steps), size)


def job_of(out: Path, *sets: str):
    overrides = {"out": str(out), "task": "mixture:right", "method": SLUG}
    config = load_config(None, ["rollout.max_tokens=5", "dtype=float64", *sets], overrides)
    return build_denoising_job(config, config.make_recipe(), F64)


@pytest.mark.checks(SLUG, "a step of DDIM with η = 1 is the posterior of DDPM, and diffusers' step")
def test_the_chain() -> None:
    model = policy(steps=10)
    chain, states = model.chain, sample(model, 4, torch.Generator().manual_seed(0)).states
    a, p, variance = chain.alpha, chain.alpha_next, chain.variance
    assert (p > a).all()
    assert (1 - p - variance >= 0).all()
    assert (variance > 0).all()
    step, x = model(states), states[..., :-1]
    start = (x - (1 - a)[:, None].sqrt() * step.predicted_noise) / a[:, None].sqrt()
    beta = 1 - a / p
    posterior = (p.sqrt() * beta / (1 - a))[:, None] * start
    posterior = posterior + ((a / p).sqrt() * (1 - p) / (1 - a))[:, None] * x
    close(step.mean.detach(), posterior.detach())
    close(step.std[0].detach(), ((1 - p) / (1 - a) * beta).sqrt())
    scheduler: DDIMScheduler = make_scheduler()
    scheduler.set_timesteps(10)
    for i, t in enumerate(chain.timestep):
        theirs = scheduler.step(
            step.predicted_noise[:, i], int(t), x[:, i], eta=1.0, variance_noise=torch.zeros(4, 3)
        ).prev_sample
        close(step.mean[:, i].detach(), theirs.detach(), rtol=1e-5, atol=1e-5)  # float32 alphas
    assert chain.timestep[0] == 1 + TRAINED * 9 // 10


def transitions(shift: float = 0.0) -> tuple[DenoisingPolicy, Batch]:
    """Steps that a policy has drawn, as it scores them after its noise moved by `shift`."""
    model = policy()
    drawn = sample(model, 6, torch.Generator().manual_seed(1))
    rewards = torch.linspace(-1, 2, 6, dtype=F64)
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=F64)

    def scored() -> dict[str, torch.Tensor]:
        step = model(drawn.states)
        logp = log_density(drawn.actions, step.mean, step.std)
        return {"logp": logp, "predicted_noise": step.predicted_noise}

    old = scored()
    with torch.no_grad():
        model.denoiser.leave.bias += shift
    now = scored()
    batch = Batch(
        **now,
        old_logp=old["logp"].detach(),
        mask=torch.ones(6, 5, dtype=torch.bool),
        rewards=rewards,
        values=values,
        old_values=values,
        ref_predicted_noise=old["predicted_noise"].detach().clone(),
    )
    return model, batch


def gradient(model: DenoisingPolicy, value: torch.Tensor) -> torch.Tensor:
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, slopes)]
    )


@pytest.mark.checks(
    SLUG, "θ = θ_old: the gradient is -w_r·mean(A ∇log p), REINFORCE with a baseline"
)
def test_on_policy_gradient() -> None:
    model, batch = transitions()
    advantage = batch.rewards[:, None] - batch.values
    expected = gradient(model, -100.0 * (advantage * batch.logp).mean())
    close(gradient(model, loss_fn(method(SLUG))(batch).value), expected, rtol=1e-9)
    assert expected.abs().max() > 0.1


@pytest.mark.checks(SLUG, "|ρ-1| > κ: no policy gradient for either sign of A; only the KL term")
def test_outside_the_clip() -> None:
    model, batch = transitions(shift=0.05)
    outside = (batch.logp - batch.old_logp).exp().sub(1).abs() > 1e-4
    assert outside.all()
    assert ((batch.rewards[:, None] - batch.values) > 0).any()
    assert ((batch.rewards[:, None] - batch.values) < 0).any()
    found = loss_fn(method(SLUG))(batch)
    gap = (batch.predicted_noise - batch.ref_predicted_noise).square().mean()
    close(gradient(model, found.value), gradient(model, 0.01 * gap), rtol=1e-9)
    assert not gradient(model, loss_fn(method(SLUG, kl_coef=0.0))(batch).value).any()
    assert found.metrics["trust/clipped"] == 1


@pytest.mark.checks(SLUG, "e = e_pre: the KL term is 0 with zero gradient")
def test_no_distance() -> None:
    model, batch = transitions()
    plain, anchored = (loss_fn(method(SLUG, kl_coef=c))(batch).value for c in (0.0, 5.0))
    close(anchored.detach(), plain.detach())
    close(gradient(model, anchored), gradient(model, plain))


@pytest.mark.checks(SLUG, "V ≡ mean reward: advantages average 0")
def test_mean_baseline() -> None:
    _, batch = transitions()
    mean = torch.full_like(batch.values, float(batch.rewards.mean()))
    ready = prepare(method(SLUG), batch.replace(values=mean, old_values=mean)).batch
    close(ready.advantages.mean(), 0.0)
    close(ready.advantages[:, 0], batch.rewards - batch.rewards.mean())


@pytest.mark.checks(SLUG, "the loss, step by step in plain loops")
def test_plain_loops() -> None:
    batch = make_batch(1)
    batch = batch.replace(
        predicted_noise=batch.mean, ref_predicted_noise=batch.ref_mean, token_rewards=None
    )
    total, count = 0.0, 0
    for i, t in tokens(batch):
        ratio = float((batch.logp[i, t] - batch.old_logp[i, t]).exp())
        advantage = number(batch.rewards[i]) - number(batch.old_values[i, t])
        kl = sum((a - b) ** 2 for a, b in zip(batch.mean[i, t], batch.ref_mean[i, t])) / 3
        total += -100 * advantage * min(max(ratio, 0.9), 1.1) + 0.01 * float(kl)
        count += 1
    close(loss_fn(method(SLUG, clip_low=0.1, clip_high=0.1))(batch).value, total / count)


@pytest.mark.checks(
    SLUG, "the buffer: the newest transitions, with log p of the policy that drew them"
)
def test_the_buffer(tmp_path: Path) -> None:
    job = job_of(tmp_path, "buffer=230", "samples_per_prompt=16")  # 80 transitions a rollout
    drawn = []
    for step in range(4):
        drawn.append(job.collect(step).experience)
        before = [p.detach().clone() for p in job.model.parameters()]
        values = [p.detach().clone() for p in job.learner.critic.parameters()]
        metrics = job.update(drawn[-1])
        assert any(not torch.equal(p, q) for p, q in zip(before, job.model.parameters()))
        assert any(not torch.equal(p, q) for p, q in zip(values, job.learner.critic.parameters()))
        assert metrics["value/error"] > 0
        job.step += 1
    assert job.learner.version == 4 * 5
    updates = RolloutUpdates(job, drawn[3], path=("x",))
    job.past = drawn[:3]
    updates.gather(tokens=230)
    assert updates.experience.mask.sum() == 230
    assert torch.equal(updates.experience.actions, join(drawn).actions[-46:])
    close(updates.batch().old_logp[:, 0], join(drawn).rollout_logp[-46:].flatten())
    assert len(updates.batch().mask) == 230  # single transitions are rows


@pytest.mark.checks(SLUG, "the critic: one AdamW step on the mean gradient of its draws")
def test_the_critic(tmp_path: Path) -> None:
    job = job_of(tmp_path, "samples_per_prompt=4")
    rows = job.collect(0).experience
    RolloutUpdates(job, rows, path=("x",)).fit_critic(draws=3, batch=20, lr=1e-2)  # all, 3 times
    twin = job_of(tmp_path, "samples_per_prompt=4").learner.critic
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    (twin(rows.observations)[..., 0] - rows.rewards[:, None]).square().mean().backward()
    optimizer.step()
    for p, q in zip(job.learner.critic.parameters(), twin.parameters()):
        close(p.detach(), q.detach(), rtol=1e-9)
