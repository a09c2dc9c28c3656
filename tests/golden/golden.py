"""The fixed batch and the recorded losses: how they are read and what they hold."""

import json
from pathlib import Path

import torch
from helpers import LEAVES, f64, loss_and_gradients
from methods.cases import recipe
from torch import Tensor

from proxpo import Batch

FOLDER = Path(__file__).parent / "values"
BATCH = Path(__file__).parent / "batch.json"
BOOLEAN = (
    *("mask", "step_end", "correct", "truncated", "void"),
    *("reflect", "summary", "latent"),
)
INTEGER = (
    *("lag", "tokens", "group", "turn", "prompt_id"),
    *("episode", "step", "attempt", "state"),
)


def read_batch() -> Batch:
    """Numbers in a file, not a seed: a generator may change, the file does not."""
    dtypes = dict.fromkeys(BOOLEAN, torch.bool) | dict.fromkeys(INTEGER, torch.int64)
    fields = json.loads(BATCH.read_text())
    return Batch(
        **{k: torch.tensor(v, dtype=dtypes.get(k, torch.float64)) for k, v in fields.items()}
    )


def compute(case: str) -> dict[str, Tensor]:
    """The loss and every gradient that is not zero throughout."""
    value, grads = loss_and_gradients(recipe(case), read_batch())
    found = {f"d{name}": grads[name] for name in LEAVES if grads[name].any()}
    return {"loss": value, **found}


def write(case: str, found: dict[str, Tensor]) -> None:
    lines = ["# loss, then gradients row by row; rewritten by scripts/write_golden.py only"]
    for name, value in found.items():
        rows = [value.tolist()] if value.dim() == 0 else value.flatten(1).tolist()
        for row in rows:
            numbers = [row] if isinstance(row, float) else row
            lines.append(" ".join([name, *(repr(number) for number in numbers)]))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{case}.txt").write_text("\n".join(lines) + "\n")


def read(case: str) -> dict[str, Tensor]:
    """Recorded values; gradients as rows."""
    rows: dict[str, list[list[float]]] = {}
    for line in (FOLDER / f"{case}.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, *numbers = line.split()
            rows.setdefault(name, []).append([float(number) for number in numbers])
    return {k: f64(v[0][0]) if k == "loss" else f64(v) for k, v in rows.items()}
