import pytest
import torch
from models import hf
from torch import nn
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo
from proxpo.gradients.proma import proma

EXACT = {"rtol": 1e-9, "atol": 1e-10}
VOCAB, LENGTH, PER_BATCH, BATCHES = 7, 6, 3, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.norm(torch.tanh(self.up(x + x.cumsum(1)))))


@pytest.fixture
def model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token ids, lengths and advantages of each micro-batch."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(VOCAB, (PER_BATCH, LENGTH), generator=draw),
            torch.randint(2, LENGTH + 1, (PER_BATCH,), generator=draw),
            torch.randn(PER_BATCH, generator=draw, dtype=torch.float64),
        )
        for _ in range(BATCHES)
    ]


def nll(model: nn.Module, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logp * (torch.arange(LENGTH - 1) < lengths[:, None] - 1)).sum(1)


def numbers(lengths: torch.Tensor) -> torch.Tensor:
    valid = torch.arange(LENGTH - 1) < lengths[:, None]
    return torch.where(valid, torch.arange(len(lengths))[:, None], -1)


def run(transform, model, batches) -> dict[str, torch.Tensor]:
    """The running gradient of one step, by the transform."""
    model.zero_grad()
    for ids, lengths, advantages in batches:
        with transform.applied(model, sequences=numbers(lengths), advantages=advantages):
            nll(model, ids, lengths).sum().backward()
    transform.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def sequence_gradients(model, ids, lengths) -> list[dict[str, torch.Tensor]]:
    """V_i of every sequence, one backward each."""
    names, parameters = zip(*model.named_parameters())
    losses = nll(model, ids, lengths)
    return [
        dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True)))
        for loss in losses
    ]


def project_reference(r, vs, solver):
    """P with every vector written out."""
    units = torch.stack([v / v.norm() if v.norm() > 0 else v for v in vs])
    if solver == "exact":
        _, s, basis = torch.linalg.svd(units, full_matrices=False)
        basis = basis[s > 1e-10]
        return basis.T @ (basis @ r)
    if solver == "solve":
        gram = units @ units.T + 0.01 * torch.eye(len(units), dtype=r.dtype)
        return units.T @ torch.linalg.solve(gram, units @ r)
    x = r.clone()
    for _ in range(2):
        for v in units:
            x = x - (x @ v) * v
    return r - x


def accumulate_reference(model, batches, *, solver, sigma=1.0, rho=None) -> dict:
    """R, layer by layer, as the rule is written."""
    running: dict[str, torch.Tensor] = {}
    for ids, lengths, advantages in batches:
        actual = sequence_gradients(model, ids, lengths)
        for name, p in model.named_parameters():
            vs = [v[name].flatten() for v in actual]
            g = sum(a * v for a, v in zip(advantages, vs))
            if name in running:
                removed = project_reference(running[name].flatten(), vs, solver)
                if rho is not None and removed.norm() > rho * g.norm():
                    removed = removed * rho * g.norm() / removed.norm()
                g = running[name].flatten() - sigma * removed + g
            running[name] = g.view_as(p)
    return running


@pytest.mark.parametrize("path", ["gram", "materialise"])
@pytest.mark.parametrize("solver", ["exact", "solve", "sweep"])
@pytest.mark.parametrize(("sigma", "rho"), [(1.0, None), (0.6, 0.5), (1.0, 0.05)])
def test_equals_the_rule_written_out(model, batches, path, solver, sigma, rho):
    transform = proma(solver=solver, sigma=sigma, rho=rho, path=path)
    expected = accumulate_reference(model, batches, solver=solver, sigma=sigma, rho=rho)
    actual = run(transform, model, batches)
    assert len(actual) == 6
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.checks("proma", "nothing removed is plain accumulation")
def test_sigma_zero_is_reinforce(model, batches):
    expected = accumulate_reference(model, batches, solver="exact", sigma=0.0)
    for name, gradient in run(proma(sigma=0.0), model, batches).items():
        assert_close(gradient, expected[name], **EXACT)


