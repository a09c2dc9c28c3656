"""Whole models against brute force: every parameter kind, every preset, NTK for several c."""

import warnings
from collections.abc import Callable

import peft
import pytest
import slow
import torch
from models import VOCAB, Tiny, hf, nll, padded
from torch import Tensor, nn
from torch.testing import assert_close

from proxpo.gradients import Transform, isopo, isopo_ntk

LENGTHS = [5, 7, 4]
ADVANTAGES = torch.tensor([1.0, -0.6, 0.3], dtype=torch.float64)
Objective = Callable[[], Tensor]

OPTIONS = {
    "fisher": {"p": -1.0},
    "nearest-npg": {"p": 0.0, "r": -2.0, "reg": 0.1},
    "figure4": {"p": 0.0, "q": -1.0, "r": -2.0},
    "euclidean": {"p": 0.0, "q": -1.0},
    "all, regularised": {"p": -1.0, "q": -0.5, "r": 0.5, "reg": 0.7, "eps": 1e-3},
    "keep_small": {"p": -1.0, "q": -0.5, "reg": 0.7, "keep_small": True},
}


def gradients(model: nn.Module, objective: Objective, transform: Transform, seq: Tensor):
    model.zero_grad()
    with transform.applied(model, sequences=seq, advantages=ADVANTAGES) as session:
        objective().backward()
    actual = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in actual.values())
    model.zero_grad()
    return {name: grad.clone() for name, grad in actual.items()}, session


def by_slices(grads: Tensor, method: Callable[[Tensor], Tensor], bank: bool) -> Tensor:
    """A bank of experts is one layer per expert."""
    if not bank:
        return method(grads)
    return torch.stack([method(grads[:, e]) for e in range(grads.shape[1])])


def assert_isopo(
    model: nn.Module, objective: Objective, seq: Tensor, tolerance: float, overlap, **options
) -> None:
    actual, session = gradients(model, objective, isopo(overlap=overlap, **options), seq)
    grads = slow.position_gradients(model, objective, seq.numel())
    known = {k: v for k, v in options.items() if k != "path"}
    assert grads.keys() == actual.keys()
    for name, value in grads.items():
        bank = value.dim() == 4
        overlap_set = seq.flatten() >= 0
        overlap_set = overlap_set.nonzero()[:, 0]
        if not bank and overlap != "all":
            drawn = session.handles[name].overlap_set()
            overlap_set = drawn.index[drawn.valid]
            assert len(overlap_set) <= overlap < seq.numel()
        want = by_slices(
            value,
            lambda g, j=overlap_set: slow.isopo(g, seq.flatten(), ADVANTAGES, j, **known),
            bank,
        )
        assert_near(actual[name], want, tolerance, name)


def assert_near(actual: Tensor, want: Tensor, tolerance: float, name: str) -> None:
    error = (actual - want).norm() / want.norm().clamp(min=1e-30)
    assert error < tolerance, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    model = Tiny().double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    ids, seq = padded(LENGTHS, 13)
    return model, lambda: nll(model(ids, seq), ids, seq).sum(), seq


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("overlap", ["all", 6])
def test_every_kind_of_layer_in_float64(tiny, options, overlap):
    drawn = options["p"] or options.get("r")  # else there is no overlap set
    assert_isopo(*tiny, 1e-9, overlap if drawn else "all", **options)


@pytest.mark.parametrize("path", ["gram", "materialise", "stream"])
@pytest.mark.parametrize("options", ["fisher", "figure4", "all, regularised"])
def test_every_path_in_float64(tiny, path, options):
    assert_isopo(*tiny, 1e-9, 6, path=path, **OPTIONS[options])


