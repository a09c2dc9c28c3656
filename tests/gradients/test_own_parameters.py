"""Parameters that a module uses itself: every way to read one gives its whole gradient."""

import warnings
from collections.abc import Callable

import pytest
import slow
import torch
import torch.nn.functional as F
from models import nll, padded
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo, isopo_ntk

A = torch.tensor([1.0, -0.6, 0.3]).double()
WIDTH = 6
EXACT = {"rtol": 1e-10, "atol": 1e-12}
Use = Callable[[nn.Module, Tensor], Tensor]


class Owner(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.b = nn.Parameter(torch.randn(WIDTH))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Around(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.owner = Owner(use)
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.owner(self.embed(ids))))


def made(use: Use) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Around(use).double(), *padded([5, 7, 4], 13)


def gradients(model: nn.Module, ids: Tensor, seq: Tensor, transform) -> dict[str, Tensor | None]:
    model.zero_grad()
    with transform.applied(model, sequences=seq, advantages=A):
        nll(model(ids), ids, seq).sum().backward()
    actual = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return actual


def rows(use: Callable[[Owner, Tensor], Tensor]) -> Use:
    """The same on activations of shape (positions, width)."""
    return lambda m, x: use(m, x.reshape(-1, WIDTH)).view_as(x)


ONCE: dict[str, Use] = {
    "linear": lambda m, x: F.linear(x, m.w, m.b),
    "linear of .T": lambda m, x: F.linear(x, m.w.T) + m.b,
    ".T": lambda m, x: x @ m.w.T + m.b,
    ".mT": lambda m, x: x @ m.w.mT + m.b,
    ".H": lambda m, x: x @ m.w.H + m.b,
    ".mH": lambda m, x: x @ m.w.mH + m.b,
    ".t()": lambda m, x: torch.matmul(x, m.w.t()) + m.b,
    "transpose": lambda m, x: x.matmul(m.w.transpose(-1, -2)) * m.b,
    "permute": lambda m, x: x @ m.w.permute(1, 0) - m.b,
    "twice transposed": lambda m, x: x @ m.w.T.T / m.b,
    "matrix first": lambda m, x: (m.w @ x.mT).mT + m.b,
    "mm": rows(lambda m, x: torch.mm(x, m.w) + m.b[None]),
    "addmm": rows(lambda m, x: torch.addmm(m.b, x, m.w)),
    "view": lambda m, x: x @ m.w.view(-1).view(WIDTH, WIDTH) + m.b.view(1, 1, -1),
    "to": lambda m, x: x @ m.w.to(x.dtype).contiguous() + m.b.double(),
    "half of the rows": lambda m, x: F.pad(x @ m.w[:3].T, (0, 3)) + m.b,
    "a block of .T": lambda m, x: F.pad(x[..., 1:4] @ m.w.T[1:4, 2:], (0, 2)) + m.b,
    "chunk": lambda m, x: x[..., 3:] @ m.w.chunk(2)[1] + m.b,
    "in place": lambda m, x: (x @ m.w).add_(m.b),
    "as sum on the left": lambda m, x: m.b + x @ m.w,
}  # fmt: skip


@pytest.mark.parametrize("use", ONCE.values(), ids=ONCE.keys())
def test_a_view_or_cast_of_a_parameter_is_followed_to_its_use(use):
    model, ids, seq = made(use)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = gradients(model, ids, seq, isopo(overlap="all", q=-0.5))
    grads = slow.position_gradients(model, lambda: nll(model(ids), ids, seq).sum(), seq.numel())
    overlap_set = (seq.flatten() >= 0).nonzero()[:, 0]
    for name, value in grads.items():
        want = slow.isopo(value, seq.flatten(), A, overlap_set, q=-0.5)
        assert_close(actual[name], want, **EXACT, msg=lambda m, n=name: n + m)


