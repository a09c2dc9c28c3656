"""The kernels of a decoding step under Triton's interpreter, against plain torch: gaps as JSON.

Runs on a GPU, or anywhere with TRITON_INTERPRET=1, which knows no products of bfloat16.
"""

import json
from types import SimpleNamespace

import torch

from proxpo.sampler import _pieces, _pieces_triton
from proxpo.sampler import _triton as triton
from proxpo.sampler._draw import uniforms
from proxpo.sampler._step import PAGE, PLAIN, Paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
torch.set_default_device(DEVICE)
torch.manual_seed(0)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def attention(*, heads: int, kv: int, width: int, normed: bool, splits: int, dtype=torch.float32):
    """Largest gap of the output and of the pages that the new keys and values went to."""
    draws = torch.Generator(DEVICE).manual_seed(heads)
    lengths = torch.tensor([0, 1, PAGE, 3 * PAGE + 5, 200])
    rows, entries, context = len(lengths), 8, 190  # the last row is past the tables

    def random(*shape):
        return torch.randn(*shape, generator=draws)

    weights = SimpleNamespace(
        cos=random(context, width), sin=random(context, width), heads=heads, kv_heads=kv,
        width=width, eps=1e-6,
    )  # fmt: skip
    layer = SimpleNamespace(qk_norm=random(heads + kv, width) if normed else None)
    qkv = random(rows, (heads + 2 * kv) * width).to(dtype)
    pages = random(2, rows * entries + 1, kv, PAGE, width).to(dtype)
    order = 1 + torch.randperm(rows * entries, generator=draws)
    table = order.view(rows, entries).int()
    table[4, :2] = table[3, :2]  # a shared prompt
    results = []
    for parts in (triton.PARTS, PLAIN):
        cache = Paged(pages.clone(), table, lengths)
        results.append((parts.attend(weights, layer, qkv, cache, splits), cache.pages))
    (found, written), (expected, plain) = results
    return max(gap(found, expected), gap(written, plain))


def norms(dtype: torch.dtype, residual: torch.dtype) -> float:
    """Largest gap of the sum and of the norm, relative to numbers above one."""
    x, more = torch.randn(5, 96).to(residual), torch.randn(5, 96).to(dtype)
    weight = torch.randn(96).to(residual)
    gaps = []
    for added in (None, more):
        expected = PLAIN.add_norm(x.clone(), added, weight, 1e-6, dtype)
        found = triton.PARTS.add_norm(x.clone(), added, weight, 1e-6, dtype)
        gaps += [
            gap(a / b.abs().clamp(min=1), b / b.abs().clamp(min=1)) for a, b in zip(found, expected)
        ]
    return max(gaps)


def pieces(kind: torch.dtype) -> float:
    """Largest gap, relative to numbers above one, of the parts of a block and their gradients."""
    width, halves = torch.randn(12, 5, 24), torch.randn(12, 2 * 1500)
    cos, sin = torch.randn(2, 4, 24)
    calls = [
        ("turned", [width[:, :3]], [cos, sin]),
        ("gated", [halves[:, :40], halves[:, 40:80]], []),
        ("gated_halves", [halves], []),
    ]
    gaps = []
    for name, inputs, tables in calls:
        results = []
        for module, dtype in ((_pieces_triton, kind), (_pieces, torch.float64)):
            leaves = [x.to(kind).to(dtype).detach().requires_grad_() for x in inputs]
            wide = torch.promote_types(dtype, torch.float32)
            out = getattr(module, name)(*leaves, *(x.to(wide) for x in tables))
            (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            results.append([out, *(x.grad for x in leaves)])
        gaps += [gap(a / b.abs().clamp(min=1), b / b.abs().clamp(min=1)) for a, b in zip(*results)]
    return max(gaps)


def draws() -> dict[str, float]:
    """Tokens that differ, and the gap of the log-probabilities of the others."""
    torch.manual_seed(1)
    logits = 3 * torch.randn(20, 5001)
    logits[:10] *= 5
    logits[10:12, 1000:] = -float("inf")
    logits[12:14] = -1e4
    logits[12:14, 5000] = 0.0
    u = uniforms(list(range(20)), 1, torch.device(DEVICE))[:, 0]
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    tau = torch.tensor([0.7], dtype=torch.float64)
    found, expected = (parts.draw_token(logits, u, tau) for parts in (triton.PARTS, PLAIN))
    same = found.token == expected.token
    broken = triton.PARTS.draw_token(logits * float("nan"), u, tau)
    return {
        "different": int((~same).sum()),
        "logp": gap(found.logp[same], expected.logp[same]),
        "possible": bool(torch.isfinite(logits.gather(1, found.token[:, None])).all()),
        "nan": bool(broken.logp.isnan().all()) and int(broken.token.max()) < 5001,
    }


wide = torch.randn(4, 2 * 1500)
print(
    json.dumps(
        {
            "grouped": attention(heads=6, kv=2, width=16, normed=True, splits=1),
            "split": attention(heads=4, kv=1, width=24, normed=True, splits=3),
            "plain": attention(heads=2, kv=2, width=8, normed=False, splits=1),
            "half": attention(heads=4, kv=2, width=16, normed=True, splits=1, dtype=HALF),
            "norm": norms(torch.float32, torch.float32),
            "norm_half": norms(torch.bfloat16, torch.float32),
            "gated": gap(triton.PARTS.gated(wide), PLAIN.gated(wide)),
            "pieces": pieces(torch.float32),
            "pieces_half": pieces(HALF),
            "draw": draws(),
        }
    )
)
