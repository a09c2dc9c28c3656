"""Pages without network: a template, its style and its script become one file."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent.parent / "data"


def fill(name: str, parts: Mapping[str, str], data: Any) -> str:
    """The template `name`.html with its places filled; `data` becomes JSON for the script."""
    known = {
        "style": _part(f"{name}.css"),
        "script": _part(f"{name}.js"),
        # "</script>" in a text must not end the script
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        **parts,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: known[place[1]], _part(f"{name}.html"))


def plain(value: Any) -> Any:
    """What JSON has: no NaN, no infinity, no tuple, no dataclass."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


__all__ = ["fill", "plain"]
