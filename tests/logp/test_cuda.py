"""The fused head on a GPU: Triton kernels against plain torch, and the sums in float32."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proxpo import gradients
from proxpo.logp import HeadInput, _tile, head, token_kl, token_logp
from proxpo.ops.blocks import blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_plain_torch(dtype, entropy, softcap, monkeypatch):
    rows, cols, warp = 37, 5000, _tile.Warp(0.7, softcap)
    x = (3 * torch.randn(rows, 2 * cols, device="cuda")).to(dtype)
    x[0, 5] = float("-inf")
    target = torch.randint(0, 2 * cols, (rows,), device="cuda")
    target[3] = 3 * cols  # no such token
    incoming = torch.randn(2, rows, device="cuda")

    def run():
        stats = _tile.SoftmaxStats.empty(rows, x, entropy=entropy)
        tiles = [(x[:, c].contiguous(), target - c.start) for c in blocks(2 * cols, cols)]
        for tile, local in tiles:
            stats = head.tile_functions(tile).absorb(stats, tile.clone(), local, warp)
        spread = stats.entropy()
        token_grads = _tile.TokenGrads(
            stats.logsumexp(), incoming[0], spread, incoming[1] if entropy else None
        )
        grads = [
            head.tile_functions(tile).logit_grad(tile.clone(), local, token_grads, warp)
            for tile, local in tiles
        ]
        return stats.picked, token_grads.logsumexp, spread, *grads

    ours = run()
    monkeypatch.setattr(head, "_has_triton", lambda: False)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for mine, plain in zip(ours, run()):
        assert_close(mine, plain, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [20_000, 1 << 22])
def test_kl_near_float64(dtype, chunk):
    made = [torch.randn(n, 64, device="cuda", dtype=torch.float64) for n in (300, 3000) * 2]
    sides = [HeadInput(made[0], 0.3 * made[1]), HeadInput(made[2], 0.3 * made[3])]
    p, q = ((side.hidden @ side.weight.T / 0.7).log_softmax(-1) for side in sides)
    rounded = [HeadInput(*(x.to(dtype) for x in side[:2])) for side in sides]
    kl, entropy = token_kl(*rounded, temperature=0.7, chunk=chunk)
    close = (
        {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    assert_close(kl.double(), (p.exp() * (p - q)).sum(-1), **close)
    assert_close(entropy.double(), -(p.exp() * p).sum(-1), **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [20_000, 1 << 22])
def test_gradients_near_float64(dtype, chunk):
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.float64)
    weight = 0.3 * torch.randn(3000, 64, device="cuda", dtype=torch.float64)
    bias, targets = torch.randn(3000, device="cuda").double(), torch.randint(0, 3000, (300,)).cuda()

    def run(kind):
        inputs = [x.to(kind, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        ours = token_logp(*inputs[:2], targets, bias=inputs[2], entropy=True, chunk=chunk)
        outputs = (ours.logp.sum() + ours.entropy.sum(),)
        return *ours, *torch.autograd.grad(outputs, inputs)

    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, exact in zip(run(dtype), run(torch.float64)):
        assert (mine.double() - exact).norm() <= error * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1000 * 60, 1000 * 300, 1000 * 5000])
@pytest.mark.parametrize(
    "make",
    [
        lambda: gradients.isopo(overlap=64),
        lambda: gradients.isopo(preset="figure4", overlap=64),
        gradients.isopo_ntk,
    ],
    ids=["isopo", "figure4", "ntk"],
)
def test_transforms_near_float64(make, dtype, chunk):
    exact_layer = nn.Linear(32, 1000, device="cuda", dtype=torch.float64)
    hidden = torch.randn(5, 200, 32, device="cuda", dtype=torch.float64)
    targets = torch.randint(0, 1000, (5, 200), device="cuda")
    mask = torch.rand(5, 200, device="cuda") < 0.8
    sequences = torch.arange(5, device="cuda")[:, None].expand(5, 200)
    advantages = torch.randn(5, device="cuda", dtype=torch.float64)

    def run(kind):
        layer = nn.Linear(32, 1000, device="cuda", dtype=kind)
        layer.load_state_dict(exact_layer.state_dict())
        h = hidden.to(kind, copy=True).requires_grad_()
        with make().applied(layer, sequences=sequences, advantages=advantages):
            logp = token_logp(h, layer.weight, targets, bias=layer.bias, mask=mask, chunk=chunk)
            logp.sum().backward()
        return h.grad, layer.weight.grad, layer.bias.grad

    error = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for mine, exact in zip(run(dtype), run(torch.float64)):
        assert (mine.double() - exact).norm() <= error * exact.norm()
