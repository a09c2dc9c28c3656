"""GPU time of a piece of work by kind of kernel, and the gaps between kernels."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# The first pattern that is found in a kernel's name decides.
KINDS = {
    "attention": r"flash|fmha|attention|_attn|sdpa|_attend_kernel|_join_kernel",
    "sampling": r"_mass_kernel|_pick_kernel|argmax",
    "norms, activation": r"_add_norm_kernel|_gated_kernel",
    "clip and optimizer": r"multi_tensor|adam",
    "loss and head": r"softmax|logsumexp|nll_|cross_entropy|_logp|head",
    "isopo": r"gram|overlap|isopo|norms?_kernel",
    "matrix products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk",
    "copies": r"memcpy|memset|copy_|_copy|CatArray|\bfill",
    "elementwise": r"elementwise|vectorized|triton|reduce|index|gather|scatter|scan|sort|norm",
}
_PATTERNS = {kind: re.compile(pattern, re.I) for kind, pattern in KINDS.items()}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def kernel_profile(work: Callable[[], object], *, most: int = 12) -> dict[str, Any]:
    """Milliseconds of one run of `work` by kind of kernel, the gaps, and the longest kernels.

    Only the device is traced: a trace of the host slows the run it looks at.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    return summary(spans, most=most)


def summary(spans: list[tuple[str, float, float]], *, most: int = 12) -> dict[str, Any]:
    """`kernel_profile` of kernels given as (name, start, end) in microseconds."""
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    begin = reached = min((start for _, start, _ in spans), default=0.0)
    busy = 0.0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        kinds[kind_of(name)] += end - start
        names[name[:120]] += end - start
        counts[name[:120]] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    total = reached - begin
    return {
        "ms": total / 1e3,
        "kernels": len(spans),
        "gaps_ms": (total - busy) / 1e3,
        "kinds_ms": {kind: value / 1e3 for kind, value in kinds.most_common()},
        "longest": [
            {"name": name, "ms": value / 1e3, "count": counts[name]}
            for name, value in names.most_common(most)
        ],
    }


def lines(profile: dict[str, Any]) -> str:
    """The profile as text."""
    total = profile["ms"]
    rows = [f"  {total:8.2f} ms in {profile['kernels']} kernels and copies"]
    for kind, value in [*profile["kinds_ms"].items(), ("gaps", profile["gaps_ms"])]:
        rows.append(f"  {value:8.2f} ms {value / max(total, 1e-9):6.1%}  {kind}")
    rows += [f"  {e['ms']:8.2f} ms x{e['count']:<5} {e['name']}" for e in profile["longest"]]
    return "\n".join(rows)


__all__ = ["KINDS", "kernel_profile", "kind_of", "lines", "summary"]
