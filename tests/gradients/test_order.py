"""The axes of `sequences` among those of a layer: right, or refused where lengths do not tell."""

import pytest
import torch
from models import VOCAB, hf, nll, padded
from torch import Tensor, nn
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo, isopo_ntk

EXACT = {"rtol": 1e-9, "atol": 1e-12}
A = torch.tensor([1.0, -0.6, 0.3, 0.8, -0.2]).double()
SQUARE, WIDE = padded([5, 3, 4, 5, 2], 13), padded([6, 3, 4, 5, 2], 13)


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], transform=None) -> dict[str, Tensor]:
    ids, seq = batch
    model.zero_grad()
    transform = isopo(overlap="all", q=-0.5) if transform is None else transform
    with transform.applied(model, sequences=seq, advantages=A):
        nll(model(ids), ids, seq).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Σ A_i V_i by plain autograd: what modules without a per-sequence form get."""
    model.zero_grad()
    (A @ nll(model(batch[0]), *batch).sum(1)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


class Mixing(nn.Module):
    """A model that hands its hidden states to `inner` as B x L, as L x B or flattened."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(13, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 13)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids.T if self.kind == "ids" else ids)
        if self.kind == "ids":
            return self.head(self.inner(h)).transpose(0, 1)
        if self.kind == "inside":
            h = torch.tanh(self.inner(h.transpose(0, 1))).permute(1, 0, 2)
        elif self.kind == "flattened":
            h = self.inner(h.transpose(0, 1).flatten(0, 1)).view(*ids.T.shape, 4).swapaxes(0, 1)
        elif self.kind == "undone":
            h = self.inner(h.transpose(0, 1).cumsum(0).transpose(0, 1))
        else:
            h = torch.tanh(self.inner(h))
        return self.head(h)


@pytest.mark.parametrize("kind", ["ids", "inside", "flattened", "undone"])
def test_as_many_sequences_as_positions_exchanged_inside_are_refused(kind):
    model = Mixing(kind).double()
    for _ in range(2):
        with pytest.raises(ProxpoError, match=r"exchanges the axes .* of 5 x 5 does not tell"):
            gradients(model, SQUARE)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ids", r"embed saw other positions.*\(6, 5\).*in this order \(batch_first=True\)"),
        ("inside", r"inner saw other positions.*\(6, 5\).*in this order \(batch_first=True\)"),
        ("flattened", r"flattens its positions in the order 6 x 5"),
    ],
)
def test_exchanged_axes_of_different_lengths_are_refused(kind, message):
    with pytest.raises(ProxpoError, match=message):
        gradients(Mixing(kind).double(), WIDE)


def test_an_exchange_that_is_undone_is_known_from_other_lengths():
    """After a block with B ≠ L the order of every layer is known, and B = L is no riddle."""
    model, transform = Mixing("undone").double(), isopo(overlap="all", q=-0.5)
    gradients(model, WIDE, transform)
    transform.step(skipped=True)
    assert_close(gradients(model, SQUARE, transform), by_a_column(model), **EXACT)


def by_a_column(model: nn.Module, transform=None) -> dict[str, Tensor]:
    """The gradients of SQUARE with a column of padding, whose lengths leave nothing open."""
    ids, seq = (
        nn.functional.pad(x, (0, 1), value=fill) for x, fill in zip(SQUARE, (0, -1), strict=True)
    )
    return gradients(model, (ids, seq), transform)


@pytest.mark.parametrize("make", [lambda: isopo(overlap="all", r=-1.0), isopo_ntk])
@pytest.mark.parametrize("kind", ["plain", "qwen3", "gpt2"])
def test_a_batch_first_model_needs_no_argument(kind, make):
    """B = L with nothing exchanged, in a transform that has seen no other lengths."""
    if kind == "plain":
        model = Mixing("plain").double()
    else:
        family = hf(kind)
        model = Causal(family)
    assert_close(gradients(model, SQUARE, make()), by_a_column(model, make()), rtol=1e-5, atol=1e-6)


class Causal(nn.Module):
    def __init__(self, family: nn.Module) -> None:
        super().__init__()
        assert VOCAB > 13
        self.family = family

    def forward(self, ids: Tensor) -> Tensor:
        return self.family(ids, use_cache=False).logits


