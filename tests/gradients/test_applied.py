"""The block itself: packing, accumulation, checkpointing, repeated calls, autocast."""

import warnings

import pytest
import torch
from blocks import EXACT, LENGTHS, A, assert_same, backward
from models import VOCAB, hf, nll, packed, padded
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from proxpo.errors import ProxpoError
from proxpo.gradients import active_handle, isopo, isopo_ntk


@pytest.mark.parametrize("make", [lambda: isopo(overlap="all", q=-0.5), isopo_ntk])
def test_padded_equals_packed(tiny, batch, make):
    want = backward(tiny, *batch, make())
    assert_same(backward(tiny, *packed(*batch), make()), want)


def test_left_padding(tiny, batch):
    ids, seq = batch
    want = backward(tiny, ids, seq, isopo(overlap="all", q=-1.0))
    left, numbers = torch.zeros_like(ids), torch.full_like(seq, -1)
    for i, length in enumerate(LENGTHS):
        left[i, -length:], numbers[i, -length:] = ids[i, :length], i
    actual = backward(tiny, left, numbers, isopo(overlap="all", q=-1.0))
    assert_same(actual, want, rtol=1e-6, atol=1e-6)


def test_garbage_in_padding_changes_nothing(tiny, batch):
    ids, seq = batch
    for make in (lambda: isopo(overlap="all", q=-1.0), isopo_ntk):
        want = backward(tiny, ids, seq, make())
        other = torch.where(seq >= 0, ids, 5)
        assert_same(backward(tiny, other, seq, make()), want)


def test_accumulated_micro_batches_equal_one_batch(tiny, batch):
    """Where no sequence depends on another, that is without an overlap set."""
    ids, seq = batch
    transform = isopo(preset="euclidean")
    want = backward(tiny, ids, seq, transform)
    tiny.zero_grad()
    for i in range(3):
        one = torch.where(seq[i : i + 1] >= 0, 0, -1)
        with transform.applied(tiny, sequences=one, advantages=A[i : i + 1]):
            nll(tiny(ids[i : i + 1], one), ids[i : i + 1], one).sum().backward()
    assert_same({n: p.grad for n, p in tiny.named_parameters()}, want)


