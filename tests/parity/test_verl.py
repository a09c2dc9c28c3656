"""proxpo against verl 0.9.1's own functions, run in verl's environment."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_inputs import KINDS, close, compose, evaluate, given_weights, make_batch, make_fields
from parity_table import shows
from verl_cases import (
    ADVANTAGES,
    AGGREGATES,
    CORRECTIONS,
    EXACT,
    GLOBAL,
    LOSSES,
    NEAR,
    PENALTIES,
    REJECTIONS,
    WHITENED,
    all_cases,
    clip,
    weigh,
)

import proxpo
from proxpo.compose import policy_loss, prepare
from proxpo.ops import kl
from proxpo.stages import advantage as advantages
from proxpo.stages import ratio as ratios
from proxpo.stages import trust, weights
from proxpo.stages.filter import reject
from proxpo.types import Denominators, memory_name

ALONE = 11  # the response without siblings of the batch with holes
GUARDED_ONE = (torch.tensor(1.0, dtype=torch.float32) + 1e-6).double()


@pytest.fixture(scope="module")
def verl(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What verl answers to every case, from one run of verl_side.py."""
    python = os.environ.get("PROXPO_VERL_PYTHON", "")
    if not python or not Path(python).exists():
        pytest.fail(
            "parity with verl needs verl's own environment: run `make test`, or set "
            "PROXPO_VERL_PYTHON to the interpreter of one built from requirements/verl.txt"
            + (f" ('{python}' does not exist)" if python else ""),
            pytrace=False,
        )
    folder = tmp_path_factory.mktemp("verl")
    batches = {
        kind: {name: value.tolist() for name, value in make_fields(kind).items()} for kind in KINDS
    }
    cases = {
        name: {"call": case.call, "batch": case.batch, "options": case.options}
        for name, case in all_cases().items()
    }
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({"batches": batches, "cases": cases}))
    script = Path(__file__).with_name("verl_side.py")
    run = subprocess.run(
        [python, str(script), str(request), str(answer)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode:
        pytest.fail(f"verl_side.py failed:\n{run.stderr[-3000:]}", pytrace=False)
    found = json.loads(answer.read_text())
    assert found["version"] == "0.9.1"
    return found["results"]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def agree(recipe: proxpo.Recipe, batch: proxpo.Batch, theirs: dict[str, Any], **given) -> None:
    value, grad, _ = evaluate(recipe, batch, **given)
    close(value, tensor(theirs["value"]))
    close(grad, tensor(theirs["grad"]))


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(verl, name):
    case = LOSSES[name]
    batch = make_batch(case.batch)
    if name.startswith("clip_cov"):
        batch = batch.replace(token_draw=drawn_as_by_verl(batch))
    agree(case.recipe(), batch, verl[name])


def drawn_as_by_verl(batch: proxpo.Batch) -> torch.Tensor:
    """Numbers that take the eligible tokens in the order of verl's random permutation of them."""
    logp, mask = batch.logp, batch.mask
    adv = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    adv, ratio = adv.expand_as(logp), (logp - batch.old_logp).exp()
    cov = (adv - adv[mask].mean()) * (logp - logp[mask].mean())
    clipped = -adv * ratio.clamp(0.9, 1.15) > -adv * ratio
    eligible = (mask & ~clipped & (cov > 0.2) & (cov < 3.0)).nonzero()
    order = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(11))
    drawn = torch.zeros_like(logp)
    for place, number in enumerate(order):
        drawn[tuple(eligible[number])] = 1 - (place + 1) / (len(order) + 1)
    return drawn


@pytest.mark.parametrize("agg", EXACT)
def test_micro_batch_of_a_larger_step(verl, agg):
    """Both sides divide by the counts of the whole step."""
    recipe, ready = clip(agg)(), prepare(clip(agg)(), make_batch()).batch
    counts = Denominators(
        tokens=tensor(GLOBAL["batch_num_tokens"]),
        sequences=tensor(GLOBAL["global_batch_size"]),
        rows=tensor(GLOBAL["global_batch_size"]),
    )
    leaf = ready.logp.clone().requires_grad_()
    ours = policy_loss(recipe, ready.replace(logp=leaf), proxpo.Context(denominators=counts)).value
    close(ours.detach(), tensor(verl[f"global {agg}"]["value"]))
    close(torch.autograd.grad(ours, leaf)[0], tensor(verl[f"global {agg}"]["grad"]))


def guarded(batch: proxpo.Batch) -> proxpo.Batch:
    """Advantages times L/(L + 1e-8): the losses are homogeneous in A, so this is verl's guard."""
    lengths = batch.mask.sum(1, keepdim=True).double()
    adv = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    return batch.replace(advantages=(adv * lengths / (lengths + 1e-8)).expand_as(batch.logp))


@pytest.mark.parametrize("name", NEAR)
@shows("verl-row-count")
def test_response_average_up_to_its_guard(verl, name):
    case = NEAR[name]
    agree(case.recipe(), guarded(make_batch(case.batch)), verl[name])
    value, _, _ = evaluate(case.recipe(), make_batch(case.batch))
    assert 0 < abs(value.item() / verl[name]["value"] - 1) < 1e-8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", AGGREGATES)
def test_aggregation(verl, mode, kind):
    """∂/∂x of the average is its weights, so the gradient compares every weight."""
    batch = make_batch(kind)
    identity = proxpo.Stage(
        kind="trust", name="identity", apply=lambda _, batch, ctx: (batch.logp, {}), gives="loss"
    )
    value, grad, _ = evaluate(compose(trust=identity, aggregate=AGGREGATES[mode]()), batch)
    theirs = verl[f"agg {mode} {kind}"]
    if mode == "seq-mean-token-mean":
        lengths = batch.mask.sum(1, keepdim=True).double()
        close(grad * lengths / (lengths + 1e-8), tensor(theirs["grad"]), rtol=1e-12)
    else:
        close(grad, tensor(theirs["grad"]), rtol=1e-12)
        close(value, tensor(theirs["value"]), rtol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_gmpo(verl, kind):
    recipe = proxpo.make_recipe("gmpo", {"clip_low": 0.2, "clip_high": 0.25})
    batch = make_batch(kind, advantages="rows")
    value, grad, _ = evaluate(recipe, batch)
    theirs = verl[f"geo_mean {kind}"]
    share = batch.mask.any(1).double().mean()  # verl averages over empty responses too
    close(value * share, tensor(theirs["value"]), rtol=1e-8)  # L + 1e-8, twice
    close(grad * share, tensor(theirs["grad"]), rtol=1e-8)


@shows("verl-geo-empty")
def test_gmpo_counts_empty_responses_in_verl(verl):
    recipe = proxpo.make_recipe("gmpo", {"clip_low": 0.2, "clip_high": 0.25})
    value, _, _ = evaluate(recipe, make_batch("holes", advantages="rows"))
    assert verl["geo_mean holes"]["value"] / value.item() == pytest.approx(11 / 12, rel=1e-8)


@shows("verl-geo-weights")
def test_gmpo_weights(verl):
    recipe = weigh(lambda: proxpo.make_recipe("gmpo", {"clip_low": 0.2, "clip_high": 0.25}))()
    batch = make_batch(advantages="rows")
    w = torch.where(batch.mask, batch.ref_logp, 0.0)
    lengths = batch.mask.sum(1)
    arithmetic = torch.where(batch.mask, w.exp(), 0.0).sum(1) / lengths
    geometric = (w.sum(1) / lengths).exp()
    theirs = tensor(verl["geo_mean weighted"]["value"])
    as_verl = batch.replace(advantages=batch.advantages * geometric / arithmetic)
    close(evaluate(recipe, as_verl)[0], theirs, rtol=1e-8)
    assert abs(evaluate(recipe, batch)[0] / theirs - 1) > 1e-2


@pytest.mark.parametrize("name", ["kl_cov", "dro"])
@shows("verl-penalty-weights")
def test_verl_weighs_these_penalties(verl, name):
    """A `select` stage multiplies the regularisers too, which is what verl does here."""
    recipe, theirs = LOSSES[f"{name} plain"].recipe, verl[f"{name} weighted"]
    everywhere = given_weights("select", "ref_logp")
    agree(recipe().replace(select=(everywhere,)), make_batch(), theirs)
    value, _, _ = evaluate(weigh(recipe)(), make_batch())
    assert abs(value.item() - theirs["value"]) > 1e-6


@pytest.mark.parametrize(("name", "advantages"), [("tokens", "tokens"), ("weighted", "rows")])
@shows("verl-gspo-token")
def test_verl_s_gspo_is_the_token_form(verl, name, advantages):
    """Of the same value as GSPO's eq. 5, with another gradient where tokens count differently."""
    theirs, batch = verl[f"gspo {name}"], make_batch(advantages=advantages)
    for own_gradient in (True, False):
        stages = {
            "ratio": ratios.sequence(own_gradient=own_gradient),
            "trust": trust.ppo_clip(clip_low=0.05, clip_high=0.03),
        }
        recipe = compose(**stages)
        if name == "weighted":
            recipe = weigh(lambda recipe=recipe: recipe)()
        value, grad, _ = evaluate(recipe, batch)
        close(value, tensor(theirs["value"]))
        wanted = tensor(theirs["grad"])
        if own_gradient:
            close(grad, wanted)
        else:
            assert (grad - wanted).norm() > 0.05 * wanted.norm()


@shows("verl-cov-limit")
def test_covariance_losses_have_no_bound_in_verl(verl):
    bounded = LOSSES["kl_cov plain"].recipe()
    free = bounded.replace(ratio=ratios.token(limit=math.inf))
    agree(free, make_batch("wild"), verl["kl_cov wild"])
    value, _, _ = evaluate(bounded, make_batch("wild"))
    assert abs(verl["kl_cov wild"]["value"] / value.item()) > 1e6


@shows("verl-dual")
def test_verl_always_clips_twice(verl):
    theirs = verl["vanilla default"]
    agree(compose(trust=trust.ppo_clip(dual=3.0)), make_batch("wild"), theirs)
    value, _, _ = evaluate(compose(), make_batch("wild"))
    assert value.item() > 10 * abs(theirs["value"])


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(verl, name, kind):
    ready = prepare(ADVANTAGES[name][1](), make_batch(kind, advantages=None))
    theirs = tensor(verl[f"advantage {name} {kind}"]["value"])
    if name == "grpo" and kind == "holes":
        theirs[ALONE] *= GUARDED_ONE  # shown below
    close(ready.batch.advantages, theirs * ready.batch.mask)


@shows("verl-grpo-alone")
def test_grpo_alone(verl):
    batch = make_batch("holes", advantages=None)
    ours = prepare(proxpo.make_recipe("grpo"), batch).batch.advantages[ALONE]
    theirs = tensor(verl["advantage grpo holes"]["value"])[ALONE]
    close(ours, batch.rewards[ALONE] * batch.mask[ALONE], rtol=1e-15)
    close(theirs * GUARDED_ONE, ours, rtol=1e-15)


@pytest.mark.parametrize("kind", ["plain", "holes"])
@pytest.mark.parametrize("name", WHITENED)
@shows("verl-whiten-count")
def test_whitened_advantages(verl, name, kind):
    """verl's guard moves mean and variance by 1e-8/N; undoing it leaves nothing."""
    recipe = WHITENED[name][1]()
    unwhitened = {**recipe.advantage.options, "whitening": False}
    make = getattr(advantages, recipe.advantage.name)
    raw_recipe = recipe.replace(advantage=make(**unwhitened))
    batch = make_batch(kind, advantages=None)
    ready, raw = prepare(recipe, batch).batch, prepare(raw_recipe, batch).batch.advantages
    theirs = tensor(verl[f"advantage {name} {kind}"]["value"]) * ready.mask
    close(ready.advantages, theirs)
    n = ready.mask.sum().double()
    mean = raw[ready.mask].sum() / (n + 1e-8)
    variance = (raw[ready.mask] - mean).square().sum() / (n + 1e-8) * n / (n - 1)
    close((raw - mean) * (variance + 1e-8).rsqrt() * ready.mask, theirs, rtol=1e-13)


@shows("verl-rloo-alone")
def test_rloo_alone(verl):
    batch = make_batch("holes", advantages=None)
    ours = prepare(proxpo.make_recipe("rloo", {"kl_coef": 0}), batch).batch.advantages[ALONE]
    theirs = tensor(verl["advantage rloo holes"]["value"])[ALONE]
    assert bool((ours == 0).all())
    assert torch.equal(theirs, batch.rewards[ALONE] * batch.mask[ALONE])


@shows("verl-dr-grpo-alone")
def test_dr_grpo_alone(verl):
    batch = make_batch("holes", advantages=None)
    ours = prepare(proxpo.make_recipe("dr-grpo"), batch).batch.advantages[ALONE]
    theirs = tensor(verl["advantage dr-grpo holes"]["value"])[ALONE]
    assert bool((ours == 0).all())
    assert torch.equal(theirs, batch.rewards[ALONE] * batch.mask[ALONE])


@shows("verl-vectorized-float32")
def test_vectorized_grpo_is_single_precision(verl):
    ours = prepare(proxpo.make_recipe("grpo"), make_batch("holes", advantages=None)).batch
    theirs = tensor(verl["advantage grpo_vectorized"]["value"])
    close(ours.advantages, theirs, rtol=1e-6)
    assert (ours.advantages - theirs).abs().max() > 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_kl_penalty(verl, penalty, kind):
    batch = make_batch(kind)
    leaf = batch.logp.clone().requires_grad_()
    ours = kl.kl_estimate(leaf, batch.ref_logp, estimator=penalty, clamp="verl")
    (grad,) = torch.autograd.grad(ours.sum(), leaf)
    theirs = verl[f"kl {penalty} {kind}"]
    torch.testing.assert_close(ours.detach(), tensor(theirs["value"]), rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(grad, tensor(theirs["grad"]), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["plain", "holes"])
def test_value_loss(verl, kind):
    recipe = proxpo.make_recipe("ppo", {"gamma": 0.95, "lam": 0.9, "value_clip": 0.4})
    _, grad, seen = evaluate(recipe, make_batch(kind), wrt="values")
    theirs = verl[f"value {kind}"]
    close(seen["loss/value"], tensor(theirs["value"]))
    close(grad, tensor(theirs["grad"]))
    close(seen["value/clipped"], tensor(theirs["clipped"]), rtol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("option", "estimator", "statistic", "threshold"), REJECTIONS)
def test_rejection(verl, option, estimator, statistic, threshold, kind):
    rule = reject(estimator=estimator, statistic=statistic, threshold=threshold)
    kept = prepare(compose(filter=(rule,)), make_batch(kind)).batch.mask
    theirs = tensor(verl[f"reject {option} {threshold} {kind}"]["mask"]).bool()
    assert torch.equal(kept, theirs)
    assert 0 < kept.sum() < make_batch(kind).mask.sum(), "the threshold should reject some"


def test_two_rejections(verl):
    rules = (
        reject(estimator="k1", statistic="token", threshold="0.8_1.3"),
        reject(estimator="k3", statistic="seq_mean", threshold=0.02),
    )
    batch = make_batch()
    one, other = (prepare(compose(filter=(rule,)), batch).batch.mask for rule in rules)
    assert torch.equal(one & other, tensor(verl["reject two"]["mask"]).bool())


def correction_weights(batch: proxpo.Batch, level, mode, floor, cap, normalise) -> torch.Tensor:
    stage = weights.tis(level=level, mode=mode, floor=floor, cap=cap, normalise=normalise)
    return stage.apply(batch.clean(), proxpo.Context())[0] * batch.mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "threshold", "mode", "floor", "cap"), CORRECTIONS)
def test_correction_weights(verl, level, threshold, mode, floor, cap, kind):
    batch = make_batch(kind)
    ours = correction_weights(batch, level, mode, floor, cap, False)
    close(ours, tensor(verl[f"weights {level} {threshold} False {kind}"]["weights"]), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "threshold", "mode", "floor", "cap"), CORRECTIONS)
