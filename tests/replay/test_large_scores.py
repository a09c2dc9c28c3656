"""Passes in bfloat16 of a model with attention scores near -120: gradients of float32.

Such scores, which the first layers of Qwen2.5 reach, overflow in cuDNN's backward pass at some
lengths. On a CPU the same passes run, without that fault.
"""

import math
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recorder import record
from replay.test_prefix import make_rows
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from proxpo import gradients
from proxpo.logp import model_logp
from proxpo.models import Policy
from proxpo.ops.attention import faulty_attention, is_faulty
from proxpo.replay.graphs import CudaRecorder, PolicyGraphs
from proxpo.train.experience import Experience

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
LENGTHS = (63, 64, 65, 127, 128, 129, 191, 192, 193, 320)
WIDTH, LOW = 64, 31  # of a head, and its coordinate that turns least with the position
TRANSFORMS = {
    "isopo": partial(gradients.isopo, overlap="all"),
    "ntk": gradients.isopo_ntk,
}


def make_model(device: str) -> Qwen2ForCausalLM:
    """Two layers of which the first has scores of -120 between all positions."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=30,
        hidden_size=2 * WIDTH,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    size = math.sqrt(120 * math.sqrt(WIDTH))
    first = model.model.layers[0].self_attn
    with torch.no_grad():
        for linear, value in ((first.q_proj, size), (first.k_proj, -size)):
            for start in range(0, len(linear.weight), WIDTH):
                linear.weight[start + LOW] = 0.0
                linear.bias[start + LOW] = value
    return model.to(device)


def policy_of(model: nn.Module) -> Policy:
    return Policy(model, None, [0], 0, "tiny", 1024, torch.bfloat16)


def rows_of(length: int, device: str, *, samples: int = 1) -> Experience:
    """Two prompts with responses, of so many columns together."""
    rows = make_rows(
        prompts=[length - 20, length - 27], samples=[samples, samples], lengths=[20, 13, 17]
    )
    return rows.to(device)


def slope_of(rows: Experience) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows.mask.shape, generator=draw).to(rows.mask.device) * rows.mask


def through_modules(model: nn.Module, rows: Experience, kind: torch.dtype) -> torch.Tensor:
    with torch.autocast(rows.mask.device.type, dtype=kind, enabled=kind != torch.float32):
        return model_logp(model, rows.input_ids, rows.mask, attention_mask=rows.attention_mask)


def collected(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the trained parameters, which are cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def plain(model: nn.Module, rows: Experience, kind: torch.dtype) -> dict[str, torch.Tensor]:
    (through_modules(model, rows, kind).float() * slope_of(rows)).sum().backward()
    return collected(model)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Finite everywhere, and within rounding of bfloat16."""
    assert found.keys() == expected.keys()
    whole = math.sqrt(sum(float(x.double().square().sum()) for x in expected.values()))
    for name, x in expected.items():
        assert found[name].isfinite().all(), name
        # Sums over queries that cancel to rounding, which ISOPO divides by their size.
        if "k_proj.bias" in name or "k_proj.lora_B" in name:
            continue
        gap, norm = float((found[name] - x).norm()), float(x.norm())
        assert gap <= 0.25 * norm + 0.05 * whole, (name, gap, norm, whole)


def recorder(device: str):
    return CudaRecorder() if device == "cuda" else record


def recorded(graphs: PolicyGraphs, rows: Experience) -> dict[str, torch.Tensor]:
    """Gradients of a replay."""
    model = graphs.policy.model
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        logp = graphs.fields(rows, temperature=1.0, entropy=False)["logp"]
        (logp.float() * slope_of(rows)).sum().backward()
    assert any(run.recorded for run in graphs._runs.values())
    return collected(model)


def test_the_scores_are_low_enough(monkeypatch):
    model, rows, highest = make_model("cpu"), rows_of(64, "cpu"), []

    def watched(q, k, v, **options):
        key = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        highest.append(float((q @ key.mT / math.sqrt(WIDTH)).max()))
        return scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    through_modules(model, rows, torch.float32)
    assert min(highest) < -100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_rule_knows_this_machine():
    """Bare attention has the fault where the rule says so, at those lengths alone."""
    device = torch.device("cuda")
    if not is_faulty(torch.cuda.get_device_capability(), torch.backends.cudnn.version()):
        pytest.skip("no Hopper GPU, or a cuDNN without the fault")
    assert faulty_attention(device)
    for length in (128, 191, 192, 193):
        draw = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(1, 2, length, WIDTH, device=device, generator=draw) * 0.1 for _ in range(3)
        )
        q[..., LOW], k[..., LOW] = 30.0, -32.0
        q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out.backward(torch.randn_like(out))
        assert bool(q.grad.isfinite().all()) == (length % 128 != 64), length


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_passes_through_modules(device, checkpointed):
    model = make_model(device)
    for length in LENGTHS if device == "cuda" else (63, 64):
        rows = rows_of(length, device)
        expected = plain(model, rows, torch.float32)
        if checkpointed:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        found = plain(model, rows, torch.bfloat16)
        model.gradient_checkpointing_disable()
        assert_near(found, expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_passes_with_lora(device):
    model = get_peft_model(
        make_model(device).cpu(),
        LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4),
    ).to(device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    for length in LENGTHS if device == "cuda" else (64,):
        rows = rows_of(length, device)
        assert_near(plain(model, rows, torch.bfloat16), plain(model, rows, torch.float32))


@pytest.mark.parametrize("samples", [1, 8], ids=["whole rows", "prompts once"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_recorded_passes(device, samples):
    """Prompts of 50 and 150 tokens are padded to 64 and 192."""
    model = make_model(device)
    graphs = PolicyGraphs(policy_of(model), record=recorder(device))
    prompts = (17, 50, 64, 65, 100, 150, 192, 300) if device == "cuda" else (50,)
    for prompt in prompts:
        rows = rows_of(prompt + 20, device, samples=samples)
        found = recorded(graphs, rows)
        assert_near(found, plain(model, rows, torch.float32))
    kinds = {kind[0] for kind, _ in graphs._runs}
    assert kinds == {"rows" if samples == 1 else "prompts"}


@pytest.mark.parametrize("graphed", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_passes_under_a_transform(device, name, graphed):
    for length in (63, 64, 65, 192, 193) if device == "cuda" else (64,):
        rows = rows_of(length, device, samples=2)
        expected = under_transform(device, rows, name, torch.float32, graphed=False)
        found = under_transform(device, rows, name, torch.bfloat16, graphed=graphed)
        assert_near(found, expected)


def under_transform(
    device: str, rows: Experience, name: str, kind: torch.dtype, *, graphed: bool
) -> dict[str, torch.Tensor]:
    """The gradient of the fourth update on the same rows, which is a replay if it is recorded."""
    model, transform = make_model(device), TRANSFORMS[name]()
    graphs = PolicyGraphs(policy_of(model), transform=transform, record=recorder(device))
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.2], device=device)
    number = torch.arange(len(rows.mask), device=device)[:, None]
    sequences = torch.where(rows.attention_mask, number, -1)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        if graphed:
            with graphs.applied(rows, advantages=advantages, temperature=1.0, entropy=False):
                logp = graphs.fields(rows, temperature=1.0, entropy=False)["logp"]
                logp.float().sum().backward()
        else:
            options = {"sequences": sequences, "advantages": advantages, "groups": rows.group}
            with transform.applied(model, **options):
                through_modules(model, rows, kind).float().sum().backward()
        transform.step()
    assert not graphed or all(run.recorded for run in graphs._runs.values())
    return collected(model)
