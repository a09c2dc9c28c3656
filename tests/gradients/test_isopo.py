"""The properties of ISOPO and ISOPO-NTK that their sheets list, on one layer."""

import copy
import warnings

import pytest
import slow
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from proxpo.gradients import Transform, isopo, isopo_ntk
from proxpo.gradients.isopo import lengths2

EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Layer:
    """One linear layer whose inputs a and output gradients g are given."""

    def __init__(self, lengths: list[int], seed: int = 0, inp: int = 5, out: int = 4) -> None:
        torch.manual_seed(seed)
        seq = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
        self.seq = seq
        self.a = torch.randn(len(seq), inp).double()
        self.g = torch.randn(len(seq), out).double()
        self.linear = nn.Linear(inp, out, bias=False).double()

    def gradient(
        self,
        transform: Transform,
        advantages: Tensor,
        *,
        g: Tensor | None = None,
        order: Tensor | None = None,
        observed: dict | None = None,
        **options,
    ) -> Tensor:
        """U for the objective Σ g·y; the gradient of a is compared with the plain one."""
        order = torch.arange(len(self.seq)) if order is None else order
        a = self.a[order].clone().requires_grad_()
        g = (self.g if g is None else g)[order]
        observe = None if observed is None else (lambda name, values: observed.update(values))
        self.linear.zero_grad()
        block = transform.applied(
            self.linear,
            sequences=self.seq[order],
            advantages=advantages,
            observe=observe,
            **options,
        )
        with block as session:
            (self.linear(a) * g).sum().backward()
        self.session = session
        assert_close(a.grad, g @ self.linear.weight, **EXACT)
        return self.linear.weight.grad.clone()

    def sums(self, g: Tensor | None = None) -> Tensor:
        g = self.g if g is None else g
        members = [self.seq == i for i in range(int(self.seq.max()) + 1)]
        return torch.stack([g[m].T @ self.a[m] for m in members])


A = torch.tensor([1.0, -0.5, 0.25]).double()


@pytest.mark.checks("isopo", "the gradient of the layer's input is the unscaled one")
@pytest.mark.checks("isopo", "without exponents U is exactly the REINFORCE gradient")
def test_reinforce():
    layer = Layer([3, 2, 4])
    actual = layer.gradient(isopo(p=0.0), A)
    assert_close(actual, torch.einsum("i,iod->od", A, layer.sums()), **EXACT)
    mean = layer.gradient(isopo(p=0.0, scale="mean"), A)
    assert_close(mean, actual / 3, **EXACT)


@pytest.mark.parametrize("exponents", [{"p": -1.0}, {"p": 0.0, "q": -1.0}])
@pytest.mark.checks("isopo", "p = -1 or q = -1: the scale of the objective drops out of U")
def test_scale_of_the_objective_drops_out(exponents):
    layer = Layer([3, 2, 4])
    transform = isopo(eps=0.0, overlap="all", **exponents)
    actual = layer.gradient(transform, A)
    assert_close(layer.gradient(transform, A, g=37.0 * layer.g), actual, **EXACT)


@pytest.mark.checks("isopo", "r = -2 keeps the scale: U is as homogeneous as V")
def test_nearest_npg_scales_with_the_objective():
    layer = Layer([3, 2, 4])
    transform = isopo(preset="nearest-npg", eps=0.0, overlap="all")
    actual = layer.gradient(transform, A)
    assert_close(layer.gradient(transform, A, g=37.0 * layer.g), 37.0 * actual, **EXACT)


@pytest.mark.checks("isopo", "p = -1: rescaling one sequence outside J changes nothing")
def test_rescaling_a_sequence_outside_the_overlap_set():
    layer = Layer([3, 12, 2])
    for seed in range(100):  # a draw that misses the last sequence
        actual = layer.gradient(isopo(eps=0.0, overlap=4, seed=seed), A)
        overlap_set = layer.session.handles["weight"].overlap_set().index
        if (layer.seq[overlap_set] != 2).all():
            break
    scale = torch.where(layer.seq == 2, 9.0, 1.0).double()[:, None]
    again = layer.gradient(isopo(eps=0.0, overlap=4, seed=seed), A, g=layer.g * scale)
    assert torch.equal(layer.session.handles["weight"].overlap_set().index, overlap_set)
    assert_close(again, actual, **EXACT)


