"""The order of the stages and what prepare() fixes."""

import warnings

import pytest
import torch
from helpers import (
    cast,
    close,
    f64,
    gradients,
    loss_and_gradients,
    make_batch,
    method,
    policy_gradient,
    with_leaves,
)

import proxpo
from proxpo import ProxpoError, Recipe, compose
from proxpo.compose import count
from proxpo.ops.pairs import roles
from proxpo.stages import Parts, stage
from proxpo.stages.aggregate import token_mean
from proxpo.stages.filter import not_truncated
from proxpo.stages.ratio import none, token
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.select import probability_split
from proxpo.stages.trust import ppo_clip, score_function
from proxpo.stages.weights import tis


def test_given_advantages_are_used_as_they_are() -> None:
    batch = make_batch(1)
    rows = torch.linspace(-1, 1, 9).double()
    tokens = rows[:, None].expand(9, 6)
    for made in (method("grpo"), method("ppo", value=None), method("rloo")):
        a, b = (policy_gradient(made, batch.replace(advantages=x)) for x in (rows, tokens.clone()))
        close(a, b)
    ready = proxpo.prepare(method("grpo"), batch.replace(advantages=rows, rewards=None)).batch
    close(ready.advantages, tokens * batch.mask)


@pytest.mark.parametrize(
    ("slug", "options"), [("ppo", {"kl_coef": 0.1}), ("text2grad", {}), ("foldact", {})]
)
def test_given_advantages_leave_the_targets_of_the_critic(slug: str, options: dict) -> None:
    made, batch = method(slug, **options), make_batch(1)
    own = proxpo.prepare(made, batch).batch
    given = proxpo.prepare(made, batch.replace(advantages=torch.ones(9).double())).batch
    close(given.returns, own.returns)


def test_no_gradient_flows_through_advantages() -> None:
    batch = make_batch(1)
    leaf = torch.ones(9).double().requires_grad_()
    value = proxpo.loss_fn(method("grpo"))(batch.replace(advantages=leaf)).value
    assert not value.requires_grad


def test_fields_that_are_not_of_the_policys_pass_are_constants() -> None:
    made, batch = method("ppo", lam=0.5), with_leaves(make_batch(1))
    moving = {"old_values": batch.values, "rewards": batch.rewards + batch.logp.sum(1)}
    losses = (
        proxpo.loss_fn(made)(batch.replace(**fields)).value
        for fields in (moving, {name: x.detach() for name, x in moving.items()})
    )
    found, wanted = (gradients(x, batch) for x in losses)
    close(found, wanted)


def test_order_weights_regularisers_select() -> None:
    """x·w, then + β·KL, then ·select: weights leave the KL alone, select does not."""
    batch = make_batch(1).replace(advantages=torch.ones(9).double())
    parts = {
        "ratio": token(),
        "trust": ppo_clip(clip_low=9, clip_high=9),
        "aggregate": token_mean(),
    }
    whole = Recipe(
        weights=(tis(cap=1.1),), regularisers=(kl_to_ref(coef=0.3),),
        select=(probability_split(part="low"),), **parts
    )  # fmt: skip
    r = (batch.logp - batch.old_logp).exp()
    w = (batch.old_logp - batch.rollout_logp).exp().clamp(max=1.1)
    kl = 0.3 * (1 - (batch.ref_logp - batch.logp).exp())
    low = batch.old_logp.exp() < 0.5
    expected = (-r * w + kl) * low * batch.mask / batch.mask.double().sum()
    close(policy_gradient(whole, batch), expected)


def test_filters_shrink_every_denominator() -> None:
    batch = make_batch(1)
    batch = batch.replace(advantages=torch.ones_like(batch.logp))
    made = Recipe(
        filter=(not_truncated(),), advantage=None, ratio=none(), trust=score_function(),
        aggregate=token_mean(),
    )  # fmt: skip
    ready = proxpo.prepare(made, batch)
    kept = batch.mask & ~batch.truncated[:, None]
    assert ready.ctx.counts.tokens == kept.sum() < batch.mask.sum()
    assert ready.ctx.counts.sequences == kept.any(1).sum()
    assert ready.ctx.counts.rows == 9


