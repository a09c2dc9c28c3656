"""TabNAS on the toy of nine architectures, whose expectations can be enumerated."""

import pytest
import torch

from proxpo.control.architecture import draw, log_feasible, log_prob, toy_space

SPACE = toy_space()
ALL = SPACE.all()
INSIDE, QUALITY = SPACE.feasible(ALL), SPACE.qualities(ALL)


def parameters() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(3, generator=draws, dtype=torch.float64).requires_grad_() for _ in range(2)]


def flat(value: torch.Tensor, logits: list[torch.Tensor]) -> torch.Tensor:
    grads = torch.autograd.grad(value, logits, retain_graph=True, allow_unused=True)
    return torch.cat([g if g is not None else torch.zeros(3).double() for g in grads])


def test_the_toy_is_the_papers() -> None:
    assert SPACE.cost[(3, 3)] == SPACE.cost[(4, 2)] == SPACE.limit == 25
    feasible = {SPACE.sizes(y) for y, ok in zip(ALL, INSIDE) if ok}
    assert max(feasible, key=SPACE.quality.__getitem__) == (4, 2)


@pytest.mark.checks("tabnas", "V = everything: P̂ = 1, so plain REINFORCE in expectation")
def test_everything_feasible() -> None:
    logits = parameters()
    logp, every = log_prob(logits, ALL), torch.ones(9, dtype=torch.bool)
    share = log_feasible(logp, every, correction="exact")
    assert float(share.detach()) == pytest.approx(0.0, abs=1e-12)
    assert flat(share, logits).abs().max() < 1e-12
    z = draw(logits, 7, torch.Generator().manual_seed(0))
    assert float(log_feasible(log_prob(logits, z), every[:7], correction="estimated")) == 0.0


@pytest.mark.checks("tabnas", "V = {y}: the exact correction leaves no gradient")
def test_one_feasible() -> None:
    logits = parameters()
    logp, only = log_prob(logits, ALL), torch.arange(9) == 4
    loss = logp[4] - log_feasible(logp, only, correction="exact")
    assert flat(loss, logits).abs().max() < 1e-12


def expected_gradient(logits, correction: str) -> torch.Tensor:
    """E over feasible y of the gradient of Q(y)·[log P(y) - log P(V)]."""
    logp = log_prob(logits, ALL)
    given = (logp.exp() * INSIDE / (logp.exp() * INSIDE).sum()).detach()
    share = log_feasible(logp, INSIDE, correction=correction)
    return flat((given * QUALITY * (logp - share)).sum(), logits)


@pytest.mark.checks("tabnas", "with P(V) exact the expected gradient is ∇E[Q | V]; without, not")
def test_expected_gradient() -> None:
    logits = parameters()
    chance = log_prob(logits, ALL).exp() * INSIDE
    objective = flat((chance * QUALITY).sum() / chance.sum(), logits)
    torch.testing.assert_close(expected_gradient(logits, "exact"), objective)
    for biased in ("none", "pytorch"):
        assert (expected_gradient(logits, biased) - objective).abs().max() > 0.01


@pytest.mark.checks("tabnas", "E ∇P̂ = ∇P(V) over 1e5 samples; the notebooks' sum is no estimate")
def test_estimate_is_unbiased() -> None:
    logits = parameters()
    z = draw(logits, 100_000, torch.Generator().manual_seed(5))
    logp, inside = log_prob(logits, z), SPACE.feasible(ALL)[(z * torch.tensor([3, 1])).sum(1)]
    exact = log_feasible(log_prob(logits, ALL), INSIDE, correction="exact")
    estimate = log_feasible(logp, inside, correction="estimated")
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), abs=0.01)
    wanted, got = flat(exact, logits), flat(estimate, logits)
    torch.testing.assert_close(got, wanted, atol=0.01, rtol=0)
    by_hand = torch.cat(
        [
            torch.nn.functional.one_hot(z[inside, layer], 3).double().mean(0) - theta.softmax(0)
            for layer, theta in enumerate(logits)
        ]
    )
    torch.testing.assert_close(got, by_hand.detach())
    notebook = flat(log_feasible(logp, inside, correction="tf2"), logits)
    assert (notebook - wanted).abs().max() > 0.05
    assert flat(log_prob(logits, ALL).sum() * 0, logits).abs().sum() == 0
    assert not log_feasible(logp, inside, correction="pytorch").requires_grad
