"""proxpo against TRL 1.16's own GRPO and RLOO trainers, loss and advantages, in float64."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from parity_inputs import (
    ROWS,
    TOKENS,
    close,
    compose,
    evaluate,
    given_weights,
    make_batch,
    make_fields,
)
from parity_table import shows
from trl import RLOOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl_side import MAX_TOKENS, trl_loss, trl_scores

import proxpo
from proxpo.compose import prepare
from proxpo.stages import aggregate, regularisers, trust, weights
from proxpo.stages import ratio as ratios
from proxpo.stages.reward import overlong_penalty


def agree(recipe: proxpo.Recipe, kind: str = "plain", **changes) -> None:
    value, grad, entropy_grad = trl_loss(kind, **changes)
    ours, our_grad, _ = evaluate(recipe, make_batch(kind, advantages="rows"))
    close(ours, value)
    close(our_grad, grad * make_fields(kind)["mask"])
    _, our_entropy_grad, _ = evaluate(recipe, make_batch(kind, advantages="rows"), wrt="entropy")
    torch.testing.assert_close(our_entropy_grad, entropy_grad, rtol=1e-9, atol=1e-15)


AGGREGATES = {
    "grpo": partial(aggregate.seq_mean_token_mean, count_empty=True),
    "bnpo": aggregate.token_mean,
    "dapo": aggregate.token_mean,
    "dr_grpo": partial(aggregate.constant_length, max_tokens=MAX_TOKENS, count_empty=True),
    "luspo": partial(aggregate.seq_mean_token_sum, count_empty=True),
}
RATIOS = {"token": ratios.token, "sequence": ratios.sequence}
CLIP = trust.ppo_clip(clip_low=0.1, clip_high=0.15)


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("loss_type", AGGREGATES)
def test_clipped_losses(loss_type, level, kind):
    recipe = compose(ratio=RATIOS[level](), trust=CLIP, aggregate=AGGREGATES[loss_type]())
    agree(recipe, kind, loss_type=loss_type, importance_sampling_level=level)


def gated(tau_pos: float, tau_neg: float, level: str = "token") -> proxpo.Recipe:
    gate = trust.soft_gate(tau_pos=tau_pos, tau_neg=tau_neg)
    return compose(ratio=RATIOS[level](), trust=gate, aggregate=AGGREGATES["grpo"]())


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("level", RATIOS)
def test_sapo(level, kind):
    rounded = torch.tensor([1.2, 1.7], dtype=torch.float32).tolist()
    agree(gated(*rounded, level), kind, loss_type="sapo", importance_sampling_level=level)


@shows("trl-sapo-temperature")
def test_sapo_temperatures_are_single_precision_in_trl():
    value, _, _ = trl_loss(loss_type="sapo")
    ours, _, _ = evaluate(gated(1.2, 1.7), make_batch(advantages="rows"))
    assert 1e-9 < abs(ours / value - 1) < 1e-7


@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_vespo(kind):
    kernel = trust.gamma_weight(k_pos=0.5, lambda_pos=3.0, k_neg=1.5, lambda_neg=2.0)
    product = ratios.sequence(normalise=False, limit=20.0)
    agree(compose(ratio=product, trust=kernel), kind, loss_type="vespo", weight=None)


@shows("trl-vespo-correction")
def test_vespo_corrects_its_ratio_in_trl():
    kernel = trust.gamma_weight(k_pos=0.5, lambda_pos=3.0, k_neg=1.5, lambda_neg=2.0)
    product = ratios.sequence(normalise=False, limit=20.0)
    fields = make_fields()
    weight = torch.where(fields["mask"], fields["old_logp"] - fields["rollout_logp"], 0.0).exp()
    value, grad, _ = trl_loss(loss_type="vespo", weight=weight)
    batch = make_batch(advantages="rows")
    sampler = ratios.sequence(normalise=False, limit=20.0, anchor="rollout")
    ours, our_grad, _ = evaluate(compose(ratio=sampler, trust=kernel), batch)
    close(ours, value)
    close(our_grad, grad)
    apart = compose(ratio=product, trust=kernel, weights=(weights.tis(cap=math.inf),))
    assert abs(evaluate(apart, batch)[0] / value - 1) > 1e-3


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("level", RATIOS)
def test_cispo(level, kind):
    recipe = compose(
        ratio=RATIOS[level](), trust=trust.clipped_weight(clip_high=1.2, absolute=True)
    )
    agree(recipe, kind, loss_type="cispo", importance_sampling_level=level, epsilon_high=1.2)


@shows("trl-cispo-cap")
def test_cispo_cap():
    value, grad, _ = trl_loss(loss_type="cispo", epsilon_high=1.2)
    ours, our_grad, _ = evaluate(
        proxpo.make_recipe("cispo", {"clip_high": 0.2}), make_batch(advantages="rows")
    )
    close(ours, value)
    close(our_grad, grad)
    far, _, _ = evaluate(
        proxpo.make_recipe("cispo", {"clip_high": 1.2}), make_batch(advantages="rows")
    )
    assert abs(far / value - 1) > 1e-3


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_kl(loss_type, level, corrected):
    recipe = compose(
        ratio=RATIOS[level](),
        trust=CLIP,
        regularisers=(regularisers.kl_to_ref(coef=0.3, ratio_corrected=corrected),),
        aggregate=AGGREGATES[loss_type](),
    )
    options = {"beta": 0.3, "use_bias_correction_kl": corrected}
    agree(recipe, loss_type=loss_type, importance_sampling_level=level, **options)


@shows("trl-kl")
def test_kl_is_multiplied_by_the_ratio_in_trl():
    value, _, _ = trl_loss(loss_type="grpo", beta=0.3)
    clip = {"clip_low": 0.1, "clip_high": 0.15, "kl_coef": 0.3}
    batch = make_batch(advantages="rows")
    plain, _, _ = evaluate(proxpo.make_recipe("grpo", clip), batch)
    theirs, _, _ = evaluate(proxpo.make_recipe("grpo", {**clip, "kl_ratio_corrected": True}), batch)
    close(theirs, value)
    assert abs(plain / value - 1) > 1e-3


@pytest.mark.parametrize("delta", [1.02, 1.05, 1.15, 1.3])
@pytest.mark.parametrize("level", RATIOS)
def test_two_sided_clip(level, delta):
    recipe = compose(
        ratio=RATIOS[level](), trust=trust.ppo_clip(clip_low=0.1, clip_high=0.15, cap=delta)
    )
    agree(recipe, importance_sampling_level=level, delta=delta)


def test_on_policy_without_old_log_probabilities():
    """TRL leaves them out when the data are fresh; then old_logp is the policy's own."""
    value, grad, _ = trl_loss(anchors=False)
    fresh = make_batch(advantages="rows")
    ours, our_grad, _ = evaluate(compose(trust=CLIP), fresh.replace(old_logp=fresh.logp))
    close(ours, value)
    close(our_grad, grad)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_top_entropy(share, kind):
    top = weights.top_entropy(share=share, rule="quantile", normalise="all")
    agree(compose(trust=CLIP, weights=(top,)), kind, top_entropy_quantile=share)


