"""The backward pass of a micro-batch: its parts add up to the gradient of the loss."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import make_batch
from torch import Tensor
from torch.testing import assert_close

import proxpo
from proxpo.backward import (
    advantages_per_response,
    asks_for_sums,
    backward_pass,
    sums_over_step,
    without_policy_term,
)
from proxpo.types import local


class Policy:
    """Log-probabilities as parameters: a leaf for every forward pass, kept with its gradient."""

    def __init__(self, logp: Tensor) -> None:
        self.logp, self.leaves, self.advantages = logp, [], None

    def forward(self) -> dict[str, Tensor]:
        self.leaves.append(self.logp.clone().requires_grad_())
        return {"logp": self.leaves[-1]}

    @contextmanager
    def applied(self, *, advantages: Tensor) -> Iterator[None]:
        """A transform that changes nothing: gradients of sequences times their advantages."""
        self.advantages = advantages
        yield
        self.leaves[-1].grad *= advantages[:, None]

    def gradient(self) -> Tensor:
        return torch.stack([leaf.grad for leaf in self.leaves]).sum(dim=0)


def prepared(options: dict) -> tuple[proxpo.Recipe, proxpo.Batch, proxpo.Context]:
    recipe = proxpo.make_recipe("grpo", options)
    batch, ctx, _ = proxpo.prepare(recipe, make_batch())
    return recipe, batch, ctx


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("options", "passes"), [({}, 1), ({"kl_coef": 0.3}, 2)], ids=["policy term", "with a KL"]
)
def test_the_parts_under_a_transform_add_up_to_the_gradient_of_the_loss(options, passes, ranks):
    """Each part gets a forward pass of its own, the rest first and outside the transform."""
    recipe, batch, ctx = prepared(options)
    policy, plain = Policy(batch.logp), Policy(batch.logp)
    given = {"forward": policy.forward, "ranks": ranks}
    with backward_pass(recipe, batch, ctx, applied=policy.applied, **given) as parts:
        parts.objective.backward()
    with backward_pass(recipe, batch, ctx, forward=plain.forward, ranks=ranks) as whole:
        whole.objective.backward()
    assert len(policy.leaves) == passes
    assert len(plain.leaves) == 1
    assert parts.fields["logp"] is policy.leaves[-1]
    assert_close(policy.gradient(), plain.gradient())
    assert plain.gradient().abs().max() > 0
    assert_close(parts.loss.value, whole.loss.value)
    assert parts.loss.metrics.keys() == whole.loss.metrics.keys()


def test_advantages_of_the_caller_are_one_for_each_response():
    recipe, batch, _ = prepared({})
    batch = batch.rows(slice(0, batch.mask.shape[1]))  # as many responses as tokens
    rows = torch.arange(len(batch.mask)).double()
    assert_close(advantages_per_response(recipe, batch.replace(advantages=rows)), rows)


def test_masked_log_probabilities_may_hold_anything():
    recipe, batch, ctx = prepared({})
    mask = batch.mask.clone()
    mask[0, -1] = False
    policy = Policy(batch.logp.masked_fill(~mask, torch.nan))
    with backward_pass(
        recipe, batch.replace(mask=mask), ctx, applied=policy.applied, forward=policy.forward
    ) as step:
        step.objective.backward()
    assert step.objective.isfinite()
    assert policy.gradient().isfinite().all()


REFUSED = {
    "a loss without advantages": (("dpo", {}), "needs a loss proportional to the advantage"),
    "a part without advantages": (
        ("pacs", {"score": "centred", "balance": "only_negative"}),
        "needs a loss proportional to the advantage",
    ),
    "a penalty on what is not computed": (
        ("grpo", {"regularisers+": {"name": "entropy_bonus", "coef": 0.1}}),
        "regularisers=entropy_bonus needs 'entropy' from the forward pass",
    ),
    "a ratio of what is not computed": (
        ("grpo", {"ratio": "recentred"}),
        "ratio=recentred needs 'vocab_logp' from the forward pass",
    ),
}


@pytest.mark.parametrize(("method", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_gradient_that_would_be_lost_is_refused(method, reason):
    recipe = proxpo.make_recipe(*method)
    batch, ctx, _ = proxpo.prepare(recipe, make_batch())
    policy = Policy(batch.logp)
    step = backward_pass(recipe, batch, ctx, applied=policy.applied, forward=policy.forward)
    with pytest.raises(proxpo.ProxpoError, match=reason), step:
        pass


@pytest.mark.parametrize(("ratio", "field"), [("recentred", "vocab_logp"), ("latent", "mean")])
@pytest.mark.parametrize("grad", [True, False])
def test_a_policy_term_with_a_gradient_beside_log_probabilities_is_refused(ratio, field, grad):
    recipe, batch, ctx = prepared({"ratio": ratio})
    policy = Policy(batch.logp)

    def forward() -> dict[str, Tensor]:
        x = getattr(batch, field).detach().clone().requires_grad_(grad)
        return policy.forward() | {field: x}

    step = backward_pass(recipe, batch, ctx, applied=policy.applied, forward=forward)
    with pytest.raises(proxpo.ProxpoError, match=f"but this loss has one through '{field}'"), step:
        pass


def test_a_ratio_of_a_stale_field_is_refused_without_a_transform_too():
    recipe, batch, ctx = prepared({"ratio": "recentred"})
    step = backward_pass(recipe, batch, ctx, forward=Policy(batch.logp).forward)
    with pytest.raises(proxpo.ProxpoError, match="ratio=recentred needs 'vocab_logp'"), step:
        pass


def test_a_recipe_with_a_transform_needs_its_block():
    recipe = proxpo.make_recipe("isopo")
    batch, ctx, _ = proxpo.prepare(recipe, make_batch())
    step = backward_pass(recipe, batch, ctx, forward=Policy(batch.logp).forward)
    with pytest.raises(proxpo.ProxpoError, match="gradient=isopo acts in the backward pass"), step:
        pass
    with backward_pass(
        recipe.replace(gradient=None), batch, ctx, forward=Policy(batch.logp).forward
    ) as plain:
        assert plain.objective.requires_grad


def test_losses_inside_a_transform_do_not_warn_that_it_is_missing():
    recipe = proxpo.make_recipe("isopo", {"regularisers+": "kl_to_ref"})
    batch, ctx, _ = proxpo.prepare(recipe, make_batch())
    policy = Policy(batch.logp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with backward_pass(
            recipe, batch, ctx, forward=policy.forward, applied=policy.applied
        ) as step:
            step.objective.backward()
    assert len(policy.leaves) == 2


def test_an_engine_back_propagates_by_itself():
    recipe, batch, ctx = prepared({"kl_coef": 0.3})
    policy, rest = Policy(batch.logp), []
    given = {"applied": policy.applied, "forward": policy.forward, "backward": rest.append}
    with backward_pass(recipe, batch, ctx, **given) as parts:
        assert policy.leaves[0].grad is None
        parts.objective.backward()
    rest[0].backward()
    assert policy.leaves[0].grad.abs().max() > 0


def test_what_a_regulariser_adds_holds_nothing_of_a_random_policy_term():
    """The whole loss and its policy term draw the same tokens."""
    options = {"trust": "clip_cov", "trust.share": 0.5, "kl_coef": 0.3}
    options |= {"trust.cov_low": -10.0, "trust.cov_high": 10.0}
    recipe, batch, ctx = prepared(options)
    logp = batch.logp.clone().requires_grad_()
    ctx = replace(ctx, generator=torch.Generator().manual_seed(3))
    before = ctx.generator.get_state()
    loss, rest = without_policy_term(recipe, batch.replace(logp=logp), ctx)
    assert torch.equal(ctx.generator.get_state(), before)
    still = recipe.replace(weights=(), trust=proxpo.make_stage("trust", "unclipped"))
    alone = without_policy_term(still, batch.replace(logp=logp), ctx)[1]
    assert loss.value != rest
    assert_close(rest, alone)
    assert_close(*(torch.autograd.grad(x, logp)[0] for x in (rest, alone)))


@pytest.mark.parametrize(
    ("slug", "options", "asks"),
    [("grpo", {}, False), ("p3o", {}, True), ("p3o", {"ess_scope": "microbatch"}, False)],
)
def test_micro_batches_are_run_only_for_recipes_that_ask_for_their_sums(slug, options, asks):
    recipe = proxpo.make_recipe(slug, options)
    batch, ctx, _ = proxpo.prepare(recipe, make_batch())
    ctx, cuts, runs = replace(ctx, all_sum=local), [slice(0, 3), slice(3, None)], []

    def microbatches() -> list[proxpo.Batch]:
        runs.append(1)
        return [batch.rows(cut) for cut in cuts]

    assert asks_for_sums(recipe, batch.rows(cuts[0]), ctx) == asks
    sums = sums_over_step(recipe, batch.rows(cuts[0]), ctx, microbatches=microbatches)
    assert len(runs) == asks
    if asks:
        whole = proxpo.policy_loss(recipe, batch, ctx).value
        shared = replace(ctx, all_sum=sums)
        parts = [proxpo.policy_loss(recipe, batch.rows(cut), shared).value for cut in cuts]
        assert_close(torch.stack(parts).sum(), whole)
