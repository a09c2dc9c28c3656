"""Time the parallel Kalman scan against a loop over tokens and against one torch.cumsum.

    python benchmarks/kalman_scan.py [--device cuda] [--q 1e-6] [--json]

All three run on the same B × T float32 log-ratios, in turns, so that a busy machine slows them
alike; the figures are medians. Gain tables are built before the clock starts, as in training.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from proxpo.ops.shapes import Tensor
from proxpo.stages.ratio._scan import ema_scan, kalman_gains, scan_table

SHAPES = ((8, 4_096), (8, 65_536))


def spiky(rows: int, tokens: int) -> Tensor:
    """Log-ratios N(0.02, 0.1²) with 200 spikes of ±5 in each row."""
    generator = torch.Generator().manual_seed(0)
    z = 0.02 + 0.1 * torch.randn(rows, tokens, generator=generator)
    for row in z:
        where = torch.randperm(tokens, generator=generator)[:200]
        row[where] = 5.0 * torch.randn(200, generator=generator).sign()
    return z


def loop(z: Tensor, gains: Tensor) -> Tensor:
    state, states = torch.zeros_like(z[:, 0]), torch.empty_like(z)
    for t in range(z.shape[1]):
        state = torch.lerp(state, z[:, t], gains[t])
        states[:, t] = state
    return states


def seconds(call: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(rows: int, tokens: int, *, q: float, p0: float, device: str, repeats: int) -> dict:
    z = spiky(rows, tokens).to(device)
    gains = kalman_gains(tokens, q=q, p0=p0)
    table = scan_table(gains).to(z.device, z.dtype)
    gains32 = gains.to(z.device, z.dtype)
    fast = {"scan": lambda: ema_scan(z, table), "cumsum": lambda: torch.cumsum(z, 1)}
    times: dict[str, list[float]] = {"scan": [], "cumsum": [], "loop": []}
    for turn in range(-3, repeats):
        for name, call in fast.items():
            spent = seconds(call, device)
            if turn >= 0:  # the first turns warm the caches
                times[name].append(spent)
        if turn >= 0 and turn % max(repeats // 3, 1) == 0:  # slow: three times are enough
            times["loop"].append(seconds(lambda: loop(z, gains32), device))
    median = {name: statistics.median(spent) for name, spent in times.items()}
    exact = loop(z.cpu().double(), gains)
    return {
        "shape": [rows, tokens],
        "q": q,
        "p0": p0,
        "device": device,
        "chunks": list(table.into.shape),
        "milliseconds": {name: 1e3 * value for name, value in median.items()},
        "loop_over_scan": median["loop"] / median["scan"],
        "scan_over_cumsum": median["scan"] / median["cumsum"],
        "max_error": (ema_scan(z, table).cpu() - exact).abs().max().item(),
        "max_error_of_loop": (loop(z, gains32).cpu() - exact).abs().max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--q", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--p0", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [
        measure(*shape, q=q, p0=args.p0, device=args.device, repeats=args.repeats)
        for q in args.q
        for shape in SHAPES
    ]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        spent = "  ".join(f"{name} {ms:.3f} ms" for name, ms in result["milliseconds"].items())
        print(
            f"{result['shape'][0]} x {result['shape'][1]:>6}  q {result['q']:g}  {spent}  "
            f"loop/scan {result['loop_over_scan']:.0f}x  "
            f"scan/cumsum {result['scan_over_cumsum']:.2f}x  "
            f"error {result['max_error']:.1e} (loop {result['max_error_of_loop']:.1e})"
        )


if __name__ == "__main__":
    main()
