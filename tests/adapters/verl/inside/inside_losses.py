"""Loss modes and advantage estimators on verl's tensors, against proxpo's own and verl's own."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import cast, close, make_batch, outcome_only
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

import proxpo
from proxpo.adapters.verl import LossConfig, _environment, _losses
from proxpo.adapters.verl._losses import OWN_AVERAGES, response_length
from proxpo.adapters.verl._recipes import estimator_refusal, loss_refusal, verl_name
from proxpo.adapters.verl._settings import default_average
from proxpo.batch_file import load_batch, saved_steps
from proxpo.compose import policy_loss, prepare
from proxpo.errors import ProxpoError
from proxpo.ops.masked import last_valid
from proxpo.recipes import methods
from proxpo.settings import at_length
from proxpo.stages import aggregate

MODES = {
    "token-mean": aggregate.token_mean(),
    "token-sum": aggregate.token_sum(),
    "seq-mean-token-sum": aggregate.seq_mean_token_sum(),
    "seq-mean-token-mean": aggregate.seq_mean_token_mean(),
    "seq-mean-token-sum-norm": aggregate.constant_length(max_tokens=7.0),
}
# What keeps a method from verl's plain loss function, and the options that remove it.
OPTIONS = {
    "lopti": {"variant": "ar", "kl_coef": 0.0},
    "reinforce-pp-baseline": {"kl_coef": 0.0},
    "kpo": {"q": 0.1, "clip_low": 0.02, "clip_high": 0.02},
    "rloo": {"kl_coef": 0.0},
    "reinforce-pp": {"kl_coef": 0.0},
    "simpletir": {"prune": None},
    "empg": {"advantage": None},
    "dcpo": {"advantage": None},
    "text2grad": {"advantage": None, "reward": None},
}
LOOKS = ("clip-cov", "kl-cov", "text2grad")  # at so few tokens that a cut may change none
HALVES = ("dcpo", "empg", "reinforce-pp", "rloo", "simpletir", "text2grad")
REFUSED = ("decoupled-ppo", "dpo", "entropy-80-20", "isopo", "isopo-ntk", "p3o-2019", "p4o")
REFUSED = (*REFUSED, "scalerl", "tis")
LOSSES = [
    slug
    for slug, entry in methods("language").items()
    if not loss_refusal(proxpo.make_recipe(slug, OPTIONS.get(slug, {})), engine=False)
]


def test_the_methods_that_verl_can_compute():
    assert {"grpo", "dapo", "p3o", "kpo", "gspo", "cispo", "sapo", "ppo"} <= set(LOSSES)
    assert not set(REFUSED) & set(LOSSES)
    assert set(HALVES) <= set(LOSSES)


def ready(slug: str) -> tuple[proxpo.Recipe, proxpo.Batch]:
    """A batch as verl hands it over: advantages are there, filters and rewards are behind it."""
    recipe = proxpo.make_recipe(slug, OPTIONS.get(slug, {}))
    batch = make_batch(groups=4, size=2)
    given = torch.linspace(-1.5, 2.0, len(batch.mask), dtype=torch.float64)
    return recipe.replace(reward=(), filter=(), prune=(), value=None), proxpo.Batch(
        logp=batch.logp,
        old_logp=batch.old_logp,
        mask=batch.mask,
        advantages=given[:, None] * batch.mask,
    )


def in_force(recipe: proxpo.Recipe, mode: str) -> proxpo.Recipe:
    """The recipe under verl's average, its own beside verl's default."""
    if mode == default_average() and recipe.aggregate.name in OWN_AVERAGES:
        return at_length(recipe, 7)
    return recipe.replace(aggregate=MODES[mode])


def call(slug: str, mode: str, batch: proxpo.Batch, weights=None, **info) -> tuple:
    """The registered function, with verl's arguments and config."""
    leaf = batch.logp.clone().requires_grad_()
    config = SimpleNamespace(
        global_batch_info={"loss_scale_factor": 7, **info},
        policy_loss=SimpleNamespace(options=OPTIONS.get(slug, {})),
        strategy="fsdp2",
    )
    torch.manual_seed(5)
    value, metrics = get_policy_loss_fn(verl_name(slug))(
        old_log_prob=batch.old_logp,
        log_prob=leaf,
        advantages=batch.advantages,
        response_mask=batch.mask.long(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    value.backward()
    assert all(isinstance(one, float) for one in metrics.values())
    return value.detach(), leaf.grad


def ours(recipe: proxpo.Recipe, batch: proxpo.Batch) -> tuple:
    leaf = batch.logp.clone().requires_grad_()
    torch.manual_seed(5)
    value = proxpo.loss_fn(recipe)(batch.replace(logp=leaf)).value
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slug", LOSSES)
def test_every_loss_mode_under_every_average(slug, mode):
    recipe, batch = ready(slug)
    wanted = ours(in_force(recipe, mode), batch)
    assert wanted[1].abs().max() > 0
    value, grad = call(slug, mode, batch)
    close(value, wanted[0])
    close(grad, wanted[1])


def test_every_second_micro_batch_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(_losses, "_SEEN", itertools.count(1))
    _, batch = ready("grpo")
    loss = SimpleNamespace(options={}, batch_every=2, batch_folder=str(tmp_path))
    config = SimpleNamespace(global_batch_info={}, policy_loss=loss, strategy="fsdp2")
    for part in (batch.rows(slice(0, 4)), batch.rows(slice(4, 8))):
        get_policy_loss_fn(verl_name("grpo"))(
            part.old_logp, part.logp, part.advantages, part.mask, "token-mean", config
        )
    assert list(saved_steps(tmp_path)) == [2]
    saved = load_batch(saved_steps(tmp_path)[2])
    assert torch.equal(saved.logp[saved.mask], batch.logp[4:][batch.mask[4:]])
    assert torch.equal(saved.advantages, batch.advantages[4:])
    with pytest.raises(ProxpoError, match="belongs to a loss_mode proxpo_"):
        LossConfig(loss_mode="vanilla", batch_every=1)


def can_be_cut(recipe: proxpo.Recipe, batch: proxpo.Batch) -> bool:
    """True if no stage looks at the whole batch or, by definition, at each micro-batch."""
    asked = []

    def probe(x, scope="batch"):
        asked.append(x)
        return x

    known = prepare(recipe, batch)
    policy_loss(recipe, known.batch, replace(known.ctx, all_sum=probe))
    return not asked and all(stage.whole_batch for _, stage in recipe.stages())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slug", [slug for slug in LOSSES if can_be_cut(*ready(slug))])
def test_ranks_and_micro_batches_add_up(slug, mode):
    """Two ranks of two micro-batches, gradients averaged over the ranks, against the whole."""
    recipe, batch = ready(slug)
    info = {"dp_size": 2, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": 8}
    cuts = [torch.arange(8)[2 * k : 2 * k + 2] for k in range(4)]
    parts = [call(slug, mode, batch.rows(cut), **info) for cut in cuts]
    value, grad = ours(in_force(recipe, mode), batch)
    close(sum(part[0] for part in parts) / 2, value)
    close(torch.cat([part[1] for part in parts]) / 2, grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_verl_s_own_clip(mode, weighted):
    """verl's vanilla loss is GRPO's with a dual clip; both read the same counts."""
    _, batch = ready("grpo")
    weights = torch.rand(8, 6, dtype=torch.float64) * 2 if weighted else None
    info = {"dp_size": 3, "batch_num_tokens": 50, "global_batch_size": 11, "loss_scale_factor": 7}
    own = {"aggregate": "token_mean"} if mode == "token-mean" else {}
    config = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        global_batch_info=info,
        policy_loss=SimpleNamespace(options={"dual": 3.0, **own}),
        get=lambda key, default=None: {"clip_ratio_c": 3.0}.get(key, default),
        strategy="fsdp2",
    )
    leaves, values, shares = [], [], []
    for name in ("vanilla", "proxpo_grpo"):
        leaves.append(batch.logp.clone().requires_grad_())
        given = (batch.old_logp, leaves[-1], batch.advantages, batch.mask.double())
        value, metrics = get_policy_loss_fn(name)(*given, mode, config, weights)
        value.backward()
        values.append(value.detach())
        shares.append(metrics["actor/pg_clipfrac"])
    assert shares[1] == pytest.approx(shares[0], rel=1e-6)
    assert shares[0] > 0
    close(values[1], values[0], rtol=1e-7)
    close(leaves[1].grad, leaves[0].grad, rtol=1e-7)


@pytest.mark.parametrize(
    ("theirs", "slug", "settings"),
    [
        ("vanilla", "grpo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}),
        ("vanilla", "dapo", {"clip_ratio_high": 0.4, "clip_ratio_c": 1.5}),
        ("vanilla", "opo", {"clip_ratio_low": None, "clip_ratio": 0.1, "clip_ratio_c": 1.5}),
        ("gspo", "gspo", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.6}),
        ("geo_mean", "gmpo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.05}),
        ("cispo", "cispo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
        ("sapo", "sapo", {"tau_pos": 0.5, "tau_neg": 2.0}),
        (
            "dppo_tv",
            "dppo",
            {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.05},
        ),
    ],
)
def test_verl_s_clip_settings_reach_the_loss(theirs, slug, settings):
    """Changed from verl's defaults they mean what they mean in verl's own loss of that kind."""
    _, batch = ready("grpo")
    config = FSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        global_batch_info={"dp_size": 1},
        **settings,
    )
    leaves = []
    for name in (theirs, verl_name(slug)):
        leaves.append(batch.logp.clone().requires_grad_())
        given = (batch.old_logp, leaves[-1], batch.advantages, batch.mask.double())
        get_policy_loss_fn(name)(*given, "seq-mean-token-mean", config)[0].backward()
    close(leaves[1].grad, leaves[0].grad, rtol=1e-6)
    config = FSDPActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    plain = batch.logp.clone().requires_grad_()
    given = (batch.old_logp, plain, batch.advantages, batch.mask.double())
    get_policy_loss_fn(verl_name(slug))(*given, "seq-mean-token-mean", config)[0].backward()
    assert not torch.allclose(plain.grad, leaves[1].grad)


def beside(theirs: str, slug: str, batch: proxpo.Batch, weights=None, mode="token-mean", **given):
    """Value, gradient and metrics of verl's loss and of ours; settings of both, options of ours."""
    own = {name: given.pop(name) for name in ("options", "weighted_terms") if name in given}
    loss = {**given.pop("policy_loss", {}), "loss_mode": verl_name(slug)}
    config = FSDPActorConfig(
        rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=LossConfig(**loss, **own), **given
    )
    results = []
    for name in (theirs, verl_name(slug)):
        leaf = batch.logp.clone().requires_grad_()
        tensors = (batch.old_logp, leaf, batch.advantages, batch.mask.double())
        value, metrics = get_policy_loss_fn(name)(*tensors, mode, config, weights)
        value.backward()
        results.append((value.detach(), leaf.grad, metrics))
    return results


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("options", [{}, {"variant": "token"}])
def test_gspo_is_verl_s_under_rollout_weights_and_advantages_of_each_token(options, per_token):
    """The form of a whole response spreads the weight of a token over all of them."""
    _, batch = ready("gspo")
    if per_token:
        batch = batch.replace(advantages=batch.mask * (drawn(*batch.mask.shape) - 0.5))
    weights = 0.5 + drawn(*batch.mask.shape)
    for mode in ("seq-mean-token-mean", "token-sum"):
        given = {"mode": mode, "clip_ratio_low": 0.5, "clip_ratio_high": 0.6}
        theirs, ours = beside("gspo", "gspo", batch, weights, options=options, **given)
        close(ours[0], theirs[0], rtol=1e-7)
        close(ours[1], theirs[1], rtol=1e-7)
        whole = beside("gspo", "gspo", batch, weights, options={"variant": "sequence"}, **given)[1]
        close(whole[0], theirs[0], rtol=1e-7)
        assert (whole[1] - theirs[1]).norm() > 0.05 * theirs[1].norm()


def test_a_line_says_that_a_written_form_of_gspo_weighs_whole_responses(capfd, monkeypatch):
    monkeypatch.setattr(_environment, "_NOTICES", set())
    _, batch = ready("gspo")
    weights = torch.ones_like(batch.logp)
    beside("gspo", "gspo", batch, weights, options={"variant": "sequence"})
    assert "ratio.own_gradient=true is the form of verl's gspo" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "slug", "given"),
    [
        ("kl_cov", "kl-cov", {"policy_loss": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}}),
        (
            "dro",
            "reinforce",
            {
                "options": {
                    "regularisers": {"name": "kl_from_old", "coef": 0.3, "estimator": "k2"},
                    "aggregate": "token_mean",
                },
            },
        ),
    ],
)
def test_rollout_weights_act_on_a_penalty_where_that_is_asked_for(
    theirs, slug, given, capfd, monkeypatch
):
    monkeypatch.setattr(_environment, "_NOTICES", set())
    _, batch = ready("kl-cov")
    weights = 0.5 + drawn(*batch.mask.shape)
    if theirs == "dro":  # verl's beta, which our loss mode has as an option of a stage
        dro = PolicyLossConfig(loss_mode="dro", dro_beta=0.3)
        config = FSDPActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=dro)
        leaf = batch.logp.clone().requires_grad_()
        tensors = (batch.old_logp, leaf, batch.advantages, batch.mask.double())
        value, _ = get_policy_loss_fn("dro")(*tensors, "token-mean", config, weights)
        value.backward()
        wanted, theirs = (value.detach(), leaf.grad), "gpg"
    else:
        wanted = beside(theirs, slug, batch, weights, **given)[0]
    every = beside(theirs, slug, batch, weights, weighted_terms="all", **given)[1]
    close(every[0], wanted[0], rtol=1e-7)
    close(every[1], wanted[1], rtol=1e-7)
    monkeypatch.setattr(_environment, "_NOTICES", set())
    capfd.readouterr()
    policy = beside(theirs, slug, batch, weights, **given)[1]
    assert abs(policy[0] - wanted[0]) > 1e-4
    assert "weighted_terms=all weighs both, as verl's kl_cov and dro do" in capfd.readouterr().err
    with pytest.raises(ProxpoError, match="weighted_terms is policy or all, got 'al'"):
        LossConfig(loss_mode="proxpo_grpo", weighted_terms="al")


