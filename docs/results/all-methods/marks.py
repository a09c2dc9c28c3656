"""A reward that also marks the answer as a span, for methods that learn from spans."""


def score(solution_str: str, ground_truth: str) -> dict:
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "spans": [[0, 99, 1.0 if right else -1.0]]}