@pytest.mark.checks("isopo", "q = -1: every sequence contributes with length |A|")
def test_euclidean_contributions():
    layer = Layer([3, 2, 4])
    for i in range(3):
        only = torch.zeros(3).double()
        only[i] = A[i]
        actual = layer.gradient(isopo(preset="euclidean", eps=0.0), only)
        assert_close(actual.norm(), A[i].abs(), **EXACT)


@pytest.mark.parametrize("make", [lambda: isopo(overlap="all", q=-0.5), isopo_ntk])
@pytest.mark.checks("isopo", "permuting sequences and positions consistently changes nothing")
def test_permutations(make):
    layer = Layer([3, 2, 4])
    actual = layer.gradient(make(), A)
    order = torch.randperm(9)
    assert_close(layer.gradient(make(), A, order=order), actual, **EXACT)
    renamed = torch.tensor([2, 0, 1])  # sequence i is now called renamed[i]
    other = torch.empty_like(A)
    other[renamed] = A
    layer.seq = renamed[layer.seq]
    assert_close(layer.gradient(make(), other), actual, **EXACT)


@pytest.mark.parametrize("make", [lambda: isopo(overlap="all", r=-1.0), isopo_ntk])
@pytest.mark.checks("isopo", "U is odd in the advantages, which never enter F")
def test_advantages_enter_linearly(make):
    layer = Layer([3, 2, 4])
    observed, other = {}, {}
    actual = layer.gradient(make(), A, observed=observed)
    assert_close(layer.gradient(make(), -A, observed=other), -actual, **EXACT)
    for name in ("F2", "N2", "R2", "kernel"):
        if name in observed:
            assert torch.equal(observed[name], other[name])
    assert (layer.gradient(make(), 0 * A) == 0).all()


@pytest.mark.checks("isopo", "a sequence with A = 0 that is not in J changes nothing")
def test_a_sequence_without_advantage():
    layer = Layer([6, 8, 2])
    for seed in range(100):
        actual = layer.gradient(isopo(overlap=3, seed=seed), A * torch.tensor([1.0, 1.0, 0.0]))
        overlap_set = layer.session.handles["weight"].overlap_set().index
        if (layer.seq[overlap_set] != 2).all():
            break
    a, g = layer.a[layer.seq < 2], layer.g[layer.seq < 2]
    sums = layer.sums()[:2]
    top = torch.stack([(g[j] @ sums @ a[j]).square() for j in overlap_set]).sum(0)
    bottom = sum(g[j].square().sum() * a[j].square().sum() for j in overlap_set)
    s = (top / bottom + 1e-8).rsqrt()
    assert_close(actual, torch.einsum("i,iod->od", A[:2] * s, sums), **EXACT)


def test_sequences_without_gradient_contribute_nothing():
    layer = Layer([3, 2, 4])
    g = layer.g * (layer.seq != 1)[:, None]
    for options in ({"p": -1.0}, {"p": 0.0, "q": -1.0}, {"p": -1.0, "q": -1.0, "r": -2.0}):
        actual = layer.gradient(isopo(eps=0.0, overlap="all", **options), A, g=g)
        assert actual.isfinite().all()
    only = torch.tensor([0.0, 1.0, 0.0]).double()
    assert (layer.gradient(isopo(eps=0.0, overlap="all"), only, g=g) == 0).all()


def test_an_overlap_set_without_gradient_leaves_lengths_alone():
    layer = Layer([3, 2, 4])
    layer.gradient(isopo(overlap=2), A)
    overlap_set = layer.session.handles["weight"].overlap_set().index
    g = layer.g.clone()
    g[overlap_set] = 0
    actual = layer.gradient(isopo(overlap=2), A, g=g)
    assert torch.equal(layer.session.handles["weight"].overlap_set().index, overlap_set)
    assert_close(actual, torch.einsum("i,iod->od", A, layer.sums(g)), **EXACT)


