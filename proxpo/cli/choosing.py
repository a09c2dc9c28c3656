"""Methods by setting, from the measurements in proxpo/data/choose.yaml: `proxpo methods --for`."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from proxpo.errors import ProxpoError, resolve
from proxpo.recipes import method
from proxpo.report.terminal import console
from proxpo.runs.yaml_file import read_yaml

TABLE = Path(__file__).parents[1] / "data" / "choose.yaml"
NO_EVIDENCE = "no evidence yet"
MOST_ROWS = 16  # of a table in which rows of earlier ones come again


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A measured reason to take a method: the settings it holds for, the size it was seen at."""

    settings: tuple[str, ...]
    take: str
    set: Mapping[str, Any] = field(default_factory=dict)
    why: str
    seen: str
    result: str  # under docs/results


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting's meaning, and the advice that follows from its facts."""

    meaning: str
    take: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The settings, measured facts, and methods made for a setting but not measured."""

    settings: Mapping[str, Setting]
    facts: tuple[Fact, ...]
    untried: Mapping[str, tuple[str, ...]]


@functools.cache
def read_advice() -> Advice:
    """The table of facts."""
    tree = read_yaml(TABLE)
    facts = tuple(
        Fact(settings=tuple(fact["for"]), **{k: v for k, v in fact.items() if k != "for"})
        for fact in tree["facts"]
    )
    settings = {s: Setting(meaning=t["is"], take=t["take"]) for s, t in tree["settings"].items()}
    untried = {setting: tuple(slugs) for setting, slugs in tree["untried"].items()}
    return Advice(settings=settings, facts=facts, untried=untried)


def show_choice(text: str, *, as_json: bool) -> None:
    """Prints the facts for settings given as `stale,long`."""
    advice = read_advice()
    names = [name for name in map(str.strip, text.split(",")) if name]
    if not names:
        raise ProxpoError(f"--for takes settings: {', '.join(advice.settings)}")
    asked = list(dict.fromkeys(resolve(name, advice.settings, what="setting") for name in names))
    if as_json:
        facts = [asdict(fact) for fact in _together(advice, asked)]
        parts = {s: [asdict(fact) for fact in _facts(advice, s)] for s in asked}
        take = {s: advice.settings[s].take for s in asked}
        untried = {s: list(advice.untried.get(s, ())) for s in asked}
        print(json.dumps({"take": take, "together": facts, "each": parts, "untried": untried}))
        return
    console().print(_shown(advice, asked))


def choice_table() -> str:
    """The facts as Markdown, by setting, for docs/choose.md."""
    advice = read_advice()
    lines: list[str] = []
    for setting, words in advice.settings.items():
        lines += [f"### {setting}", "", f"{_capital(words.meaning)}.", ""]
        facts, again = _facts(advice, setting), ""
        if len(facts) > MOST_ROWS:
            facts, again = _new_facts(advice, setting)
        if facts:
            lines += ["| take | settings | also | measured reason | seen at |", "| --- " * 5 + "|"]
            lines += [_table_row(fact, setting) for fact in facts]
        elif not again:
            lines.append(f"{NO_EVIDENCE.capitalize()}.")
        lines += ["", again] if facts and again else [again] if again else []
        if setting in advice.untried:
            slugs = ", ".join(f"[`{s}`](methods/{s}.md)" for s in advice.untried[setting])
            lines += ["", f"Made for it by their papers, not measured here: {slugs}."]
        lines.append("")
    return "\n".join(lines)


def short_table() -> str:
    """The advice of every setting as Markdown, for the head of docs/choose.md."""
    lines = ["| setting | that is | take |", "| --- " * 3 + "|"]
    for setting, words in read_advice().settings.items():
        lines.append(f"| [{setting}](#{setting}) | {words.meaning} | {words.take} |")
    return "\n".join([*lines, ""])


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _facts(advice: Advice, setting: str) -> list[Fact]:
    return [fact for fact in advice.facts if setting in fact.settings]


def _new_facts(advice: Advice, setting: str) -> tuple[list[Fact], str]:
    """The facts that no earlier setting shows, and a sentence on the others."""
    names, facts = list(advice.settings), _facts(advice, setting)
    shown = set().union(*(fact.settings for fact in facts)) & set(names[: names.index(setting)])
    links = " and ".join(f"[{name}](#{name})" for name in names if name in shown)
    again = f"And the rows of {links} that have `{setting}` in the column *also*." if links else ""
    return [fact for fact in facts if shown.isdisjoint(fact.settings)], again


def _together(advice: Advice, asked: Sequence[str]) -> list[Fact]:
    """Facts that hold for all settings asked for."""
    return [fact for fact in advice.facts if set(asked) <= set(fact.settings)]


def _shown(advice: Advice, asked: Sequence[str]) -> RenderableType:
    parts: list[RenderableType] = []
    for setting in asked:
        words = advice.settings[setting]
        parts += [Text.assemble((setting, "bold"), f": {words.meaning}"), _indented(words.take)]
    together = _together(advice, asked)
    parts += [Text(), _measured(asked), *_texts(together, asked)]
    for setting in asked if len(asked) > 1 else []:
        facts = [fact for fact in _facts(advice, setting) if fact not in together]
        if facts:
            parts += [Text(), _measured([setting]), *_texts(facts, [setting])]
    for setting in asked:
        if setting in advice.untried:
            slugs = ", ".join(advice.untried[setting])
            made = f"Made for {setting} by their papers, not measured here: {slugs}"
            parts += [Text(), Text(made, "dim")]
    return Group(*parts)


def _measured(asked: Sequence[str]) -> Text:
    return Text.assemble("Measured for ", (" and ".join(asked), "bold"))


def _texts(facts: Sequence[Fact], asked: Sequence[str]) -> list[Padding]:
    """The facts by method, those first that ask for the fewest further settings."""
    ordered = sorted(facts, key=lambda fact: len(_further(fact, asked)))
    groups: dict[tuple[str, str], list[Padding]] = {}
    for fact in ordered:
        groups.setdefault(_head(fact, asked), []).extend(
            [
                _indented(fact.why, by=4),
                _indented(f"{fact.seen}; docs/results/{fact.result}", "dim", by=4),
            ]
        )
    texts = []
    for (name, also), lines in groups.items():
        texts += [_indented(Text.assemble((name, "cyan"), (also, "yellow"))), *lines]
    return texts or [_indented(NO_EVIDENCE)]


def _indented(text: str | Text, style: str = "", *, by: int = 2) -> Padding:
    return Padding(
        Text(text, style) if isinstance(text, str) else text, (0, 0, 0, by), expand=False
    )


def _head(fact: Fact, asked: Sequence[str]) -> tuple[str, str]:
    """A fact's method with its settings, and the further settings that it was measured in."""
    further = _further(fact, asked)
    also = f"  also: {', '.join(further)}" if further else ""
    return " ".join([method(fact.take).slug, *_sets(fact)]), also


def _further(fact: Fact, asked: Sequence[str]) -> list[str]:
    return [setting for setting in fact.settings if setting not in asked]


def _sets(fact: Fact) -> list[str]:
    return [f"{key}={value}" for key, value in fact.set.items()]


def _table_row(fact: Fact, setting: str) -> str:
    others = ", ".join(other for other in fact.settings if other != setting)
    sets = " ".join(f"`{text}`" for text in _sets(fact)) or "defaults"
    why = f"{fact.why} ([{fact.result.removesuffix('.md')}](results/{fact.result}))"
    cells = (f"[`{fact.take}`](methods/{fact.take}.md)", sets, others, why, fact.seen)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


__all__ = ["choice_table", "read_advice", "short_table", "show_choice"]
