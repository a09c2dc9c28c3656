import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.exact import (
    ActionBatch,
    FlatPolicy,
    fisher_exact,
    fisher_sequence,
    fisher_token,
    kl_step,
    mean_kl,
    natural_gradient,
    natural_gradient_batch,
    policy_gradient,
    scores,
    token_scores,
    trpo_step,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
DAMPING = pytest.mark.parametrize("damping", [0.0, 1e-3, 1e-1])


def test_scores_are_the_gradients_of_each_sequence(policy, samples):
    """Against one backward per sequence through the module itself."""
    rows = []
    for i in range(len(samples.mask)):
        logits = policy.model(samples.inputs[i : i + 1])
        logp = logits.log_softmax(-1).gather(-1, samples.actions[i : i + 1, :, None])[0, :, 0]
        grads = torch.autograd.grad(logp[samples.mask[i]].sum(), list(policy.model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    assert_close(scores(policy, samples), torch.stack(rows), **EXACT)


def test_token_scores_add_up_to_sequence_scores(policy, samples):
    row = samples.mask.nonzero()[:, 0]
    tokens = token_scores(policy, samples)
    summed = torch.zeros(7, tokens.shape[1], dtype=tokens.dtype).index_add_(0, row, tokens)
    assert_close(summed, scores(policy, samples), **EXACT)


@pytest.mark.checks("npg", "tabular softmax, one context: the step is the centred advantage")
def test_tabular_step_is_the_centred_advantage():
    policy = FlatPolicy(nn.Embedding(1, 5).double())
    actions = torch.arange(5)[:, None]
    every = ActionBatch(torch.zeros(5, 1, dtype=torch.long), actions, torch.ones(5, 1).bool())
    adv = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.1], dtype=torch.float64)
    p = policy.log_probs(policy.vector(), every)[0, 0].exp()
    adv = adv - p @ adv
    g = policy_gradient(scores(policy, every), 5 * p * adv)
    d = natural_gradient(fisher_exact(policy, every), g)
    assert_close(d, adv - adv.mean(), **EXACT)


@pytest.mark.checks("npg", "the Fisher matrix is the Hessian of the mean KL in either direction")
def test_fisher_is_the_hessian_of_both_kls(policy, samples):
    theta = policy.vector()
    fisher = fisher_exact(policy, samples)
    old_new = torch.func.hessian(lambda t: mean_kl(policy, samples, theta, t))(theta)
    new_old = torch.func.hessian(lambda t: mean_kl(policy, samples, t, theta))(theta)
    assert_close(old_new, fisher, **EXACT)
    assert_close(new_old, fisher, **EXACT)


def test_three_fisher_forms_agree_in_expectation(policy):
    """All V^T continuations of one prompt, each with its exact probability."""
    tails = torch.tensor(list(itertools.product(range(4), repeat=3)))
    ids = torch.cat([torch.zeros(len(tails), 1, dtype=torch.long), tails], dim=1)
    every = ActionBatch(ids[:, :-1], ids[:, 1:], torch.ones(len(tails), 3).bool())
    p = policy.logp(policy.vector(), every).sum(1).exp()
    assert_close(p.sum(), torch.ones((), dtype=torch.float64))
    weight = (len(p) * p).sqrt()[:, None]
    sequence = fisher_sequence(weight * scores(policy, every))
    tokens = weight.repeat_interleave(3, dim=0) * token_scores(policy, every)
    one = [
        q
        * fisher_exact(policy, ActionBatch(ids[i : i + 1, :-1], ids[i : i + 1, 1:], every.mask[:1]))
        for i, q in enumerate(p)
    ]
    exact = torch.stack(one).sum(0)
    assert_close(sequence, exact, **EXACT)
    assert_close(fisher_token(tokens, sequences=len(p)), exact, **EXACT)


@pytest.mark.checks("npg", "the undamped step is covariant under linear re-parametrisation")
def test_step_is_covariant(linear, generator):
    policy, samples, adv = linear
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)

    def direction(policy):
        g = policy_gradient(scores(policy, samples), adv)
        return natural_gradient(fisher_exact(policy, samples), g)

    theta = policy.vector()
    plain = direction(policy)
    mixed = direction(FlatPolicy(type(policy.model)(torch.linalg.solve(mix, theta), mix)))
    assert_close(plain, mix @ mixed, rtol=1e-7, atol=1e-8)


@DAMPING
@pytest.mark.checks("npg", "solving over parameters and over samples gives the same step")
def test_parameter_space_equals_batch_space(policy, samples, advantages, damping):
    j = scores(policy, samples)
    g = policy_gradient(j, advantages)
    d = natural_gradient(fisher_sequence(j), g, damping=damping)
    assert_close(natural_gradient_batch(j, advantages, damping=damping), d, **EXACT)


@DAMPING
@pytest.mark.checks("npg", "the step is the ridge regression of the advantage on the scores")
def test_step_is_a_regression(policy, samples, advantages, damping):
    j = scores(policy, samples)
    n, size = j.shape
    ridge = (n * damping) ** 0.5 * torch.eye(size, dtype=j.dtype)
    target = torch.cat([advantages, torch.zeros(size, dtype=j.dtype)])
    fit = torch.linalg.lstsq(torch.cat([j, ridge]), target, driver="gelsd").solution
    assert_close(natural_gradient_batch(j, advantages, damping=damping), fit, **EXACT)


