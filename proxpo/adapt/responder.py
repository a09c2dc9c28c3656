"""Answers of a policy, graded by the task, with a count of every token that passes the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from proxpo.adapt.types import Answer
from proxpo.errors import ProxpoError
from proxpo.logp import HeadInput, model_states
from proxpo.models import Policy
from proxpo.ops.shapes import Tensor
from proxpo.ops.streams import derive
from proxpo.rewards import RewardItem, RewardPool
from proxpo.rewards._types import Messages
from proxpo.sampler import Sampler
from proxpo.train.tasks import Problem, Task


@dataclass
class Responder:
    """Samples answers and grades them; `tokens` counts passes of a token through the model.

    A pass is a forward pass, a backward pass (weights are frozen, so it costs as much) or a
    Jacobian-vector product. A prompt counts once for each call of the sampler that runs it. A pass
    through the head alone counts as its share of the weights that multiply a token.
    """

    policy: Policy
    sampler: Sampler
    task: Task
    pool: RewardPool
    max_tokens: int
    temperature: float
    seed: int
    tokens: float = 0.0
    head_share: float = field(init=False)

    def __post_init__(self) -> None:
        head = output_layer(self.policy)
        linear = [m for m in self.policy.bare.modules() if type(m) is nn.Linear]
        whole = sum(m.weight.numel() for m in linear)
        self.head_share = head.weight.numel() / whole

    def encode(self, prompt: str | Messages, problem: Problem) -> list[int]:
        """Token ids of a prompt or dialogue about the problem."""
        asked = Problem(prompt, problem.answer, problem.index)
        return self.task.encode(asked, self.policy.tokenizer)

    def fits(self, prompt: list[int]) -> bool:
        """True if the longest answer fits the context after this prompt."""
        return len(prompt) + self.max_tokens <= self.policy.context

    def draw(
        self, problem: Problem, prompt: list[int], attempts: Sequence[int], *, greedy: bool = False
    ) -> list[Answer]:
        """Answers to one prompt in one call; attempt k has the same random numbers in all arms."""
        seeds = [derive(self.seed, "attempt", problem.index, k) for k in attempts]
        rows = self.generate(prompt, seeds, temperature=0.0 if greedy else self.temperature)
        return self.grade(problem, rows)

    def complete(self, problem: Problem, prompt: list[int], block: list[int]) -> Answer:
        """The answer that begins with `block` and goes on greedily, unless the block ends it."""
        ends = [i + 1 for i, token in enumerate(block) if token in self.policy.eos_ids]
        begin = block[: ends[0]] if ends else block
        room = self.max_tokens - len(begin)
        if not ends and room > 0:
            begin = begin + self.generate(prompt + begin, [0], temperature=0.0, most=room)[0]
        return self.grade(problem, [begin])[0]

    def generate(
        self,
        prompt: list[int],
        seeds: list[int],
        *,
        temperature: float,
        most: int | None = None,
    ) -> list[list[int]]:
        """Sampled ids after the prompt, one row for each seed."""
        samples = self.sampler.sample(
            [prompt] * len(seeds),
            seeds=seeds,
            max_tokens=self.max_tokens if most is None else most,
            temperature=temperature,
        )
        rows = [ids[mask].tolist() for ids, mask in zip(samples.tokens, samples.mask)]
        self.tokens += len(prompt) + sum(map(len, rows))
        return rows

    def text(self, ids: list[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)

    def grade(self, problem: Problem, rows: list[list[int]]) -> list[Answer]:
        """The rows with the task's verdicts."""
        items = [
            RewardItem(
                prompt=problem.prompt,
                completion=self.text(ids),
                answer=problem.answer,
                extra=problem.extra,
                completion_ids=ids,
            )
            for ids in rows
        ]
        outcomes = self.pool.score(items)
        if not self.pool.judges:
            raise ProxpoError(
                f"task {self.task.name}: its reward does not say what is right, as 'acc' or "
                "'correct': set task.correct_above"
            )
        return [
            Answer(ids, item.completion, bool(outcome.correct))
            for ids, item, outcome in zip(rows, items, outcomes)
        ]

    def states(self, prompt: list[int], ids: list[int]) -> HeadInput:
        """The last-layer states that predict `ids`, and the frozen head; one forward pass."""
        sequence = self.sequence(prompt, ids)
        mask = torch.ones(1, len(ids), dtype=torch.bool, device=sequence.device)
        self.count(prompt, ids)
        states = model_states(self.policy.model, sequence, mask)
        bias = None if states.bias is None else states.bias.detach()
        return states._replace(weight=states.weight.detach(), bias=bias)

    def sequence(self, prompt: list[int], ids: list[int]) -> Tensor:
        return torch.tensor([prompt + ids], device=self.policy.device)

    def count(self, prompt: list[int], ids: list[int], passes: int = 1) -> None:
        """Counts passes of a whole sequence through the model."""
        self.tokens += passes * (len(prompt) + len(ids))

    def count_head(self, ids: list[int], passes: int = 1) -> None:
        """Counts passes of an answer's states through the head alone."""
        self.tokens += passes * len(ids) * self.head_share


def output_layer(policy: Policy) -> nn.Linear:
    """The model's head; refused unless it is a plain linear layer."""
    head = getattr(policy.bare, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        raise ProxpoError(
            f"model '{policy.name}': its output layer must be a plain linear layer, got "
            f"{'none' if head is None else type(head).__name__}"
        )
    return head


__all__ = ["Responder", "output_layer"]