@pytest.mark.parametrize(("theirs", "slug"), [("sapo", "sapo"), ("geo_mean", "gmpo")])
def test_verl_s_default_average_is_not_that_of_a_method_with_one(theirs, slug):
    """verl's sapo and geo_mean have one of their own too, whatever loss_agg_mode is."""
    _, batch = ready("grpo")
    given = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.05} if slug == "gmpo" else {}
    host, ours = beside(theirs, slug, batch, **given)
    close(ours[0], host[0], rtol=1e-7)
    close(ours[1], host[1], rtol=1e-7)
    written = beside(theirs, slug, batch, mode="seq-mean-token-sum", **given)[1]
    assert float(written[0]) != pytest.approx(float(host[0]), rel=0.3)


@pytest.mark.parametrize(
    ("theirs", "slug", "settings"),
    [
        ("vanilla", "dapo", {"clip_ratio_c": 1.1, "clip_ratio_high": 0.05}),
        ("vanilla", "grpo", {"clip_ratio_c": 1.2, "clip_ratio_low": 0.1}),
        ("dppo_tv", "dppo", {"clip_ratio_c": 1.05, "clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
    ],
)
def test_tokens_at_a_cap_are_reported_as_by_verl(theirs, slug, settings):
    _, batch = ready("grpo")
    host, ours = beside(theirs, slug, batch, mode="token-sum", **settings)
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert ours[2][name] == pytest.approx(host[2][name], rel=1e-6)
    assert 0 < host[2]["actor/pg_clipfrac_lower"] < 1
    assert ours[2]["actor/trust/capped"] == ours[2]["actor/pg_clipfrac_lower"]
    assert "actor/pg_clipfrac_lower" not in beside("gpg", "reinforce", batch)[1][2]


@pytest.mark.parametrize(
    ("slug", "settings", "options", "reason"),
    [
        ("reinforce", {"clip_ratio_low": 0.1}, {}, "no effect on reinforce: trust=score_function"),
        ("p3o", {"clip_ratio_high": 0.3}, {}, "no effect on p3o: trust=ess_cap has no such option"),
        ("bapo", {"clip_ratio_high": 0.3}, {}, "no effect on bapo: trust=balanced_clip"),
        ("grpo", {"tau_pos": 2.0}, {}, "tau_pos=2.0 has no effect on grpo"),
        ("grpo", {"clip_ratio": 0.1}, {}, "clip_ratio=0.1 has no effect in verl beside"),
        ("grpo", {"clip_ratio_high": 0.3}, {"clip_high": 0.28}, "contradicts.*clip_high=0.28"),
        ("kpo", {"clip_ratio_low": 0.1}, {"clipped": False}, "trust=unclipped has no such option"),
    ],
)
def test_clip_settings_without_effect_are_refused(slug, settings, options, reason):
    _, batch = ready("grpo")
    chosen = SimpleNamespace(options=options)
    config = SimpleNamespace(
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, **settings},
        policy_loss=chosen,
    )
    with pytest.raises(ValueError, match=f"verl: actor_rollout_ref.actor.*{reason}") as caught:
        get_policy_loss_fn(verl_name(slug))(
            batch.old_logp, batch.logp, batch.advantages, batch.mask, config=config
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slug", "line"),
    [
        (
            "gspo",
            "clip_ratio_low=0.2 (trust.clip_low is 0.0003), clip_ratio_high=0.2 (trust.clip",
        ),
        (
            "grpo",
            "does not read verl's defaults clip_ratio_c=3.0 (trust.dual is None); policy_loss",
        ),
        ("reinforce", "clip_ratio_high=0.2 (the method has none)"),
        ("kl-cov", "kl_cov_ratio=0.0002 (regularisers.covariance_penalty.share is 0.002)"),
    ],
)
def test_one_line_names_the_defaults_of_verl_that_a_method_does_not_read(
    slug, line, capfd, monkeypatch
):
    monkeypatch.setattr(_environment, "_NOTICES", set())
    _, batch = ready(slug)
    config = FSDPActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    for _ in range(2):
        given = (batch.old_logp, batch.logp, batch.advantages, batch.mask)
        get_policy_loss_fn(verl_name(slug))(*given, config=config)
    err = capfd.readouterr().err
    assert line in err
    assert err.count("does not read verl's defaults") == 1


def estimate(name: str, batch: proxpo.Batch, options=None) -> torch.Tensor:
    """The registered estimator with what verl's trainer gives: token rewards and prompt ids."""
    last = torch.zeros_like(batch.logp)
    last[torch.arange(len(last)), (batch.mask * torch.arange(last.shape[1])).argmax(1)] = 1.0
    found, returns = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=last * batch.rewards[:, None],
        response_mask=batch.mask.long(),
        config=OmegaConf.create({"options": options or {}, "gamma": 1.0}),
        index=np.array([f"prompt-{number}" for number in batch.group], dtype=object),
    )
    assert returns.shape == found.shape
    return found


