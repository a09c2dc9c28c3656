"""proxpo against polgrad 0.2.1, a library of reference semantics for policy-gradient losses."""

import math

import polgrad
import pytest
import torch
from parity_inputs import close, compose, evaluate, make_batch
from parity_table import shows
from polgrad import Aggregation, ClipConfig, KLEstimator, RatioKind, SurrogateKind

import proxpo
from proxpo.compose import prepare
from proxpo.ops import kl
from proxpo.stages import aggregate, regularisers, trust, weights
from proxpo.stages import ratio as ratios
from proxpo.stages.advantage import raw_gae, token_rewards, whiten

AGGREGATES = {
    Aggregation.TOKEN_MEAN: aggregate.token_mean(),
    Aggregation.SEQ_MEAN_TOKEN_MEAN: aggregate.seq_mean_token_mean(),
    Aggregation.SEQ_MEAN_TOKEN_SUM: aggregate.seq_mean_token_sum(),
    Aggregation.TOKEN_SUM_NORM: aggregate.constant_length(max_tokens=20),
}
RATIOS = {
    RatioKind.TOKEN: ratios.token(),
    RatioKind.SEQUENCE: ratios.sequence(),
    RatioKind.SEQUENCE_TOKEN: ratios.sequence(own_gradient=True),
}
SURROGATES = {  # theirs: kind and clip; ours: trust stage
    "clip": (
        SurrogateKind.PG_CLIP,
        ClipConfig(0.1, 0.15),
        trust.ppo_clip(clip_low=0.1, clip_high=0.15),
    ),
    "dual": (
        SurrogateKind.PG_CLIP,
        ClipConfig(0.1, 0.15, 1.4),
        trust.ppo_clip(clip_low=0.1, clip_high=0.15, dual=1.4),
    ),
    "unclipped": (SurrogateKind.PG, None, trust.unclipped()),
    "cispo": (SurrogateKind.CISPO, ClipConfig(None, 0.15), trust.clipped_weight(clip_high=0.15)),
    "cispo two-sided": (
        SurrogateKind.CISPO,
        ClipConfig(0.1, 0.15),
        trust.clipped_weight(clip_low=0.1, clip_high=0.15),
    ),
}
METHODS = {  # polgrad's registry -> our recipe with the same numbers
    "grpo": ("grpo", {"kl_coef": 0.04}),
    "dr_grpo": ("dr-grpo", {"max_tokens": 20}),
    "dapo": ("dapo", {}),
    "gspo": ("gspo", {}),
    "gspo_token": ("gspo", {"variant": "token"}),
    "cispo": ("cispo", {}),
    "rloo": ("rloo", {}),
    "ppo": ("ppo", {"value": None}),
    "reinforce_pp": ("reinforce-pp", {"aggregate": "seq_mean_token_mean"}),
    "grpo_tis": ("tis", {"cap": 10.0}),
}


def theirs(config: polgrad.PolicyLossConfig, batch: proxpo.Batch):
    leaf = batch.logp.clone().requires_grad_()
    loss = polgrad.policy_loss(
        config,
        logprobs=leaf,
        old_logprobs=batch.old_logp,
        advantages=batch.advantages,
        response_mask=batch.mask,
        ref_logprobs=batch.ref_logp,
        rollout_logprobs=batch.rollout_logp,
    ).loss
    return loss.detach(), *torch.autograd.grad(loss, leaf)


def agree(config: polgrad.PolicyLossConfig, recipe: proxpo.Recipe, batch: proxpo.Batch) -> None:
    value, grad = theirs(config, batch)
    ours, our_grad, _ = evaluate(recipe, batch)
    close(ours, value)
    close(our_grad, grad)


@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize("ratio", RatioKind)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_policy_loss(surrogate, ratio, mode):
    kind, clip, stage = SURROGATES[surrogate]
    config = polgrad.PolicyLossConfig(ratio, kind, clip, mode, norm_len=20)
    recipe = compose(ratio=RATIOS[ratio], trust=stage, aggregate=AGGREGATES[mode])
    agree(config, recipe, make_batch())


