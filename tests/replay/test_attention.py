"""Masked attention: every pass stays away from the lengths at which cuDNN's gradients are NaN."""

import pytest
import torch
from replay.test_prefix import SHAPE, make_rows
from torch.backends import cuda
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

import proxpo.ops.attention as attention_module
import proxpo.sampler._lean as lean_module
from proxpo import gradients
from proxpo.logp import model_logp, model_states
from proxpo.models import Policy
from proxpo.ops.attention import is_faulty, safe_attention
from proxpo.replay.graphs import PolicyGraphs
from proxpo.replay.inputs import PassShape
from proxpo.sampler._lean import prefill
from proxpo.sampler._weights import read

LENGTHS = (63, 64, 65, 128, 192, 200)


@pytest.fixture
def faulty(monkeypatch):
    """Makes this device one with the fault."""

    def enabled(device: torch.device) -> bool:
        return cuda.cudnn_sdp_enabled()

    monkeypatch.setattr(attention_module, "faulty_attention", enabled)


@pytest.fixture
def keys(monkeypatch) -> list[tuple[int, bool, bool]]:
    """Calls of attention: number of keys, whether there is a mask, whether cuDNN is enabled."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **options):
        seen.append((k.shape[2], attn_mask is not None, cuda.cudnn_sdp_enabled()))
        return real(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(lean_module, "scaled_dot_product_attention", watched)
    return seen


def exposed(seen: list[tuple[int, bool, bool]]) -> list[tuple[int, bool, bool]]:
    assert seen
    return [call for call in seen if call[0] % 128 == 64 and call[1] and call[2]]


def make_long(length: int = 512) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE | {"num_hidden_layers": 1, "max_position_embeddings": length})
    return Qwen2ForCausalLM(config).double()


def policy_of(model, dtype=torch.float64) -> Policy:
    return Policy(model, None, [0], 0, "tiny", 512, dtype)


def test_the_fault_is_in_kernels_for_hopper_before_cudnn_9_26():
    assert is_faulty((9, 0), 91900)
    assert is_faulty((9, 0), 92501)
    assert not is_faulty((9, 0), 92600)
    assert not is_faulty((8, 0), 91900)
    assert not is_faulty((9, 0), None)


def test_prompts_of_every_recorded_shape_get_safe_keys(faulty, keys):
    """Prompts run once: 64 and 192 columns are among the shapes."""
    model, columns = make_long(), set()
    for longest in (1, 16, 33, 50, 64, 70, 130, 180, 192, 200):
        rows = make_rows(prompts=[longest], samples=[9], lengths=[3])
        graphs = PolicyGraphs(policy_of(model))
        slope = torch.randn(rows.mask.shape, dtype=torch.float64)
        got = graphs.fields(rows, temperature=1.0, entropy=False)["logp"]
        (got * slope).sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        wanted = model_logp(
            model, rows.input_ids, rows.mask, attention_mask=rows.attention_mask.long()
        )
        (wanted * slope).sum().backward()
        assert_close(got, wanted, rtol=1e-5, atol=1e-7)
        for ours, p in zip(found, model.parameters()):
            assert_close(ours, p.grad, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        columns |= {shape.prompt for _, shape in graphs._runs if isinstance(shape, PassShape)}
    assert {64, 192} <= columns
    assert exposed(keys) == []


def test_the_samplers_prefill_gets_safe_keys(faulty, keys):
    model = make_long()
    ids = torch.randint(1, 30, (2, 64))
    weights = read(model, torch.float64, 64)
    expected = model(ids).logits[:, -1]
    keys.clear()
    logits, cache = prefill(weights, ids, torch.tensor([0, 0]))
    assert exposed(keys) == []
    assert cache.keys[0].shape[2] == 64
    assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "new", "reentrant"])
def test_passes_of_any_model_run_without_cudnn_at_those_lengths(checkpointed, faulty, keys):
    """With checkpointing in the second run too, which the backward pass makes."""
    model = make_long().train()
    if checkpointed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
        model.enable_input_require_grads()
    for length in LENGTHS:
        ids = torch.randint(1, 30, (2, length))
        real = torch.arange(length) >= torch.tensor([[0], [3]])
        mask = torch.ones(2, 5, dtype=torch.bool)
        keys.clear()
        model_logp(model, ids, mask, attention_mask=real).sum().backward()
        model_states(model, ids, mask, attention_mask=real)
        assert [enabled for _, _, enabled in keys] == [length % 128 != 64] * len(keys)
        assert len(keys) >= (2 if checkpointed is None else 3)
        assert cuda.cudnn_sdp_enabled()


def test_blocks_of_a_transform_run_without_cudnn_at_those_lengths(faulty, keys):
    model = make_long()
    for length in LENGTHS:
        ids = torch.randint(1, 30, (2, length))
        real = torch.arange(length) >= torch.tensor([[0], [3]])
        number = torch.where(real, torch.arange(2)[:, None], -1)
        keys.clear()
        with gradients.isopo(overlap=8).applied(model, sequences=number, advantages=torch.ones(2)):
            model(ids, attention_mask=real.long()).logits.log_softmax(-1)[..., 0].sum().backward()
        assert exposed(keys) == []
        assert cuda.cudnn_sdp_enabled()


def test_what_the_user_has_disabled_stays_so(faulty):
    with safe_attention(64, torch.device("cpu")):
        assert not cuda.cudnn_sdp_enabled()
        with safe_attention(64, torch.device("cpu")):
            pass
        assert not cuda.cudnn_sdp_enabled()
    assert cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        with safe_attention(64, torch.device("cpu")) as follow:
            x = torch.ones(1, requires_grad=True)
            follow(x)
        x.sum().backward()
        assert not cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(True)


def test_a_compiled_model_chooses_for_all_lengths(faulty, keys):
    model = make_long()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    ids = torch.randint(1, 30, (2, 65))
    real = torch.arange(65) >= torch.tensor([[0], [3]])
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(model, "forward", _watched(model.forward, seen))
        model_logp(compiled, ids, mask, attention_mask=real)
    assert seen[-1] is False  # before it, the map behind the head is learnt from few positions


def _watched(forward, seen):
    @torch.compiler.disable
    def run(*args, **options):
        seen.append(cuda.cudnn_sdp_enabled())
        return forward(*args, **options)

    return run