@pytest.mark.parametrize(
    ("name", "slug", "options"),
    [
        ("proxpo_grpo", "grpo", {"eps": 1e-3}),
        ("proxpo_p3o", "p3o", {}),
        ("proxpo_opo", "opo", {}),
        ("proxpo_rloo", "rloo", {"kl_coef": 0.0}),
        ("proxpo_reinforce_pp_baseline", "reinforce-pp-baseline", {}),
        ("proxpo_reinforce", "reinforce", {"gamma": 0.9}),
        ("proxpo_dapo", "dapo", {"max_tokens": 5, "cache": 4}),
        ("proxpo_scalerl", "scalerl", {}),
    ],
)
def test_estimators(name, slug, options):
    batch = outcome_only(make_batch()).replace(correct=None)  # which verl does not know
    wanted = prepare(proxpo.make_recipe(slug, options), batch).batch.advantages
    assert wanted.abs().max() > 0
    close(estimate(name, batch, options), wanted)


def test_the_longest_response_is_asked_for():
    """dapo's penalty in the estimator, and dr-grpo's divisor in the loss."""
    batch = outcome_only(make_batch()).replace(correct=None)
    wanted = prepare(at_length(proxpo.make_recipe("dapo"), 5), batch).batch.advantages
    assert wanted.ne(prepare(proxpo.make_recipe("dapo"), batch).batch.advantages).any()
    close(estimate("proxpo_dapo", batch, {"reward.overlong_penalty.max_tokens": 5}), wanted)
    with pytest.raises(ProxpoError, match=r"max_tokens=data\.max_response_length"):
        estimate("proxpo_dapo", batch, {})
    own = proxpo.make_recipe("dr-grpo", {"max_tokens": 50})
    assert response_length(own, {}, 6) == 50
    assert response_length(own, {"loss_scale_factor": 50}, 6) == 50
    assert response_length(proxpo.make_recipe("dr-grpo"), {"loss_scale_factor": 7}, 6) == 7
    assert response_length(proxpo.make_recipe("grpo"), {}, 6) == 6
    with pytest.raises(ProxpoError, match="dr-grpo divides by the longest response allowed, and"):
        response_length(proxpo.make_recipe("dr-grpo"), {}, None)
    with pytest.raises(ProxpoError, match="both are the constant a response's sum is divided by"):
        response_length(own, {"loss_scale_factor": 7}, 6)