@pytest.mark.checks("proma", "what earlier micro-batches asked for leaves the new sequences alone")
def test_exact_removal_is_orthogonal_to_the_new_sequences(model, batches):
    after = run(proma(solver="exact", rho=None), model, batches)
    ids, lengths, advantages = batches[-1]
    actual = sequence_gradients(model, ids, lengths)
    for name in after:
        share = sum(a * v[name] for a, v in zip(advantages, actual))
        for v in actual:
            inner = ((after[name] - share) * v[name]).sum()
            assert abs(float(inner)) < 1e-10 * (1 + float(v[name].norm() * after[name].norm()))
    plain = run(proma(sigma=0.0), model, batches)
    inner = ((plain["up.weight"] - sum(a * v["up.weight"] for a, v in zip(advantages, actual)))
             * actual[0]["up.weight"]).sum()  # fmt: skip
    assert abs(float(inner)) > 1e-3


@pytest.mark.parametrize("rho", [None, 0.3])
@pytest.mark.checks("proma", "the removed part is no longer than R, nor than rho |G_b|")
def test_removed_part_is_bounded(model, batches, rho):
    transform = proma(solver="exact", rho=rho)
    before = run(proma(solver="exact", rho=rho), model, batches[:1])
    after = run(transform, model, batches[:2])
    ids, lengths, advantages = batches[1]
    actual = sequence_gradients(model, ids, lengths)
    for name in after:
        share = sum(a * v[name] for a, v in zip(advantages, actual))
        removed = before[name] + share - after[name]
        limit = before[name].norm() if rho is None else rho * share.norm()
        assert float(removed.norm()) <= float(limit) * (1 + 1e-9)


@pytest.mark.parametrize("variant", ["accumulation", "both"])
@pytest.mark.checks("proma", "one micro-batch is its own gradient")
def test_one_micro_batch_is_reinforce(model, batches, variant):
    expected = accumulate_reference(model, batches[:1], solver="exact")
    actual = run(proma(variant=variant, dim=0), model, batches[:1])
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], **EXACT)


