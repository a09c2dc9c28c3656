"""Arms: one of several pays, and one tells which; for methods that learn from attempts.

    attempt 0   prompt ?    action 0      arm 0 pays nothing and shows the arm that pays
    reflection  prompt 3?   response 3    after a failed attempt; kept for the next one
    attempt 1   prompt 3?   action 3      pays 1 and ends the episode

An attempt is one pull, and an arm one token. A policy that is paid for the present attempt alone
pulls an arm that may pay; only one that is paid for later attempts too pulls arm 0 first.
"""

import random

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.train.tasks._session import EARNED, Memory, Move, Script, sessions
from proxpo.train.tasks._types import Lazy, Problem, Task
from proxpo.train.tasks.arithmetic import TRAIN_SIZE

OPENING = "?"


class Arms:
    """The game: `right` is the arm that pays, among 1..count."""

    rules = system = ""

    def __init__(self, count: int, right: int) -> None:
        self.count, self.right, self.won = count, right, False

    def start(self) -> str:
        self.won = False
        return OPENING

    def move(self, action: str) -> Move:
        action = action[:1]
        self.won = action == str(self.right)
        void = action not in map(str, range(self.count + 1))
        shown = self.right if action == "0" else 0
        return Move(str(shown), reward=float(self.won), done=True, void=void)


def arms(
    *,
    count: int = 6,
    attempts: int = 3,
    memory: Memory = "reflection",
    test_size: int = 256,
    seed: int = 0,
) -> Task:
    """`count` arms, of which one pays; arm 0 names it. `attempts` pulls at most, one each."""
    if not 2 <= count <= 9:
        raise ProxpoError(f"task arms: count is from 2 to 9, got {count}")
    script = Script(
        attempts=attempts,
        memory=memory,
        show="latest",
        notes=1,
        longest=1,
        whole=False,
        note="{}",
        reflect=OPENING,
    )

    def problem(stream: str, number: int) -> Problem:
        right = random.Random(derive(seed, stream, number)).randint(1, count)
        return Problem(OPENING, right, number, hidden=f"{stream} {number}")

    return Task(
        name="arms",
        train=Lazy(lambda number: problem("arms", number), TRAIN_SIZE),
        test=[problem("arms test", i) for i in range(test_size)],
        reward=EARNED,
        environment=sessions(lambda problem: Arms(count, problem.answer), script),
        max_turns=2 * attempts - 1,
    )


__all__ = ["Arms", "arms"]
