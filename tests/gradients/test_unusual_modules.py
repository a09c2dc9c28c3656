"""Layers with weights that are computed, recurrent, convolved or used by the module above."""

import warnings
from contextlib import nullcontext

import peft
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, hf, nll, padded
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo

A = torch.tensor([1.0, -0.6, 0.3]).double()
LENGTHS = [5, 7, 4]
EXACT = {"rtol": 1e-9, "atol": 1e-11}
pytestmark = pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")


class Around(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.middle = middle
        self.head = nn.Linear(6, 13)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.middle(self.embed(ids))
        return self.head(h[0] if isinstance(h, tuple) else h)


def assert_plain(model: nn.Module, forward, names: list[str]) -> None:
    """Σ A_i V_i for some parameters, twice in a row."""
    ids, seq = padded(LENGTHS, 13)
    before = {name: value.clone() for name, value in model.named_buffers()}
    transform, actual = isopo(overlap="all"), []
    for _ in range(2):
        model.load_state_dict(before, strict=False)
        model.zero_grad()
        with transform.applied(model, sequences=seq, advantages=A):
            nll(forward(ids), ids, seq).sum().backward()
        actual.append({name: model.get_parameter(name).grad for name in names})
    model.load_state_dict(before, strict=False)
    model.zero_grad()
    (A @ nll(forward(ids), ids, seq).sum(1)).backward()
    want = {name: model.get_parameter(name).grad for name in names}
    assert_close(actual[0], want, **EXACT)
    assert_close(actual[1], want, **EXACT)


def made(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Around(middle).double()


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_weight(norm):
    model = made(norm(nn.Linear(6, 6)))
    names = [f"middle.{name}" for name, _ in model.middle.named_parameters()]
    assert len(names) >= 2
    assert_plain(model, model, names)


@pytest.mark.parametrize("norm", [old_weight_norm, old_spectral_norm])
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated")
def test_a_weight_computed_in_a_hook_is_refused_with_the_reason(norm):
    model = made(norm(nn.Linear(6, 6)))
    ids, seq = padded(LENGTHS, 13)
    reason = rf"middle \(Linear\) computes its weight in a hook of torch.nn.utils.{norm.__name__}"
    with (
        pytest.raises(ProxpoError, match=reason),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        model(ids)


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(6, 6), "weight", 0.3)


def computed() -> nn.Module:
    """A linear layer whose weight is a result, set once."""
    layer = nn.Linear(6, 6)
    layer.root = nn.Parameter(layer.weight.detach())
    del layer.weight
    layer.weight = 2 * layer.root
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pruned, "computes its weight in a hook of torch.nn.utils.prune, .* with prune.remove"),
        (computed, "computes its weight before its forward"),
    ],
)
def test_a_weight_that_is_no_parameter_is_refused_with_the_reason(make, reason):
    model, (_, seq) = made(make()), padded(LENGTHS, 13)
    with (
        pytest.raises(ProxpoError, match=rf"middle \(Linear\) {reason}"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        pass


def test_an_embedding_that_rescales_its_rows_is_refused_with_the_reason():
    model, (_, seq) = made(nn.Identity()), padded(LENGTHS, 13)
    model.embed.max_norm = 1.0
    with (
        pytest.raises(ProxpoError, match=r"embed \(Embedding\) rescales its rows in its forward"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        pass


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = states if gate is None else states * gate
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class LayerNorm(GatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class MeanNorm(GatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.abs().mean() * x / x.norm(dim=-1, keepdim=True)


class UnitNorm(GatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight / self.weight.norm()


@pytest.mark.parametrize("kind", [LayerNorm, MeanNorm, UnitNorm])
def test_a_norm_that_reads_its_vector_as_a_whole_keeps_its_numbers(kind):
    assert_plain(model := made(kind()), model, ["middle.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_eps_of_an_rms_norm_that_names_none(dtype):
    norm, x = nn.RMSNorm(32).to(dtype), (0.05 * torch.randn(1, 4, 32)).to(dtype)
    slope, one = torch.randn(1, 4, 32).to(dtype), torch.zeros(1, 4, dtype=torch.long)
    block = isopo(preset="reinforce").applied(norm, sequences=one, advantages=torch.ones(1))
    grads = []
    for context in (nullcontext(), block):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        with context:
            (norm(leaf) * slope).sum().backward()
        grads.append([norm.weight.grad, leaf.grad])
    assert_close(*grads, rtol=0.02, atol=0.02)


def by_name(model: nn.Module, call) -> dict[str, Tensor]:
    """Gradients with the middle called in this way; None for the usual one."""
    ids, seq = padded(LENGTHS, 13)
    call = model.middle if call is None else call
    model.zero_grad()
    with isopo(overlap="all", q=-0.5).applied(model, sequences=seq, advantages=A):
        logits = model.head(call(model.embed(ids)))
        nll(logits, ids, seq).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (lambda: nn.Linear(6, 6), "input"),
        (lambda: nn.LayerNorm(6), "input"),
        (lambda: nn.RMSNorm(6), "x"),
        (lambda: Conv1D(6, 6), "x"),
        (lambda: LlamaRMSNorm(6), "hidden_states"),
        (GatedNorm, "states"),
    ],
    ids=["Linear", "LayerNorm", "RMSNorm", "Conv1D", "LlamaRMSNorm", "GatedNorm"],
)  # fmt: skip
def test_a_layer_may_be_called_by_the_name_of_its_input(kind, name):
    model = made(kind())
    want = by_name(model, None)
    assert_close(by_name(model, lambda x: model.middle(**{name: x})), want, **EXACT)
    with pytest.raises(TypeError):
        by_name(model, lambda x: model.middle(other=x))


def test_further_inputs_by_name():
    model = made(GatedNorm())
    gate = torch.rand(6).double()
    want = by_name(model, lambda x: model.middle(x, gate))
    actual = by_name(model, lambda x: model.middle(gate=gate, states=x))
    assert_close(actual, want, **EXACT)


def test_an_embedding_may_be_called_by_the_name_of_its_input():
    model, (ids, seq) = made(nn.Identity()), padded(LENGTHS, 13)
    actual = []
    for call in (lambda: model.embed(ids), lambda: model.embed(input=ids)):
        model.zero_grad()
        with isopo(overlap="all").applied(model, sequences=seq, advantages=A):
            nll(model.head(call()), ids, seq).sum().backward()
        actual.append(model.embed.weight.grad.clone())
    assert_close(actual[1], actual[0], **EXACT)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_recurrent_layer(kind):
    model = made(kind(6, 6, num_layers=2, batch_first=True))
    assert_plain(model, model, [f"middle.{name}" for name, _ in model.middle.named_parameters()])
    model, (ids, seq) = made(kind(6, 6)), padded(LENGTHS, 13)
    with (
        pytest.raises(ProxpoError, match=r"positions before sequences; build it with batch_first"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        model(ids)


class Convolved(nn.Module):
    def __init__(self, called: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=2, groups=2)
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        if self.called:
            return self.conv(x)[..., : x.shape[-1]].mT
        return F.conv1d(F.pad(x, (2, 0)), self.conv.weight, self.conv.bias, groups=2).mT


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_convolution_called_or_used_by_the_module_above(called, checkpointed):
    model = made(Convolved(called))

    def forward(ids: Tensor) -> Tensor:
        return model.head(checkpoint(model.middle, model.embed(ids), use_reentrant=False))

    names = ["middle.conv.weight", "middle.conv.bias"]
    assert_plain(model, forward if checkpointed else model, names)


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_is_refused_with_the_reason(frozen):
    """Also where it has been evaluated in an earlier block."""
    model, (ids, seq) = made(nn.BatchNorm1d(7)), padded(LENGTHS, 13)
    model.middle.requires_grad_(not frozen)
    transform = isopo()

    def block() -> None:
        with transform.applied(model, sequences=seq, advantages=A):
            nll(model(ids), ids, seq).sum().backward()

    model.middle.eval()
    block()
    model.middle.train()
    for _ in range(2):
        with pytest.raises(ProxpoError, match=r"middle \(BatchNorm1d\) mixes the sequences.*eval"):
            block()
    model.middle = nn.BatchNorm1d(7, track_running_stats=False).double().eval()
    with pytest.raises(ProxpoError, match=r"middle \(BatchNorm1d\) mixes the sequences.*replace"):
        block()


def test_a_frozen_batch_norm_of_constants_is_left_alone():
    """As in a frozen vision tower, which `model.train()` puts in training mode again and again."""
    model, (ids, seq) = made(nn.BatchNorm1d(7)), padded(LENGTHS, 13)
    for part in (model.embed, model.middle):
        part.requires_grad_(False)
    with isopo(preset="reinforce").applied(model, sequences=seq, advantages=A):
        nll(model(ids), ids, seq).sum().backward()
    actual = model.head.weight.grad.clone()
    model.zero_grad()
    (A @ nll(model(ids), ids, seq).sum(1)).backward()
    assert_close(actual, model.head.weight.grad, **EXACT)
    model.embed.requires_grad_(True)
    with (
        pytest.raises(ProxpoError, match=r"middle \(BatchNorm1d\) mixes the sequences"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        model(ids)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_the_eps_of_a_norm_may_change_between_blocks(kind):
    model, (ids, seq) = made(kind(6, eps=1e-3)), padded(LENGTHS, 13)
    transform, outputs = isopo(), []
    for eps in (1e-3, 0.5):
        model.middle.eps = eps
        with transform.applied(model, sequences=seq, advantages=A):
            outputs.append(model(ids))
        assert_close(outputs[-1], model(ids), **EXACT)
    assert not torch.allclose(*outputs)


def test_a_linear_layer_whose_output_is_changed_in_place():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 6)
            self.gru = nn.GRU(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            y += x
            z, _ = self.gru(y)
            z *= 2
            return z

    model = made(InPlace())
    assert_plain(model, model, ["middle.gru.weight_ih_l0"])


def test_dora():
    model = hf("qwen3")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_alpha=8, use_dora=True)
    model = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.3)
    ids, seq = padded(LENGTHS, VOCAB)
    actual = {}
    for kind, transform in {"p = 0": isopo(p=0.0), "isopo": isopo(overlap="all")}.items():
        model.zero_grad()
        with transform.applied(model, sequences=seq, advantages=A):
            nll(model(input_ids=ids).logits, ids, seq).sum().backward()
        actual[kind] = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    (A @ nll(model(input_ids=ids).logits, ids, seq).sum(1)).backward()
    for name, value in model.named_parameters():
        if value.requires_grad:
            # The norms of the model compute in float32.
            assert_close(actual["p = 0"][name], value.grad, rtol=1e-4, atol=1e-6)
            same = torch.allclose(actual["isopo"][name], value.grad, rtol=1e-4, atol=1e-6)
            assert same == ("magnitude" in name)


ADAPTERS = {
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "hra": lambda: peft.HRAConfig(r=2, target_modules=["q_proj"]),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
    "tied tokens": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapters_that_keep_parameters_in_a_dict(config):
    model = peft.get_peft_model(hf("llama", tie_word_embeddings=True), config()).double()
    with torch.no_grad():
        for value in filter(lambda p: p.requires_grad, model.parameters()):
            value.add_(0.3 * torch.randn_like(value))
    ids, seq = padded(LENGTHS, VOCAB)
    with isopo(p=0.0).applied(model, sequences=seq, advantages=A):
        nll(model(input_ids=ids).logits, ids, seq).sum().backward()
    actual = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    (A @ nll(model(input_ids=ids).logits, ids, seq).sum(1)).backward()
    for name, value in model.named_parameters():
        assert_close(actual[name], value.grad, rtol=1e-4, atol=1e-6)


def test_a_key_value_cache_is_filled_once():
    """GPT-OSS runs its attention again for the gradient of the sinks, with its cache."""
    import conformance

    with conformance.precise(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = conformance.build("gpt_oss")
        ids, seq = padded(LENGTHS, VOCAB)
        grads = []
        for use_cache in (False, True):
            model.zero_grad()
            with isopo(overlap="all").applied(model, sequences=seq, advantages=A):
                out = model(input_ids=ids, use_cache=use_cache)
                nll(out.logits, ids, seq).sum().backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
    assert out.past_key_values.get_seq_length() == ids.shape[1]
    assert_close(grads[1], grads[0], **EXACT)


def test_a_child_called_by_another_method_of_its_module_is_normalised():
    class Methods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.rand(()))

        def predict(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(x))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.methods = Methods()

        def forward(self, x: Tensor) -> Tensor:
            return self.methods(self.methods.predict(x))

    model, (ids, seq) = made(Both()), padded(LENGTHS, 13)
    with (
        pytest.warns(UserWarning, match=r"middle\.methods \(Methods: scale\)"),
        isopo(overlap="all").applied(model, sequences=seq, advantages=A),
    ):
        nll(model(ids), ids, seq).sum().backward()
    actual = model.middle.methods.mix.weight.grad.clone()
    model.zero_grad()
    (A @ nll(model(ids), ids, seq).sum(1)).backward()
    assert not torch.allclose(actual, model.middle.methods.mix.weight.grad, rtol=1e-2)


def test_a_layer_applied_to_a_constant_keeps_its_shape_and_is_refused_with_the_reason():
    class Delayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            first = self.mix(x.new_zeros(len(x), 1, 6))
            return torch.cat([first, self.mix(x)[:, :-1]], 1)

    model, (ids, seq) = made(Delayed()), padded(LENGTHS, 13)
    with (
        pytest.raises(
            ProxpoError, match=r"middle\.mix is applied to a constant of shape \(3, 1, 6\)"
        ),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        nll(model(ids), ids, seq).sum().backward()


class Rotation(nn.Module):
    """x exp(W): run again in the backward pass, with what a test changes meanwhile."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 4)
        self.change, self.scale, self.calls = change, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.change == "counter"
        if self.change == "training" and not self.training:
            x = 2 * x
        return (1 + self.calls) * self.scale * x @ torch.matrix_exp(self.weight)


@pytest.mark.parametrize("change", ["", "training", "attribute", "input", "counter", "elsewhere"])
def test_a_module_that_is_run_again_sees_the_state_of_its_first_run(change):
    """Otherwise the gradient is that of another function: refused by the module's name."""
    model, kept = made(Rotation(change)), []
    if change == "input":
        model.middle.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))
    ids, seq = padded(LENGTHS, 13)

    def run():
        with isopo(overlap="all").applied(model, sequences=seq, advantages=A):
            loss = nll(model(ids), ids, seq).sum()
            model.middle.scale = 3.0 if change == "attribute" else 1.0
            model.embed.training = change != "elsewhere"
            model.middle.training = change != "training"
            for x in kept:
                x.mul_(2)
            loss.backward()

    if change in ("", "elsewhere"):
        run()
        return
    reason = r"middle \(Rotation: weight\) has no per-sequence form, and gave other outputs when"
    with pytest.raises(ProxpoError, match=reason):
        run()


def test_a_product_is_followed_without_a_second_run():
    class Product(Rotation):
        def forward(self, x):
            self.calls += 1
            return x @ self.weight

    model = made(Product())
    ids, seq = padded(LENGTHS, 13)
    transform, calls = isopo(), []
    for _ in range(2):  # the first block verifies the order of positions before
        model.middle.calls = 0
        with transform.applied(model, sequences=seq, advantages=A):
            nll(model(ids), ids, seq).sum().backward()
        calls.append(model.middle.calls)
    assert calls[1] == 1
