"""HTML pages in one file, without network: a template of proxpo/data, its style and its script."""

import json
import math
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "data"
ENDINGS = {"style": "css", "script": "js"}
# (light, dark): distinct with any colour vision, together with dash and marker
PALETTE = (
    ("#0067b3", "#5ab4f5"),
    ("#c8500a", "#ff9a5c"),
    ("#00805c", "#3ddba6"),
    ("#a8428a", "#f09ad2"),
    ("#8a6100", "#f2c14e"),
    ("#1a8098", "#7fdcf0"),
    ("#5b6472", "#c3cad4"),
    ("#4346b4", "#b0b1ff"),
)
SOFT = "#586170"  # labels and lines beside the curves, on white


def fill_page(
    name: str,
    *,
    text: Mapping[str, Any],
    markup: Mapping[str, str],
    data: Any = None,
) -> str:
    """The template NAME.html with `text` (escaped here) and `markup` (HTML) in its places.

    {{style}} and {{script}} are NAME.css and NAME.js, {{chart.js}} any file by its name, {{data}}
    is `data` as JSON, {{palette}} the colours of lines.
    """

    def content(place: re.Match[str]) -> str:
        key = place[1]
        if key in markup:
            return markup[key]
        if key in text:
            return escape(text[key])
        if key == "data":
            # "</script>" in a text must not end the script
            return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        if key == "palette":
            return _palette()
        return _read(f"{name}.{ENDINGS[key]}" if key in ENDINGS else key)

    return re.sub(r"\{\{([\w.]+)\}\}", content, _read(f"{name}.html"))


def _palette() -> str:
    pairs = "".join(f"--c{i}: light-dark({a}, {b});" for i, (a, b) in enumerate(PALETTE))
    return f":root {{ {pairs} }}\n"


def json_ready(value: Any) -> Any:
    """The value as JSON has it: no NaN, no infinity (both None), no tuple, no dataclass."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


__all__ = ["PALETTE", "SOFT", "escape", "fill_page", "json_ready"]
