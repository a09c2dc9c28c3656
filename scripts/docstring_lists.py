"""Extension of mkdocstrings: lines `name: ...` of a docstring become a list on the site.

A docstring describes parameters and attributes by lines `name: ...` or `a, b: ...`; Markdown would
run them together into one paragraph.
"""

from typing import Any

from griffe import Alias, Docstring, Extension, Object


class DocstringLists(Extension):
    """Writes the docstrings of a package anew once it is loaded."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        written(pkg)


def written(part: Object | Alias) -> None:
    """Turns the described names of an object, and of all below it, into list items."""
    if isinstance(part, Alias):
        return
    if part.docstring:
        part.docstring = Docstring(
            as_list(part.docstring.value, described(part)), parent=part, parser=None
        )
    for member in part.members.values():
        written(member)


def described(part: Object) -> set[str]:
    """The names that lines of the docstring may describe."""
    names = {parameter.name for parameter in getattr(part, "parameters", ())}
    return names | set(part.members if part.is_class else ())


def as_list(text: str, names: set[str]) -> str:
    """The text with a Markdown list in place of each run of lines `name: ...`."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        head, colon, rest = line.partition(": ")
        if colon and names.issuperset(head.split(", ")):
            lines += [] if inside else [""]
            shown = ", ".join(f"`{name}`" for name in head.split(", "))
            line, inside = f"- {shown}: {rest}", True
        elif not line.strip():
            inside = False
        lines.append(line)
    return "\n".join(lines)