class Encoding(nn.Module):
    """torch's own encoder layer, in the order it is built for."""

    def __init__(self, batch_first: bool, exchanging: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.exchanging = exchanging
        self.embed = nn.Embedding(13, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(4, 13)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        length = ids.shape[0 if not self.encoder.self_attn.batch_first else 1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.exchanging:
            return self.head(self.encoder(h.transpose(0, 1), src_mask=mask).transpose(0, 1))
        return self.head(self.encoder(h, src_mask=mask))


@pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")
def test_torch_encoder_layers():
    """Built for L x B: refused; built for B x L: its attention gets A[seq] g, the rest is exact."""
    with pytest.raises(ProxpoError, match=r"encoder.* has batch_first=False.*5 x 5 does not tell"):
        gradients(Encoding(batch_first=False, exchanging=True).double(), SQUARE)
    model = Encoding(batch_first=True, exchanging=False).double()
    actual, want = gradients(model, SQUARE), weighted(model, SQUARE)
    for name in want:
        if "self_attn" in name:
            assert_close(actual[name], want[name], **EXACT)
    assert_close(actual, by_a_column(model), **EXACT)


@pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")
def test_a_model_that_is_sequence_first_throughout():
    """`sequences` as L x B, like input_ids: the numbers show that this is the encoder's order."""
    ids, seq = SQUARE
    first = Encoding(batch_first=True, exchanging=False).double()
    last = Encoding(batch_first=False, exchanging=False).double()
    last.load_state_dict(first.state_dict())
    turned = ids.T
    with isopo(overlap="all").applied(last, sequences=seq.T, advantages=A):
        nll(last(turned).transpose(0, 1), ids, seq).sum().backward()
    actual = {n: p.grad for n, p in last.named_parameters()}
    assert_close(actual, gradients(first, SQUARE, isopo(overlap="all")), **EXACT)


@pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")
@pytest.mark.parametrize("layer", [nn.Conv1d(4, 5, 3, padding=1), nn.GroupNorm(2, 4, affine=True)])
@pytest.mark.parametrize("batch", [SQUARE, padded([4, 2, 3, 4, 1], 13)], ids=["5x5", "5x4"])
def test_channels_are_no_positions(layer, batch):
    """As many channels as positions, before or behind the layer."""

    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 4)
            self.layer = layer
            self.head = nn.Linear(5 if isinstance(layer, nn.Conv1d) else 4, 13)

        def forward(self, ids: Tensor) -> Tensor:
            mixed = self.layer(self.embed(ids).transpose(1, 2))
            return self.head(torch.tanh(mixed).transpose(1, 2))

    torch.manual_seed(0)
    model = Convolving().double()
    actual, want = gradients(model, batch), weighted(model, batch)
    for name in ("layer.weight", "layer.bias"):
        assert_close(actual[name], want[name], **EXACT)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5)])
def test_one_number_per_sequence_is_refused(shape):
    model = Mixing("plain").double()
    numbers = torch.arange(5).view(shape)
    with (
        pytest.raises(ProxpoError, match=r"embed .* \(5, 6\).* one number per sequence; pass one"),
        isopo().applied(model, sequences=numbers, advantages=A),
    ):
        model(WIDE[0])


def test_one_number_for_the_only_sequence_is_refused():
    model = Mixing("plain").double()
    with (
        pytest.raises(ProxpoError, match=r"leading shape \(1, 6\).* one number per sequence"),
        isopo().applied(model, sequences=torch.zeros(1).long(), advantages=A[:1]),
    ):
        model(WIDE[0][:1])


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5)])
def test_sequences_of_one_position_are_not(shape):
    """Five tokens, five sequences: the numbers have the shape of the tokens."""
    model, numbers = Mixing("plain").double(), torch.arange(5).view(shape)
    actual = {}
    for name, view in (("given", shape), ("usual", (5, 1))):
        model.zero_grad()
        with isopo(overlap="all").applied(model, sequences=numbers.view(view), advantages=A):
            model(numbers.view(view)).log_softmax(-1)[..., 1].sum().backward()
        actual[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert_close(actual["given"], actual["usual"], **EXACT)


class Reordering(Mixing):
    """A model with the positions in another order before one of its layers, and back behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.own = nn.Parameter(torch.randn(4, 4))
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "ids":
            order = (ids > 0).sum(1).argsort()
            return self.head(torch.tanh(self.inner(self.embed(ids[order]))))[order.argsort()]
        h = self.embed(ids)
        if self.kind == "rolled":
            h = torch.tanh(self.inner(h.roll(1, 0))).roll(-1, 0)
        elif self.kind == "sorted":
            order = (ids > 0).sum(1).argsort()
            h = torch.tanh(h[order] @ self.own)[order.argsort()]
        elif self.kind == "by expert":
            flat = h.flatten(0, 1)
            order = (flat[:, 0] > 0).long().argsort(stable=True)
            h = torch.tanh(self.inner(flat[order]))[order.argsort()].view_as(h)
        elif self.kind == "packed":
            h = torch.tanh(self.inner(h.flip(1))).flip(1)
        elif self.kind == "undone":
            h = torch.tanh(self.inner(h.roll(1, 0).roll(-1, 0))) @ self.own
        else:
            h = torch.tanh(self.inner(h.cumsum(1))) @ self.own
        return self.head(h)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ids", "the model's output"),
        ("rolled", "inner.weight"),
        ("sorted", "own"),
        ("by expert", "inner.weight"),
        ("packed", "inner.weight"),
    ],
)
def test_positions_in_another_order_are_refused(kind, where):
    """Their shapes are right, and their gradients would have the weights of other sequences."""
    ids, seq = WIDE
    if kind == "packed":
        ids, seq = ids[seq >= 0][None], seq[seq >= 0][None]
    message = f"{where} sees the positions in another order than `sequences`"
    for make in (isopo, isopo_ntk):
        model = Reordering(kind).double()
        block = make().applied(model, sequences=seq, advantages=A)
        with pytest.raises(ProxpoError, match=message), block:
            model(ids)


@pytest.mark.parametrize(("kind", "first"), [("", 2), ("undone", 6)])
def test_the_order_of_positions_is_verified_once(kind, first):
    """By one pass without gradient, and four more where something may move positions."""
    model, transform = Reordering(kind).double(), isopo(p=0.0)
    ids, seq = WIDE
    state, calls = torch.get_rng_state(), []
    for rows in ([0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]):
        model.zero_grad()
        number = torch.where(seq[rows] >= 0, torch.arange(len(rows))[:, None], -1)
        before = model.calls
        with transform.applied(model, sequences=number, advantages=A[: len(rows)]):
            nll(model(ids[rows]), ids[rows], number).sum().backward()
        calls.append(model.calls - before)
    assert calls == [1, first, 1]  # in the first block of several sequences
    assert torch.equal(torch.get_rng_state(), state)
    actual = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert_close(actual, weighted(model, WIDE), **EXACT)