def test_the_sketch_is_close_and_reproducible():
    layer = Layer([30, 40, 20], inp=40, out=30)
    exact = layer.gradient(isopo(preset="euclidean"), A)
    first = layer.gradient(isopo(preset="euclidean", norm="sketch", sketch=256, seed=3), A)
    again = layer.gradient(isopo(preset="euclidean", norm="sketch", sketch=256, seed=3), A)
    assert torch.equal(first, again)
    assert 0 < (first - exact).norm() / exact.norm() < 0.2


def test_draws_follow_the_seed_the_step_and_the_block():
    layer = Layer([30, 40, 20])

    def draws(transform: Transform) -> list[int]:
        layer.gradient(transform, A)
        return layer.session.handles["weight"].overlap_set().index.sort().values.tolist()

    one, two = isopo(overlap=8, seed=1), isopo(overlap=8, seed=1)
    first, second = draws(one), draws(one)
    assert draws(two) == first
    assert draws(two) == second != first
    one.step(), two.step()
    copied = copy.deepcopy(one)
    third = draws(one)
    assert third == draws(two) == draws(copied)
    assert third not in (first, second)
    assert draws(isopo(overlap=8, seed=2)) != first
    assert len(set(first)) == 8
    resumed = isopo(overlap=8, seed=1)
    resumed.load_state_dict(one.state_dict())
    assert draws(resumed) == third


