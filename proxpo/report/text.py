"""Short texts that all reports share."""


def plural(n: int, noun: str) -> str:
    """A number with its noun: `1 run`, `1,200 runs`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def one_line(label: str) -> str:
    """Text from a file without line breaks or the control characters terminals obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(label.split()))


__all__ = ["one_line", "plural"]
