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


def fill_page(
    name: str,
    *,
    text: Mapping[str, Any],
    markup: Mapping[str, str],
    data: Any = None,
    style: str | None = None,
) -> str:
    """The template NAME.html with `text` (escaped here) and `markup` (HTML) in its places.

    {{style}} and {{script}} are NAME.css and NAME.js, {{data}} is `data` as JSON. style: the page
    whose style this one shares.
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
        owner = style if key == "style" and style else name
        return _read(f"{owner}.{ENDINGS[key]}")

    return re.sub(r"\{\{(\w+)\}\}", content, _read(f"{name}.html"))


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


__all__ = ["escape", "fill_page", "json_ready"]