@shows("verl-weight-count")
def test_normalised_correction_weights(verl, level, threshold, mode, floor, cap, kind):
    batch = make_batch(kind)
    raw = correction_weights(batch, level, mode, floor, cap, False)
    ours = correction_weights(batch, level, mode, floor, cap, True)
    theirs = tensor(verl[f"weights {level} {threshold} True {kind}"]["weights"])
    close(ours, theirs, rtol=1e-8)
    lengths = batch.mask.sum(1).double()
    if level == "token":
        mean = raw.sum() / (lengths.sum() + 1e-8)
    else:
        mean = (raw.sum(1) / (lengths + 1e-8)).sum() / (lengths > 0).sum()
    close(raw / mean, theirs, rtol=1e-13)


@pytest.mark.parametrize("name", ["above", "below", "near"])
def test_adaptive_kl(verl, name):
    case = all_cases()[f"controller {name}"].options
    recipe = proxpo.make_recipe(
        "ppo",
        {
            "kl_coef": case["coef"],
            "kl_controller": "horizon",
            "kl_target": case["target"],
            "kl_horizon": case["horizon"],
        },
    )
    ready = prepare(recipe, make_batch(advantages=None))
    own = memory_name("reward.kl_in_reward", "reward/kl")
    seen = ready.metrics | {own: tensor(case["kl"])}
    state = recipe.update_state(recipe.init_state(), ready.batch, seen)
    close(state["reward.kl_in_reward"]["coef"], tensor(verl[f"controller {name}"]["value"]))
