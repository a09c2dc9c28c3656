"""Responses in one turn or several: a tool's words are read by the policy and never trained on.

Each round samples the next turn of the episodes that are still open. What was sampled is kept as
ids, never decoded and tokenised again; only what the tool says is tokenised.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.sampler import Rollout, Samples, inputs
from proxpo.sampler._agreement import Inputs
from proxpo.sampler._types import join, reorder
from proxpo.train.tasks import Task

Seeds = Callable[[int, int], int]  # row, turn


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Finished episodes. `samples.mask` holds what the policy said, `real` the tool's words too.

    turn: number of the turn of each token, a tool's reply counting with the call
    void: a turn neither called the tool nor answered; a turn that was cut calls nothing
    texts: everything said after the prompt; answers: the last turn, which the reward sees
    begins: where the last turn begins, in tokens
    seconds: time spent in the tool
    """

    samples: Samples
    real: Bool[Tensor, "seq tok"]
    turn: Int[Tensor, "seq tok"]
    void: Bool[Tensor, " seq"]
    texts: list[str]
    answers: list[str]
    begins: list[int]
    seconds: list[float]

    def inputs(self, pad_id: int) -> Inputs:
        """Whole sequences as the model reads them."""
        return inputs(replace(self.samples, mask=self.real), pad_id)


