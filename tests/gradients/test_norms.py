"""Lengths and kernels of one layer against materialised gradients, in float64."""

import pytest
import slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxpo.gradients import Dense, Layout, OneHot, Outer, OverlapSet
from proxpo.gradients._engine import inner_products
from proxpo.gradients._engine.device import accumulator
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients.isopo import lengths2
from proxpo.gradients.ntk import kernel as kernel_by_definition
from proxpo.gradients.ntk import mixed_advantages

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def made(lengths: list[int], seed: int, kind: str, shuffled: bool = False):
    """Position gradients of one parameter, their materialised form, and their layout."""
    torch.manual_seed(seed)
    seq = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.tensor([-1])])
    if shuffled:
        seq = seq[torch.randperm(len(seq))]
    size = len(seq)
    a, g = torch.randn(size, 5).double(), torch.randn(size, 3).double()
    ids = torch.randint(0, 4, (size,))
    layout = Layout(seq, len(lengths))
    if kind == "outer":
        return Outer(a, g), g[:, :, None] * a[:, None, :], layout
    if kind == "dense":
        return Dense(g), g, layout
    one_hot = torch.nn.functional.one_hot(ids, 4).double()
    return OneHot(ids, g, 4), one_hot[:, :, None] * g[:, None, :], layout


def measured(rows, layout: Layout, overlap_set: OverlapSet) -> tuple[Tensor, Tensor]:
    """F² and N² by the cheapest forms of each kind."""
    if isinstance(rows, Outer):
        top, bottom = inner_products.overlap_gram(rows, layout, overlap_set)
        return top / bottom, inner_products.norm_gram(rows, layout)
    if isinstance(rows, Dense):
        sums = rows.sums(layout)
        top, bottom = inner_products.overlap_dense(rows, layout, sums, overlap_set)
        return top / bottom, sums.square().sum(1)
    top, bottom = inner_products.overlap_gram(rows, layout, overlap_set)
    return top / bottom, inner_products.norm_pairs(rows, layout)


lengths_of = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(
    lengths_of,
    st.integers(0, 10**6),
    st.sampled_from(["outer", "dense", "onehot"]),
    st.booleans(),
    st.integers(1, 9),
)
def test_lengths_equal_materialised_ones(lengths, seed, kind, shuffled, drawn):
    rows, grads, layout = made(lengths, seed, kind, shuffled)
    index = torch.randperm(layout.size)[:drawn]
    if not layout.valid[index].any():
        index = layout.valid.nonzero()[:1, 0]
    overlap_set = OverlapSet.at(index, layout)
    f, n = slow.lengths(
        grads, slow.sequence_gradients(grads, layout.seq, layout.count), index[overlap_set.valid]
    )
    f2, n2 = measured(rows, layout, overlap_set)
    assert_close(f2, f**2, rtol=1e-10, atol=1e-12)
    assert_close(n2, n**2, rtol=1e-10, atol=1e-12)
    assert_close(
        lengths2(grads, layout.seq, index[overlap_set.valid]), (f2, n2), rtol=1e-10, atol=1e-12
    )


@settings(deadline=None, max_examples=30)
@given(lengths_of, st.integers(0, 10**6), st.booleans())
@pytest.mark.checks("isopo", "Gram and materialised lengths agree; one GEMM is the sum of scaled V")
def test_paths_agree(lengths, seed, shuffled):
    rows, grads, layout = made(lengths, seed, "outer", shuffled)
    overlap_set = OverlapSet.at(torch.randperm(layout.size)[:4], layout)
    top, bottom = inner_products.overlap_gram(rows, layout, overlap_set)
    for block in (1 << 24, 7):  # all columns at once, and one at a time
        size, inner_products.BLOCK = inner_products.BLOCK, block
        try:
            others = inner_products.materialised(rows, layout, overlap_set)
            blocks = inner_products.overlap_gram(rows, layout, overlap_set)
            norm2 = inner_products.norm_gram(rows, layout)
        finally:
            inner_products.BLOCK = size
        assert_close(others, (top, bottom, norm2), **EXACT)
        assert_close(blocks, (top, bottom), **EXACT)
    weights = torch.randn(layout.count).double()
    sums = slow.sequence_gradients(grads, layout.seq, layout.count)
    whole = torch.einsum("i,iod->od", weights, sums)
    assert_close(rows.reduce(layout.spread(weights)), whole, **EXACT)
    assert_close(Outer(rows.g, rows.a).reduce(layout.spread(weights)), whole.T, **EXACT)


