"""The fused head under ISOPO and ISOPO-NTK: its gradients are those of the formulas."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from proxpo import gradients
from proxpo.errors import ProxpoError
from proxpo.gradients._engine import head_passes
from proxpo.logp import token_logp

VOCAB, DIM, ROWS, LENGTH, TAU = 23, 6, 4, 7, 0.7
EXACT = {"rtol": 1e-9, "atol": 1e-13}

TRANSFORMS = {
    "fisher": lambda: gradients.isopo(p=-1.0, overlap=6),
    "fisher-all": lambda: gradients.isopo(p=-1.0, overlap="all"),
    "euclidean": lambda: gradients.isopo(preset="euclidean"),
    "nearest-npg": lambda: gradients.isopo(preset="nearest-npg", overlap=6),
    "figure4": lambda: gradients.isopo(preset="figure4", overlap=6),
    "regularised": lambda: gradients.isopo(p=-1.0, q=0.5, reg=0.3, overlap=6),
    "strengths": lambda: gradients.isopo(
        p=-1.0, q=0.5, r=-0.5, reg=0.3, overlap_reg=0.0, norm_reg=2.0, overlap=6
    ),
    "keep-small": lambda: gradients.isopo(p=-0.5, reg=0.3, keep_small=True, scale="mean"),
    "own-history": lambda: gradients.isopo(p=-1.0, reg=0.3, history="own", overlap=6),
    "reinforce": lambda: gradients.isopo(preset="reinforce"),
    "ntk": lambda: gradients.isopo_ntk(rho=0.5),
    "ntk-paper": lambda: gradients.isopo_ntk(rho=2.0, scale="paper", path="materialise"),
    "ntk-prompt": lambda: gradients.isopo_ntk(group_by="prompt", path="gram"),
}
# Less than a sequence, one sequence at a time, several, and everything at once.
CHUNKS = [2 * VOCAB, 4 * VOCAB, 8 * VOCAB, 100 * VOCAB]


class Policy(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)

    def hidden(self, ids):
        h = torch.tanh(self.mix(self.embed(ids)))
        return h + h.cumsum(1)

    def naive(self, ids, targets):
        logp = (self.head(self.hidden(ids)) / TAU).log_softmax(-1)
        return logp.gather(-1, targets[..., None])[..., 0]

    def fused(self, ids, targets, **options):
        weight, bias = self.head.weight, self.head.bias
        return token_logp(self.hidden(ids), weight, targets, bias=bias, temperature=TAU, **options)


class Problem:
    """Left and right padding, prompts without loss, and one sequence without any loss at all."""

    def __init__(self, *, bias: bool = True) -> None:
        self.model = Policy(bias=bias).double()
        self.ids, self.targets = torch.randint(0, VOCAB, (2, ROWS, LENGTH))
        self.seq = torch.arange(ROWS)[:, None].repeat(1, LENGTH)
        self.seq[0, -2:], self.seq[2, :3] = -1, -1
        self.mask = (self.seq >= 0) & (torch.rand(ROWS, LENGTH) < 0.7)
        self.mask[3] = False
        self.advantages = torch.randn(ROWS, dtype=torch.float64)
        self.groups = torch.tensor([0, 1, 0, 1])

    def grads(self, make, logp, *, steps=1):
        """Gradients added up over some steps; the later ones have the averages of the earlier."""
        transform = make()
        self.model.zero_grad()
        for _ in range(steps):
            with transform.applied(
                self.model, sequences=self.seq, advantages=self.advantages, groups=self.groups
            ):
                (-(logp() * self.mask).sum()).backward()
            transform.step()
        return {name: p.grad for name, p in self.model.named_parameters()}


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_fused_head_equals_the_module_it_replaces(name, chunk):
    problem = Problem()
    model, ids, targets = problem.model, problem.ids, problem.targets
    theirs = problem.grads(TRANSFORMS[name], lambda: model.naive(ids, targets), steps=2)
    for mask in (None, problem.mask):
        ours = problem.grads(
            TRANSFORMS[name], lambda m=mask: model.fused(ids, targets, mask=m, chunk=chunk), steps=2
        )
        assert_close(ours, theirs, **EXACT)


def position_gradients(problem):
    """G_t = g_t h_tᵀ of the objective -Σ log π, one row per position."""
    hidden = problem.model.hidden(problem.ids).detach()
    logits = problem.model.head(hidden).detach().requires_grad_()
    logp = (logits / TAU).log_softmax(-1).gather(-1, problem.targets[..., None])[..., 0]
    (g,) = torch.autograd.grad(-(logp * problem.mask).sum(), logits)
    return torch.einsum("blo,bld->blod", g, hidden).flatten(0, 1).flatten(1)


@pytest.mark.checks("isopo", "fused head: U = Σ A_i F_i^p N_i^q R_i^r V_i with every V_i built")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("p", "q", "r"), [(-1, 0, 0), (0, -1, 0), (0, 0, -2), (0.5, -1, -2)])
def test_isopo_by_brute_force(p, q, r, chunk):
    problem = Problem(bias=False)
    G, seq = position_gradients(problem), problem.seq.flatten()
    V = torch.stack([G[seq == i].sum(0) for i in range(ROWS)])
    valid = G[seq >= 0]
    F2 = (V @ valid.T).square().sum(1) / valid.square().sum()
    N2 = V.square().sum(1)
    eps = 1e-8
    R2 = torch.where(N2 > 0, F2 / N2, 0.0)
    scale = (F2 + eps) ** (p / 2) * (N2 + eps) ** (q / 2) * (R2 + eps) ** (r / 2)
    expected = ((problem.advantages * scale) @ V).view(VOCAB, DIM)
    ours = problem.grads(
        lambda: gradients.isopo(p=float(p), q=float(q), r=float(r), overlap="all"),
        lambda: problem.model.fused(problem.ids, problem.targets, chunk=chunk),
    )
    assert_close(ours["head.weight"], expected, **EXACT)


@pytest.mark.checks("isopo-ntk", "fused head: equals the parameter-space solve (JᵀJ + cI)⁻¹ Jᵀ A")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("rho", [0.01, 1.0, 30.0])
def test_ntk_by_brute_force(rho, chunk):
    problem = Problem(bias=False)
    G, seq = position_gradients(problem), problem.seq.flatten()
    J = torch.stack([G[seq == i].sum(0) for i in range(ROWS)])
    squares = J.square().sum(1)
    c = rho * squares[squares > 0].mean()  # a row without trained tokens does not count
    solved = torch.linalg.solve(
        J.T @ J + c * torch.eye(J.shape[1]).double(), J.T @ problem.advantages
    )
    ours = problem.grads(
        lambda: gradients.isopo_ntk(rho=rho, scale="paper"),
        lambda: problem.model.fused(problem.ids, problem.targets, chunk=chunk),
    )
    assert_close(ours["head.weight"], solved.view(VOCAB, DIM), rtol=1e-8, atol=1e-11)


@pytest.mark.checks("isopo", "fused head: the gradient of the hidden states is the unscaled one")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_hidden_states_get_the_plain_gradient(name, chunk):
    problem = Problem()
    hidden = problem.model.hidden(problem.ids).detach().requires_grad_()
    head = problem.model.head

    def pull():
        logp = token_logp(hidden, head.weight, problem.targets, bias=head.bias, chunk=chunk)
        (grad,) = torch.autograd.grad((logp * problem.mask).sum(), hidden)
        return grad

    plain = pull()
    with TRANSFORMS[name]().applied(
        problem.model,
        sequences=problem.seq,
        advantages=problem.advantages,
        groups=problem.groups,
    ):
        assert_close(pull(), plain, rtol=1e-11, atol=1e-13)


def test_positions_in_any_order():
    """Packed positions that jump between sequences give the gradient of the sorted ones."""
    problem = Problem()
    order = torch.randperm(ROWS * LENGTH)
    hidden = problem.model.hidden(problem.ids).detach()
    head = problem.model.head

    def packed(order):
        h, y, m = (x.flatten(0, 1)[order][None] for x in (hidden, problem.targets, problem.mask))
        transform = gradients.isopo(preset="figure4", overlap="all")
        problem.model.zero_grad()
        with transform.applied(
            problem.model,
            sequences=problem.seq.flatten()[order][None],
            advantages=problem.advantages,
        ):
            logp = token_logp(h, head.weight, y, bias=head.bias, mask=m, chunk=8 * VOCAB)
            (-logp.sum()).backward()
        return head.weight.grad, head.bias.grad

    assert_close(packed(order), packed(torch.arange(ROWS * LENGTH)), **EXACT)


def test_all_routes_are_taken(monkeypatch):
    """The chunk sizes above do exercise the single pass, the two passes and the fallback."""
    taken = []
    for name in ("by_sequences", "by_vocabulary", "all_logits"):
        route = getattr(head_passes, name)

        def spy(*args, _route=route, _name=name, **kwargs):
            taken.append(_name)
            return _route(*args, **kwargs)

        monkeypatch.setattr(head_passes, name, spy)
    problem = Problem()
    logp = {
        c: (lambda c=c: problem.model.fused(problem.ids, problem.targets, chunk=c)) for c in CHUNKS
    }
    for chunk, route in zip(CHUNKS, ["by_vocabulary", *["by_sequences"] * 3]):
        taken.clear()
        problem.grads(TRANSFORMS["fisher"], logp[chunk])
        assert set(taken) == {route}
    taken.clear()
    problem.grads(TRANSFORMS["ntk"], logp[CHUNKS[-1]])
    assert taken == ["by_vocabulary"]


def test_unknown_rules_get_what_a_layer_would_give_them(monkeypatch):
    problem = Problem()
    model, ids, targets = problem.model, problem.ids, problem.targets
    theirs = problem.grads(TRANSFORMS["figure4"], lambda: model.naive(ids, targets))
    monkeypatch.setattr(head_passes, "LengthRule", type("NotThisOne", (), {}))
    monkeypatch.setattr(head_passes, "KernelRule", type("NorThisOne", (), {}))
    ours = problem.grads(
        TRANSFORMS["figure4"], lambda: model.fused(ids, targets, mask=problem.mask)
    )
    assert_close(ours, theirs, **EXACT)


def test_sketched_norms_come_near_the_exact_ones():
    problem = Problem()
    exact = gradients.isopo(preset="euclidean")
    sketch = gradients.isopo(preset="euclidean", norm="sketch", sketch=4096)
    for chunk in (4, 100 * VOCAB):
        logp = lambda c=chunk: problem.model.fused(problem.ids, problem.targets, chunk=c)  # noqa: E731
        ours = problem.grads(lambda: sketch, logp)["head.weight"]
        theirs = problem.grads(lambda: exact, logp)["head.weight"]
        assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()


def test_checkpointed_head():
    problem = Problem()
    model, ids, targets = problem.model, problem.ids, problem.targets

    def fused(h):
        weight, bias = model.head.weight, model.head.bias
        return token_logp(h, weight, targets, bias=bias, temperature=TAU, chunk=8 * VOCAB)

    plain = problem.grads(TRANSFORMS["figure4"], lambda: fused(model.hidden(ids)))
    for reentrant in (False, True):
        ours = problem.grads(
            TRANSFORMS["figure4"],
            lambda r=reentrant: checkpoint(fused, model.hidden(ids), use_reentrant=r),
        )
        assert_close(ours, plain, **EXACT)


@pytest.mark.parametrize("name", ["fisher", "ntk"])
def test_embedding_used_as_head_is_a_second_group(name):
    """A tied weight gets the sum of two transformed gradients, head and embedding apart."""
    problem = Problem(bias=False)
    model, ids, targets = problem.model, problem.ids, problem.targets
    model.head.weight = model.embed.weight
    make = {"fisher": lambda: gradients.isopo(overlap="all"), "ntk": TRANSFORMS["ntk"]}[name]
    theirs = problem.grads(make, lambda: model.naive(ids, targets))
    ours = problem.grads(make, lambda: model.fused(ids, targets))
    assert_close(ours, theirs, **EXACT)
    del model.head
    logp = lambda: token_logp(  # noqa: E731
        model.hidden(ids), model.embed.weight, targets, temperature=TAU
    )
    assert_close(problem.grads(make, logp), theirs, **EXACT)


def test_nothing_scored_is_a_zero_gradient():
    problem = Problem()
    problem.mask = torch.zeros_like(problem.mask)
    ours = problem.grads(
        TRANSFORMS["figure4"],
        lambda: problem.model.fused(problem.ids, problem.targets, mask=problem.mask),
    )
    assert all(not grad.any() for grad in ours.values() if grad is not None)


def test_frozen_head_passes_the_gradient_on():
    problem = Problem()
    model, ids, targets = problem.model, problem.ids, problem.targets
    model.head.requires_grad_(False)
    theirs = problem.grads(TRANSFORMS["fisher"], lambda: model.naive(ids, targets))
    ours = problem.grads(TRANSFORMS["fisher"], lambda: model.fused(ids, targets))
    assert ours["head.weight"] is None
    del ours["head.weight"], ours["head.bias"], theirs["head.weight"], theirs["head.bias"]
    assert_close(ours, theirs, **EXACT)


def test_two_calls_in_one_block_are_refused():
    problem = Problem()
    model, ids, targets = problem.model, problem.ids, problem.targets
    with pytest.raises(ProxpoError, match=r"head is used more than once in this `applied` block"):
        problem.grads(
            TRANSFORMS["fisher"], lambda: model.fused(ids, targets) + model.fused(ids, targets)
        )
    with pytest.raises(ProxpoError, match="used more than once"):
        problem.grads(
            TRANSFORMS["fisher"], lambda: model.fused(ids, targets) + model.naive(ids, targets)
        )


def test_positions_must_be_those_of_the_block():
    problem = Problem()
    model = problem.model

    def short():
        hidden = model.hidden(problem.ids)[:, 1:]
        return token_logp(hidden, model.head.weight, problem.targets[:, 1:])

    with pytest.raises(
        ProxpoError, match=r"\[4, 6\] positions .* shape \[4, 7\]; pass all positions"
    ):
        problem.grads(TRANSFORMS["fisher"], short)


def test_no_gradient_wanted_no_treatment():
    problem = Problem()
    with (
        TRANSFORMS["fisher"]().applied(
            problem.model, sequences=problem.seq, advantages=problem.advantages
        ),
        torch.no_grad(),
    ):
        short = problem.model.fused(problem.ids[:, 1:], problem.targets[:, 1:])
    assert short.shape == (ROWS, LENGTH - 1)