def test_a_stage_by_itself_is_an_estimator():
    batch = outcome_only(make_batch())
    recipe = proxpo.make_recipe("reinforce", {"advantage": "leave_one_out"})
    close(estimate("proxpo_leave_one_out", batch), prepare(recipe, batch).batch.advantages)
    stages = ("group_relative", "leave_one_out", "length_weighted_baseline", "discounted_return")
    assert {f"proxpo_{name}" for name in stages} <= set(core_algos.ADV_ESTIMATOR_REGISTRY)


def test_rewards_on_single_tokens_reach_returns():
    """verl's KL in the reward puts rewards on every token."""
    batch = make_batch(holes=False)
    rewards = torch.where(batch.mask, batch.token_rewards, 0.0)
    find = core_algos.get_adv_estimator_fn("proxpo_discounted_return")
    found, _ = find(rewards, batch.mask.long(), config={"options": {"baseline": "none"}})
    close(found, rewards.flip(1).cumsum(1).flip(1) * batch.mask)


@pytest.mark.parametrize(
    ("theirs", "name", "rtol"),
    [
        ("rloo", "proxpo_rloo", 1e-12),
        ("rloo_vectorized", "proxpo_rloo", 1e-12),
        ("grpo", "proxpo_grpo", 1e-9),
        ("grpo_vectorized", "proxpo_grpo", 1e-6),
        ("opo", "proxpo_opo", 1e-9),
        ("reinforce_plus_plus", "proxpo_reinforce_pp", 1e-6),
    ],
)
def test_verl_s_own_estimators(theirs, name, rtol):
    batch = outcome_only(make_batch(holes=False))
    options = {"kl_coef": 0.0} if name in ("proxpo_rloo", "proxpo_reinforce_pp") else {}
    close(estimate(name, batch, options), estimate(theirs, batch) * batch.mask, rtol=rtol)