class Siblings(nn.Module):
    """Two layers that multiply one input, and a third that multiplies another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.third(torch.tanh(self.first(x) * self.second(x)))


def test_layers_that_share_an_input_share_the_draw():
    torch.manual_seed(0)
    model = Siblings().double()
    x, seq = torch.randn(3, 5, 4).double(), torch.arange(3)[:, None].expand(3, 5)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            inputs[name] = args[0].detach()
            out.register_hook(lambda grad: outputs.update({name: grad}))

        return hook

    for name, module in model.named_children():
        module.register_forward_hook(keep(name))
    lengths: dict[str, Tensor] = {}
    transform = isopo(overlap=3, q=-1.0)
    options = {"sequences": seq, "advantages": torch.ones(3), "observe": lengths.__setitem__}
    with transform.applied(model, **options) as session:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        drawn = {name: session.handles[f"{name}.weight"].overlap_set().index for name in inputs}
    assert_close([p.grad / 2 for p in model.parameters()], once)
    drawn["second"] = drawn["first"]
    for name, index in drawn.items():
        G = torch.einsum("to,td->tod", outputs[name].flatten(0, 1), inputs[name].flatten(0, 1))
        F2, N2 = lengths2(G, seq.flatten(), index)
        assert_close(lengths[f"{name}.weight"]["F2"], F2)
        assert_close(lengths[f"{name}.weight"]["N2"], N2)


def test_padding_is_never_drawn():
    layer = Layer([4, 5])
    layer.seq = torch.where(torch.arange(9) % 3 == 0, -1, layer.seq)
    for seed in range(20):
        layer.gradient(isopo(overlap=5, seed=seed), A[:2])
        overlap_set = layer.session.handles["weight"].overlap_set()
        assert overlap_set.valid.all()
        assert (layer.seq[overlap_set.index] >= 0).all()
    layer.gradient(isopo(overlap=8), A[:2])
    assert layer.session.handles["weight"].overlap_set().valid.sum() == 6


# ---- trailing averages


@pytest.mark.parametrize("keep_small", [False, True])
@pytest.mark.parametrize("history", ["microbatch", "own"])
def test_trailing_averages(keep_small, history):
    layer = Layer([3, 2, 4])
    transform = isopo(
        overlap="all", reg=0.5, eps=0.0, keep_small=keep_small, history=history, path="gram"
    )
    sums = layer.sums()

    def expected(scale: float, mean: Tensor) -> Tensor:
        f2 = scale**2 * base
        reg = (f2 / (0.5 * mean) + 1) if keep_small else (f2 + 0.5 * mean)
        return torch.einsum("i,iod->od", A * reg.rsqrt(), scale * sums)

    observed = {}
    first = layer.gradient(transform, A, observed=observed)
    base = observed["F2"]
    assert_close(first, expected(1.0, base if history == "own" else base.mean()), **EXACT)
    # What this mini-batch collects is not used before the step.
    second = layer.gradient(transform, A, g=2 * layer.g)
    assert_close(second, expected(2.0, 4 * (base if history == "own" else base.mean())), **EXACT)
    transform.step()
    mean = (base.mean() + 4 * base.mean()) / 2
    assert_close(transform.state_dict()["average.weight/F"], mean, **EXACT)
    assert_close(layer.gradient(transform, A, g=3 * layer.g), expected(3.0, mean), **EXACT)
    transform.step()
    mean = 0.9 * mean + 0.1 * 9 * base.mean()
    other = isopo(
        overlap="all", reg=0.5, eps=0.0, keep_small=keep_small, history=history, path="gram"
    )
    other.load_state_dict(transform.state_dict())
    for one in (transform, other):
        assert_close(layer.gradient(one, A), expected(1.0, mean), **EXACT)


STRENGTHS = [
    {"overlap_reg": 0.4},
    {"norm_reg": 2.0},
    {"rel_overlap_reg": 0.7},
    {"reg": 0.5, "norm_reg": 0.0},
    {"overlap_reg": 0.3, "norm_reg": 1.5, "rel_overlap_reg": 0.8, "keep_small": True},
]


@pytest.mark.parametrize("path", ["gram", "materialise", "stream"])
@pytest.mark.parametrize("strengths", STRENGTHS)
@pytest.mark.checks("isopo", "norm, overlap and relative overlap are regularised each by its own ρ")
def test_every_length_has_its_own_strength(strengths, path):
    layer = Layer([3, 2, 4])
    exponents = {"p": -1.0, "q": -0.5, "r": 0.7}
    grads = torch.einsum("to,td->tod", layer.g, layer.a)
    want = slow.isopo(grads, layer.seq, A, torch.arange(9), **exponents, **strengths)
    actual = layer.gradient(isopo(overlap="all", path=path, **exponents, **strengths), A)
    assert_close(actual, want, **EXACT)
    others = isopo(overlap="all", path=path, **exponents)
    assert not torch.allclose(layer.gradient(others, A), want, rtol=1e-3)


def test_one_strength_for_all_is_reg():
    layer = Layer([3, 2, 4])
    options = {"p": -1.0, "q": -0.5, "r": 0.7, "overlap": "all"}
    each = isopo(overlap_reg=0.6, norm_reg=0.6, rel_overlap_reg=0.6, **options)
    every = isopo(reg=0.6, **options)
    for _ in range(2):
        assert torch.equal(layer.gradient(each, A), layer.gradient(every, A))
        each.step(), every.step()


def test_averages_of_all_quantities():
    layer = Layer([3, 2, 4])
    transform = isopo(p=-1.0, q=-1.0, r=-2.0, overlap="all")
    observed = {}
    layer.gradient(transform, A, observed=observed)
    transform.step()
    state = transform.state_dict()
    assert state.pop("steps") == 1
    assert state.keys() == {f"average.weight/{x}" for x in "FNR"}
    for x in "FNR":
        assert_close(state[f"average.weight/{x}"], observed[f"{x}2"].mean(), **EXACT)


def test_streams_wait_for_a_history():
    """Without one, a sequence's weight needs the others' lengths: no stream, same numbers."""
    layer = Layer([3, 2, 4])
    options = {"p": -1.0, "q": -1.0, "reg": 0.5, "overlap": "all"}
    gram, stream = isopo(path="gram", **options), isopo(path="stream", **options)
    for _ in range(3):
        one, two = layer.gradient(gram, A), layer.gradient(stream, A)
        assert_close(one, two, **EXACT)
        gram.step(), stream.step()
    for key, value in gram.state_dict().items():
        assert_close(torch.as_tensor(stream.state_dict()[key]), torch.as_tensor(value), **EXACT)


# ---- ISOPO-NTK


def ntk(
    layer: Layer, rho: float, scale: str = "paper", advantages: Tensor = A, **options
) -> Tensor:
    return layer.gradient(isopo_ntk(rho=rho, scale=scale), advantages, **options)


@pytest.mark.checks("isopo-ntk", "c -> infinity: cU is the REINFORCE gradient")
def test_large_c_is_reinforce():
    layer = Layer([3, 2, 4])
    want = torch.einsum("i,iod->od", A, layer.sums())
    assert_close(ntk(layer, 1e12, "c"), want, rtol=1e-9, atol=1e-9)


@pytest.mark.checks("isopo-ntk", "c -> 0 and independent rows: the predicted change J U is A")
def test_small_c_hits_the_advantages():
    layer = Layer([3, 2, 4])
    update = ntk(layer, 1e-12)
    assert_close(layer.sums().flatten(1) @ update.flatten(), A, rtol=1e-8, atol=1e-8)


@pytest.mark.checks("isopo-ntk", "orthogonal sequences do not interact")
def test_orthogonal_sequences():
    layer = Layer([3, 2, 4], inp=6)
    parts = torch.zeros(3, 6).double()
    for i in range(3):
        parts[i, 2 * i : 2 * i + 2] = 1.0
    layer.a = layer.a * parts[layer.seq]
    sums = layer.sums()
    size = sums.flatten(1).square().sum(1)
    c = 0.7 * size.mean()
    want = torch.einsum("i,iod->od", A / (size + c), sums)
    assert_close(ntk(layer, 0.7), want, **EXACT)


def doubled(advantages: Tensor) -> tuple[Layer, Tensor]:
    """Sequence 0 a second time, as the last one."""
    layer = Layer([3, 2, 4])
    copy = layer.seq == 0
    layer.a, layer.g = torch.cat([layer.a, layer.a[copy]]), torch.cat([layer.g, layer.g[copy]])
    layer.seq = torch.cat([layer.seq, torch.full((3,), 3)])
    return layer, advantages


@pytest.mark.checks("isopo-ntk", "duplicating a sequence with c -> 0 leaves U unchanged")
def test_duplicates_count_once():
    layer, advantages = doubled(torch.cat([A, A[:1]]))
    assert_close(
        ntk(layer, 1e-10, advantages=advantages), ntk(Layer([3, 2, 4]), 1e-10), rtol=1e-5, atol=1e-7
    )
    single = Layer([3, 2, 4]).gradient(isopo(p=0.0), A)
    twice = layer.gradient(isopo(p=0.0), advantages)
    assert_close(twice - single, A[0] * layer.sums()[0], **EXACT)


@pytest.mark.checks("isopo-ntk", "equal sequences with advantages +x and -x cancel")
def test_opposite_advantages_cancel():
    layer, advantages = doubled(torch.tensor([0.8, -0.5, 0.25, -0.8]).double())
    zero = torch.tensor([0.0, -0.5, 0.25, 0.0]).double()
    assert_close(ntk(layer, 0.5, advantages=advantages), ntk(layer, 0.5, advantages=zero), **EXACT)


@pytest.mark.checks("isopo-ntk", "objective times k, c times k²: U times 1/k (paper) or k (c)")
def test_homogeneity_of_ntk():
    layer = Layer([3, 2, 4])  # c = rho tr K / m carries the k² by itself
    for scale, power in (("paper", -1), ("c", 1)):
        actual = ntk(layer, 0.5, scale)
        assert_close(ntk(layer, 0.5, scale, g=3 * layer.g), 3.0**power * actual, **EXACT)
        # No absolute term: a tiny objective degenerates to nothing else.
        assert_close(ntk(layer, 0.5, scale, g=1e-9 * layer.g), 1e-9**power * actual, **EXACT)


def test_one_sequence_and_no_gradient():
    layer = Layer([4])
    size = layer.sums().square().sum()
    one = torch.ones(1).double()
    assert_close(ntk(layer, 0.5, advantages=one), layer.sums()[0] / (1.5 * size), **EXACT)
    for scale in ("c", "paper"):
        assert (ntk(layer, 0.5, scale, one, g=0 * layer.g) == 0).all()


class Keys(nn.Module):
    """Attention without rotary positions: the gradient of the keys' bias is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, width) for width in (16, 16, 16, 11))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        return self.out(
            x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gradient_of_rounding_errors_is_not_enlarged(kind):
    torch.manual_seed(0)
    model = Keys().to(kind)
    ids, seq = torch.randint(11, (3, 24)), torch.arange(3)[:, None].expand(3, 24)
    with isopo_ntk(scale="paper").applied(model, sequences=seq, advantages=A):
        logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        (-logp.sum()).backward()
    sizes = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    assert sizes.pop("k.bias") == 0  # 680 in bfloat16 without the bound, 1e7 in float32, 3e15
    assert all(0.01 < size < 10 for size in sizes.values())


