"""Tables of an inspection for the terminal, readable at 80 columns and in a pipe."""

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxpo.batch_file import BatchFile
from proxpo.inspection import Inspection
from proxpo.report.inspection_text import (
    FIGURES,
    batch_line,
    batch_notes,
    figure_texts,
    inspection_notes,
    loudest,
    prompt_labels,
    shares,
    short,
)
from proxpo.report.text import one_line, plural

SPARKS = "▁▂▃▄▅▆▇█"
BAR = 5
MOST_ROWS = 16
LEAST_SPARKS = 8
LOSS = "loss"
FIGURE_COLUMNS = (LOSS, *(heading for _, heading, _ in FIGURES))
UP, DOWN = "cyan", "dark_orange"


class InspectTable:
    """All methods in one table, then each response's share of every method's gradient."""

    def __init__(self, inspections: Sequence[Inspection], file: BatchFile, *, source: str) -> None:
        self.inspections, self.file, self.source = inspections, file, source

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        wide = options.update(max_width=10_000)
        yield Text(batch_line(self.file, self.source), style="bold")

        def width(figures: Sequence[str]) -> int:
            return console.measure(method_table(self.inspections, figures), options=wide).maximum

        *tables, last = fitting(FIGURE_COLUMNS, width, options.max_width)
        for figures in tables:
            yield method_table(self.inspections, figures)
        room = options.max_width - width(last) - 2  # less the padding of one more column
        yield method_table(self.inspections, last, sparks=room if room >= LEAST_SPARKS else 0)
        detail = response_table(self.inspections, self.file)
        fits = console.measure(detail, options=wide).maximum
        if fits <= options.max_width:
            yield detail
        else:
            yield Text("Fewer methods or --html show each response.\n", style="dim")
        for line in [*batch_notes(self.file), *inspection_notes(self.inspections)]:
            yield Text(line, "yellow")
        yield Text("\n".join(f"{heading:8}{meaning}" for _, heading, meaning in FIGURES), "dim")
        yield Text("▲ ▼     the step makes the response likelier, less likely", "dim")


def fitting(
    figures: Sequence[str], width: Callable[[Sequence[str]], int], most: int
) -> list[list[str]]:
    """The figures in as few tables as fit into `most` columns, in their order."""
    tables: list[list[str]] = [[]]
    for figure in figures:
        if tables[-1] and width([*tables[-1], figure]) > most:
            tables.append([])
        tables[-1].append(figure)
    return tables


def method_table(
    inspections: Sequence[Inspection], figures: Sequence[str], *, sparks: int = 0
) -> Table:
    """Table of methods; with `sparks` characters at most for the gradient by response."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", style="bold", no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    if sparks:
        table.add_column("gradient by response" if sparks >= 20 else "gradient", no_wrap=True)
    for inspection in inspections:
        texts = {LOSS: short(inspection.loss), **figure_texts(inspection)}
        line = [sparkline(inspection, sparks)] if sparks else []
        table.add_row(inspection.method, *(texts[figure] for figure in figures), *line)
    return table


def sparkline(inspection: Inspection, most: int) -> Text:
    """One character per response: height for its gradient mass, colour for its direction."""
    parts, top = shares(inspection), max(shares(inspection), default=0.0)
    line = Text()
    for share, push in zip(parts, inspection.push.tolist()):
        level = 0 if top == 0 else min(int(share / top * len(SPARKS)), len(SPARKS) - 1)
        line.append(
            SPARKS[level] if share else "·", UP if push > 0 else DOWN if push < 0 else "dim"
        )
    line.truncate(most, overflow="ellipsis")
    return line


def response_table(inspections: Sequence[Inspection], file: BatchFile) -> Table | Group:
    """Table of responses by method: a bar for the share of the gradient, an arrow for its sign."""
    batch = file.batch
    labels = [one_line(label) for label in prompt_labels(file)]
    lengths = batch.mask.sum(dim=1).tolist()
    rewards = [None] * len(lengths) if batch.rewards is None else batch.rewards.tolist()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt", no_wrap=True, max_width=14, overflow="ellipsis")
    for heading in ("tokens", "reward"):
        table.add_column(heading, justify="right", no_wrap=True)
    for inspection in inspections:
        table.add_column(inspection.method, no_wrap=True, min_width=BAR + 6)
    longest = loudest(inspections)
    parts = [shares(inspection) for inspection in inspections]
    for i in range(min(len(lengths), MOST_ROWS)):
        first = i == 0 or labels[i] != labels[i - 1]
        cells = [
            bar(part[i], float(inspection.push[i]), longest)
            for part, inspection in zip(parts, inspections)
        ]
        reward = "–" if rewards[i] is None or rewards[i] != rewards[i] else short(rewards[i])
        table.add_row(labels[i] if first else "", str(lengths[i]), reward, *cells)
    left = len(lengths) - MOST_ROWS
    return (
        Group(table, Text(f"… and {plural(left, 'more response')}\n", "dim")) if left > 0 else table
    )


def bar(share: float, push: float, longest: float) -> Text:
    colour = UP if push > 0 else DOWN if push < 0 else "dim"
    arrow = "▲" if push > 0 else "▼" if push < 0 else " "
    length = round(BAR * share / longest) if share else 0
    return Text(f"{arrow}{'█' * length:{BAR}}{short(share, share=True):>5}", colour)


__all__ = ["InspectTable"]