@pytest.mark.parametrize("name", ["proxpo_scalerl", "proxpo_grpo", "proxpo_reinforce_pp_baseline"])
def test_rows_that_fill_up_a_batch_change_no_advantage(name):
    """verl's V1 trainer adds responses without a trained token, under a prompt of their own."""
    batch = outcome_only(make_batch()).replace(correct=None)
    rows = len(batch.mask)
    given = {n: getattr(batch, n) for n in ("logp", "mask", "rewards", "group")}
    filled = proxpo.Batch(
        **{n: torch.cat([x, 0 * x[:3] + (99 if n == "group" else 0)]) for n, x in given.items()}
    )
    close(estimate(name, filled)[:rows], estimate(name, batch))
    assert not estimate(name, filled)[rows:].any()


def test_a_reward_at_a_token_that_is_not_trained_counts():
    """verl rejects tokens before it computes advantages, and a tool may write the last one."""
    rewards, mask = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.long)
    rewards[:, 2] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    prompts = np.array(["a"] * 4, dtype=object)
    for trained in ([1, 1, 0], [0, 0, 0]):
        mask[0] = torch.tensor(trained)
        given = {"token_level_rewards": rewards, "response_mask": mask, "index": prompts}
        for theirs, ours in (("grpo", "proxpo_grpo"), ("opo", "proxpo_opo")):
            wanted, _ = core_algos.get_adv_estimator_fn(theirs)(**given, config=None)
            close(core_algos.get_adv_estimator_fn(ours)(**given)[0], wanted * mask)
    mask[0] = torch.tensor([0, 1, 0])
    steps = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    find = core_algos.get_adv_estimator_fn("proxpo_discounted_return")
    found, _ = find(steps, mask[:2], config={"options": {"baseline": "none"}})
    close(found, torch.tensor([[0.0, 7.0, 0.0], [7.0, 6.0, 4.0]]))


