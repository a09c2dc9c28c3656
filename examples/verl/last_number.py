"""A reward for verl: 1 if the answer that a response marks, or else its last number, is right.

    reward.custom_reward_function.path=examples/verl/last_number.py

verl's own reward for GSM8K wants the answer after "####", which small models rarely write.
"""

from typing import Any

from proxpo.rewards.answers import final_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return final_answer(solution_str, ground_truth, strict=False)["score"]