@pytest.mark.checks("proma", "for orthogonal sequences the sweep is exact")
def test_sweep_is_exact_for_orthogonal_sequences():
    """Each sequence is one token of its own: embedding gradients do not overlap."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)).double()
    first = (torch.tensor([[0], [1], [2]]), torch.tensor([0.5, -1.0, 2.0]).double())
    second = (torch.tensor([[1], [2], [3]]), torch.tensor([1.0, 0.3, -0.7]).double())

    def embedding_gradient(solver):
        transform = proma(solver=solver, rho=None)
        model.zero_grad()
        for ids, advantages in (first, second):
            index = torch.arange(3)[:, None]
            with transform.applied(model, sequences=index, advantages=advantages):
                (-model(ids).log_softmax(-1)[..., 5].sum()).backward()
        return model[0].weight.grad.clone()

    exact = embedding_gradient("exact")
    assert_close(embedding_gradient("sweep"), exact, **EXACT)
    assert not torch.allclose(embedding_gradient("solve"), exact, rtol=1e-4)


@pytest.mark.parametrize("solver", ["exact", "solve", "sweep"])
@pytest.mark.checks("proma", "the length of a sequence's gradient does not change the projector")
def test_projector_ignores_lengths(model, batches, solver):
    """Two copies of a sequence's loss: V doubles, the removed part stays."""

    def removed(factor):
        transform = proma(solver=solver, rho=None)
        model.zero_grad()
        for b, (ids, lengths, advantages) in enumerate(batches[:2]):
            scale = torch.tensor([factor, 1.0, 1.0 / factor]).double() if b else torch.ones(3)
            adv = torch.zeros_like(advantages) if b else advantages
            with transform.applied(model, sequences=numbers(lengths), advantages=adv):
                (scale * nll(model, ids, lengths)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    one, eight = removed(1.0), removed(8.0)
    for name in one:
        assert_close(one[name], eight[name], **EXACT)


def test_zero_advantages_and_the_bound(model, batches):
    """All A = 0: with a bound R stays; without one the sequences are still projected out."""
    ids, lengths, advantages = batches[1]
    silent = [batches[0], (ids, lengths, torch.zeros_like(advantages))]
    first = run(proma(), model, batches[:1])
    bounded = run(proma(rho=0.5), model, silent)
    free = run(proma(rho=None), model, silent)
    assert all(torch.equal(bounded[name], first[name]) for name in first)
    assert all(free[name].norm() < first[name].norm() for name in first)


def test_a_sequence_without_gradient_is_harmless(model, batches):
    """Length 1: a prompt with no response."""
    ids, lengths, advantages = batches[1]
    lengths = lengths.clone()
    lengths[0] = 1
    pair = [batches[0], (ids, lengths, advantages)]
    for solver in ("exact", "solve", "sweep"):
        expected = accumulate_reference(model, pair, solver=solver)
        actual = run(proma(solver=solver, rho=None), model, pair)
        for name in actual:
            assert_close(actual[name], expected[name], **EXACT)


def test_step_opens_a_new_accumulation(model, batches):
    transform = proma()
    one = run(transform, model, batches)
    assert not transform.rule.running
    again = run(transform, model, batches)
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_order_matters(model, batches):
    forward, backward = (run(proma(rho=None), model, b) for b in (batches, batches[::-1]))
    assert not torch.allclose(forward["up.weight"], backward["up.weight"])


def test_tied_weights_are_two_layers(batches):
    """Embedding and head share a parameter; each keeps a running gradient of its own."""
    torch.manual_seed(0)
    tied = nn.ModuleDict({"embed": nn.Embedding(VOCAB, 6), "head": nn.Linear(6, VOCAB, bias=False)})
    tied = tied.double()
    apart = {name: nn.Parameter(tied["embed"].weight.detach().clone()) for name in tied}
    tied["head"].weight = tied["embed"].weight

    class Chain(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, ids):
            return self.parts["head"](torch.tanh(self.parts["embed"](ids).cumsum(1)))

    shared = run(proma(), Chain(tied), batches)
    tied["embed"].weight, tied["head"].weight = apart["embed"], apart["head"]
    separate = run(proma(), Chain(tied), batches)
    assert_close(sum(separate.values()), shared["parts.embed.weight"], **EXACT)


def intra_reference(share, a, g, k):
    """G - Q_g Q_gᵀ G Q_a Q_aᵀ with singular vectors."""
    if k == 0:
        return share
    q_a = torch.linalg.svd(a, full_matrices=False).Vh[:k].T
    q_g = torch.linalg.svd(g, full_matrices=False).Vh[:k].T
    return share - q_g @ q_g.T @ share @ q_a @ q_a.T


@pytest.mark.parametrize("dim", [0, 2, 4, 100])
def test_intra_equals_the_rule_written_out(model, batches, dim):
    ids, lengths, advantages = batches[0]
    kept = {}

    def keep(module, args, out):
        kept["a"] = args[0].detach()
        out.register_hook(lambda g: kept.update(g=g))

    handle = model.up.register_forward_hook(keep)
    share = sum(
        a * v["up.weight"] for a, v in zip(advantages, sequence_gradients(model, ids, lengths))
    )
    nll(model, ids, lengths).sum().backward()
    handle.remove()
    valid = (numbers(lengths) >= 0)[..., None]
    a, g = ((x * valid).flatten(0, 1) for x in (kept["a"], kept["g"]))
    expected = intra_reference(share, a, g, min(dim, 6))
    actual = run(proma(variant="intra", dim=dim, bases="exact"), model, batches[:1])["up.weight"]
    assert_close(actual, expected, **EXACT)


@pytest.mark.checks(
    "proma", "intra removes nothing at rank 0, everything at full rank, and more with rank"
)
def test_intra_removes_more_with_rank(model, batches):
    plain = run(proma(sigma=0.0), model, batches[:1])
    left = {
        dim: run(proma(variant="intra", dim=dim, bases="exact"), model, batches[:1])
        for dim in (0, 1, 3, 5, 30)
    }
    for name in ("up.weight", "head.weight"):
        assert torch.equal(left[0][name], plain[name])
        removed = [float((plain[name] - left[dim][name]).norm()) for dim in (0, 1, 3, 5, 30)]
        assert removed == sorted(removed)
        assert left[30][name].abs().max() < 1e-12
    for name in ("embed.weight", "up.bias", "norm.weight", "norm.bias"):
        assert torch.equal(left[30][name], plain[name])


def test_random_bases_find_a_dominant_subspace():
    """Inputs of rank 2: the range finder must find them, whatever it draws."""
    torch.manual_seed(0)
    model = nn.Linear(10, 9, bias=False).double()
    low = torch.randn(2, 10).double()
    x = torch.randn(1, 20, 2).double() @ low
    index = torch.zeros(1, 20, dtype=torch.long)
    removed = {}
    for bases in ("random", "exact"):
        transform = proma(variant="intra", dim=2, bases=bases)
        model.zero_grad()
        with transform.applied(model, sequences=index, advantages=torch.ones(1).double()):
            (model(x) @ torch.randn(9, 2, generator=torch.Generator().manual_seed(3)).double()
             ).square().sum().backward()  # fmt: skip
        removed[bases] = model.weight.grad.clone()
    assert_close(removed["random"], removed["exact"], rtol=0, atol=1e-9)


def test_both_accumulates_what_intra_leaves(model, batches):
    """A sum of intra's shares minus projections: with sigma = 0 exactly intra."""
    intra = run(proma(variant="intra", dim=2, bases="exact"), model, batches)
    both = run(proma(variant="both", sigma=0.0, dim=2, bases="exact"), model, batches)
    full = run(proma(variant="both", dim=2, bases="exact"), model, batches)
    for name in intra:
        assert_close(both[name], intra[name], **EXACT)
    assert not torch.allclose(full["up.weight"], intra["up.weight"])


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe"])
def test_real_architectures(kind, batches):
    """Tied heads, Conv1D, experts: one micro-batch is REINFORCE, the second is projected first."""
    model = hf(kind)

    def gradient(transform, count):
        model.zero_grad()
        for ids, lengths, advantages in batches[:count]:
            with transform.applied(model, sequences=numbers(lengths), advantages=advantages):
                logp = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
                inside = torch.arange(LENGTH - 1) < lengths[:, None] - 1
                (-(logp[..., 0] * inside).sum()).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = {count: gradient(isopo(preset="reinforce"), count) for count in (1, 2)}
    for name, value in gradient(proma(), 1).items():
        assert_close(value, plain[1][name], rtol=1e-6, atol=1e-9)
    projected = gradient(proma(rho=0.5), 2)
    moved = 0
    for name, value in projected.items():
        removed, share = plain[2][name] - value, plain[2][name] - plain[1][name]
        if "wte" not in name:  # GPT-2's tied weight is two layers, each with a bound of its own
            assert removed.norm() <= 0.5 * share.norm() * (1 + 1e-6)
        moved += bool(removed.norm() > 1e-6 * share.norm())
    assert moved > 0.9 * len(projected)


def test_float32_models(model, batches):
    single = Net()
    single.load_state_dict(model.state_dict())
    expected = run(proma(), model, batches)
    actual = run(proma(), single, [(i, n, a.float()) for i, n, a in batches])
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert_close(gradient, expected[name].float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "accumulate"}, "variant of proma 'accumulate'; did you mean 'accumulation'"),
        ({"solver": "sweeps"}, "did you mean 'sweep'"),
        ({"sigma": -1.0}, "sigma must be a finite number >= 0"),
        ({"rho": -0.5}, "rho must be a finite number >= 0"),
        ({"rho": "a"}, "rho must be a finite number >= 0, got 'a'"),
        ({"dim": -1}, "dim must be a whole number >= 0"),
        ({"dim": 1.5}, "dim must be a whole number >= 0, got 1.5"),
        ({"ridge": 0.0}, "needs ridge > 0"),
        ({"solver": "exact", "ridge": 0.5}, "ridge=0.5 has no effect with solver=exact"),
        ({"variant": "intra", "sigma": 0.5}, "sigma=0.5 has no effect with variant=intra"),
        ({"variant": "intra", "solver": "sweep"}, "solver=sweep has no effect with variant=intra"),
        ({"dim": 5}, "dim=5 has no effect with variant=accumulation"),
        ({"bases": "exact"}, "bases=exact has no effect with variant=accumulation"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ProxpoError, match=message):
        proma(**options)
