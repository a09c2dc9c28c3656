"""Mistakes around a block of a transform: refused in one line, and the model left as it was."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from blocks import LENGTHS, A, assert_same, backward
from models import VOCAB, hf, nll, packed, padded
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from proxpo.errors import ProxpoError
from proxpo.gradients import active_handle, isopo, isopo_ntk, proma


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


def test_a_model_is_not_copied_inside_the_block(tiny, batch):
    want = backward(tiny, *batch)
    with isopo(overlap="all").applied(tiny, sequences=batch[1], advantages=A):
        for module in (tiny, tiny.up):
            with pytest.raises(
                ProxpoError, match=r"copied or pickled inside the `with` block.*before the"
            ):
                copy.deepcopy(module)
            with pytest.raises(ProxpoError, match="copied or pickled inside"):
                pickle.dumps(module)
    assert_same(backward(copy.deepcopy(tiny), *batch), want)


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


def test_a_hook_on_a_parameter_is_given_the_transformed_gradient(tiny, batch):
    want = backward(tiny, *batch)
    hook = tiny.up.weight.register_hook(lambda grad: grad * 2)
    actual = backward(tiny, *batch)
    hook.remove()
    assert_same(actual, want | {"up.weight": 2 * want["up.weight"]})


def test_one_row_of_several_is_refused():
    model, (ids, seq) = hf("qwen3"), padded([6, 6], VOCAB)
    with isopo().applied(model, sequences=seq, advantages=A[:2]):
        with torch.no_grad():
            assert len(model(ids[:1]).logits) == 1
        with pytest.raises(ProxpoError, match=r"called with one row, and `sequences` has 2"):
            model(ids[:1])


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
        ({"sequences": torch.full((3, 7), -1)}, "asks for 0 advantages (padding is -1), got 3"),
        ({"sequences": torch.zeros(1, 7).long()}, "asks for 1 advantages (padding is -1), got 3"),
    ],
)  # fmt: skip
def test_bad_micro_batches(tiny, batch, change, message):
    options = {"sequences": batch[1], "advantages": A} | change
    with pytest.raises(ProxpoError, match=re.escape(message)), isopo().applied(tiny, **options):
        pass
    assert active_handle(tiny.head.weight) is None


@pytest.mark.parametrize("name", ["sequences", "advantages"])
@pytest.mark.usefixtures("unchecked")
def test_a_list_is_no_tensor(tiny, batch, name):
    options = {"sequences": batch[1], "advantages": A}
    message = f"`{name}` must be a tensor, got list"
    with (
        pytest.raises(ProxpoError, match=message),
        isopo().applied(tiny, **options | {name: options[name].tolist()}),
    ):
        pass


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: isopo(overlap="all", q=-0.5),
        lambda: isopo(overlap="all", reg=1.0),
        lambda: isopo(overlap="all", scale="mean"),
        isopo_ntk,
    ],
)
def test_a_row_of_padding_alone_changes_nothing(tiny, batch, row, make):
    """The last row too, and no average that the next block reads."""
    ids, seq = batch
    others = torch.arange(3) != row
    empty = torch.where(others[:, None], seq, -1)
    kept = torch.where(seq[others] >= 0, torch.arange(2)[:, None], -1)
    transform, fewer = make(), make()
    for _ in range(2):
        found = backward(tiny, ids, empty, transform)
        want = backward(tiny, ids[others], kept, fewer, advantages=A[others])
        assert_same(found, want, rtol=1e-9, atol=1e-11)
        transform.step()
        fewer.step()


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
        (lambda: isopo(sketch=0), "sketch must be a whole number >= 1, got 0"),
        (lambda: isopo(sketch=1.5), "sketch must be a whole number >= 1, got 1.5"),
        (lambda: isopo(sketch=8, q=-1.0), "sketch=8 has no effect with norm=exact"),
        (lambda: isopo(norm="sketch"), "norm=sketch has no effect while q and r are 0"),
        (lambda: isopo(p=0.0, reg=1.0), "reg=1.0 has no effect while p, q and r are 0"),
        (lambda: isopo(reg=1.0, overlap_reg=0.0), "reg=1.0 has no effect beside overlap_reg=0"),
        (lambda: isopo(p=0.0, q=-1.0, overlap=9), "overlap=9 has no effect while p and r are 0"),
        (lambda: isopo(history="own"), "history=own has no effect on lengths without reg"),
        (lambda: isopo(history="own", overlap_reg=0.0, reg=1.0), "history=own has no effect"),
        (lambda: isopo(preset="figure4", p=-2.0), "preset=figure4 sets p to 0, so p=-2 has no"),
        (lambda: isopo(preset="figure4", p=-1.0), "preset=figure4 sets p to 0, so p=-1 has no"),
        (lambda: isopo(preset="fisher", p=-1.0), "preset=fisher sets p to -1, so p=-1 has no"),
        (lambda: isopo(p="a"), "p must be a finite number, got 'a'"),
        (lambda: isopo(eps=None), "eps must be a finite number >= 0, got None"),
        (lambda: isopo(overlap=True), "overlap must be a count of positions or 'all', got True"),
        (lambda: isopo_ntk(rho=None), "rho must be a finite number > 0, got None"),
        (lambda: isopo_ntk(rho=0.0), "rho must be a finite number > 0, got 0.0"),
        (lambda: isopo_ntk(scale="papers"), "unknown scale of isopo_ntk 'papers'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_bad_options(make, message):
    with pytest.raises(ProxpoError, match=re.escape(message)):
        make()


def test_a_foreign_state_is_refused():
    with pytest.raises(ProxpoError, match=r"expected 'steps' and 'average.\*', got 'exp_avg'"):
        isopo().load_state_dict({"steps": 1, "exp_avg": torch.ones(1)})
    with pytest.raises(ProxpoError, match="got no 'steps'"):
        isopo().load_state_dict({})


def unfreeze(model: nn.Module) -> None:
    model.up.requires_grad_(True)


def replace(model: nn.Module) -> None:
    model.up = nn.Linear(8, 24).double()


@pytest.mark.parametrize("change", [unfreeze, replace])
def test_parameters_that_join_inside_the_block_are_refused(tiny, batch, change):
    tiny.up.requires_grad_(change is not unfreeze)
    forward = lambda: change(tiny) or tiny(*batch)  # noqa: E731
    with pytest.raises(
        ProxpoError, match=r"up\.weight began to be trained inside the `with` block"
    ):
        backward(tiny, *batch, forward=forward)


@pytest.mark.parametrize("make", [lambda: isopo(reg=0.5), isopo_ntk, proma])
def test_a_transform_stays_with_its_model(tiny, batch, make):
    other, transform = copy.deepcopy(tiny), make()
    backward(tiny, *batch, transform)
    with pytest.raises(ProxpoError, match="keeps lengths of another model's layers; make one"):
        backward(other, *batch, transform)
    backward(nn.ModuleDict({"module": tiny}), *batch, transform, forward=lambda: tiny(*batch))
    fresh = make()
    fresh.load_state_dict(transform.state_dict())
    backward(other, *batch, fresh)


def test_a_transform_whose_lengths_have_no_part_in_the_next_block_takes_another_model(tiny, batch):
    other, transform = copy.deepcopy(tiny), isopo(overlap="all")
    want = backward(other, *batch)
    backward(tiny, *batch, transform)
    transform.step()
    assert_same(backward(other, *batch, transform), want)


def test_updates_do_not_end_inside_a_block(tiny, batch):
    transform, state = isopo(), isopo().state_dict()
    with transform.applied(tiny, sequences=batch[1], advantages=A):
        with pytest.raises(ProxpoError, match=r"step\(\) inside an `applied` block"):
            transform.step()
        with pytest.raises(ProxpoError, match=r"load_state_dict\(\) inside an `applied` block"):
            transform.load_state_dict(state)
    transform.step()


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_that_selective_checkpointing_keeps_is_not_changed(batch, bias):
    """PyTorch itself overlooks the change where the layer has no bias."""
    torch.manual_seed(0)
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    contexts = partial(create_selective_checkpoint_contexts, list(kept))
    embed, up = nn.Embedding(13, 6), nn.Linear(6, 13, bias=bias)
    model = nn.ModuleList([embed, up]).double()

    def forward(change: str) -> Tensor:
        segment = lambda x: torch.sin(getattr(up(x), change)(2.0))  # noqa: E731
        return checkpoint(segment, embed(batch[0]), use_reentrant=False, context_fn=contexts)

    backward(model, *batch, forward=lambda: forward("mul"))
    with pytest.raises(RuntimeError, match="has been mutated"):
        backward(model, *batch, forward=lambda: forward("mul_"))


class Failing(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise MemoryError


@pytest.mark.parametrize("make", [lambda: isopo(reg=0.5), proma])
def test_a_backward_that_failed_spoils_its_block(tiny, batch, make):
    """The layers it has passed have measured lengths, and held back parts of gradients."""
    clean, transform = make(), make()
    want = backward(tiny, *batch, clean)
    hook = tiny.up.register_forward_hook(lambda _, __, out: Failing.apply(out))

    def repeated() -> Tensor:
        with pytest.raises(MemoryError):
            nll(tiny(*batch), *batch).sum().backward()
        hook.remove()
        tiny.zero_grad()
        return tiny(*batch)

    with pytest.raises(ProxpoError, match=r"a backward pass of this block failed.*another block"):
        backward(tiny, *batch, transform, forward=repeated)
    assert_same(backward(tiny, *batch, transform), want)
    clean.step()
    transform.step()
    assert_close(transform.state_dict(), clean.state_dict(), rtol=0, atol=0)
