"""Public signatures, pinned: a change here is a change for users and belongs in the changelog.

To accept one on purpose: python tests/test_signatures.py
"""

import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path

import proxpo
from proxpo.stages import STAGES, load_stages

PINNED = Path(__file__).with_name("signatures.txt")


def parameters(function: object) -> str:
    """Names in order, `*` before keyword-only ones, `=…` with the default."""
    shown, keyword = [], False
    for name, p in inspect.signature(function).parameters.items():
        if p.kind is p.KEYWORD_ONLY and not keyword:
            shown.append("*")
            keyword = True
        shown.append(name if p.default is p.empty else f"{name}={default(p.default)}")
    return f"({', '.join(shown)})"


def default(value: object) -> str:
    """A function by its name, a dataclass as a call, anything else as Python writes it."""
    if is_dataclass(value):
        return f"{type(value).__name__}()"
    return getattr(value, "__name__", repr(value))


def signatures() -> list[str]:
    """Functions and classes of the package, stages by kind, methods by slug."""
    load_stages()
    public = {name: getattr(proxpo, name) for name in sorted(proxpo.__all__)}
    del public["ProxpoError"]  # a ValueError like any other
    lines = [f"proxpo.{name}{parameters(one)}" for name, one in public.items()]
    for kind, stages in STAGES.items():
        lines += [f"{kind}={name}{parameters(stages[name])}" for name in sorted(stages)
                  if stages[name].__module__.startswith("proxpo.")]  # fmt: skip
    lines += [f"{slug}{parameters(entry.make)}" for slug, entry in proxpo.methods().items()]
    return lines


def test_signatures_are_those_pinned() -> None:
    pinned, found = PINNED.read_text().splitlines(), signatures()
    gone, new = sorted(set(pinned) - set(found)), sorted(set(found) - set(pinned))
    assert not gone, f"changed or removed: {gone}; now: {new}"
    assert not new, f"new and not pinned: {new}"


if __name__ == "__main__":
    PINNED.write_text("\n".join(signatures()) + "\n")
    print(f"{PINNED}: {len(signatures())} signatures", file=sys.stderr)