def test_the_ceiling_of_a_dual_clip_is_not_in_trust_clipped():
    """polgrad's masks hold every token without a gradient; ours counts the clipped branch alone."""
    kind, clip, stage = SURROGATES["dual"]
    config = polgrad.PolicyLossConfig(RatioKind.TOKEN, kind, clip, Aggregation.TOKEN_MEAN)
    batch = make_batch()
    given = {"logprobs": batch.logp, "old_logprobs": batch.old_logp, "response_mask": batch.mask}
    silent = polgrad.policy_loss(config, advantages=batch.advantages, **given)
    silent = silent.clipped_low | silent.clipped_high
    _, grad, seen = evaluate(compose(trust=stage), batch)
    assert torch.equal(silent, batch.mask & (grad == 0))
    at_ceiling = silent & (batch.advantages < 0) & (batch.logp - batch.old_logp > math.log(1.4))
    assert bool(at_ceiling.any())
    share = (silent & ~at_ceiling).sum() / batch.mask.sum()
    close(seen["trust/clipped"], share.double(), rtol=1e-6)


def test_reinforce():
    config = polgrad.PolicyLossConfig(
        RatioKind.TOKEN, SurrogateKind.REINFORCE, None, Aggregation.SEQ_MEAN_TOKEN_SUM
    )
    agree(config, proxpo.make_recipe("reinforce"), make_batch())


@pytest.mark.parametrize("name", METHODS)
def test_registered_methods(name):
    method, settings = METHODS[name]
    config = polgrad.get_algorithm(name).loss
    if config.aggregation is Aggregation.TOKEN_SUM_NORM:
        config = polgrad.PolicyLossConfig(**{**vars(config), "norm_len": 20})
    recipe = proxpo.make_recipe(method, settings)
    if name == "grpo_tis":
        recipe = recipe.replace(regularisers=(regularisers.kl_to_ref(coef=0.04),))
    agree(config, recipe, make_batch(advantages="rows"))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampler_correction(level):
    correction = polgrad.ISCorrectionConfig(cap=1.1, level=level)
    config = polgrad.PolicyLossConfig(
        RatioKind.TOKEN,
        SurrogateKind.PG_CLIP,
        ClipConfig(0.2, 0.2),
        Aggregation.TOKEN_MEAN,
        is_correction=correction,
    )
    agree(config, compose(weights=(weights.tis(cap=1.1, level=level),)), make_batch())


@pytest.mark.parametrize("estimator", KLEstimator)
def test_kl(estimator):
    batch = make_batch()
    leaf = batch.logp.clone().requires_grad_()
    value = polgrad.kl_estimate(leaf, batch.ref_logp, estimator, response_mask=batch.mask)
    ours = kl.kl_estimate(leaf, batch.ref_logp, estimator=estimator.value)
    ours = torch.where(batch.mask, ours, 0.0)
    close(ours.detach(), value.detach())
    grads = [torch.autograd.grad(x.sum(), leaf)[0] for x in (ours, value)]
    close(*grads)


@pytest.mark.parametrize("estimator", KLEstimator)
@pytest.mark.parametrize("mode", Aggregation)
def test_kl_in_the_loss(estimator, mode):
    config = polgrad.PolicyLossConfig(
        RatioKind.TOKEN,
        SurrogateKind.PG,
        None,
        mode,
        norm_len=20,
        kl=polgrad.KLLossConfig(estimator, 0.3),
    )
    penalty = regularisers.kl_to_ref(coef=0.3, estimator=estimator.value)
    recipe = compose(trust=trust.unclipped(), regularisers=(penalty,), aggregate=AGGREGATES[mode])
    agree(config, recipe, make_batch())


def our_advantages(method: str, settings: dict | None = None, kind: str = "plain") -> torch.Tensor:
    ready = prepare(proxpo.make_recipe(method, settings or {}), make_batch(kind, advantages=None))
    return ready.batch.advantages