def test_verl_s_estimators_for_what_it_alone_knows():
    """`gae` and `remax` stand for the advantages of ppo and remax, whose fields verl keeps."""
    batch = outcome_only(make_batch(holes=False)).replace(returns=None)
    rewards = torch.where(last_valid(batch.mask), batch.rewards[:, None], 0.0)
    mask = batch.mask.long()
    values = torch.where(batch.mask, batch.old_values, 0.0)
    found, _ = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    wanted = prepare(proxpo.make_recipe("ppo", {"gamma": 0.9, "lam": 0.8}), batch).batch.advantages
    close(found * mask, wanted, rtol=1e-6)
    find = core_algos.get_adv_estimator_fn("remax")
    found, _ = find(rewards, reward_baselines=batch.greedy_rewards, response_mask=mask)
    close(found, prepare(proxpo.make_recipe("remax"), batch).batch.advantages)


@pytest.mark.parametrize(
    ("slug", "options", "reason"),
    [
        ("dpo", {}, "ratio=log_ratio_to_ref needs 'ref_logp'"),
        ("tis", {}, "needs 'rollout_logp'.*algorithm.rollout_correction.*VERL_ENGINE_VENDOR"),
        ("grpo", {"kl_coef": 0.1}, "kl_to_ref needs 'ref_logp'.*actor.use_kl_loss=True"),
        ("entropy-80-20", {}, "top_entropy needs 'entropy'"),
        ("isopo", {}, "gradient=isopo, which needs proxpo's engine: set VERL_ENGINE_VENDOR=proxpo"),
        ("lopti", {}, "makes 2 passes over a batch"),
        ("p3o-2019", {}, "schedule=poisson_replay"),
        ("simpletir", {}, "prune=void_turns needs 'void'.*policy_loss.options.prune=null"),
        ("empg", {}, "advantage=entropy_modulated needs 'entropy'"),
        ("text2grad", {}, "reward=span_reward needs 'span_rewards'"),
        ("dcpo", {}, "advantage=smooth_standardised needs 'prompt_id'"),
        ("rloo", {}, "reward=kl_in_reward.*kl_coef=0.*algorithm.use_kl_in_reward=True"),
        ("reinforce-pp", {}, "reward=kl_in_reward.*kl_coef=0.*use_kl_in_reward=True"),
    ],
)
def test_losses_that_verl_cannot_compute(slug, options, reason):
    _, batch = ready("grpo")
    config = SimpleNamespace(policy_loss=SimpleNamespace(options=options))
    with pytest.raises(ValueError, match=f"verl: {slug}.*{reason}") as caught:
        get_policy_loss_fn(verl_name(slug))(
            batch.old_logp, batch.logp, batch.advantages, batch.mask, config=config
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slug", "reason"),
    [
        ("ppo", "'values'.*adv_estimator=gae"),
        ("remax", "'greedy_rewards'.*adv_estimator=remax"),
        ("rloo", "'old_logp'|'ref_logp'"),
        ("dpo", "has no advantage stage"),
    ],
)
def test_estimators_that_verl_cannot_compute(slug, reason):
    with pytest.raises(ValueError, match=f"verl: {slug}.*({reason})"):
        estimate(verl_name(slug), make_batch())
    assert estimator_refusal(proxpo.make_recipe(slug))


