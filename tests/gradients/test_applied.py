"""The block itself: packing, accumulation, checkpointing, repeated calls, autocast, mistakes."""

import re
import warnings

import pytest
import torch
from models import VOCAB, Tiny, hf, nll, packed, padded
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from proxpo.errors import ProxpoError
from proxpo.gradients import active_handle, isopo, isopo_ntk

A = torch.tensor([1.0, -0.6, 0.3]).double()
LENGTHS = [5, 7, 4]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def tiny() -> Tiny:
    torch.manual_seed(0)
    model = Tiny().double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return model


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return padded(LENGTHS, 13)


def backward(model, ids, seq, transform=None, advantages=A, forward=None) -> dict[str, Tensor]:
    """p.grad after one block, from zero."""
    model.zero_grad()
    transform = isopo(overlap="all") if transform is None else transform
    with transform.applied(model, sequences=seq, advantages=advantages):
        logits = model(ids, seq) if forward is None else forward()
        nll(logits, ids, seq).sum().backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return actual


def assert_same(actual: dict[str, Tensor], want: dict[str, Tensor], **tolerance) -> None:
    assert actual.keys() == want.keys()
    for name in actual:
        assert_close(actual[name], want[name], **(tolerance or EXACT), msg=lambda m, n=name: n + m)


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
    assert len(calls) == 2


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


# ---- mistakes


def forwards(model: nn.Module) -> list:
    return [module.__dict__.get("forward") for module in model.modules()]


def test_the_model_is_restored_after_an_exception(tiny, batch):
    want = backward(tiny, *batch)
    before = forwards(tiny)

    def interrupted() -> None:
        with isopo().applied(tiny, sequences=batch[1], advantages=A):
            tiny(*batch)
            assert forwards(tiny) != before
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert forwards(tiny) == before
    assert_same(backward(tiny, *batch), want)


def test_nested_blocks_are_refused(tiny, batch):
    second = isopo().applied(tiny.up, sequences=batch[1], advantages=A)
    with isopo().applied(tiny, sequences=batch[1], advantages=A):
        with pytest.raises(ProxpoError, match="already applied to this model"):
            second.__enter__()
        nll(tiny(*batch), *batch).sum().backward()


def test_backward_outside_the_block_is_refused(tiny, batch):
    transform = isopo()
    with transform.applied(tiny, sequences=batch[1], advantages=A):
        loss = nll(tiny(*batch), *batch).sum()
    with pytest.raises(ProxpoError, match=r"after the `with` block of its forward had ended"):
        loss.backward()
    with transform.applied(tiny, sequences=batch[1], advantages=A):
        late = nll(tiny(*batch), *batch).sum()
    with (
        pytest.raises(ProxpoError, match=r"after the `with` block of its forward had ended"),
        transform.applied(tiny, sequences=batch[1], advantages=A),
    ):
        late.backward()


def test_forward_outside_the_block_is_refused(tiny, batch):
    loss = nll(tiny(*batch), *batch).sum()
    with (
        pytest.raises(ProxpoError, match=r"embed\.weight received a gradient that did not pass"),
        isopo().applied(tiny, sequences=batch[1], advantages=A),
    ):
        loss.backward()


