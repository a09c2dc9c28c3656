"""The fused kernels against the plain forms: on a GPU, or in Triton's interpreter.

Without a GPU, where Triton is installed: TRITON_INTERPRET=1 pytest -o addopts= test_fused.py
"""

import os

import pytest
import torch
from torch.testing import assert_close

from proxpo.gradients import Dense, Layout, OneHot, Outer, OverlapSet
from proxpo.gradients._engine import inner_products
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.measure import ScaleOptions
from proxpo.gradients._engine.position_gradients import SharedInput
from proxpo.gradients.isopo import ratio2, scale
from proxpo.gradients.ntk import Ntk

if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("needs a CUDA device", allow_module_level=True)

from proxpo.gradients._engine import fused  # needs Triton

pytestmark = pytest.mark.gpu
INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

LAYOUTS = {
    "aligned": [0] * 40 + [1] * 40 + [2] * 40,
    "packed": [0] * 5 + [1] * 7 + [2] * 4,
    "padded": [0, 0, -1, -1, 1, 1, 1, -1, 2, 2, 2, 2],
    "left": [-1, -1, 1, 1, 0, 0],
    "long": [0] * 300 + [1] * 3000,
    "one": [0] * 17,
    "gap": [0, 0, 2, 2, 2],
}
if not INTERPRETED:  # which would take minutes
    LAYOUTS["many"] = [row for row in range(150) for _ in range(3)]


def layout_of(name: str) -> Layout:
    seq = torch.tensor(LAYOUTS[name], device=DEVICE)
    return Layout(seq, int(seq.max()) + 1)


KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
SHAPES = [(33, 70)] if INTERPRETED else [(64, 48), (33, 70), (256, 2048)]
NONE = (0.0, 0.0, 0.0)
RULES = {
    "p": ScaleOptions(-1.0, 0.0, 0.0, NONE, 1e-8, False),
    "p = -0.5": ScaleOptions(-0.5, 0.0, 0.0, NONE, 1e-8, False),
    "q": ScaleOptions(0.0, -1.0, 0.0, NONE, 1e-8, False),
    "r": ScaleOptions(0.0, 0.0, -2.0, NONE, 1e-8, False),
    "all": ScaleOptions(-0.5, -1.0, 0.5, (0.1, 0.2, 0.3), 1e-8, False),
    "keep_small": ScaleOptions(-1.0, -1.0, 0.0, (0.1, 0.2, 0.0), 0.0, True),
}

# Without a regulariser there is no E[x²] to come from anywhere.
MEASURED = [
    (rule, history)
    for rule, options in RULES.items()
    for history in (("known", "own") if any(options.reg) else ("known",))
]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "history"), MEASURED)
def test_linear_layers_and_vectors(name, kind, shape, rule, history):
    options = RULES[rule]
    torch.manual_seed(0)
    layout = layout_of(name)
    out, inp = shape
    a = torch.randn(layout.size, inp, device=DEVICE, dtype=kind)
    g = torch.randn(layout.size, out, device=DEVICE, dtype=kind)
    advantages = torch.randn(layout.count, device=DEVICE)
    means = tuple(
        torch.tensor(x, device=DEVICE, dtype=torch.float64) if rho and history == "known" else None
        for x, rho in zip((0.7, 40.0, 0.01), options.reg)
    )
    overlap_set = OverlapSet.at(torch.randperm(layout.size, device=DEVICE)[:20], layout)
    measured = overlap_set if options.p or options.r else None
    close = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    shared = SharedInput(None)
    shared.layers = 2
    forms = [
        (Outer(a, g), False),
        (Outer(a, g, shared), False),
        (Outer(a, g, shared), True),
        (Dense(g), True),
        (Dense(g.T.contiguous().T), True),
    ]
    for rows, stacked in forms:
        assert fused.fits(layout, measured, kind)
        high = Outer(a.double(), g.double()) if isinstance(rows, Outer) else Dense(g.double())
        norm2 = inner_products.length2(high.sums(layout))
        grad, f2, r2, weights = fused.weighted(
            rows,
            layout,
            measured,
            norm2.float() if options.q or options.r else None,
            rows.sums(layout) if stacked else None,
            advantages,
            options,
            means,
        )
        top, bottom = inner_products.overlap_gram(high, layout, overlap_set)
        F2 = top / bottom
        want = scale(
            F2, norm2, ratio2(F2, norm2), p=options.p, q=options.q, r=options.r, reg=options.reg,
            mean=means, eps=options.eps, keep_small=options.keep_small, history="own",
            times=advantages.double(),
        )  # fmt: skip
        observed = torch.tensor(layout.lengths, device=DEVICE) > 0
        if measured is not None:
            assert_close(f2[observed].double(), F2[observed], rtol=1e-3, atol=1e-6)
        if options.r:
            assert_close(r2[observed].double(), (F2 / norm2)[observed], rtol=1e-3, atol=1e-6)
        assert_close(weights[observed].double(), want[observed], rtol=1e-3, atol=1e-6)
        exact = high.reduce(layout.spread(want))
        assert_close(grad.double() / exact.norm(), exact / exact.norm(), **close)


