"""`proxpo inspect`: a table, JSON or page of what methods do with a batch."""

import json
import sys
from collections.abc import Sequence

from proxpo.batch_file import read_batch, saved_steps, step_file
from proxpo.cli.named import named_recipes
from proxpo.errors import ProxpoError
from proxpo.inspection import Inspection, inspect_batch, without_effect
from proxpo.inspection import as_json as entry
from proxpo.runs.files import write_whole
from proxpo.settings import make_recipe
from proxpo.types import Batch, Recipe


def chosen_batch(batch: str | None, run: str | None, step: int | None) -> tuple[str, str]:
    """The batch file of `--batch`, or of `--run` and `--step`, and its name in reports."""
    if (batch is None) == (run is None):
        raise ProxpoError(
            "inspect takes --batch FILE ('sample' is included) or --run DIR with --step N"
        )
    if batch is not None:
        if step is not None:
            raise ProxpoError("--step belongs to --run DIR, not to --batch")
        return batch, batch
    assert run is not None
    chosen = max(saved_steps(run), default=0) if step is None else step
    return str(step_file(run, chosen)), f"{run}, step {chosen}"


def inspect_methods(
    methods: Sequence[str],
    batch: str,
    settings: Sequence[str],
    *,
    source: str,
    as_json: bool,
    html: str | None,
    seed: int,
) -> None:
    """Inspects the methods, then writes: a mistake leaves no file."""
    recipes = named_recipes(methods, settings)
    file = read_batch(batch)
    for label, recipe in recipes.items():
        for line in without_effect(recipe, make_recipe(recipe.name), file.batch):
            print(f"proxpo: {label}: {line}", file=sys.stderr)
    inspections = [
        _inspected(label, recipe, file.batch, seed=seed) for label, recipe in recipes.items()
    ]
    if html is not None:
        from proxpo.report.inspection_page import inspect_page

        write_whole(html, inspect_page(inspections, file, source=source).encode())
    if as_json:
        print(
            json.dumps(
                {inspection.method: entry(inspection) for inspection in inspections},
                allow_nan=False,
            )
        )
        return
    from proxpo.report.inspection_table import InspectTable
    from proxpo.report.terminal import console

    console().print(InspectTable(inspections, file, source=source))
    if html is not None:
        print(f"heat map: {html}")


def _inspected(label: str, recipe: Recipe, batch: Batch, *, seed: int) -> Inspection:
    """The inspection of one method; an error opens with its label."""
    try:
        return inspect_batch(recipe, batch, name=label, seed=seed)
    except ProxpoError as error:
        text = str(error)
        raise ProxpoError(text if text.startswith(label) else f"{label}: {text}") from None


__all__ = ["inspect_methods"]