def test_gradients_add_to_what_is_there(tiny, batch):
    want = backward(tiny, *batch)
    for value in tiny.parameters():
        value.grad = torch.ones_like(value)
    with isopo(overlap="all").applied(tiny, sequences=batch[1], advantages=A):
        nll(tiny(*batch), *batch).sum().backward()
    assert_same({n: p.grad - 1 for n, p in tiny.named_parameters()}, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(tiny, batch, reentrant):
    ids, seq = batch
    transform = isopo(overlap=6, q=-0.5)
    want = backward(tiny, ids, seq, transform)
    plain = tiny.block
    calls = []

    def block(h: Tensor, allowed: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return plain(h, allowed)

    tiny.block = lambda h, allowed: checkpoint(block, h, allowed, use_reentrant=reentrant)
    actual = backward(tiny, ids, seq, isopo(overlap=6, q=-0.5))
    assert_same(actual, want)
    assert len(calls) == 3  # the first: do positions keep their order


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_in_transformers(kind, reentrant):
    model = hf(kind)
    ids, seq = padded(LENGTHS, VOCAB)
    forward = lambda: model(ids, attention_mask=(seq >= 0).long(), use_cache=False).logits  # noqa: E731
    want = backward(model, ids, seq, forward=forward)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(backward(model, ids, seq, forward=forward), want)


class Twice(nn.Module):
    """One linear layer and one norm, each used two times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13)

    def forward(self, ids: Tensor, seq: Tensor) -> Tensor:
        h = self.embed(ids)
        for _ in range(2):
            h = h + torch.tanh(self.mix(self.norm(h)))
        return self.head(h)


def slow_of(model: nn.Module, ids: Tensor, seq: Tensor, **options) -> dict[str, Tensor]:
    import slow

    grads = slow.position_gradients(
        model, lambda: nll(model(ids, seq), ids, seq).sum(), seq.numel()
    )
    flat = seq.flatten()
    actual = {}
    for name, value in grads.items():
        numbers = flat.repeat(len(value) // len(flat))
        overlap_set = (numbers >= 0).nonzero()[:, 0]
        actual[name] = slow.isopo(value, numbers, A, overlap_set, **options)
    return actual


def test_a_module_called_twice_is_one_list_of_positions(batch):
    torch.manual_seed(0)
    model = Twice().double()
    assert_same(backward(model, *batch), slow_of(model, *batch))
    actual = backward(model, *batch, isopo_ntk())
    assert all(grad.isfinite().all() for grad in actual.values())


def test_a_call_that_never_reaches_its_backward(batch):
    """A dropped forward, and one that is kept but not part of the loss."""
    torch.manual_seed(0)
    model = Twice().double()
    want = backward(model, *batch)
    model.zero_grad()
    with isopo(overlap="all").applied(model, sequences=batch[1], advantages=A):
        model(*batch)
        kept = model(*batch)
        with torch.no_grad():
            model(*batch)
        nll(model(*batch), *batch).sum().backward()
    assert kept.requires_grad
    assert_same({n: p.grad for n, p in model.named_parameters()}, want)


@pytest.mark.parametrize("make", [lambda: isopo(overlap="all", q=-0.5), isopo_ntk])
def test_a_second_backward_joins_the_same_calls(batch, make):
    """retain_graph=True over a module called twice: each backward is what the first one was."""
    torch.manual_seed(0)
    model = Twice().double()
    want = backward(model, *batch, make())
    with make().applied(model, sequences=batch[1], advantages=A):
        loss = nll(model(*batch), *batch).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    actual = {n: p.grad for n, p in model.named_parameters()}
    assert_same(actual, {n: 3 * grad for n, grad in want.items()})


@pytest.mark.parametrize("first", [True, False])
def test_a_second_backward_over_some_calls_is_refused(batch, first):
    """Losses at two depths: one backward reaches both calls of a module, the other one of them."""
    torch.manual_seed(0)
    model = Twice().double()

    def apart() -> None:
        with isopo().applied(model, sequences=batch[1], advantages=A):
            low = torch.tanh(model.mix(model.embed(batch[0])))
            high = torch.tanh(model.mix(low))
            losses = [nll(model.head(h), *batch).sum() for h in (low, high)]
            losses[not first].backward(retain_graph=True)
            losses[first].backward()

    with pytest.raises(ProxpoError, match="second backward reached only some of the calls of mix"):
        apart()


def test_losses_that_share_a_module_but_no_call_are_joined(batch):
    """Two forwards, two backwards, one block: the positions of both are one list, as in a sum."""
    torch.manual_seed(0)
    model = Twice().double()
    twice = lambda: [nll(model(*batch), *batch).sum() for _ in range(2)]  # noqa: E731
    with isopo(overlap="all").applied(model, sequences=batch[1], advantages=A):
        sum(twice()).backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with isopo(overlap="all").applied(model, sequences=batch[1], advantages=A):
        for loss in twice():
            loss.backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, want)


@pytest.mark.parametrize("both", [True, False])
def test_a_module_shared_over_checkpointed_segments(batch, both):
    """Two segments, or one and a call outside: refused if reentrant, else as without any."""
    torch.manual_seed(0)
    model = Twice().double()
    want = backward(model, *batch)

    def run(reentrant: bool) -> Tensor:
        layer = lambda h: h + torch.tanh(model.mix(model.norm(h)))  # noqa: E731
        h = checkpoint(layer, model.embed(batch[0]), use_reentrant=reentrant)
        return model.head(checkpoint(layer, h, use_reentrant=reentrant) if both else layer(h))

    assert_same(backward(model, *batch, forward=lambda: run(False)), want)
    with pytest.raises(
        ProxpoError, match=r"several segments under reentrant checkpointing.*=False"
    ):
        backward(model, *batch, forward=lambda: run(True))


@pytest.mark.parametrize("through", ["numpy", "data", "during the block"])
def test_sequences_changed_behind_the_back_of_their_version(tiny, batch, through):
    """Numbers of the second block are its own; those of the first stay what they were."""
    ids, seq = batch
    other = torch.where(seq >= 0, (seq + 1) % 3, -1)
    want = [backward(tiny, ids, numbers) for numbers in (seq, other)]
    transform, numbers = isopo(overlap="all"), seq.clone()

    def change() -> None:
        if through == "numpy":
            numbers.numpy()[:] = other.numpy()
        else:
            numbers.data.copy_(other)

    def forward() -> Tensor:
        logits = tiny(ids, seq)
        if through == "during the block":
            change()
        return logits

    assert_same(backward(tiny, ids, numbers, transform, forward=forward), want[0])
    change()
    assert_same(backward(tiny, ids, numbers, transform, forward=forward), want[1])


class Unknown(nn.Module):
    """Parameters that no layer type explains, one of them in the container itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.gate = Gate()
        self.head = nn.Linear(6, 13)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, ids: Tensor, seq: Tensor) -> Tensor:
        return self.head(self.gate(self.embed(ids)) * self.scale.exp())


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 6) / 3)
        self.power = nn.Parameter(torch.rand(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(torch.tanh(h @ self.matrix) * self.power)


def test_unknown_parameters_get_the_advantage_weighted_gradient(batch):
    torch.manual_seed(0)
    model = Unknown().double()
    ids, seq = batch
    transform = isopo(overlap="all")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="no per-sequence form") as caught:
        actual = backward(model, ids, seq, transform)
    messages = sorted(str(w.message) for w in caught)
    assert len(messages) == 2
    assert "gate (Gate: matrix, power)" in messages[0]
    assert "the model itself (Unknown: scale)" in messages[1]
    torch.manual_seed(1)
    losses = nll(model(ids, seq), ids, seq).sum(1)
    (A @ losses).backward()
    for name in ("gate.matrix", "gate.power", "scale"):
        assert_close(actual[name], model.get_parameter(name).grad, **EXACT)
    # Everything else is treated as ever.
    head = model.head.weight.grad
    assert (actual["head.weight"] - head).norm() > 0.1 * head.norm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        backward(model, ids, seq, transform)


def test_attention_of_torch_is_treated_as_a_whole(batch):
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 6)
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.head = nn.Linear(6, 13)

        def forward(self, ids: Tensor, seq: Tensor) -> Tensor:
            h = self.embed(ids)
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            return self.head(h + self.attention(h, h, h, attn_mask=mask)[0])

    torch.manual_seed(0)
    model = Attending().double()
    with pytest.warns(UserWarning, match=r"attention \(MultiheadAttention: in_proj_weight"):
        actual = backward(model, *batch)
    (A @ nll(model(*batch), *batch).sum(1)).backward()
    for name, value in model.attention.named_parameters():
        assert_close(actual[f"attention.{name}"], value.grad, **EXACT)