def test_a_sum_over_the_batch_needs_ranks_that_all_compute_a_loss():
    _, batch = ready("p3o")
    config = SimpleNamespace(
        global_batch_info={"dp_size": 2, "batch_num_tokens": 99, "global_batch_size": 8},
        strategy="megatron",
    )
    given = (batch.old_logp, batch.logp, batch.advantages, batch.mask)
    with pytest.raises(ValueError, match=r"p3o sums over the batch.*got 'megatron'"):
        get_policy_loss_fn("proxpo_p3o")(*given, config=config)


def test_a_gradient_transform_under_an_engine_that_is_not_ours(monkeypatch):
    """The environment promises our engine, and the actor's strategy has chosen another."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "proxpo")
    _, batch = ready("grpo")
    given = (batch.old_logp, batch.logp, batch.advantages, batch.mask)
    with pytest.raises(ValueError, match="isopo: gradient=isopo needs proxpo's engine"):
        get_policy_loss_fn("proxpo_isopo")(*given)


@contextmanager
def one_more_stage(name, apply):
    """GRPO with a stage of a user's own among its weights."""
    proxpo.stage("weights", name=name)(lambda: apply)
    OPTIONS["grpo"] = {"weights+": name}
    try:
        yield
    finally:
        del OPTIONS["grpo"]


