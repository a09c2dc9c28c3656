"""Samples, and files of reward functions, for the tests of rewards."""

import textwrap
from pathlib import Path

from proxpo.rewards import RewardItem


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem(prompt="2+2=", completion=text, answer="4") for text in texts]


def write(folder: Path, source: str, name: str = "reward.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return f"{folder / name}:score"