@shows("trl-entropy-selected")
def test_top_entropy_divides_by_all_tokens_in_trl():
    value, grad, _ = trl_loss(top_entropy_quantile=0.25)
    options = {"share": 0.25, "rule": "quantile", "clip_low": 0.1, "clip_high": 0.15}
    batch = make_batch(advantages="rows")
    ours, our_grad, seen = evaluate(proxpo.make_recipe("entropy-80-20", options), batch)
    close(ours * seen["weights/selected"].double(), value, rtol=1e-6)  # the share is a metric
    chosen = our_grad != 0
    close((grad[chosen] / our_grad[chosen]).min(), (grad[chosen] / our_grad[chosen]).max())
    assert (grad[chosen] / our_grad[chosen])[0] == pytest.approx(26 / 104)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_entropy_bonus(loss_type, kind):
    recipe = compose(trust=CLIP, regularisers=(regularisers.entropy_bonus(coef=0.2),))
    agree(recipe, kind, loss_type=loss_type, entropy_coef=0.2, _entropy_bonus_enabled=True)


@shows("trl-entropy-bonus")
def test_entropy_bonus_has_its_own_average_in_trl():
    policy = compose(trust=CLIP, aggregate=aggregate.seq_mean_token_mean())
    bonus = (regularisers.entropy_bonus(coef=0.2),)
    batch = make_batch(advantages="rows")
    value, _, grad = trl_loss(loss_type="grpo", entropy_coef=0.2, _entropy_bonus_enabled=True)
    token_mean = batch.entropy[batch.mask].mean()
    close(evaluate(policy, batch)[0] - 0.2 * token_mean, value)
    close(grad, -0.2 * batch.mask.double() / batch.mask.sum())
    assert abs(evaluate(policy.replace(regularisers=bonus), batch)[0] - value) > 1e-4


