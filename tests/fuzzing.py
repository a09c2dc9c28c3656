"""The number of cases that a fuzz test draws: `@settings(max_examples=times(50))`.

`PROXPO_FUZZ=20` draws 20 times as many, from other seeds in every run; a failure is printed with
the line that repeats it. Without it the cases are the same in every run.
"""

import os

FACTOR = int(os.environ.get("PROXPO_FUZZ", "1"))


def times(examples: int) -> int:
    """`examples`, multiplied by the environment variable PROXPO_FUZZ."""
    return examples * FACTOR
