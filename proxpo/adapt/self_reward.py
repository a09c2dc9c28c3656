"""Reward that a model gives its own answer: four yes/no checks with weights."""

import re
from dataclasses import dataclass

from proxpo.adapt.responder import Responder
from proxpo.adapt.types import Answer
from proxpo.errors import ProxpoError
from proxpo.rewards.answers import extract
from proxpo.train.tasks import Problem

# (weight, question): the weights are the released code's, the words are ours.
CHECKS = {
    "calculation": (2, "Is every calculation in the answer correct?"),
    "answer": (1, "Is the final result of the answer correct?"),
    "completeness": (2, "Does the answer state a result for everything the question asks for?"),
    "understanding": (1, "Does the answer understand the question as it is meant?"),
}
TOTAL = sum(weight for weight, _ in CHECKS.values())
NO_FORMAT = 2
VERDICT_TOKENS = 8
VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@dataclass
class SelfReward:
    """R = -(Σ weights of failed checks)/6, by greedy verdicts of the model; its tokens count.

    format_rule: an answer that marks no final answer (`####`, a box) fails 2 more
    """

    responder: Responder
    format_rule: bool = False

    def __call__(self, problem: Problem, answer: Answer) -> float:
        failed = sum(
            weight
            for weight, question in CHECKS.values()
            if not self._passes(problem, answer, question)
        )
        if self.format_rule and extract(answer.text) is None:
            failed += NO_FORMAT
        return -failed / TOTAL

    def _passes(self, problem: Problem, answer: Answer, question: str) -> bool:
        """True for a verdict of yes; one that says neither yes nor no is a failure."""
        responder = self.responder
        if isinstance(problem.prompt, str):
            raise ProxpoError(
                f"latentseek: judge=self asks the model in chat messages; the prompts of task "
                f"{responder.task.name} are plain text: judge=task, or a chat task"
            )
        asked = "\n".join(m["content"] for m in problem.prompt if m["role"] == "user")
        request = (
            f"Question: {asked}\n\nAnswer: {answer.text}\n\n{question} Reply with yes or no only."
        )
        prompt = responder.encode([{"role": "user", "content": request}], problem)
        (ids,) = responder.generate(prompt, [0], temperature=0.0, most=VERDICT_TOKENS)
        verdict = VERDICT.search(responder.text(ids))
        return verdict is not None and verdict[1].lower() == "yes"


__all__ = ["CHECKS", "SelfReward"]