@pytest.mark.parametrize(
    ("method", "settings", "config"),
    [
        ("grpo", {"eps": 1e-4}, polgrad.GroupNormConfig()),
        ("grpo", {"eps": 1e-6}, polgrad.GroupNormConfig(eps=1e-6)),
        ("grpo", {"advantage.unbiased": False}, polgrad.GroupNormConfig(eps=1e-6, unbiased=False)),
        ("dr-grpo", {}, polgrad.GroupNormConfig(scale="none")),
    ],
)
def test_group_advantages(method, settings, config):
    batch = make_batch()
    value = polgrad.grpo_advantages(batch.rewards, batch.group, config)
    close(our_advantages(method, settings), polgrad.broadcast_to_tokens(value, batch.mask))


def test_rloo_advantages():
    batch = make_batch()
    value = polgrad.rloo_advantages(batch.rewards, batch.group)
    ours = our_advantages("rloo", {"kl_coef": 0})
    close(ours, polgrad.broadcast_to_tokens(value, batch.mask))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_and_whitening(gamma, lam):
    batch = make_batch(advantages=None)
    rewards = token_rewards(batch)
    config = polgrad.GAEConfig(gamma=gamma, lam=lam)
    value, _ = polgrad.gae(rewards, batch.old_values, config=config, response_mask=batch.mask)
    close(raw_gae(batch, gamma=gamma, lam=lam), value)
    close(whiten(value, batch.mask), polgrad.whiten(value, batch.mask))


@pytest.mark.parametrize("clip", [None, 0.4])
def test_value_loss(clip):
    batch = make_batch()
    leaf = batch.values.clone().requires_grad_()
    returns = raw_gae(batch, gamma=0.95, lam=0.9) + batch.old_values
    value = polgrad.value_loss(
        leaf,
        batch.old_values,
        returns,
        batch.mask,
        clip_eps=clip,
        aggregation=Aggregation.TOKEN_MEAN,
    ).loss
    recipe = proxpo.make_recipe("ppo", {"gamma": 0.95, "lam": 0.9, "value_clip": clip})
    _, grad, seen = evaluate(recipe, batch, wrt="values")
    close(seen["loss/value"], value.detach())
    close(grad, torch.autograd.grad(value, leaf)[0])


@shows("polgrad-limit")
def test_large_log_ratios():
    config = polgrad.PolicyLossConfig(
        RatioKind.TOKEN, SurrogateKind.PG, None, Aggregation.TOKEN_MEAN
    )
    batch, stage = make_batch("wild"), trust.unclipped()
    agree(config, compose(ratio=ratios.token(limit=math.inf), trust=stage), batch)
    value, _ = theirs(config, batch)
    assert abs(value / evaluate(compose(trust=stage), batch)[0]) > 1e6


@shows("polgrad-alone")
def test_a_response_without_siblings():
    batch = make_batch("holes")
    with pytest.raises(ValueError, match="single reward"):
        polgrad.grpo_advantages(batch.rewards, batch.group, polgrad.GroupNormConfig())
    with pytest.raises(ValueError, match="single reward"):
        polgrad.rloo_advantages(batch.rewards, batch.group)
    assert our_advantages("grpo", kind="holes")[11, 0] == batch.rewards[11]
    assert our_advantages("rloo", {"kl_coef": 0}, kind="holes")[11, 0] == 0


@shows("polgrad-reinforce-pp")
def test_reinforce_pp_counts_tokens_here_and_responses_there():
    batch = make_batch()
    value = polgrad.reinforce_pp_advantages(
        batch.rewards, config=polgrad.ReinforcePPConfig(batch_norm=True)
    )
    centred = batch.rewards - batch.rewards.mean()
    close(value, centred / (batch.rewards.std() + 1e-8))
    tokens = our_advantages("reinforce-pp", {"kl_coef": 0})[batch.mask]
    assert abs(tokens.mean()) < 1e-12
    assert tokens.std().item() == pytest.approx(1.0, abs=1e-6)
    spread = polgrad.broadcast_to_tokens(value, batch.mask)[batch.mask]
    assert abs(spread.mean()) > 1e-2
