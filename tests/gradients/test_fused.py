"""The fused kernels against the plain forms, on the device they are for."""

import pytest
import torch
from torch.testing import assert_close

from proxpo.gradients import Dense, Layout, Outer, OverlapSet
from proxpo.gradients._engine import inner_products
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients.isopo import scale
from proxpo.gradients.ntk import Ntk

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from proxpo.gradients._engine import fused  # needs Triton

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "aligned": [0] * 40 + [1] * 40 + [2] * 40,
    "packed": [0] * 5 + [1] * 7 + [2] * 4,
    "padded": [0, 0, -1, -1, 1, 1, 1, -1, 2, 2, 2, 2],
    "left": [-1, -1, 1, 1, 0, 0],
    "long": [0] * 300 + [1] * 3000,
    "one": [0] * 17,
    "gap": [0, 0, 2, 2, 2],
}


def layout_of(name: str) -> Layout:
    seq = torch.tensor(LAYOUTS[name], device="cuda")
    return Layout(seq, int(seq.max()) + 1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (33, 70), (256, 2048)])
@pytest.mark.parametrize("p", [-1.0, -0.5])
def test_linear_layers_and_vectors(name, kind, shape, p):
    torch.manual_seed(0)
    layout = layout_of(name)
    out, inp = shape
    a = torch.randn(layout.size, inp, device="cuda", dtype=kind)
    g = torch.randn(layout.size, out, device="cuda", dtype=kind)
    advantages = torch.randn(layout.count, device="cuda")
    overlap_set = OverlapSet.at(torch.randperm(layout.size, device="cuda")[:20], layout)
    close = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for rows in (Outer(a, g), Dense(g), Dense(g.T.contiguous().T)):
        assert fused.fits(layout, overlap_set, kind)
        run = fused.outer if isinstance(rows, Outer) else fused.dense
        grad, f2, weights = run(rows, layout, overlap_set, advantages, p=p, eps=1e-8)
        high = Outer(a.double(), g.double()) if isinstance(rows, Outer) else Dense(g.double())
        top, bottom = inner_products.overlap_gram(high, layout, overlap_set)
        want = scale(top / bottom, None, p=p, q=0.0, r=0.0, eps=1e-8, times=advantages.double())
        observed = torch.tensor(layout.lengths, device="cuda") > 0
        assert_close(f2[observed].double(), (top / bottom)[observed], rtol=1e-3, atol=1e-6)
        assert_close(weights[observed].double(), want[observed], rtol=1e-3, atol=1e-6)
        exact = high.reduce(layout.spread(want))
        assert_close(grad.double() / exact.norm(), exact / exact.norm(), **close)


@pytest.mark.parametrize("numbers", [[0], [0] * 3, [0] * 33, [0] * 64, [0, 1] * 5, [5, 1, 5, 2]])
@pytest.mark.parametrize("scale", ["c", "paper"])
@pytest.mark.parametrize("known", [None, 2.5])
def test_solving_for_the_weights_of_ntk(numbers, scale, known):
    torch.manual_seed(0)
    sums, advantages = torch.randn(len(numbers), 100), torch.randn(len(numbers))
    rule = Ntk(0.7, scale, "prompt", "auto")

    def solved(device: str) -> list[torch.Tensor]:
        groups = Groups.of(torch.tensor(numbers, device=device))
        average = None if known is None else torch.tensor(known, device=device)
        kernel = groups.blocks((sums @ sums.T).to(device))
        return [x.cpu() for x in rule.solve(kernel, advantages.to(device), average, groups)]

    assert_close(solved("cuda"), solved("cpu"), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("method", ["isopo", "ntk", "euclidean"])
def test_a_model_in_bfloat16_against_the_same_in_float64(tie, method):
    from models import hf, nll, padded

    from proxpo.gradients import isopo, isopo_ntk

    make = {
        "isopo": lambda: isopo(overlap="all"),
        "ntk": isopo_ntk,
        "euclidean": lambda: isopo(preset="euclidean"),
    }[method]
    ids, seq = (x.cuda() for x in padded([40, 60, 51], 50))
    advantages = torch.tensor([1.0, -0.6, 0.3], device="cuda")

    def gradients(kind: torch.dtype) -> dict[str, torch.Tensor]:
        model = hf("qwen3", tie_word_embeddings=tie).to("cuda", kind)
        with make().applied(model, sequences=seq, advantages=advantages):
            nll(model(ids).logits.double(), ids, seq).sum().backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    actual, want = gradients(torch.bfloat16), gradients(torch.float64)
    for name, grad in want.items():
        cosine = torch.cosine_similarity(actual[name].flatten(), grad.flatten(), dim=0)
        assert cosine > 0.97, (name, float(cosine))