class Bare(nn.Module):
    """A module without a forward."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = w


CONTAINERS = {
    "ParameterDict": (lambda w: nn.ParameterDict({"w": w}), lambda c: c["w"]),
    "ParameterList": (lambda w: nn.ParameterList([w]), lambda c: c[0]),
    "no forward": (Bare, lambda c: c.w),
    "nested": (lambda w: nn.ModuleDict({"a": nn.ModuleList([Bare(w)])}), lambda c: c["a"][0].w),
}  # fmt: skip


@pytest.mark.parametrize(("make", "read"), CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("shared", [False, True])
def test_a_parameter_in_a_container_belongs_to_the_module_that_reads_it(make, read, shared):
    model, ids, seq = made(lambda m, x: x @ m.w)
    if shared:
        model.owner = nn.Sequential(model.owner, Owner(model.owner.use))
        model.owner[1].w = model.owner[0].w
    want = gradients(model, ids, seq, isopo(overlap="all"))
    owners = [*model.owner] if shared else [model.owner]
    name, container = ("owner.0.w" if shared else "owner.w"), make(owners[0].w)
    for owner in owners:
        del owner.w
        owner.container, owner.use = container, lambda m, x: x @ read(m.container)
    (inside,) = (n for n, p in model.named_parameters() if p is read(container))
    assert_close(gradients(model, ids, seq, isopo(overlap="all"))[inside], want[name], **EXACT)


SEVERAL: dict[str, Use] = {
    "linear and .T": lambda m, x: F.linear(x, m.w) + x @ m.w.T + m.b,
    "all blocks": lambda m, x: torch.cat([x @ m.w[:, :2], x @ m.w[:, 2:]], -1) * m.b + m.b,
}


@pytest.mark.parametrize("use", SEVERAL.values(), ids=SEVERAL.keys())
def test_several_uses_of_a_parameter_are_one_gradient(use):
    model, ids, seq = made(use)
    actual = gradients(model, ids, seq, isopo_ntk())
    grads = slow.position_gradients(model, lambda: nll(model(ids), ids, seq).sum(), seq.numel())
    for name, value in grads.items():
        assert_close(actual[name], slow.ntk(value, seq.flatten(), A), **EXACT)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


def seen_to_train(m: nn.Module, x: Tensor) -> Tensor:
    return x @ m.w.T.exp() if m.w.requires_grad and isinstance(m.w, nn.Parameter) else x


def caught(m: nn.Module, x: Tensor) -> Tensor:
    try:
        return torch.einsum("bld,de->ble", x, m.w)
    except Exception:
        return x @ m.w.detach()


ANY: dict[str, Use] = {
    "einsum": lambda m, x: torch.einsum("bld,de->ble", x, m.w) + m.b,
    "exp of .T": lambda m, x: x @ m.w.T.exp() + m.b,
    "columns": lambda m, x: x @ m.w[:, [1, 0, 3, 2, 5, 4]] + m.b,
    "every other row": lambda m, x: x[..., ::2] @ m.w[::2] + m.b,
    "bmm": lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)) + m.b,
    "a vector alone": lambda m, x: x @ m.w * m.b.sigmoid(),
    "requires_grad": seen_to_train,
    "inside try": caught,
    "of the parameter alone": lambda m, x: x @ (m.w + m.w.T) + m.b,
    "parameters()": lambda m, x: x @ next(m.parameters()).cos() + m.b,
    "after dropout": lambda m, x: F.dropout(x, 0.5) @ m.w.exp() + m.b,
}  # fmt: skip


@pytest.mark.parametrize("use", ANY.values(), ids=ANY.keys())
@pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")
def test_any_other_use_gets_the_whole_advantage_weighted_gradient(use):
    model, ids, seq = made(use)
    torch.manual_seed(1)
    actual = gradients(model, ids, seq, isopo(overlap="all"))
    torch.manual_seed(1)
    (A @ nll(model(ids), ids, seq).sum(1)).backward()
    for name in ("owner.w", "owner.b"):
        want = model.get_parameter(name).grad
        if want is None:
            assert actual[name] is None
        else:
            assert_close(actual[name], want, **EXACT)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")
def test_a_checkpointed_module_that_is_first_tried_in_vain(reentrant):
    model, ids, seq = made(lambda m, x: torch.tanh(x @ m.w) @ m.w.exp() + m.b)
    want = gradients(model, ids, seq, isopo(overlap="all"))
    model.owner = nn.ModuleDict({"inner": model.owner})
    model.owner.forward = lambda x: checkpoint(model.owner["inner"], x, use_reentrant=reentrant)
    transform = isopo(overlap="all")
    for _ in range(2):
        actual = gradients(model, ids, seq, transform)
        assert_close([*actual.values()], [*want.values()], **EXACT)


def test_a_use_that_torch_does_not_show_is_refused():
    model, ids, seq = made(lambda m, x: Squared.apply(x, m.w) + m.b)
    for _ in range(2):
        with pytest.raises(ProxpoError, match=r"owner\.w is used by a custom autograd function"):
            gradients(model, ids, seq, isopo())


def test_an_embedding_by_another_name():
    class Wte(nn.Module):
        def __init__(self, use) -> None:
            super().__init__()
            self.wte = nn.Parameter(torch.randn(13, WIDTH))
            self.use = use

        def forward(self, ids: Tensor) -> Tensor:
            return self.use(ids, self.wte)

    actual = []
    ids, seq = padded([5, 7, 4], 13)
    for use in (F.embedding, lambda ids, w: w[ids], None):
        torch.manual_seed(0)
        wte = Wte(use).double()
        model = nn.Sequential(wte, nn.Linear(WIDTH, 13)).double()
        if use is None:
            model[0] = nn.Embedding(13, WIDTH, _weight=wte.wte.detach())
        actual.append([*gradients(model, ids, seq, isopo(overlap="all")).values()])
    assert_close(actual[0], actual[2], **EXACT)
    assert_close(actual[1], actual[2], **EXACT)
