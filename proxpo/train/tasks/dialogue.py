"""A search through a dialogue that is longer than the model's context, which the policy folds.

    turn 0  prompt 0hbgd7fca...?   summary 7    a part of the dialogue; digits are scattered in it
    turn 1  prompt 7cabfhgde...?   summary 7    the policy's summary stands for all parts before
    turn 12 prompt 7?              action 7     the answer: the last digit of the dialogue

A part comes once; only the summary, one token, is carried from turn to turn. Each turn that gives
the last digit so far earns an equal share of 1; the answer decides on success.
"""

import random
from dataclasses import dataclass

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.train.tasks._session import EARNED
from proxpo.train.tasks._types import Effect, Lazy, Problem, Situation, Task
from proxpo.train.tasks.arithmetic import TRAIN_SIZE

LETTERS, NEEDLES = "abcdefgh", "123456789"
NOTHING, QUESTION = "0", "?"


@dataclass
class Dialogue:
    """One search: `parts` of the dialogue, shown one by one, each with the last digit up to it."""

    parts: list[str]
    needles: list[str]
    summary: str = NOTHING
    turn: int = 0
    success: bool = False

    def look(self) -> Situation | None:
        if self.turn > len(self.parts):
            return None
        prompt = f"{self.summary}{''.join(self.parts[self.turn : self.turn + 1])}{QUESTION}"
        return Situation(
            prompt=prompt,
            history=f"{NOTHING}{''.join(self.parts[: self.turn + 1])}{QUESTION}",
            state=f"{self.turn} {prompt}",
            summary=self.turn < len(self.parts),
        )

    def act(self, response: str, *, cut: bool) -> Effect:
        answer, answered = response[:1], self.turn == len(self.parts)
        right = answer == self.needles[min(self.turn, len(self.parts) - 1)]
        self.turn += 1
        self.success = answered and right
        self.summary = answer or NOTHING
        reward = right / (len(self.parts) + 1)
        return Effect(reward=reward, void=answer not in tuple(NOTHING + NEEDLES))


def dialogue(
    *, parts: int = 12, length: int = 22, share: float = 0.5, test_size: int = 256, seed: int = 0
) -> Task:
    """`parts` x `length` letters, read part by part; the policy keeps one token.

    share: chance that a part after the first one holds a digit
    """
    if parts < 1 or length < 1 or not 0 <= share <= 1:
        raise ProxpoError(
            "task dialogue: expected parts and length of at least 1 and a share between 0 and 1, "
            f"got {parts}, {length} and {share}"
        )

    def problem(stream: str, number: int) -> Problem:
        draw = random.Random(derive(seed, stream, number))
        shown: list[str] = []
        needles: list[str] = []
        for part in range(parts):
            letters = [draw.choice(LETTERS) for _ in range(length)]
            if part == 0 or draw.random() < share:
                needles.append(draw.choice(NEEDLES))
                letters[draw.randrange(length)] = needles[-1]
            else:
                needles.append(needles[-1])
            shown.append("".join(letters))
        first, extra = f"{NOTHING}{shown[0]}{QUESTION}", {"parts": shown, "needles": needles}
        return Problem(first, needles[-1], number, extra, hidden=f"{stream} {number}")

    return Task(
        name="dialogue",
        train=Lazy(lambda number: problem("dialogue", number), TRAIN_SIZE),
        test=[problem("dialogue test", i) for i in range(test_size)],
        reward=EARNED,
        environment=lambda problem: Dialogue(**problem.extra),
        max_turns=parts + 1,
        folds=True,
    )


__all__ = ["Dialogue", "dialogue"]