@pytest.mark.parametrize("kind", ["outer", "dense", "onehot"])
@pytest.mark.checks("isopo", "0 <= R <= 1, and R = 1 for one token that is its own overlap set")
def test_relative_length_is_at_most_one(kind):
    for seed in range(20):
        rows, _, layout = made([3, 1, 4], seed, kind)
        f2, n2 = measured(rows, layout, OverlapSet.at(torch.randperm(layout.size)[:5], layout))
        assert (f2 >= 0).all()
        assert (f2 <= n2 * (1 + 1e-12)).all()
    rows, _, layout = made([1], 0, kind)
    f2, n2 = measured(rows, layout, OverlapSet.at(torch.tensor([0]), layout))
    assert_close(f2, n2, **EXACT)


@pytest.mark.parametrize("kind", ["outer", "dense", "onehot"])
def test_weighted_sum_of_positions(kind):
    rows, grads, layout = made([3, 1, 4], 1, kind)
    weights = torch.randn(layout.size).double()
    whole = torch.einsum("t...,t->...", grads, weights)
    assert_close(rows.reduce(weights), whole, **EXACT)
    assert rows.shape == tuple(whole.shape)


def test_a_padding_token_has_no_gradient():
    rows, grads, layout = made([3, 2, 4], 2, "onehot")
    rows = OneHot(rows.ids, rows.g, 4, padding=1)
    grads = grads * (rows.ids != 1)[:, None, None]
    overlap_set = OverlapSet.all(layout)
    sums = slow.sequence_gradients(grads, layout.seq, layout.count)
    f, n = slow.lengths(grads, sums, layout.valid.nonzero()[:, 0])
    f2, n2 = measured(rows, layout, overlap_set)
    assert_close((f2, n2), (f**2, n**2), rtol=1e-10, atol=1e-12)
    assert (rows.reduce(torch.ones(layout.size).double())[1] == 0).all()


def kernels(rows, layout: Layout, groups: Groups) -> list[Tensor]:
    """K in every form there is for such gradients."""
    if isinstance(rows, Dense):
        sums = groups.arranged(rows.sums(layout))
        return [inner_products.kernel_stacked(sums.unflatten(0, (groups.count, -1)))]
    actual = [inner_products.kernel_gram(rows, layout, groups)]
    if isinstance(rows, Outer):
        stacked = inner_products.kernel_materialised
        for held in (True, False):
            for shape in (rows, Outer(rows.g, rows.a)):
                actual += [stacked(shape, layout, groups, kind=torch.float64, held=held)[0]]
    return actual


