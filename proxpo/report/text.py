"""Short texts that all reports share."""

import math


def plural(n: int, noun: str) -> str:
    """A number with its noun: `1 run`, `1,200 runs`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def one_line(label: str) -> str:
    """Text from a file without line breaks or the control characters terminals obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(label.split()))


def setting_text(value: object) -> str:
    """The value of a setting as YAML and `--set` write it: none, true, 0.5."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def size_text(count: int) -> str:
    """Bytes in a unit that fits: 2.4 MiB, 17.3 GiB."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(max(int(math.log(max(count, 1), 1024)), 1), len(units))
    return f"{count / 1024**power:.1f} {units[power - 1]}"


__all__ = ["one_line", "plural", "setting_text", "size_text"]
