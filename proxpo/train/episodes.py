"""Responses in one turn or several; a tool's replies are read by the policy, never trained on.

Each round samples the next turn of the episodes that are still open. Sampled tokens are kept as
ids, never decoded and tokenised again; only the tool's replies are tokenised. In an environment
each turn is a row, with a prompt that the environment writes anew (environments.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.ops.streams import derive
from proxpo.sampler import Sampler, Samples, inputs
from proxpo.sampler._types import Inputs, join_samples, reorder
from proxpo.train.environments import Played, play_turns
from proxpo.train.tasks import Problem, Task

Seeds = Callable[[int, int], int]  # row, turn


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Finished episodes.

    `samples.mask` marks the policy's tokens, `real` those of tools and latent thoughts as well.

    Tensors have a row for each sequence, lists an entry for each episode, which is one sequence
    but in an environment, where it has as many as turns.

    turn: number of the turn of each token, a tool's reply counting with the call
    void: a turn neither called the tool nor answered; a turn that was cut calls nothing
    texts: everything after the prompt; answers: the last turn, which the reward sees
    begins: first token of the last turn; last: row of the last turn
    seconds: time spent in the tool or environment
    owner: number of the episode of each row
    played: the turns, by row, and their outcome in an environment
    """

    samples: Samples
    real: Bool[Tensor, "seq tok"]
    turn: Int[Tensor, "seq tok"]
    void: Bool[Tensor, " seq"]
    texts: list[str]
    answers: list[str]
    begins: list[int]
    last: list[int]
    seconds: list[float]
    owner: Int[Tensor, " seq"]
    played: Played | None = None

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
    problems: list[Problem] | None = None,
    histories: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """Plays one episode per prompt; `max_tokens` bounds every turn, for all rows or row by row.

    problems: those of the prompts, which an environment starts from
    histories: turns with folded prompts keep the unfolded ones too
    """
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

    if task.environment is not None:
        if problems is None:
            raise ProxpoError(f"task {task.name}: its environment starts from problems; pass them")
        played = play_turns(
            policy, task, problems, draw, limits, sampler.context, histories=histories
        )
        return _of_turns(policy, played)
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
        real=samples.real,
        turn=torch.zeros_like(samples.tokens),
        void=torch.zeros_like(samples.finished),
        texts=texts,
        answers=texts,
        begins=[samples.thought_count] * count,
        last=list(range(count)),
        seconds=[0.0] * count,
        owner=torch.arange(count, device=samples.mask.device),
    )


def _of_turns(policy: Policy, played: Played) -> Episodes:
    """One row per turn, in the order of episodes and turns."""
    turns = played.turns
    rows: list[list[int]] = [[] for _ in played.success]
    for row, turn in enumerate(turns):
        rows[turn.episode].append(row)
    tokens = _padded(policy, [turn.tokens for turn in turns], policy.pad_id, torch.long)
    lengths = torch.tensor([len(turn.tokens) for turn in turns])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(policy.device)
    steps = torch.tensor([turn.step for turn in turns], device=policy.device)
    return Episodes(
        samples=Samples(
            prompts=[turn.prompt for turn in turns],
            tokens=tokens,
            logp=_padded(policy, [turn.logp for turn in turns], 0.0, torch.float32),
            mask=mask,
            finished=torch.tensor([turn.finished for turn in turns], device=policy.device),
        ),
        real=mask,
        turn=steps[:, None].expand_as(tokens),
        void=torch.tensor([turn.void for turn in turns], device=policy.device),
        texts=["\n".join(turns[row].text for row in own) for own in rows],
        answers=[turns[own[-1]].text for own in rows],
        begins=[0] * len(rows),
        last=[own[-1] for own in rows],
        seconds=[sum(turns[row].seconds for row in own) for own in rows],
        owner=torch.tensor([turn.episode for turn in turns], device=policy.device),
        played=played,
    )


def _finished(policy: Policy, prompts: list[list[int]], episodes: list[_Episode]) -> Episodes:
    """The rows padded to one width; a reply after the last turn is left out."""
    for episode in episodes:
        used = max((i + 1 for i, sampled in enumerate(episode.mask) if sampled), default=0)
        for column in (episode.tokens, episode.logp, episode.mask, episode.turn):
            del column[used:]

    def padded(name: str, value: float | int, dtype: torch.dtype) -> Tensor:
        return _padded(policy, [getattr(episode, name) for episode in episodes], value, dtype)

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
        last=list(range(len(episodes))),
        seconds=[episode.seconds for episode in episodes],
        owner=torch.arange(len(episodes), device=policy.device),
    )


def _padded(policy: Policy, rows: list[list], value: float | int, dtype: torch.dtype) -> Tensor:
    """Rows of numbers as one tensor, padded on the right."""
    columns = [torch.tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(columns, batch_first=True, padding_value=value).to(policy.device)


def turn_fields(episodes: Episodes, path: tuple, device: torch.device) -> dict[str, Tensor]:
    """Fields of the rows of an environment, each a turn; none elsewhere. path: of the seeds."""
    if episodes.played is None:
        return {}
    turns = episodes.played.turns
    met = [turn.situation for turn in turns]
    number: dict[tuple[int, ...], int] = {}
    prompts = [number.setdefault(tuple(turn.prompt), len(number)) for turn in turns]
    draws = [derive(*path, "segment", turn.episode, turn.step) / 2**63 for turn in turns]
    summary = torch.tensor([situation.summary for situation in met])
    fields = {
        "prompt": derive(*path, "prompt") % 2**40 + torch.tensor(prompts),
        "episode": torch.tensor([turn.episode for turn in turns]),
        "step": torch.tensor([turn.step for turn in turns]),
        "attempt": torch.tensor([situation.attempt for situation in met]),
        "reflect": torch.tensor([situation.reflect for situation in met]),
        "step_rewards": torch.tensor([turn.reward for turn in turns], dtype=torch.float32),
        "state": torch.tensor([turn.state for turn in turns]),
        "summary": summary[:, None].expand(episodes.real.shape).contiguous(),
        "segment_draw": torch.tensor(draws, dtype=torch.float32),
    }
    if episodes.played.histories:
        histories = [turn.history for turn in turns]
        longest = max(map(len, histories))
        blank = torch.tensor([longest - len(history) for history in histories])
        ids = [[0] * (longest - len(history)) + history for history in histories]
        fields["history_ids"] = torch.tensor(ids, dtype=torch.long)
        fields["history_mask"] = torch.arange(longest) >= blank[:, None]
    return {name: value.to(device) for name, value in fields.items()}


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
    column = torch.arange(samples.mask.shape[1], device=most.device) - samples.thought_count
    mask = samples.mask & (column < most[:, None])
    return replace(
        samples,
        tokens=samples.tokens.masked_fill(~mask, pad_id),
        logp=samples.logp.masked_fill(~mask, 0.0),
        mask=mask,
        finished=samples.finished & (lengths <= most),
    )


__all__ = ["Episodes", "Seeds", "play", "turn_fields"]
