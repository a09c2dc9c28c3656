"""Rejected samples: the gradient is that of E[r | V] with the correction alone, by enumeration."""

import itertools

import pytest
import torch

from proxpo.compose import policy_loss, prepare
from proxpo.settings import make_recipe
from proxpo.types import Batch, Context, local

ROWS = list(itertools.product(range(3), repeat=2))  # responses of two tokens of a vocabulary of 3
FEASIBLE = torch.tensor([a + b <= 2 and (a, b) != (0, 0) for a, b in ROWS])
REWARD = 5 + torch.tensor([1.0, 0.2, 3.0, -1.0, 0.5, 2.0, 0.7, 9.0, 4.0], dtype=torch.float64)
GROUP = 3
CORRECTED = {"reward": "feasible_only", "regularisers": "feasible_share", "baseline": "none"}


def expected_gradient(settings: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean gradient over all groups of three responses, and the gradient of E[r | V]."""
    theta = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]], dtype=torch.float64)
    theta.requires_grad_()
    tokens = torch.tensor(ROWS)
    logp = theta.log_softmax(1)[torch.arange(2), tokens]
    chance = logp.sum(1).exp()
    inside = chance * FEASIBLE
    [wanted] = torch.autograd.grad((inside * REWARD).sum() / inside.sum(), theta, retain_graph=True)
    recipe, total = make_recipe("reinforce", settings), 0.0
    enough = 0.0  # chance of at least two feasible responses
    for picked in itertools.product(range(9), repeat=GROUP):
        index = torch.tensor(picked)
        if int(FEASIBLE[index].sum()) < 2:
            continue
        weight = float(chance.detach()[index].prod())
        enough += weight
        batch = Batch(
            logp=logp[index].detach(),
            mask=torch.ones(GROUP, 2, dtype=torch.bool),
            rewards=REWARD[index],
            group=torch.zeros(GROUP, dtype=torch.long),
            feasible=FEASIBLE[index],
        )
        ready, ctx, _ = prepare(recipe, batch, Context(all_sum=local))
        total = total + weight * policy_loss(recipe, ready.replace(logp=logp[index]), ctx).value
    [got] = torch.autograd.grad(-total / enough, theta)
    return got, wanted


@pytest.mark.checks("tabnas", "rejected responses in RLVR: ∇E[r | V] with the correction, exactly")
def test_the_corrected_gradient_is_unbiased() -> None:
    got, wanted = expected_gradient(CORRECTED)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.checks("tabnas", "rejected responses in RLVR: biased without the correction")
def test_the_uncorrected_gradient_is_biased() -> None:
    got, wanted = expected_gradient({"reward": "feasible_only", "baseline": "none"})
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), dim=0)
    assert float(cosine) < 0.9
    assert (got - wanted).abs().max() > 0.1


def test_a_leave_one_out_baseline_is_the_correction_already() -> None:
    got, wanted = expected_gradient({"reward": "feasible_only", "baseline": "leave_one_out"})
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
