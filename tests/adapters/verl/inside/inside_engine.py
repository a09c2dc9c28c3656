"""verl's FSDP2 engine on the CPU: gradients under proxpo's engine equal those of our own loop."""

import copy
import math

import pytest
import torch
from engine_setup import (
    ALL,
    EVERY,
    FULL,
    KL,
    PROMA,
    actor,
    backward,
    close,
    folder,
    gradients,
    make_data,
    make_engine,
    own_isopo,
    own_isopo_and_kl,
    own_logp,
    own_model,
    own_rows,
    same_direction,
    step,
)
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import proxpo
from proxpo.adapters.verl import ProxpoEngine
from proxpo.adapters.verl.engine import check_engine_config, sequence_numbers
from proxpo.gradients import isopo, isopo_ntk, proma
from proxpo.logp import model_logp

pytestmark = pytest.mark.usefixtures("group")


def test_lookup_returns_our_engine(monkeypatch):
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", backend) is ProxpoEngine
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is ProxpoEngine
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is not ProxpoEngine
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead


def test_sequences_are_cut_at_the_offsets():
    ids = torch.nested.nested_tensor([[5, 6], [7, 8, 9]], layout=torch.jagged, dtype=torch.long)
    packed = sequence_numbers(ids, packed=True, pad=lambda length: 8 - length)
    assert packed.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    assert sequence_numbers(ids, packed=False).tolist() == [[0, 0, -1], [1, 1, 1]]


def test_log_probs_are_those_of_our_own_pass(engine):
    data = make_data(micro=4)
    with engine.eval_mode(), torch.no_grad():
        found = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
    wanted = own_logp(own_model(), EVERY)
    lengths = own_rows(EVERY)[0].mask.sum(1).tolist()
    for row, (theirs, length) in enumerate(zip(found["log_probs"].unbind(), lengths)):
        torch.testing.assert_close(theirs[-length - 1 : -1], wanted[row, :length])


@pytest.mark.parametrize("micro", [2, 8])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.checks("isopo", "verl's FSDP2 engine gives the gradients of our own loop")
def test_isopo(engine, micro, packed):
    data = make_data(micro=micro, use_remove_padding=packed)
    engine.transform = None
    found, output = backward(engine, data, actor("proxpo_isopo", options=ALL))
    close(found, own_isopo(isopo(**ALL), micro))
    assert len(output["loss"]) == 8 // micro


def test_isopo_reports_the_loss_of_the_recipe(engine):
    engine.transform = None
    _, output = backward(engine, make_data(micro=4), actor("proxpo_isopo", options=ALL))
    batch, _ = own_rows(EVERY)
    batch = batch.replace(logp=own_logp(own_model(), EVERY).detach())
    wanted = float(proxpo.loss_fn(proxpo.make_recipe("isopo"))(batch).value)
    assert sum(output["loss"]) == pytest.approx(wanted, rel=1e-5)
    reported = output["metrics"]["actor/pg_loss"].aggregate()
    assert float(reported) == pytest.approx(wanted, rel=1e-5)


def test_the_entropy_that_verl_is_asked_for_is_reported(engine):
    """As under a loss without a transform, at the same average."""
    reported = []
    for mode in ("proxpo_isopo", "proxpo_reinforce"):
        engine.transform = None
        data = make_data(micro=4, calculate_entropy=True)
        _, output = backward(engine, data, actor(mode, calculate_entropy=True))
        reported.append(output["metrics"]["actor/entropy_loss"].aggregate())
    assert reported[0] == pytest.approx(reported[1], rel=1e-5)
    assert reported[0] > 0


def test_isopo_ntk_with_checkpointing():
    engine = make_engine(checkpointing=True)
    found, _ = backward(engine, make_data(micro=4), actor("proxpo_isopo_ntk"))
    close(found, own_isopo(isopo_ntk(), 4))


def test_proma_remembers_the_earlier_micro_batches(engine):
    engine.transform = None
    found, _ = backward(engine, make_data(micro=2), actor("proxpo_isopo", options=PROMA))
    engine.transform = None
    close(found, own_isopo(proma(), 2))