@pytest.mark.checks("npg", "strong damping gives the plain gradient")
def test_strong_damping_is_the_plain_gradient(policy, samples, advantages):
    g = policy_gradient(scores(policy, samples), advantages)
    d = natural_gradient(fisher_exact(policy, samples), g, damping=1e9)
    assert_close(1e9 * d, g, rtol=1e-7, atol=1e-9)


@pytest.mark.checks("npg", "the normalised step has KL delta, to second order")
def test_normalised_step_has_the_asked_kl(linear):
    policy, samples, advantages = linear
    theta, fisher = policy.vector(), fisher_exact(policy, samples)
    g = policy_gradient(scores(policy, samples), advantages)
    d = natural_gradient(fisher, g)
    errors = []
    for delta in (1e-2, 1e-4, 1e-6):
        step = kl_step(d, g, delta=delta)
        assert float(step @ fisher @ step) / 2 == pytest.approx(delta, rel=1e-6)
        errors.append(abs(float(mean_kl(policy, samples, theta, theta + step)) / delta - 1))
    assert errors[2] < errors[1] / 3 < errors[0] / 9
    assert errors[2] < 2e-3


def test_a_token_with_a_logit_of_minus_infinity_counts_as_absent(policy, samples, advantages):
    """Models mask tokens so; they have probability 0 under both policies."""

    class Masked(nn.Module):
        def __init__(self, bias: float) -> None:
            super().__init__()
            self.model, self.bias = policy.model, bias

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.cat([z := self.model(ids), torch.full_like(z[..., :1], self.bias)], -1)

    step = torch.full_like(policy.vector(), 0.1)
    moved = policy.vector() + step * torch.arange(len(step))
    absent = FlatPolicy(Masked(-torch.inf))
    for args in ((policy.vector(), moved), (moved, policy.vector())):
        assert_close(mean_kl(absent, samples, *args), mean_kl(policy, samples, *args), **EXACT)
    assert trpo_step(absent, samples, advantages).accepted


@DAMPING
@pytest.mark.checks("npg", "the step never points against the gradient")
def test_step_ascends(policy, samples, generator, damping):
    fisher, j = fisher_exact(policy, samples), scores(policy, samples)
    for _ in range(20):
        adv = torch.randn(7, generator=generator, dtype=torch.float64)
        g = policy_gradient(j, adv)
        assert float(g @ natural_gradient(fisher, g, damping=damping)) >= 0.0


def test_one_sequence(policy, samples, advantages):
    j = scores(policy, samples)[:1]
    d = natural_gradient_batch(j, advantages[:1], damping=0.5)
    assert_close(d, advantages[0] * j[0] / (j[0] @ j[0] + 0.5), **EXACT)


def test_no_gradient_no_step(policy):
    zero = torch.zeros_like(policy.vector())
    assert not kl_step(zero, zero, delta=0.1).any()


def test_masked_actions_may_be_anything(policy, samples):
    garbage = samples.actions.masked_fill(~samples.mask, -100)
    assert not samples.mask.all()
    other = ActionBatch(samples.inputs, garbage, samples.mask)
    assert torch.equal(scores(policy, other), scores(policy, samples))


def test_frozen_parameters_are_left_out(policy, samples):
    policy.model.embed.weight.requires_grad_(False)
    assert scores(policy, samples).shape == (7, policy.vector().numel())
    assert policy.vector().numel() == 12 + 16


def test_hugging_face_models_are_read_by_their_logits(samples):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    policy = FlatPolicy(model)
    logits = model(samples.inputs).logits.log_softmax(-1)
    logp = logits.gather(-1, samples.actions[..., None])[..., 0].masked_fill(~samples.mask, 0)
    grads = torch.autograd.grad(logp[3].sum(), list(model.parameters()))
    assert_close(
        scores(policy, samples)[3], torch.cat([g.flatten() for g in grads]), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p, s: ActionBatch(s.inputs[:3], s.actions, s.mask), "one row per sequence"),
        (lambda p, s: scores(p, ActionBatch(s.inputs[:, :2], s.actions, s.mask)), "per action"),
        (lambda p, s: scores(FlatPolicy(p.model.requires_grad_(False)), s), "no trainable"),
        (lambda p, s: natural_gradient_batch(scores(p, s), torch.ones(7).double(), damping=-1.0),
         "negative"),
        (lambda p, s: natural_gradient_batch(torch.eye(3), torch.ones(3), damping=-0.1),
         "damping must not be negative, got -0.1"),
        (lambda p, s: kl_step(p.vector(), p.vector(), delta=-0.01),
         "delta, the KL of a step, must not be negative, got -0.01"),
        (lambda p, s: trpo_step(p, s, torch.arange(7).double(), delta=-1.0), "delta, the KL"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(policy, samples, make, message):
    with pytest.raises(ProxpoError, match=message):
        make(policy, samples)
