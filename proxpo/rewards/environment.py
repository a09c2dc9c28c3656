"""Rewards that an environment has given while an episode was played in it."""

from typing import Any


def earned(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The sum of the episode's rewards; right if the environment calls it a success."""
    return {"score": extra_info["earned"], "acc": extra_info["success"]}


__all__ = ["earned"]