def test_static_padding_of_packed_rows_changes_nothing():
    engine = make_engine(pad_to_length=True, pad_to_length_bucket=16)
    found, _ = backward(engine, make_data(micro=4), actor("proxpo_isopo", options=ALL))
    close(found, own_isopo(isopo(**ALL), 4))


def test_terms_without_an_advantage_stay_outside_the_transform(engine):
    """verl's KL loss is added with its plain gradient."""
    engine.transform = None
    found, output = backward(engine, make_data(micro=4), actor("proxpo_isopo", options=ALL, **KL))
    close(found, own_isopo_and_kl())
    assert "kl_loss" in output["metrics"]


def test_a_loss_without_transform_runs_as_in_verl(engine, monkeypatch):
    """The same loss mode under verl's own engine."""
    data, loss = make_data(micro=4), actor("proxpo_kpo", "token-mean", {"q": 0.1})
    found, _ = backward(engine, data, loss)
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")
    stock = make_engine()
    assert type(stock) is FSDPEngineWithLMHead
    wanted, _ = backward(stock, make_data(micro=4), actor("proxpo_kpo", "token-mean", {"q": 0.1}))
    close(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("slug", "options", "fields"),
    [
        ("tis", {"cap": 1.2}, {"rollout_logp": "rollout_log_probs"}),
        ("grpo", {"kl_coef": 0.3}, {"ref_logp": "ref_log_prob"}),
        (
            "decoupled-ppo",
            {},
            {"old_logp": "rollout_log_probs", "prox_logp": "old_log_probs"},
        ),
    ],
)
def test_fields_that_verl_keeps_from_losses(engine, slug, options, fields):
    mode = f"proxpo_{slug.replace('-', '_')}"
    options = {**options, "aggregate": "token_mean"}
    found, _ = backward(engine, make_data(micro=8), actor(mode, "token-mean", options))
    model, (batch, data) = own_model(), own_rows(EVERY)
    recipe = proxpo.make_recipe(slug, options)
    given = {ours: data[theirs] for ours, theirs in fields.items()}
    batch = batch.replace(logp=own_logp(model, EVERY), **given)
    proxpo.loss_fn(recipe)(batch).value.backward()
    close(found, gradients(model))


def test_entropy_from_the_forward_pass(engine):
    data = make_data(micro=8, calculate_entropy=True)
    loss = actor("proxpo_entropy_80_20", "token-mean", calculate_entropy=True)
    found, _ = backward(engine, data, loss)
    model, (batch, rows) = own_model(), own_rows(EVERY)
    both = model_logp(
        model,
        rows["input_ids"],
        batch.mask,
        attention_mask=rows["attention_mask"],
        entropy=True,
    )
    batch = batch.replace(logp=both.logp, entropy=both.entropy.detach())
    proxpo.loss_fn(proxpo.make_recipe("entropy-80-20"))(batch).value.backward()
    close(found, gradients(model))
    with pytest.raises(ValueError, match=r"reads 'entropy': set .*calculate_entropy=True"):
        backward(engine, make_data(micro=8), loss)


def test_micro_batches_of_verl_s_own_cut(engine):
    """A sequence's own length does not depend on who shares its micro-batch."""
    engine.transform = None
    data = make_data(micro=1, use_dynamic_bsz=True, max_token_len_per_gpu=20)
    found, output = backward(engine, data, actor("proxpo_isopo", options={"preset": "euclidean"}))
    assert len(output["loss"]) > 2
    close(found, own_isopo(isopo(preset="euclidean"), 8))


def test_verl_s_default_precision():
    """bfloat16 parameters and autocast give the same directions."""
    engine = make_engine(mixed_precision=None)
    found, _ = backward(engine, make_data(micro=4), actor("proxpo_isopo", options=ALL))
    same_direction(found, own_isopo(isopo(**ALL), 4))


def test_adapters_alone_are_trained():
    """LoRA: its B matrices start at 0, so the A matrices get nothing and B a transformed share."""
    engine = make_engine(lora=4)
    found, _ = backward(engine, make_data(micro=8), actor("proxpo_isopo", options=ALL))
    assert found
    assert all("lora_" in name for name in found)
    assert all(grad.abs().max() > 0 for name, grad in found.items() if "lora_B" in name)