@needs_gpu
@pytest.mark.parametrize("numbers", [[0], [0] * 3, [0] * 33, [0] * 64, [0, 1] * 5, [5, 1, 5, 2]])
@pytest.mark.parametrize("scale", ["c", "paper"])
@pytest.mark.parametrize("known", [None, 2.5])
def test_solving_for_the_weights_of_ntk(numbers, scale, known):
    torch.manual_seed(0)
    sums, advantages = torch.randn(len(numbers), 100), torch.randn(len(numbers))
    rule = Ntk(0.7, scale, "prompt", "auto")

    def solved(device: str) -> list[torch.Tensor]:
        groups = Groups.of(torch.tensor(numbers, device=device))
        averages = None if known is None else torch.tensor([known, 1.0], device=device)
        kernel = groups.blocks((sums @ sums.T).to(device))
        kernels = torch.stack([kernel, 3 * kernel])
        return [x.cpu() for x in rule.solve(kernels, advantages.to(device), averages, groups)]

    assert_close(solved("cuda"), solved("cpu"), rtol=1e-4, atol=1e-6)


@needs_gpu
@pytest.mark.parametrize("numbers", [[0] * 12, [0] * 300, [0] * 5 + [1] * 7, [2, 0, 2, 1, 0, 2]])
@pytest.mark.parametrize("length", [5, 40])
def test_kernels_of_bfloat16(numbers, length):
    """V rounded once, sums in float32: K is exact to 2⁻⁸ / √(O D) of |V_i||V_j|, times six."""
    torch.manual_seed(0)
    groups = Groups.of(torch.tensor(numbers, device="cuda"))
    count = len(numbers)
    layout = Layout(torch.arange(count, device="cuda").repeat_interleave(length), count).settle()
    rows = Outer(
        torch.randn(layout.size, 192, device="cuda").bfloat16(),
        torch.randn(layout.size, 136, device="cuda").bfloat16(),
    )
    sums = Outer(rows.a.double(), rows.g.double()).sums(layout).flatten(1)
    want, scale = groups.blocks(sums @ sums.T), sums.square().sum(1).mean()
    kind = inner_products.stack_dtype(rows, layout, rounded=True)
    assert kind == torch.bfloat16
    kernel, _ = inner_products.kernel_materialised(rows, layout, groups, kind=kind)
    assert ((kernel - want) / scale).abs().max() < 6 * 2**-8 / (192 * 136) ** 0.5
    kernel = inner_products.kernel_gram(rows, layout, groups)
    assert ((kernel - want) / scale).abs().max() < 1e-5


@needs_gpu
def test_sums_over_a_token_of_a_sequence_repeat_bit_by_bit():
    seq = torch.arange(16, device=DEVICE).repeat_interleave(256)
    ids = torch.randint(0, 5, seq.shape, device=DEVICE)
    tokens = OneHot(ids, torch.randn(len(seq), 576, device=DEVICE), 5)

    def sums() -> torch.Tensor:
        return tokens.pairs(Layout(seq, 16))[0].grads

    first = sums()
    assert all(torch.equal(sums(), first) for _ in range(20))


@needs_gpu
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("method", ["isopo", "ntk", "euclidean", "nearest-npg"])
def test_a_model_in_bfloat16_against_the_same_in_float64(tie, method):
    from models import hf, nll, padded

    from proxpo.gradients import isopo, isopo_ntk

    make = {
        "isopo": lambda: isopo(overlap="all"),
        "ntk": isopo_ntk,
        "euclidean": lambda: isopo(preset="euclidean"),
        "nearest-npg": lambda: isopo(preset="nearest-npg", overlap="all"),
    }[method]
    ids, seq = (x.cuda() for x in padded([40, 60, 51], 50))
    advantages = torch.tensor([1.0, -0.6, 0.3], device=DEVICE)

    def gradients(kind: torch.dtype) -> dict[str, torch.Tensor]:
        model = hf("qwen3", tie_word_embeddings=tie).to("cuda", kind)
        with make().applied(model, sequences=seq, advantages=advantages):
            nll(model(ids).logits.double(), ids, seq).sum().backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    actual, want = gradients(torch.bfloat16), gradients(torch.float64)
    for name, grad in want.items():
        cosine = torch.cosine_similarity(actual[name].flatten(), grad.flatten(), dim=0)
        assert cosine > 0.97, (name, float(cosine))