class Raw(nn.Module):
    """An embedding that is also used as head, without a module for that."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.raw = raw
        self.embed = nn.Embedding(13, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, seq: Tensor) -> Tensor:
        h = self.embed(ids) + self.mix(self.embed(ids))
        return h @ self.embed.weight.T if self.raw else self.head(h)


def test_a_weight_used_beside_its_module_is_refused(batch):
    torch.manual_seed(0)
    model = Raw(raw=True).double()
    with pytest.raises(ProxpoError, match=r"head\.weight .* also used without calling the module"):
        backward(model, *batch)
    backward(Raw(raw=False).double(), *batch)


def test_a_failed_check_of_bypassed_parameters_fails_again(batch):
    torch.manual_seed(0)
    model, transform = Raw(raw=True).double(), isopo()
    for _ in range(3):
        with pytest.raises(ProxpoError, match="also used without calling the module"):
            backward(model, *batch, transform)
    model.raw = False
    backward(model, *batch, transform)


@pytest.mark.parametrize("share", [1.0, 1e-6])
def test_a_bypass_that_first_appears_in_a_later_block_is_noticed(tiny, batch, share):
    """Also where it adds little to a gradient: of a linear layer, a norm, a tied embedding."""
    torch.manual_seed(0)
    tied = Raw(raw=False).double()
    for model, name in ((tiny, "up.weight"), (tiny, "first.weight"), (tied, "embed.weight")):
        transform = isopo()
        backward(model, *batch, transform)
        weight = model.get_parameter(name)
        extra = lambda m=model, w=weight: m(*batch) + share * w.sum()  # noqa: E731
        for _ in range(2):
            with pytest.raises(ProxpoError, match="also used without calling the module"):
                backward(model, *batch, transform, forward=lambda f=extra: f() ** 2)
        backward(model, *batch, transform)


def test_a_bypass_of_a_module_that_is_not_called_is_noticed(batch):
    torch.manual_seed(0)
    model, transform = Raw(raw=False).double(), isopo()
    backward(model, *batch, transform)
    plain = lambda: model.head(model.embed(batch[0]) @ model.mix.weight)  # noqa: E731
    for _ in range(2):
        with pytest.raises(ProxpoError, match=r"mix\.weight received a gradient that did not pass"):
            backward(model, *batch, transform, forward=plain)


def test_the_check_leaves_gradients_where_autograd_puts_them(tiny, batch):
    """A second reference to a gradient would make autograd copy it."""
    sent = {}
    with isopo().applied(tiny, sequences=batch[1], advantages=A) as session:
        send = session.audit.send
        session.audit.send = lambda site, g: sent.update({site.name: g.data_ptr()}) or send(site, g)
        nll(tiny(*batch), *batch).sum().backward()
    assert sent.keys() == dict(tiny.named_parameters()).keys()
    assert all(tiny.get_parameter(name).grad.data_ptr() == ptr for name, ptr in sent.items())


def test_a_tied_head_may_stay_unused(batch):
    """The rest of a tied model can be trained on another objective."""
    torch.manual_seed(0)
    model = Raw(raw=False).double()
    value = nn.Linear(6, 13).double()
    actual = backward(model, *batch, forward=lambda: value(model.mix(model.embed(batch[0]))))
    assert actual["embed.weight"].any()


def test_nan_is_an_error_not_a_gradient(tiny, batch):
    with torch.no_grad():
        tiny.down.weight[0, 0] = torch.nan
    for transform in (isopo(), isopo_ntk(), isopo(preset="euclidean")):
        with (
            pytest.raises(ProxpoError, match=r"is not finite"),
            transform.applied(tiny, sequences=batch[1], advantages=A),
        ):
            nll(tiny(*batch), *batch).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": A[:2]}, "asks for 3 advantages (padding is -1), got 2"),
        ({"advantages": torch.ones(4)}, "asks for 3 advantages (padding is -1), got 4"),
        ({"advantages": torch.ones(3, 7)}, "per sequence, got torch.float32 of shape (3, 7)"),
        ({"advantages": torch.tensor([1, 2, 3])}, "one float per sequence, got torch.int64"),
        ({"advantages": A * torch.inf}, "`advantages` holds NaN or infinity"),
        ({"sequences": torch.ones(3, 7)}, "must hold whole numbers shaped like input_ids"),
        ({"sequences": torch.zeros(0, 7).long()}, "must hold whole numbers shaped like input_ids"),
        ({"sequences": torch.full((3, 7), -2)}, "numbers -2..-2"),
    ],
)  # fmt: skip
def test_bad_micro_batches(tiny, batch, change, message):
    options = {"sequences": batch[1], "advantages": A} | change
    with pytest.raises(ProxpoError, match=re.escape(message)), isopo().applied(tiny, **options):
        pass
    assert active_handle(tiny.head.weight) is None


@pytest.mark.parametrize("shape", [(3, 8), (7, 3), (21,), (2, 7)])
def test_sequences_of_another_shape(tiny, batch, shape):
    ids, _ = batch
    numbers = torch.arange(shape[0]).remainder(3).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    numbers = numbers.contiguous()
    numbers.view(-1)[:3] = torch.arange(3)
    with (
        pytest.raises(ProxpoError, match=r"embed saw other positions.*leading shape \(3, 7\)"),
        isopo().applied(tiny, sequences=numbers, advantages=A),
    ):
        tiny(ids, batch[1])


def test_heads_that_look_like_positions():
    """16 heads and 16 places: refuse, rather than mix the two up."""
    model = hf("qwen3")
    ids, seq = padded([4, 4, 4], VOCAB)
    with (
        pytest.raises(ProxpoError, match=r"q_norm cannot tell which axes hold the positions"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        model(ids)
    ids, seq = packed(ids, seq)
    with isopo().applied(model, sequences=seq, advantages=A):
        model(ids).logits.sum().backward()


def test_a_head_that_sees_some_positions_only():
    model = hf("qwen3")
    ids, seq = padded(LENGTHS, VOCAB)
    with (
        pytest.raises(ProxpoError, match=r"lm_head saw other positions.*no logits_to_keep"),
        isopo().applied(model, sequences=seq, advantages=A),
    ):
        model(ids, logits_to_keep=2)


def test_a_frozen_model(tiny, batch):
    tiny.requires_grad_(False)
    with (
        pytest.raises(ProxpoError, match="no parameter of the model requires a gradient"),
        isopo().applied(tiny, sequences=batch[1], advantages=A),
    ):
        pass


def test_groups_are_asked_for(tiny, batch):
    for groups, message in ((None, "got none"), (torch.zeros(2).long(), r"got shape \(2,\)")):
        with (
            pytest.raises(ProxpoError, match=f"group_by='prompt' needs `groups`.*{message}"),
            isopo_ntk(group_by="prompt").applied(
                tiny, sequences=batch[1], advantages=A, groups=groups
            ),
        ):
            pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: isopo(preset="fischer"), "unknown preset of isopo 'fischer'; did you mean"),
        (lambda: isopo(path="grams"), "unknown path of isopo 'grams'; did you mean 'gram'"),
        (lambda: isopo(norm="exakt"), "unknown norm of isopo 'exakt'"),
        (lambda: isopo(overlap=0), "overlap must be a count of positions or 'all', got 0"),
        (lambda: isopo(reg=-1.0), "reg must be a finite number >= 0, got -1.0"),
        (lambda: isopo(p=float("nan")), "p must be a finite number, got nan"),
        (lambda: isopo(keep_small=True), "needs reg > 0"),
        (lambda: isopo(keep_small=True, reg=1.0, overlap_reg=0.0), "needs overlap_reg > 0, got 0"),
        (lambda: isopo(norm_reg=-1.0, q=1.0), "norm_reg must be a finite number >= 0, got -1.0"),
        (lambda: isopo(norm_reg=0.5), "norm_reg=0.5 has no effect while q is 0"),
        (lambda: isopo(preset="euclidean", overlap_reg=1.0), "no effect while p is 0"),
        (lambda: isopo(sketch=0), "sketch must be at least 1"),
        (lambda: isopo_ntk(rho=0.0), "rho must be a finite number > 0, got 0.0"),
        (lambda: isopo_ntk(scale="papers"), "unknown scale of isopo_ntk 'papers'"),
    ],
)  # fmt: skip
def test_bad_options(make, message):
    with pytest.raises(ProxpoError, match=re.escape(message)):
        make()


def test_a_foreign_state_is_refused():
    with pytest.raises(ProxpoError, match=r"expected 'steps' and 'average.\*', got 'exp_avg'"):
        isopo().load_state_dict({"steps": 1, "exp_avg": torch.ones(1)})
    with pytest.raises(ProxpoError, match="got no 'steps'"):
        isopo().load_state_dict({})