def test_a_loss_of_advantages_without_any_is_refused() -> None:
    made = proxpo.make_recipe("grpo", {"advantage": None})
    with pytest.raises(ProxpoError, match="grpo has no advantage stage, so it needs the batch"):
        proxpo.loss_fn(made)(make_batch(1))


def test_advantages_of_the_caller_on_a_prepared_batch() -> None:
    """With as many responses as tokens, one per response could pass for one per token."""
    batch = make_batch(1).rows(slice(0, 6))
    assert batch.mask.shape == (6, 6)
    rows = torch.linspace(-1, 1, 6).double()
    ready, ctx, _ = proxpo.prepare("grpo", batch)
    want = proxpo.loss_fn("grpo")(batch.replace(advantages=rows)).value
    close(proxpo.policy_loss("grpo", ready.replace(advantages=rows), ctx).value, want)
    with pytest.raises(ProxpoError, match=r"no advantages; policy_loss needs .* proxpo\.prepare"):
        proxpo.policy_loss("grpo", batch, ctx)


def test_counts() -> None:
    batch = make_batch(1)
    counts = count(batch)
    assert counts.tokens == batch.mask.sum()
    assert counts.prompts == 3
    pairs = sum(group.unique().numel() > 1 for group in batch.rewards.view(3, 3))
    assert counts.pairs == count(batch.replace(**roles(batch))).pairs == pairs
    assert count(batch.replace(group=None)).prompts is None


def test_a_missing_field_is_named_with_its_meaning() -> None:
    batch = make_batch(1).replace(old_logp=None)
    with pytest.raises(ValueError, match=r"grpo: ratio=token needs .* 'old_logp' \("):
        proxpo.loss_fn(method("grpo"))(batch)


def test_new_forward_pass_on_a_prepared_batch() -> None:
    """policy_loss may be given new logp; what it holds at masked positions is cleaned again."""
    batch = make_batch(1)
    made = method("grpo", kl_coef=0.1)
    ready = proxpo.prepare(made, batch)
    logp = torch.where(batch.mask, batch.logp + 0.01, torch.nan)
    fresh = proxpo.policy_loss(made, ready.batch.replace(logp=logp), ready.ctx).value
    moved = batch.replace(logp=batch.logp + 0.01)
    close(fresh, proxpo.loss_fn(made)(moved).value)


def test_a_stage_returns_metrics_and_they_carry_no_gradient() -> None:
    batch = make_batch(1)
    leaf = batch.logp.clone().requires_grad_()
    metrics = proxpo.loss_fn(method("grpo", kl_coef=0.1))(batch.replace(logp=leaf)).metrics
    assert {"trust/clipped", "kl/ref"} <= metrics.keys()
    assert not any(seen.requires_grad for seen in metrics.values())


def test_state_reaches_the_stage_and_is_updated_by_it() -> None:
    @stage("weights", name="counting_for_this_test")
    def counting(*, step: float = 2.0):
        def weights(batch, ctx):
            return torch.ones_like(batch.logp) * (1 + ctx.state["seen"]), {}

        def update(state: dict, batch: object, metrics: dict) -> dict:
            return {"seen": state["seen"] + step}

        return Parts(apply=weights, init=lambda: {"seen": f64(0.0)}, update=update)

    made = method("grpo").replace(weights=(counting(),))
    batch = make_batch(1)
    state = made.init_state()
    first, _ = loss_and_gradients(made, batch, proxpo.Context(states=state))
    state = made.update_state(state, batch, {})
    second, _ = loss_and_gradients(made, batch, proxpo.Context(states=state))
    close(second, 3 * first)