@shows("trl-vespo-kl")
def test_vespo_corrects_its_kl_by_another_ratio_in_trl():
    product = ratios.sequence(normalise=False, limit=20.0)
    kernel = trust.gamma_weight(k_pos=0.5, lambda_pos=3.0, k_neg=1.5, lambda_neg=2.0)
    kl = regularisers.kl_to_ref(coef=0.3, ratio_corrected=True)
    by_token = replace(kl, apply=lambda r, b, ctx: kl.apply((b.logp - b.old_logp).exp(), b, ctx))
    batch = make_batch(advantages="rows")
    value, grad, _ = trl_loss(loss_type="vespo", weight=None, beta=0.3)
    policy = compose(ratio=product, trust=kernel)
    ours, our_grad, _ = evaluate(policy.replace(regularisers=(by_token,)), batch)
    close(ours, value)
    close(our_grad, grad)
    assert abs(evaluate(policy.replace(regularisers=(kl,)), batch)[0] / value - 1) > 1e-3


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("threshold", [-0.02, 0.0, 0.05])
def test_off_policy_mask(threshold, kind):
    mask = weights.off_policy_mask(threshold=threshold)
    agree(compose(trust=CLIP, weights=(mask,)), kind, off_policy_mask_threshold=threshold)


def test_everything_at_once():
    """Off-policy mask, entropy mask, sampler weights and KL keep TRL's order."""
    recipe = compose(
        trust=CLIP,
        weights=(
            weights.off_policy_mask(threshold=0.0),
            weights.top_entropy(share=0.6, rule="quantile", normalise="all"),
            given_weights("weights", "rollout_logp"),
        ),
        regularisers=(regularisers.kl_to_ref(coef=0.3, ratio_corrected=True),),
    )
    agree(
        recipe,
        "holes",
        beta=0.3,
        off_policy_mask_threshold=0.0,
        top_entropy_quantile=0.6,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo"])
@shows("trl-empty")
def test_empty_responses_count_in_trl(loss_type):
    counted = AGGREGATES[loss_type]()
    options = {**counted.options, "count_empty": False}
    left_out = getattr(aggregate, counted.name)(**options)
    value, _, _ = trl_loss("holes", loss_type=loss_type)
    ours, _, _ = evaluate(
        compose(trust=CLIP, aggregate=left_out), make_batch("holes", advantages="rows")
    )
    close(ours * 11 / 12, value)


def accumulated(**changes) -> torch.Tensor:
    """The loss of three micro-batches of four responses, added up as TRL's trainer does."""
    counts = {"current_gradient_accumulation_steps": 3, "steps_per_generation": 3}
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    return sum(trl_loss(rows=rows, **counts, **changes)[0] for rows in parts)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_accumulation(loss_type):
    """Responses are spread evenly over the micro-batches, tokens are not."""
    recipe = compose(trust=CLIP, aggregate=AGGREGATES[loss_type]())
    whole, _, _ = evaluate(recipe, make_batch(advantages="rows"))
    close(whole, accumulated(loss_type=loss_type))


@shows("trl-accumulation")
def test_token_means_of_micro_batches_are_averaged_in_trl():
    recipe, batch = compose(trust=CLIP), make_batch(advantages="rows")
    parts = [batch.rows(slice(start, start + 4)) for start in (0, 4, 8)]
    theirs = accumulated(loss_type="bnpo")
    close(sum(evaluate(recipe, part)[0] for part in parts) / 3, theirs)
    assert abs(evaluate(recipe, batch)[0] / theirs - 1) > 1e-3


@shows("trl-tokens-of-a-step")
def test_a_step_is_divided_by_its_share_of_all_tokens_in_trl():
    """The first of three steps, each of one micro-batch."""
    first, whole = slice(0, 4), make_batch(advantages="rows")
    counts = {"current_gradient_accumulation_steps": 1, "steps_per_generation": 3}
    theirs = trl_loss(rows=first, loss_type="dapo", **counts)[0]
    part = whole.rows(first)
    ours, _, _ = evaluate(compose(trust=CLIP), part)
    close(ours * part.mask.sum() / (whole.mask.sum() / 3), theirs)
    assert abs(ours / theirs - 1) > 1e-3


@shows("trl-limit")
def test_large_log_ratios():
    free = {"token": ratios.token(limit=math.inf), "sequence": ratios.sequence(limit=math.inf)}
    for level, ratio in free.items():
        agree(compose(ratio=ratio, trust=trust.unclipped()), "wild", **unclipped(level))
    value, _, _ = trl_loss("wild", **unclipped("token"))
    bounded, _, _ = evaluate(
        compose(trust=trust.unclipped()), make_batch("wild", advantages="rows")
    )
    assert abs(value / bounded) > 1e6


def unclipped(level: str) -> dict[str, Any]:
    return {"importance_sampling_level": level, "epsilon_low": 1e30, "epsilon_high": 1e30}


# --- advantages and sampler weights: the part of TRL that scores completions


def our_advantages(method: str, settings: dict[str, Any], **changes) -> torch.Tensor:
    batch = prepare(proxpo.make_recipe(method, settings), make_batch(advantages=None, **changes))
    return batch.batch.advantages[:, 0]  # every response of this batch has a first token


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("missing", [False, True])
def test_grpo_advantages(scale, missing):
    rewards = make_fields()["rewards"]
    if missing:  # a response no reward function could score
        rewards[5] = math.nan
    theirs = trl_scores(scale_rewards=scale, rewards=rewards)["advantages"]
    options = {"scale": scale} if scale == "none" else {"scale": scale, "eps": 1e-4}
    close(our_advantages("grpo", options, rewards=rewards), theirs)


@shows("trl-alone")
def test_a_completion_alone_has_no_advantage_in_trl():
    rewards = make_fields()["rewards"]
    rewards[1:4] = math.nan  # no reward function could score its siblings
    theirs = trl_scores(rewards=rewards)["advantages"]
    options = {"eps": 1e-4, "advantage.singleton": "zero"}
    close(our_advantages("grpo", options, rewards=rewards), theirs)
    assert theirs[0] == 0
    assert our_advantages("grpo", {"eps": 1e-4}, rewards=rewards)[0] == rewards[0] != 0


@shows("trl-eps")
def test_grpo_epsilon():
    theirs = trl_scores()["advantages"]
    close(our_advantages("grpo", {"eps": 1e-4}), theirs)
    ours = our_advantages("grpo", {})
    std = make_fields()["rewards"].view(3, 4).std(1).repeat_interleave(4)
    close(ours * (std + 1e-6) / (std + 1e-4), theirs)
    assert (ours - theirs).abs().max() > 1e-5


@pytest.mark.parametrize(("most", "cache"), [(12, 5), (14, 14), (9, 1), (6, 4)])
def test_overlong_penalty(most, cache):
    batch = make_batch(advantages=None, rewards=torch.zeros(ROWS, dtype=torch.float64))
    ids = [[1] * length for length in batch.mask.sum(1).tolist()]
    theirs = get_soft_overlong_punishment(most, cache)(ids)
    shaped, _ = overlong_penalty(max_tokens=most, cache=cache).apply(batch, proxpo.Context())
    close(shaped.rewards, torch.tensor(theirs, dtype=torch.float64))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.6)])