def test_the_averages_travel_with_the_checkpoint(tmp_path):
    """Two steps in a row equal one step, a checkpoint, and the second in a new engine."""
    loss = actor("proxpo_isopo", options={**ALL, "reg": 0.5})
    first = make_engine(lr=0.05)
    step(first, loss)
    first.save_checkpoint(str(tmp_path))
    assert (tmp_path / "proxpo_transform.safetensors").exists()
    wanted = step(first, loss)
    second = make_engine(lr=0.05)
    second.load_checkpoint(str(tmp_path), del_local_after_load=False)
    assert step(second, loss) == pytest.approx(wanted, rel=1e-5)
    third = make_engine(lr=0.05)
    third.load_checkpoint(str(tmp_path), del_local_after_load=False)
    third._saved = None
    assert step(third, loss) != pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("mode", ["proxpo_isopo", "proxpo_isopo_ntk"])
def test_an_update_that_is_not_finite_leaves_no_trace(mode):
    """verl leaves it out by the norm of its gradient; the transform forgets it too."""
    engine = make_engine(lr=0.05)
    loss = actor(mode, options={**ALL, "reg": 0.5} if mode == "proxpo_isopo" else {})

    def kept() -> dict:
        parts = {"weights": dict(engine.module.named_parameters())}
        parts |= {"optimizer": engine.optimizer.state_dict()["state"]}
        return copy.deepcopy(parts | {"transform": engine.transform.state_dict()})

    step(engine, loss)
    before = kept()
    spoilt = engine.module.lm_head.register_forward_hook(lambda m, given, out: out * torch.nan)
    with pytest.warns(UserWarning, match="is not finite.*verl skips the update"):
        assert not math.isfinite(step(engine, loss))
    spoilt.remove()
    torch.testing.assert_close(kept(), before, rtol=0, atol=0)
    assert math.isfinite(step(engine, loss))
    assert kept()["transform"]["steps"] == 2


def test_a_transform_wants_the_average_of_its_recipe(engine):
    with pytest.raises(ValueError, match=r"gradient=isopo needs actor.loss_agg_mode=token-sum"):
        backward(engine, make_data(micro=8), actor("proxpo_isopo", "seq-mean-token-sum"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strategy": "fsdp"}, "actor.strategy=fsdp2"),
        ({"ulysses_sequence_parallel_size": 2}, "flash attention under Ulysses"),
        ({"offload_policy": True}, "offload_policy=False"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "bfloat16 or float32"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(settings, reason):
    settings = {"strategy": "fsdp2", "mixed_precision": FULL, **settings}
    eager = {"attn_implementation": "eager"}
    model = HFModelConfig(path=folder(), load_tokenizer=False, override_config=eager)
    with pytest.raises(ValueError, match=f"verl: gradient=isopo needs .*{reason}"):
        check_engine_config(proxpo.make_recipe("isopo"), model, FSDPEngineConfig(**settings))


def test_a_transform_alone_asks_for_fsdp2():
    """Other losses run on FSDP1, which verl does not initialise on a CPU."""
    engine = make_engine(strategy="fsdp", initialize=False)
    with pytest.raises(ValueError, match=r"isopo needs actor\.strategy=fsdp2, got 'fsdp'"):
        engine._make_transform(proxpo.make_recipe("isopo"))


@pytest.mark.parametrize("backend", ["megatron", "veomni", "torchtitan", "automodel"])
def test_other_engines_are_refused_at_construction(backend):
    class Config:
        strategy = backend

    with pytest.raises(ValueError, match=f"need actor.strategy=fsdp2, got '{backend}'"):
        EngineRegistry.new("language_model", backend, model_config=None, engine_config=Config)


def test_two_ranks_equal_one(engine, ranks):
    """ISOPO, and P3O whose ESS is a sum over the ranks; shards of a batch against the whole."""
    close(ranks["halves"]["isopo"], own_isopo(isopo(**ALL), 4))
    wanted, _ = backward(engine, make_data(micro=8), actor("proxpo_p3o", "token-mean"))
    close(ranks["halves"]["p3o"], wanted)
