"""`proxpo methods`: all methods, or one in full."""

import inspect
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxpo.errors import ProxpoError
from proxpo.recipes import Method, method, methods
from proxpo.report.inspection_text import sentence
from proxpo.report.terminal import console
from proxpo.settings import make_method, parse_setting
from proxpo.types import Recipe, Stage

# Entries that measure instead of training: (paper, confidence, summary, command).
DIAGNOSTICS = {
    "sparse-updates": (
        "arXiv:2505.11711",
        "official code",
        "Which weights a run changed, where, and how two runs overlap, in a stated dtype.",
        "proxpo sparsity BEFORE AFTER",
    )
}


def show_methods(*, as_json: bool) -> None:
    """Prints the catalogue."""
    if as_json:
        print(json.dumps({slug: _brief(entry) for slug, entry in methods().items()}))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
    table.add_column("method", no_wrap=True)
    table.add_column("what it does, and its stages", ratio=1)
    for slug, entry in methods().items():
        name = Text.assemble((slug, "bold"), (f"\n{entry.paper}\n{entry.confidence}", "dim"))
        what = Text.assemble(sentence(entry.summary), (f"\n{_chain(entry)}", "dim"))
        table.add_row(name, what)
    for slug, (paper, confidence, summary, command) in DIAGNOSTICS.items():
        name = Text.assemble((slug, "bold"), (f"\n{paper}\n{confidence}", "dim"))
        table.add_row(name, Text.assemble(summary, (f"\na diagnostic: {command}", "dim")))
    console().print(table)
    print(f"{len(methods())} methods; proxpo methods NAME shows one in full.")


def show_method(name: str, *, as_json: bool) -> None:
    """Prints one method in full."""
    if name in DIAGNOSTICS and not as_json:
        import proxpo.sparsity

        paper, confidence, summary, command = DIAGNOSTICS[name]
        title = Text.assemble((name, "bold"), f"  {paper}", (f"  {confidence}", "dim"))
        text = inspect.getdoc(proxpo.sparsity) or summary
        console().print(Group(title, Text(), Text(text), Text(f"\ncommand: {command}", "dim")))
        return
    entry = method(name)
    if as_json:
        full = {**_brief(entry), "text": entry.text, "source": _source(entry)}
        print(json.dumps({entry.slug: full}))
    else:
        console().print(_full(entry))


def write_picture(name: str, settings: Sequence[str], path: str) -> None:
    """Writes the picture of a method, with these settings, as SVG."""
    from proxpo.pictures import picture
    from proxpo.runs.files import write_whole

    if not path.endswith(".svg"):
        raise ProxpoError(
            f"--picture writes SVG: expected a file name ending in .svg, got '{path}'"
        )
    made = make_method(name, [parse_setting(text) for text in settings])
    write_whole(path, picture(made).encode())
    print(f"picture: {path}")


def _full(entry: Method) -> RenderableType:
    title = Text.assemble(
        (entry.slug, "bold"),
        f"  {entry.paper}",
        (f"  {entry.confidence}  for {', '.join(entry.domains)}", "dim"),
    )
    options, explained = _table("option", "default", "meaning"), entry.explained()
    for name, value in entry.defaults.items():
        options.add_row(name, Text(_shown(value), "cyan"), Text(explained[name]))
    stages = _table("stage", "what is used")
    for place, stage in _stages(entry):
        stages.add_row(place.split(".")[0], str(stage))
    source = Text(f"defined in {_source(entry)}", "dim", overflow="fold")
    tables = [options, stages] if stages.row_count else [options]
    return Group(title, Text(), Text(entry.prose), *tables, source)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, style="bold" if heading == headings[0] else "", overflow="fold")
    return table


def _brief(entry: Method) -> dict[str, Any]:
    return {
        "summary": entry.summary,
        "paper": entry.paper,
        "confidence": entry.confidence,
        "domains": list(entry.domains),
        "defaults": {name: _jsonable(value) for name, value in entry.defaults.items()},
        "stages": {
            place: {"name": stage.name, "options": _jsonable(dict(stage.options))}
            for place, stage in _stages(entry)
        },
    }


def _jsonable(value: Any) -> Any:
    """The value as JSON has it; an infinity as text, which `--set` reads back."""
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _shown(value: Any) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _chain(entry: Method) -> str:
    """The stages of a recipe; the domains of a method that is not for language models alone."""
    stages = " → ".join(stage.name for _, stage in _stages(entry)) or "updates of its own"
    return stages if entry.domains == ("language",) else f"{', '.join(entry.domains)}: {stages}"


def _stages(entry: Method) -> list[tuple[str, Stage]]:
    """The stages of a recipe with their places; none of a method with updates of its own."""
    made = entry.make()
    return made.stages() if isinstance(made, Recipe) else []


def _source(entry: Method) -> str:
    factory = inspect.unwrap(entry.make)
    return f"{inspect.getsourcefile(factory)}:{inspect.getsourcelines(factory)[1]}"


__all__ = ["show_method", "show_methods", "write_picture"]