def test_a_stage_that_follows_the_run_is_refused():
    """verl does not say how far the run is; 0 for ever would be a silent mistake."""
    _, batch = ready("grpo")

    def warm(batch, ctx):
        return torch.full_like(batch.logp, ctx.clock.step), {}

    with one_more_stage("warm", warm), pytest.raises(ValueError, match="asks for the run's step"):
        call("grpo", "token-mean", batch)


def test_autocast_changes_nothing():
    """verl computes losses inside its autocast block; matrix products would lose digits."""
    batch = cast(ready("grpo")[1], torch.float32)

    def mix(batch, ctx):
        return batch.old_logp @ torch.eye(batch.mask.shape[1]), {}

    with one_more_stage("mix", mix):
        wanted = call("grpo", "token-mean", batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call("grpo", "token-mean", batch)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_one_line_says_whose_average_it_is(capfd, monkeypatch):
    monkeypatch.setattr(_environment, "_NOTICES", set())
    _, batch = ready("sapo")
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum"):
        call("sapo", mode, batch)
    line = "averaged by verl's loss_agg_mode=seq-mean-token-sum; its own is actor.loss_agg_mode="
    err = capfd.readouterr().err
    assert err.count("proxpo: ") == 1
    assert f"{line}seq-mean-token-mean" in err
    call("sapo", "token-mean", batch)
    line = "by its own seq_mean_token_mean, not by verl's default loss_agg_mode=token-mean, which"
    assert line in capfd.readouterr().err


def test_one_line_says_that_a_statistic_is_of_the_micro_batch(capfd, monkeypatch):
    _, batch = ready("p3o")
    for tokens, lines in ((int(batch.mask.sum()), 0), (99, 1)):
        monkeypatch.setattr(_environment, "_NOTICES", set())
        monkeypatch.setattr(_losses, "_SUMMED", set())
        call("p3o", "token-mean", batch, batch_num_tokens=tokens, global_batch_size=8)
        assert capfd.readouterr().err.count("p3o wants statistics of the whole batch") == lines


@pytest.mark.parametrize("slug", LOSSES)
def test_a_loss_that_depends_on_the_micro_batch_says_so(slug, capfd, monkeypatch):
    """Two micro-batches that do not add up to the whole, and a line on stderr, go together."""
    for checked in (_losses._SUMMED, _losses._CUT):
        checked.clear()
    monkeypatch.setattr(_environment, "_NOTICES", set())
    recipe, batch = ready(slug)
    info = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": 8}
    cuts = (torch.arange(0, 8, 2), torch.arange(1, 8, 2))
    grads = torch.cat([call(slug, "token-mean", batch.rows(cut), **info)[1] for cut in cuts])
    whole = ours(in_force(recipe, "token-mean"), batch)[1]
    same = torch.allclose(grads, whole[torch.cat(cuts)], rtol=1e-9, atol=1e-12)
    assert ("micro-batch" in capfd.readouterr().err) == (not same or slug in LOOKS)
