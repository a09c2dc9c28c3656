"""Responses in one turn or several; a tool's replies are read by the policy, never trained on.

Each round samples the next turn of the episodes that are still open. Sampled tokens are kept as
ids, never decoded and tokenised again; only the tool's replies are tokenised.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.sampler import Sampler, Samples, inputs
from proxpo.sampler._types import Inputs, join_samples, reorder
from proxpo.train.tasks import Task

Seeds = Callable[[int, int], int]  # row, turn


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Finished episodes. `samples.mask` marks the policy's tokens, `real` the tool's as well.

    turn: number of the turn of each token, a tool's reply counting with the call
    void: a turn neither called the tool nor answered; a turn that was cut calls nothing
    texts: everything after the prompt; answers: the last turn, which the reward sees
    begins: first token of the last turn
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
    """One response while it is being sampled."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    void: bool = False
    finished: bool = False
    answer: str = ""
    begin: int = 0
    seconds: float = 0.0

    def add(self, ids: list[int], logp: list[float], *, turn: int, sampled: bool) -> None:
        self.tokens += ids
        self.logp += logp
        self.mask += [sampled] * len(ids)
        self.turn += [turn] * len(ids)


def play(
    policy: Policy,
    sampler: Sampler,
    task: Task,
    prompts: list[list[int]],
    *,
    seeds: Seeds,
    max_tokens: int | list[int],
    temperature: float,
    top_p: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """Plays one episode per prompt; `max_tokens` bounds every turn, for all rows or row by row."""
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    def draw(rows: list[int], ids: list[list[int]], turn: int) -> Samples:
        own = [limits[row] for row in rows]
        parts, order = [], []
        for most, places in _waves(own, list(map(len, ids)), sampler.context):
            order += places
            drawn = sampler.sample(
                [ids[i] for i in places],
                seeds=[seeds(rows[i], turn) for i in places],
                max_tokens=most,
                temperature=temperature,
                top_p=top_p,
                progress=progress,
            )
            parts.append(drawn)
        samples = reorder(join_samples(parts, policy.pad_id), order)
        return _cut(samples, own, policy.pad_id)

    rows = list(range(len(prompts)))
    first = draw(rows, prompts, 0)
    if task.tool is None:
        return _single(policy, first)
    episodes = [_Episode() for _ in rows]
    for turn in range(task.max_turns):
        samples = first if turn == 0 else draw(rows, _so_far(prompts, episodes, rows), turn)
        last = turn == task.max_turns - 1
        rows = [
            row
            for row, sampled in zip(rows, _rows(samples))
            if _add_turn(policy, task, episodes[row], *sampled, turn=turn)
            and not last
            and len(prompts[row]) + len(episodes[row].tokens) + limits[row] <= sampler.context
        ]
        if not rows:
            break
    return _finished(policy, prompts, episodes)


def _add_turn(
    policy: Policy,
    task: Task,
    episode: _Episode,
    ids: list[int],
    logp: list[float],
    finished: bool,
    *,
    turn: int,
) -> bool:
    """Adds a turn and the tool's reply to it; True if there is one, so that a turn may follow."""
    assert task.tool is not None
    episode.begin = len(episode.tokens)
    episode.add(ids, logp, turn=turn, sampled=True)
    episode.answer = policy.tokenizer.decode(ids, skip_special_tokens=True)
    episode.finished = False
    if not finished:
        # A turn that was cut calls nothing: the tool is asked only whether it holds an answer.
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
    reply_ids = list(policy.tokenizer.encode(reply.text, add_special_tokens=False))
    episode.add(reply_ids, [0.0] * len(reply_ids), turn=turn, sampled=False)
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
    """The rows padded to one width; a reply after the last turn is left out."""
    for episode in episodes:
        used = max((i + 1 for i, sampled in enumerate(episode.mask) if sampled), default=0)
        for column in (episode.tokens, episode.logp, episode.mask, episode.turn):
            del column[used:]

    def padded(name: str, value: float | int, dtype: torch.dtype) -> Tensor:
        columns = [torch.tensor(getattr(episode, name), dtype=dtype) for episode in episodes]
        return pad_sequence(columns, batch_first=True, padding_value=value).to(policy.device)

    tokens, lengths = padded("tokens", policy.pad_id, torch.long), [len(e.tokens) for e in episodes]
    real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    whole = zip(tokens.tolist(), lengths)
    return Episodes(
        samples=Samples(
            prompts=prompts,
            tokens=tokens,
            logp=padded("logp", 0.0, torch.float32),
            mask=padded("mask", False, torch.bool),
            finished=torch.tensor([episode.finished for episode in episodes], device=policy.device),
        ),
        real=real.to(policy.device),
        turn=padded("turn", 0, torch.long),
        void=torch.tensor([episode.void for episode in episodes], device=policy.device),
        texts=[policy.tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in whole],
        answers=[episode.answer for episode in episodes],
        begins=[episode.begin for episode in episodes],
        seconds=[episode.seconds for episode in episodes],
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


def _so_far(prompts: list[list[int]], episodes: list[_Episode], rows: list[int]) -> list[list[int]]:
    """Prompts with all turns up to now."""
    return [prompts[row] + episodes[row].tokens for row in rows]


def _rows(samples: Samples) -> list[tuple[list[int], list[float], bool]]:
    """Ids of each row, their log-probabilities, and True if it ended by itself."""
    lengths = samples.mask.sum(dim=1).tolist()
    columns = zip(samples.tokens.tolist(), samples.logp.tolist(), lengths)
    return [
        (ids[:n], logp[:n], bool(end))
        for (ids, logp, n), end in zip(columns, samples.finished.tolist())
    ]


def _cut(samples: Samples, limits: list[int], pad_id: int) -> Samples:
    """Cuts rows to their own limit, as if they had been drawn with it."""
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