def test_frozen_parameters_are_left_alone(tiny, batch):
    want = backward(tiny, *batch)
    for name in ("up.weight", "out.weight", "first.weight", "embed.weight"):
        tiny.get_parameter(name).requires_grad_(False)
        del want[name]
    assert_same(backward(tiny, *batch), want)


def test_training_may_move_to_other_parameters_between_blocks(tiny, batch):
    transform = isopo(overlap="all")
    want = backward(tiny, *batch, transform)
    tiny.up.weight.requires_grad_(False)
    backward(tiny, *batch, transform)
    tiny.up.weight.requires_grad_(True)
    assert_same(backward(tiny, *batch, transform), want)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_low_precision(tiny, batch, kind):
    """Without exponents the numbers of plain autograd; with them the same dtypes, near by."""
    ids, seq = batch
    exact = backward(tiny, ids, seq)
    model = tiny.float() if kind == "autocast" else tiny.bfloat16()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast")

    def forward() -> Tensor:
        with autocast:
            logits = model(ids, seq)
        assert logits.dtype == torch.bfloat16
        return logits.float()

    (A.float() @ nll(forward(), ids, seq).sum(1)).backward()
    plain = {name: value.grad.clone() for name, value in model.named_parameters()}
    actual = backward(model, ids, seq, isopo(preset="reinforce"), forward=forward)
    for name, grad in actual.items():
        assert grad.dtype == plain[name].dtype == model.get_parameter(name).dtype
        assert (grad - plain[name]).norm() < 0.05 * plain[name].norm(), name
    for name, grad in backward(model, ids, seq, forward=forward).items():
        assert (grad - exact[name]).norm() < 0.3 * exact[name].norm(), name


def test_the_active_site_of_a_parameter(tiny, batch):
    assert active_handle(tiny.head.weight) is None
    with isopo().applied(tiny, sequences=batch[1], advantages=A) as session:
        handle = active_handle(tiny.head.weight)
        assert handle is session.handles["head.weight"]
        assert active_handle(torch.nn.Parameter(torch.ones(1))) is None
    assert active_handle(tiny.head.weight) is None


def test_gradients_with_respect_to_inputs_are_plain(tiny, batch):
    ids, seq = batch
    kept = {}
    hook = tiny.embed.register_forward_hook(lambda m, i, out: kept.__setitem__("h", out))
    nll(tiny(ids, seq), ids, seq).sum().backward(inputs=[*tiny.parameters()])
    (want,) = torch.autograd.grad(nll(tiny(ids, seq), ids, seq).sum(), kept["h"])
    with isopo().applied(tiny, sequences=seq, advantages=A):
        (actual,) = torch.autograd.grad(nll(tiny(ids, seq), ids, seq).sum(), kept["h"])
    hook.remove()
    assert_close(actual, want, **EXACT)