@dataclass
class _Episode:
    """One response as it grows."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    void: bool = False
    finished: bool = False
    answer: str = ""
    begin: int = 0
    seconds: float = 0.0

    def add(self, ids: list[int], logp: list[float], *, turn: int, said: bool) -> None:
        self.tokens += ids
        self.logp += logp
        self.mask += [said] * len(ids)
        self.turn += [turn] * len(ids)


def play(
    policy: Policy,
    rollout: Rollout,
    task: Task,
    prompts: list[list[int]],
    *,
    seeds: Seeds,
    max_tokens: int | list[int],
    temperature: float,
    top_p: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """One episode per prompt; `max_tokens` bounds every turn, for all rows or row by row."""
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    def draw(rows: list[int], given: list[list[int]], turn: int) -> Samples:
        own = [limits[row] for row in rows]
        parts, order = [], []
        for most, places in _waves(own, list(map(len, given)), rollout.context):
            order += places
            drawn = rollout.sample(
                [given[i] for i in places],
                seeds=[seeds(rows[i], turn) for i in places],
                max_tokens=most,
                temperature=temperature,
                top_p=top_p,
                progress=progress,
            )
            parts.append(drawn)
        samples = reorder(join(parts, policy.pad_id), order)
        return _cut(samples, own, policy.pad_id)

    rows = list(range(len(prompts)))
    first = draw(rows, prompts, 0)
    if task.tool is None:
        return _single(policy, first)
    episodes = [_Episode() for _ in rows]
    for turn in range(task.max_turns):
        samples = first if turn == 0 else draw(rows, _given(prompts, episodes, rows), turn)
        last = turn == task.max_turns - 1
        rows = [
            row
            for row, said in zip(rows, _rows(samples))
            if _answered(policy, task, episodes[row], *said, turn=turn)
            and not last
            and len(prompts[row]) + len(episodes[row].tokens) + limits[row] <= rollout.context
        ]
        if not rows:
            break
    return _finished(policy, prompts, episodes)


def _answered(
    policy: Policy,
    task: Task,
    episode: _Episode,
    ids: list[int],
    logp: list[float],
    finished: bool,
    *,
    turn: int,
) -> bool:
    """Whether the tool answered, so that another turn may follow."""
    assert task.tool is not None
    episode.begin = len(episode.tokens)
    episode.add(ids, logp, turn=turn, said=True)
    episode.answer = policy.tokenizer.decode(ids, skip_special_tokens=True)
    episode.finished = False
    if not finished:
        # A turn that was cut calls nothing: the tool only tells whether it holds an answer.
        reply = task.tool(episode.answer)
        episode.void |= reply.void or bool(reply.text)
        return False
    started = time.perf_counter()
    reply = task.tool(episode.answer)
    episode.seconds += time.perf_counter() - started
    episode.void |= reply.void
    if not reply.text:
        episode.finished = True
        return False
    told = list(policy.tokenizer.encode(reply.text, add_special_tokens=False))
    episode.add(told, [0.0] * len(told), turn=turn, said=False)
    return True


def _single(policy: Policy, samples: Samples) -> Episodes:
    """Episodes of one turn, as they come from the sampler."""
    rows = zip(samples.tokens.cpu(), samples.mask.cpu())
    texts = [policy.tokenizer.decode(row[mask], skip_special_tokens=True) for row, mask in rows]
    count = len(texts)
    return Episodes(
        samples=samples,
        real=samples.mask,
        turn=torch.zeros_like(samples.tokens),
        void=torch.zeros_like(samples.finished),
        texts=texts,
        answers=texts,
        begins=[0] * count,
        seconds=[0.0] * count,
    )


def _finished(policy: Policy, prompts: list[list[int]], episodes: list[_Episode]) -> Episodes:
    """The rows padded to one width; a reply that nobody answered is left out."""
    for one in episodes:
        used = max((i + 1 for i, said in enumerate(one.mask) if said), default=0)
        for column in (one.tokens, one.logp, one.mask, one.turn):
            del column[used:]

    def padded(name: str, value: float | int, dtype: torch.dtype) -> Tensor:
        columns = [torch.tensor(getattr(one, name), dtype=dtype) for one in episodes]
        found = pad_sequence(columns, batch_first=True, padding_value=value)
        return found.to(policy.device)

    tokens, lengths = padded("tokens", policy.pad_id, torch.long), [len(e.tokens) for e in episodes]
    real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    whole = zip(tokens.tolist(), lengths)
    return Episodes(
        samples=Samples(
            prompts=prompts,
            tokens=tokens,
            logp=padded("logp", 0.0, torch.float32),
            mask=padded("mask", False, torch.bool),
            finished=torch.tensor([one.finished for one in episodes], device=policy.device),
        ),
        real=real.to(policy.device),
        turn=padded("turn", 0, torch.long),
        void=torch.tensor([one.void for one in episodes], device=policy.device),
        texts=[policy.tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in whole],
        answers=[one.answer for one in episodes],
        begins=[one.begin for one in episodes],
        seconds=[one.seconds for one in episodes],
    )


def _waves(limits: list[int], lengths: list[int], context: int) -> list[tuple[int, list[int]]]:
    """(limit, rows) of each call of the sampler.

    Rows are drawn together with the largest limit and cut to their own afterwards; those that the
    largest one would take past the context are drawn with their own.
    """
    most = max(limits)
    waves: dict[int, list[int]] = {}
    for row, (limit, length) in enumerate(zip(limits, lengths)):
        fits = length + most <= context
        waves.setdefault(most if fits else limit, []).append(row)
    return list(waves.items())


def _given(prompts: list[list[int]], episodes: list[_Episode], rows: list[int]) -> list[list[int]]:
    return [prompts[row] + episodes[row].tokens for row in rows]


def _rows(samples: Samples) -> list[tuple[list[int], list[float], bool]]:
    """Each row's ids, their log-probabilities, and whether it ended by itself."""
    lengths = samples.mask.sum(dim=1).tolist()
    columns = zip(samples.tokens.tolist(), samples.logp.tolist(), lengths)
    return [
        (ids[:n], logp[:n], bool(end))
        for (ids, logp, n), end in zip(columns, samples.finished.tolist())
    ]


def _cut(samples: Samples, limits: list[int], pad_id: int) -> Samples:
    """Rows with a limit of their own below the one they were drawn with, as if drawn with it."""
    if samples.mask.shape[1] <= min(limits):
        return samples
    most = torch.tensor(limits, device=samples.mask.device)
    lengths = samples.mask.sum(dim=1)
    inside = torch.arange(samples.mask.shape[1], device=most.device) < most[:, None]
    mask = samples.mask & inside
    return Samples(
        prompts=samples.prompts,
        tokens=samples.tokens.masked_fill(~mask, pad_id),
        logp=samples.logp.masked_fill(~mask, 0.0),
        mask=mask,
        finished=samples.finished & (lengths <= most),
    )


__all__ = ["Episodes", "Seeds", "play"]
