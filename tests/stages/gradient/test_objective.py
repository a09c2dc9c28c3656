"""A recipe's policy term taken apart for a gradient transform."""

import pytest
import torch

import proxpo
from proxpo.backward import objective

WEIGHTS = {
    "token_sum": lambda mask: mask.double(),
    "token_mean": lambda mask: mask / mask.sum(),
    "seq_mean_token_mean": lambda mask: mask / mask.sum(1, keepdim=True) / len(mask),
}


def batch() -> proxpo.Batch:
    """Two prompts; both responses to the second one earn the same."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    logp = -torch.rand(4, 3, dtype=torch.float64)
    return proxpo.Batch(
        logp=logp,
        old_logp=logp - 0.05 * torch.randn_like(logp),
        mask=mask,
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]).double(),
        group=torch.tensor([0, 0, 1, 1]),
    )


@pytest.mark.parametrize("average", WEIGHTS)
@pytest.mark.parametrize("slug", ["reinforce", "grpo"])
def test_weights_times_advantages_are_the_slope_of_the_loss(slug: str, average: str) -> None:
    recipe = proxpo.make_recipe(slug, {"aggregate": average, "advantage": "group_relative"})
    ready = proxpo.prepare(recipe, batch())
    found = objective(recipe, ready.batch, ready.ctx)
    logp = ready.batch.logp.clone().requires_grad_()
    now = ready.batch.replace(logp=logp)
    loss = proxpo.policy_loss(recipe, now, ready.ctx)
    (slope,) = torch.autograd.grad(loss.value, logp)
    torch.testing.assert_close(found.weights * found.advantages[:, None], -slope)
    torch.testing.assert_close(found.loss.value.detach(), loss.value.detach())


@pytest.mark.parametrize("average", WEIGHTS)
def test_a_response_without_advantage_weighs_what_the_average_gives_it(average: str) -> None:
    """Else the kernel of a transform would hold sequence gradients of two scales."""
    recipe = proxpo.make_recipe("reinforce", {"aggregate": average, "advantage": "group_relative"})
    ready = proxpo.prepare(recipe, batch())
    found = objective(recipe, ready.batch, ready.ctx)
    assert found.advantages[2:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.weights, WEIGHTS[average](ready.batch.mask).double())