def test_rloo_advantages(beta, normalise, bounds):
    low, high = bounds or (None, None)
    theirs = trl_scores(
        RLOOTrainer, beta=beta, normalize_advantages=normalise, reward_clip_range=bounds
    )["advantages"]
    settings = {"kl_coef": beta, "normalise": normalise, "reward_low": low, "reward_high": high}
    close(our_advantages("rloo", settings), theirs)


@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_rloo_loss(kind):
    """TRL's constant for an empty response (ratio 1) has no gradient; ours leaves it out."""
    recipe = proxpo.make_recipe("rloo", {"form": "trl", "clip_low": 0.3, "clip_high": 0.3})
    batch = make_batch(kind, advantages="rows")
    value, grad, _ = trl_loss(kind, RLOOTrainer, epsilon_low=0.3, epsilon_high=0.3)
    ours, our_grad, _ = evaluate(recipe, batch)
    filled = batch.mask.any(1)
    constant = -batch.advantages[~filled].sum()
    close((ours * filled.sum() + constant) / ROWS, value)
    close(our_grad * filled.sum() / ROWS, grad * batch.mask)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(None, 1.1), (0.9, 1.1), (0.8, None)])
def test_sampler_weights(level, mode, bounds):
    low, high = bounds
    theirs = trl_scores(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]
    stage = weights.tis(
        mode=mode, level=level, floor=low or 0.0, cap=math.inf if high is None else high
    )
    batch = make_batch()
    ours, _ = stage.apply(batch.clean(), proxpo.Context())
    close(ours * batch.mask, theirs.expand(ROWS, TOKENS) * batch.mask)
