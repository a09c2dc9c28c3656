"""Scores of reasoning-gym problems: the package's own verifier, on the problem made anew.

The package is imported when a worker starts: that takes seconds, and a reward's time is limited.
"""

import functools
import json
from typing import Any

import reasoning_gym

from proxpo.rewards.answers import tagged


def score(
    solution_str: str, extra_info: dict[str, Any], *, name: str, config: dict[str, Any]
) -> dict[str, Any]:
    """The dataset's score, in [0, 1], of what the last <answer>...</answer> holds; 0 without one.

    A problem is given by its number: the dataset is a function of its seed, so the entry with its
    metadata need not travel.
    """
    dataset = _dataset(name, extra_info["seed"], extra_info["size"], json.dumps(config))
    answer = tagged(solution_str)
    value = float(dataset.score_answer(answer, dataset[extra_info["index"]]))
    return {"score": value, "acc": value == 1.0, "parsed": answer is not None}


@functools.cache
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))


__all__ = ["score"]
