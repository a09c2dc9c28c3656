"""`proxpo sparsity`: share and place of weights that changed between two checkpoints."""

import json
from dataclasses import asdict
from typing import cast, get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table

from proxpo.errors import resolve
from proxpo.report.terminal import console
from proxpo.sparsity import Dtype, Overlap, Update, compare, overlap, stored_weights


def show_sparsity(
    before: str,
    after: str,
    *,
    other: str | None,
    dtype: str,
    tol: float,
    only: str,
    rank: bool,
    as_json: bool,
) -> None:
    """Prints the sparsity of an update, and with `other` the overlap of two."""
    kind = cast(Dtype, resolve(dtype, get_args(Dtype), what="dtype"))
    old, new = stored_weights(before), stored_weights(after)
    update = compare(old, new, dtype=kind, tol=tol, only=only, rank=rank)
    both = None
    if other is not None:
        both = overlap(old, new, stored_weights(other), dtype=kind, tol=tol, only=only)
    if as_json:
        print(json.dumps(_facts(update, both)))
    else:
        _show(update, both)


def _facts(update: Update, both: Overlap | None) -> dict[str, object]:
    return {
        "dtype": update.dtype,
        "tol": update.tol,
        "parameters": update.size,
        "sparsity": update.sparsity,
        "exact_sparsity": update.exact_sparsity,
        "rank": update.rank,
        "layer_density": update.layer_density(),
        "tensors": [asdict(tensor) | {"density": tensor.density} for tensor in update.tensors],
        "only_before": update.only_before,
        "only_after": update.only_after,
        "overlap": None if both is None else asdict(both),
    }


def _show(update: Update, both: Overlap | None) -> None:
    screen = console()
    unit = "as stored" if update.dtype == "stored" else f"in {update.dtype}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("layer", f"changed at all, {unit}", "unchanged"):
        table.add_column(heading)
    for number, density in update.layer_density().items():
        table.add_row(str(number), f"{density:.2%}", f"{1 - density:.2%}")
    if table.rows:
        screen.print(table)
    lines = [
        f"{update.size:,} weights in {len(update.tensors)} tensors",
        f"unchanged within {update.tol:g}, {unit}: {update.sparsity:.2%}",
        f"unchanged to the bit, {unit}: {update.exact_sparsity:.2%}",
    ]
    if update.rank is not None:
        lines.append(f"mean rank of the change over the smaller side, {unit}: {update.rank:.2%}")
    if both is not None:
        for name, share, chance in (
            ("first", both.first, both.chance_first),
            ("second", both.second, both.chance_second),
        ):
            text = "it changed nothing" if share is None else f"{share:.2%}, by chance {chance:.2%}"
            lines.append(f"of what the {name} changed, both changed ({unit}, {both.tol:g}): {text}")
    for side, names in (("before", update.only_before), ("after", update.only_after)):
        if names:
            lines.append(f"only {side}, left out: {', '.join(names)}")
    for line in lines:
        screen.print(line, soft_wrap=True)


__all__ = ["show_sparsity"]
