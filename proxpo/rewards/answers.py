r"""Rewards of the built-in tasks: 1 for the right answer, 0 otherwise, in verl's signature.

Standard library only, so that a worker starts in a moment. What a response gives as its answer is
what follows its last `####`, or else what its last `\boxed{...}` holds.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_SPACE = r"(?:\s|~|\\[ ;:])"
# Words, bare or as \text{...}; any other command of TeX makes 5 \pi another number than 5.
UNIT = re.compile(rf"(?<=[\d.])(?:{_SPACE}+|{_SPACE}*\\(?:text|mathrm)\{{[^{{}}\d]*\}})[^\d\\]*$")
VERIFIERS = ("numeric", "math-verify")
ANSWER_FIELDS = ("answer", "ground_truth", "solution")


def exact(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Compares the whole response with the answer, but for spaces around it and a full stop."""
    return _outcome(solution_str.strip().removesuffix(".").rstrip() == str(ground_truth).strip())


def last_digits(solution_str: str, ground_truth: Any, *, count: int) -> dict[str, Any]:
    """Compares the end of the response with the last `count` characters of the answer."""
    return _outcome(solution_str.strip().endswith(str(ground_truth).strip()[-count:]))


def final_answer(
    solution_str: str, ground_truth: Any, *, verifier: str = "numeric", strict: bool = True
) -> dict[str, Any]:
    """Compares the response's final answer with the truth, as numbers or else as text.

    "parsed" says whether there is one. strict=False also takes the last number of a response that
    marks no final answer. With
    verifier="math-verify" answers of another form (1/2 for 0.5) are compared symbolically.
    """
    answer = extract(solution_str)
    if answer is None and not strict:
        numbers = NUMBER.findall(solution_str)
        answer = numbers[-1] if numbers else None
    if answer is None:
        return _outcome(False) | {"parsed": False}
    right = same(answer, str(ground_truth)) or _verified(answer, ground_truth, verifier)
    return _outcome(right) | {"parsed": True}


def answer_of(row: dict[str, Any], answer_field: str | None) -> Any:
    """The right answer of a row of data: `answer_field`, verl's ground_truth, or a usual name."""
    if answer_field:
        return row.get(answer_field)
    truth = row.get("reward_model")
    if isinstance(truth, dict) and "ground_truth" in truth:
        return truth["ground_truth"]
    return next((row[name] for name in ANSWER_FIELDS if name in row), None)


def extract(text: str) -> str | None:
    """The final answer that the text marks, or None."""
    _, mark, after = text.rpartition("####")
    if mark:
        line = after.strip().splitlines()
        return line[0].strip() if line else None
    return boxed(text)


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces inside it balanced."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        first, depth = start + len("\\boxed{"), 1
        for i in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[first:i].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>."""
    tags = TAGS.findall(text)
    return tags[-1].strip() if tags else None


def same(a: str, b: str) -> bool:
    """True if equal as numbers (1,000 = 1000.0 = $1000), or as text if one of them is none."""
    x, y = number(a), number(b)
    return a.strip() == b.strip() if x is None or y is None else x == y


def number(text: str) -> Decimal | None:
    """The text as a number, without currency, thousands separators, percent, full stop or unit."""
    plain = UNIT.sub("", re.sub(r"[,$€£]|\\[$%!,]", "", text).strip())
    plain = plain.rstrip(".").removesuffix("%").rstrip()
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _verified(answer: str, truth: Any, verifier: str) -> bool:
    if verifier != "math-verify":
        return False
    from math_verify import parse, verify

    # The worker's deadline stands in for the library's own timers, which need signals.
    want, got = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return bool(verify(want, got, timeout_seconds=None))


def _outcome(right: bool) -> dict[str, Any]:
    return {"score": float(right), "acc": right}


__all__ = [
    "VERIFIERS",
    "answer_of",
    "boxed",
    "exact",
    "extract",
    "final_answer",
    "number",
    "same",
    "tagged",
]