def test_a_sequence_without_trained_tokens_does_not_count():
    """Its prompt has positions, and no gradient: c = ρ E[tr K / m] is that of the others."""
    layer = Layer([3, 2, 4])
    g = layer.g * (layer.seq < 2)[:, None]
    actual = layer.gradient(isopo_ntk(rho=0.5), A, g=g)
    alone = Layer([3, 2])
    alone.a, alone.g = layer.a[:5], layer.g[:5]
    with torch.no_grad():
        alone.linear.weight.copy_(layer.linear.weight)
    assert_close(actual, alone.gradient(isopo_ntk(rho=0.5), A[:2]), **EXACT)


@pytest.mark.parametrize(
    ("make", "degree"),
    [
        (lambda: isopo(p=-1.0), "0"),
        (lambda: isopo(p=-1.0, q=-1.0), "-1"),
        (lambda: isopo_ntk(scale="paper"), "-1"),
        (lambda: isopo(preset="nearest-npg"), None),
        (isopo_ntk, None),
    ],
)
def test_float16_warns_of_a_scaler(make, degree):
    """Where the gradient does not grow as the loss that a GradScaler multiplies."""
    linear, transform = nn.Linear(4, 3), make()
    seq = torch.arange(2)[:, None].expand(2, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with (
                transform.applied(linear, sequences=seq, advantages=torch.ones(2)),
                torch.autocast("cpu", torch.float16),
            ):
                linear(torch.randn(2, 3, 4)).float().sum().backward()
    lines = [str(one.message) for one in said if "GradScaler" in str(one.message)]
    assert len(lines) == (degree is not None)
    assert all(f"grows as s^{degree}, and" in line for line in lines)


def test_groups_do_not_interact():
    layer = Layer([3, 2, 4, 2, 3])
    advantages = torch.randn(5).double()
    groups = torch.tensor([7, 3, 7, 3, 3])
    actual = layer.gradient(isopo_ntk(group_by="prompt", scale="paper"), advantages, groups=groups)
    sums = layer.sums()
    flat = sums.flatten(1)
    c = flat.square().sum(1).mean()
    want = torch.zeros_like(actual)
    for group in (3, 7):
        inside = groups == group
        kernel = flat[inside] @ flat[inside].T
        eye = torch.eye(len(kernel)).double()
        mixed = torch.linalg.solve(kernel + c * eye, advantages[inside])
        want += torch.einsum("i,iod->od", mixed, sums[inside])
    assert_close(actual, want, **EXACT)


def test_c_trails_over_mini_batches():
    layer = Layer([3, 2, 4])
    transform = isopo_ntk(rho=0.5, scale="paper")
    flat = layer.sums().flatten(1)
    kernel = flat @ flat.T
    trace = kernel.trace() / 3

    def expected(scale: float, c: Tensor) -> Tensor:
        mixed = torch.linalg.solve(scale**2 * kernel + 0.5 * c * torch.eye(3).double(), A)
        return torch.einsum("i,iod->od", mixed, scale * layer.sums())

    assert_close(layer.gradient(transform, A), expected(1.0, trace), **EXACT)
    assert_close(layer.gradient(transform, A, g=2 * layer.g), expected(2.0, 4 * trace), **EXACT)
    transform.step()
    assert_close(layer.gradient(transform, A, g=2 * layer.g), expected(2.0, 2.5 * trace), **EXACT)
    transform.step()
    assert_close(
        layer.gradient(transform, A), expected(1.0, (0.9 * 2.5 + 0.1 * 4) * trace), **EXACT
    )