def test_a_loss_without_its_transform_schedule_or_budget_says_so() -> None:
    """One line, once for each recipe; a recipe that is all loss says nothing."""
    compose._WARNED.clear()
    parts = {
        "isopo": "gradient=isopo",
        "isopo-ntk": "gradient=isopo_ntk",
        "proma": "gradient=proma",
        "trpo": "schedule=line_search",
        "sfpo": "schedule=fast_slow",
        "mdpo": "schedule=inner_steps",
        "knapsack-rl": "budget=knapsack",
        "st-ppo": "schedule=clipping_bias",
        "lopti": "schedule=split_passes",
    }
    for slug, part in parts.items():
        with pytest.warns(
            UserWarning, match=f"^{slug}: this loss is without {part}, which .*train"
        ):
            proxpo.loss_fn(method(slug))
    compose._WARNED.clear()
    with pytest.warns(UserWarning, match="^trpo: this loss is without schedule=line_search"):
        proxpo.prepare(method("trpo"), make_batch(1))
    proxpo.loss_fn(method("isopo"))
    ready = proxpo.prepare(method("isopo"), make_batch(1))
    with pytest.warns(UserWarning, match="^isopo: this loss is without gradient=isopo, .* proxpo"):
        proxpo.policy_loss(method("isopo"), with_leaves(ready.batch), ready.ctx)
    compose._WARNED.clear()
    proxpo.loss_fn(method("isopo"))
    proxpo.loss_fn(method("sfpo"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proxpo.prepare(method("isopo"), make_batch(1))  # backward_pass refuses it without
        proxpo.prepare(method("sfpo"), make_batch(1), proxpo.Context(states={}))
        proxpo.policy_loss(method("isopo"), ready.batch, ready.ctx)  # nothing to descend
        proxpo.loss_fn(method("isopo"))(with_leaves(make_batch(1)))
        proxpo.loss_fn(method("grpo"))
        proxpo.loss_fn(method("sfpo", schedule=None))


def test_autocast_around_a_loss_changes_nothing() -> None:
    """Discounted returns are matrix products, which autocast would round to bfloat16."""
    made, batch = method("reinforce", gamma=0.9), cast(make_batch(1), torch.float32)
    wanted = policy_gradient(made, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = policy_gradient(made, batch)
    assert torch.equal(found, wanted)


def test_autocast_around_prepare_leaves_the_targets_of_a_critic() -> None:
    made, batch = method("ppo", **{"value.gamma": 0.9}), cast(make_batch(1), torch.float32)
    batch = batch.replace(returns=None)
    wanted = proxpo.prepare(made, batch).batch.returns
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = proxpo.prepare(made, batch).batch.returns
    assert torch.equal(found, wanted)


def test_a_memory_that_nobody_keeps_is_told_once() -> None:
    compose._WARNED.clear()
    memories = {"dcpo": "advantage=smooth_standardised", "fixpo": "regularisers=kl_dual"}
    for slug, part in memories.items():
        with pytest.warns(UserWarning, match=f"^{slug}: the memory of {part} starts anew"):
            proxpo.prepare(slug, make_batch(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proxpo.loss_fn("dcpo")(make_batch(1))
        for made in (method("gtpo"), method("ppo", kl_coef=0.1), method("palu")):
            proxpo.prepare(made, make_batch(1), proxpo.Context(states=made.init_state()))
        proxpo.prepare(method("ppo", kl_coef=0.1), make_batch(1))  # its controller is fixed


@pytest.mark.parametrize("slug", ["reinforce", "isopo", "dpo"])
def test_rescaling_a_recipe_without_a_ratio_is_refused(slug: str) -> None:
    with pytest.raises(
        ProxpoError, match=f"{slug}: schedule=clipping_bias works on ratio, but ratio="
    ):
        method(slug, schedule="clipping_bias")
    assert method("grpo", schedule="clipping_bias").schedule is not None