@settings(deadline=None, max_examples=40)
@given(
    lengths_of,
    st.integers(0, 10**6),
    st.sampled_from(["outer", "dense", "onehot"]),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
@pytest.mark.checks("isopo-ntk", "Gram, stacked and block-wise kernels agree")
@pytest.mark.checks("isopo-ntk", "K is symmetric PSD with tr K / m = mean |V|²")
def test_kernels_agree(lengths, seed, kind, small, numbers):
    """In one group or several, whole or in the smallest tiles and blocks."""
    rows, grads, layout = made(lengths, seed, kind, shuffled=True)
    sums = slow.sequence_gradients(grads, layout.seq, layout.count).flatten(1)
    group = torch.tensor(numbers[: layout.count])
    together = group[:, None] == group
    with pytest.MonkeyPatch.context() as patch:
        if small:
            for name, size in {"TILE": 6, "STACK": 8 * 6, "_HALVED": 2}.items():
                patch.setattr(inner_products, name, size)
        whole = kernels(rows, layout, Groups.whole(layout.count))
        parts = kernels(rows, layout, Groups.of(group))
    want = sums @ sums.T
    assert_close(kernel_by_definition(grads, layout.seq), want, **EXACT)
    for (kernel,) in whole:
        assert_close(kernel, want, **EXACT)
        assert_close(kernel, kernel.T, **EXACT)
        assert torch.linalg.eigvalsh(kernel).min() > -1e-10
        assert_close(kernel.trace() / layout.count, sums.square().sum(1).mean(), **EXACT)
    for kernel in parts:
        assert_close(Groups.of(group).joined(kernel), want * together, **EXACT)
        assert_close(Groups.of(group).blocks(want), kernel, **EXACT)


def test_a_long_kernel_is_summed_in_slices():
    sums = torch.randn(2, 3, 70_001).double()
    want = sums @ sums.mT
    assert_close(inner_products.kernel_stacked(sums), want, **EXACT)
    assert_close(inner_products.kernel_stacked(sums[:1]), want[:1], **EXACT)
    on_cuda = [inner_products._slice_length(m, 576 * 576, "cuda") for m in (2, 64, 512)]
    assert on_cuda == [1536, 1536, 55296]  # 576 * 576 is a multiple of each
    assert inner_products.even_step(1536, 1323) == 768
    assert inner_products.even_step(100, 30) == 30
    assert inner_products._slice_length(8, 576, "cuda") == 576


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor that an operation inside the block makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not func.is_view:
                self.largest = max(self.largest, x.numel() * x.element_size())
        return out


@pytest.mark.parametrize("kind", ["gram", "stacked", "rounded"])
def test_the_memory_of_a_kernel_is_bounded(kind, monkeypatch):
    """32 sequences of 64 x 96: V would be 768 KiB in float32, all Gram products 1 MiB."""
    monkeypatch.setattr(inner_products, "TILE", 1 << 14)
    monkeypatch.setattr(inner_products, "STACK", 1 << 16)
    torch.manual_seed(0)
    layout = Layout(torch.arange(32).repeat_interleave(16), 32).settle()
    rows = Outer(torch.randn(512, 64), torch.randn(512, 96))
    if kind == "rounded":  # as on CUDA
        rows = Outer(rows.a.bfloat16(), rows.g.bfloat16())
    groups = Groups.whole(32)
    with Sizes() as sizes:
        if kind == "gram":
            kernel = inner_products.kernel_gram(rows, layout, groups)
        else:
            kernel = inner_products.kernel_materialised(rows, layout, groups, kind=rows.dtype)[0]
    # Beside tiles and blocks only tensors as large as the factors in float32.
    assert sizes.largest <= max(1 << 16, 4 * rows.g.numel())
    exact = Outer(rows.a.double(), rows.g.double()).sums(layout).flatten(1)
    scale = exact.square().sum(1).mean()
    error = {"rounded": 6 * 2**-8 / (64 * 96) ** 0.5}.get(kind, 1e-6)
    assert ((kernel[0] - exact @ exact.T) / scale).abs().max() < error


def test_the_sketch_is_unbiased_and_within_its_error():
    rows, grads, layout = made([5, 7, 3], 3, "outer")
    exact = slow.sequence_gradients(grads, layout.seq, layout.count).flatten(1).square().sum(1)
    torch.manual_seed(0)
    width = 16

    def signs(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape)

    draws = torch.stack(
        [inner_products.norm_sketch(rows, layout, width, signs) for _ in range(400)]
    )
    relative = draws / exact - 1
    assert relative.std(0).max() < (2 / width) ** 0.5
    assert relative.mean(0).abs().max() < 4 * (2 / width / 400) ** 0.5


def test_products_of_bfloat16_are_added_in_float32():
    torch.manual_seed(0)
    layout = Layout(torch.arange(4).repeat_interleave(200), 4)
    low = Outer(torch.randn(800, 5).bfloat16(), torch.randn(800, 3).bfloat16())
    high = Outer(low.a.double(), low.g.double())
    overlap_set = OverlapSet.at(torch.arange(0, 800, 50), layout)
    for measure in (
        lambda rows: inner_products.overlap_gram(rows, layout, overlap_set),
        lambda rows: inner_products.materialised(rows, layout, overlap_set),
        lambda rows: inner_products.norm_gram(rows, layout),
        lambda rows: inner_products.kernel_materialised(
            rows, layout, Groups.whole(4), kind=accumulator(rows.dtype)
        )[0],
        lambda rows: inner_products.kernel_gram(rows, layout, Groups.whole(4)),
        lambda rows: Dense(rows.g).sums(layout),
    ):
        actual, want = measure(low), measure(high)
        assert_close(actual, want, rtol=1e-4, atol=1e-3, check_dtype=False)


def test_sums_of_columns_do_not_depend_on_the_way(monkeypatch):
    layout = made([3, 2, 4], 4, "outer", shuffled=True)[2]
    x = torch.randn(5, layout.size).double()
    before = layout.sum_columns(x), layout.sum_rows(x.T)
    monkeypatch.setattr("proxpo.gradients._engine.layout._ONE_HOT_LIMIT", 0)
    assert_close((layout.sum_columns(x), layout.sum_rows(x.T)), before, **EXACT)


def test_a_kernel_that_cannot_be_factored_gives_nan():
    kernel = torch.tensor([[1.0, 0.0], [0.0, -5.0]]).double()
    solved = mixed_advantages(kernel, torch.ones(2).double(), torch.tensor(1.0).double())
    assert solved.isnan().all()
