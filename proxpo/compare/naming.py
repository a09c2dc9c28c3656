"""Names of runs, one folder each, and settings as the text that `--set` reads."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from proxpo.compare.plan import Arm
from proxpo.report.text import setting_text

PLAIN = re.compile(r"[a-z0-9][a-z0-9.]*(?:-[a-z0-9.]+)*")
LONGEST = 80  # characters of a name that is kept as it is


def run_name(arm: Arm, swept: Mapping[str, Any]) -> str:
    """Folder name of an arm's runs, without the seed: `grpo`, `isopo-p-1--5f2c9a1e04`.

    A name of lower-case letters, digits, dots and single dashes is kept. Any other one loses signs
    and symbols in its readable part, so a hash of the arm and its settings follows two dashes,
    which no kept name has.
    """
    words = " ".join([arm.name, *(f"{key}={set_text(value)}" for key, value in swept.items())])
    if PLAIN.fullmatch(words) and len(words) <= LONGEST:
        return words
    slug = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")[:60].rstrip("-.")
    content = [arm.name, arm.method, setting_key(arm.settings), setting_key(swept)]
    return f"{slug}--{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:10]}"


def setting_key(settings: Mapping[str, Any]) -> str:
    """Text that is equal for equal settings alone; True and 1 differ, 1 and 1.0 do not."""
    return json.dumps({key: set_text(value) for key, value in settings.items()}, sort_keys=True)


def set_text(value: Any) -> str:
    """A value as `--set` reads it."""
    short = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if short else setting_text(value)


__all__ = ["run_name", "set_text", "setting_key"]
