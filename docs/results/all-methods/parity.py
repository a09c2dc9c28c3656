"""A reward that responses of any length can earn: the last digit is odd where the answer is."""


def score(solution_str: str, ground_truth: str) -> dict:
    digit = solution_str[-1:]
    right = digit.isdigit() and int(digit) % 2 == int(ground_truth) % 2
    return {"score": float(right), "acc": right}