@pytest.mark.parametrize("rho", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("scale", ["c", "paper"])
@pytest.mark.parametrize("path", ["auto", "gram", "materialise"])
@pytest.mark.checks("isopo-ntk", "equals the parameter-space solve (JᵀJ + cI)⁻¹ Jᵀ A")
def test_ntk_in_float64(tiny, rho, scale, path):
    model, objective, seq = tiny
    actual, _ = gradients(model, objective, isopo_ntk(rho=rho, scale=scale, path=path), seq)
    for name, value in slow.position_gradients(model, objective, seq.numel()).items():
        want = slow.ntk(value, seq.flatten(), ADVANTAGES, rho=rho, scale=scale)
        assert_near(actual[name], want, 1e-9, name)


def prepared(kind: str) -> tuple[nn.Module, Objective, Tensor]:
    model = hf(kind)
    ids, seq = padded(LENGTHS, VOCAB)
    mask, places = (seq >= 0).long(), torch.arange(ids.shape[1]).expand_as(ids)

    def objective() -> Tensor:
        return nll(model(ids, attention_mask=mask, position_ids=places).logits, ids, seq).sum()

    return model, objective, seq


def untie(model: nn.Module) -> None:
    """A second copy of a shared weight, so that brute force can tell its two uses apart."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


FAMILIES = ["qwen3", "llama", "gpt2", "gemma3", "qwen3_moe", "mixtral"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_of_models(kind):
    model, objective, seq = prepared(kind)
    untie(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every parameter is understood
        assert_isopo(model, objective, seq, 1e-6, "all", p=-1.0, q=-0.5, r=0.5, reg=0.3)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe"])
def test_ntk_on_families(kind):
    model, objective, seq = prepared(kind)
    untie(model)
    actual, _ = gradients(model, objective, isopo_ntk(), seq)
    for name, value in slow.position_gradients(model, objective, seq.numel()).items():
        solve = lambda g: slow.ntk(g, seq.flatten(), ADVANTAGES)  # noqa: E731
        assert_near(actual[name], by_slices(value, solve, value.dim() == 4), 1e-6, name)


def test_a_tied_weight_gets_both_of_its_parts():
    model, objective, seq = prepared("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    together, _ = gradients(model, objective, isopo(overlap="all"), seq)
    untie(model)
    apart, _ = gradients(model, objective, isopo(overlap="all"), seq)
    shared = apart.pop("lm_head.weight") + apart["transformer.wte.weight"]
    apart["transformer.wte.weight"] = shared
    for name, grad in together.items():
        assert_near(grad, apart[name], 1e-12, name)


def test_position_ids_shared_by_all_sequences():
    model, objective, seq = prepared("gpt2")
    ids, _ = padded(LENGTHS, VOCAB)
    explicit, _ = gradients(model, objective, isopo(overlap="all"), seq)
    shared, _ = gradients(
        model,
        lambda: nll(model(ids, attention_mask=(seq >= 0).long()).logits, ids, seq).sum(),
        isopo(overlap="all"),
        seq,
    )
    assert_near(shared["transformer.wpe.weight"], explicit["transformer.wpe.weight"], 1e-12, "wpe")


def test_lora_adapters():
    model, _, seq = prepared("qwen3")
    ids, _ = padded(LENGTHS, VOCAB)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=8)
    model = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.3)
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}

    def objective() -> Tensor:
        return nll(model(input_ids=ids, attention_mask=(seq >= 0).long()).logits, ids, seq).sum()

    actual, _ = gradients(model, objective, isopo(overlap="all", q=-0.5), seq)
    grads = slow.position_gradients(model, objective, seq.numel())
    assert all("lora_" in name for name in grads)
    overlap_set = (seq.flatten() >= 0).nonzero()[:, 0]
    for name, value in grads.items():
        want = slow.isopo(value, seq.flatten(), ADVANTAGES, overlap_set, q=-0.5)
        assert_near(actual[name], want, 1e-6, name)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], p) and after[n].grad is None for n, p in before.items())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.checks("isopo", "p = q = r = 0 is REINFORCE, for every parameter")
def test_reinforce_is_the_limit_without_exponents(kind):
    model, objective, seq = prepared(kind)
    ids, _ = padded(LENGTHS, VOCAB)
    actual, _ = gradients(model, objective, isopo(preset="reinforce"), seq)
    mask, places = (seq >= 0).long(), torch.arange(ids.shape[1]).expand_as(ids)
    losses = nll(model(ids, attention_mask=mask, position_ids=places).logits, ids, seq).sum(1)
    (ADVANTAGES @ losses).backward()
    for name, value in model.named_parameters():
        assert_near(actual[name], value.grad, 1e-6, name)


def test_the_forward_does_not_change():
    for kind in FAMILIES:
        model, _, seq = prepared(kind)
        ids, _ = padded(LENGTHS, VOCAB)
        plain = model(ids).logits
        with isopo().applied(model, sequences=seq, advantages=ADVANTAGES):
            inside = model(ids).logits
            inside.sum().backward()
        torch.testing.assert_close(inside, plain, rtol=1e-6, atol=1e-6)


def test_an_idle_expert_collects_zeros():
    """E[x²] of an expert is that of all sequences, into however many blocks they are cut."""
    ids, seq = padded([3, 2, 3], VOCAB)
    kept = []
    for cuts in ([[0, 1, 2]], [[0], [1], [2]]):
        model, transform = hf("qwen3_moe", num_experts=8), isopo(preset="euclidean", reg=1.0)
        for rows in cuts:
            number = torch.where(seq[rows] >= 0, torch.arange(len(rows))[:, None], -1)
            with transform.applied(model, sequences=number, advantages=torch.ones(len(rows))):
                logits = model(ids[rows]).logits[:, :-1].double()
                logp = logits.log_softmax(-1).gather(-1, ids[rows][:, 1:, None])[..., 0]
                (-(logp * (seq[rows][:, 1:] >= 0)).sum()).backward()
        transform.step()
        kept.append(transform.state_dict())
    whole, parts = kept
    assert whole.keys() == parts.keys()
    assert any(value == 0 for name, value in whole.items() if "experts" in name)
    assert any(value > 0 for name, value in whole.items() if "experts" in name)
    assert_close(whole, parts, rtol=1e-6, atol=1e-12)
