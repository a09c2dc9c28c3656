"""Rewards of episodes. The reward function sees decoded text; training keeps the sampled ids."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from proxpo.models import Policy
from proxpo.ops.shapes import Float, Tensor
from proxpo.rewards import Outcome, RewardItem, RewardPool
from proxpo.stages.reward.spans import token_values
from proxpo.train.episodes import Episodes
from proxpo.train.tasks import Problem


def grade(
    pool: RewardPool,
    problems: Sequence[Problem],
    episodes: Episodes,
    *,
    progress: Callable[[int, int], None] | None = None,
    trainer_state: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """Scores the last turn of every episode; an environment's rewards stand in `extra`.

    trainer_state: progress of training, for functions that ask for TRL's `trainer_state`
    """
    tokens, mask = episodes.samples.tokens.cpu(), episodes.samples.mask.cpu()
    columns = zip(
        problems, episodes.answers, episodes.last, episodes.begins, _played(episodes), strict=True
    )
    items = [
        RewardItem(
            prompt=problem.prompt,
            completion=text,
            answer=problem.answer,
            extra={**problem.extra, **played},
            completion_ids=tokens[row, begin:][mask[row, begin:]].tolist(),
        )
        for problem, text, row, begin, played in columns
    ]
    return pool.score(items, progress=progress, state=trainer_state)


def _played(episodes: Episodes) -> list[dict[str, Any]]:
    """Sum of the rewards of each episode in its environment, and its success; empty without."""
    played = episodes.played
    if played is None:
        return [{} for _ in episodes.answers]
    earned = [0.0] * len(played.success)
    for turn in played.turns:
        earned[turn.episode] += turn.reward
    return [{"earned": e, "success": s} for e, s in zip(earned, played.success)]


def verdicts(pool: RewardPool, outcomes: Sequence[Outcome]) -> list[bool] | None:
    """Right or wrong for each response; None if neither function nor setting tells.

    The reward function tells ("acc" or "correct"), or the setting task.correct_above. A response
    whose reward failed is wrong.
    """
    return [bool(outcome.correct) for outcome in outcomes] if pool.judges else None


def span_rewards(
    policy: Policy, episodes: Episodes, outcomes: Sequence[Outcome]
) -> Float[Tensor, "seq tok"]:
    """Values that the reward function gave to spans of the text, on its tokens; 0 elsewhere."""
    mask = episodes.samples.mask
    rewards = torch.zeros(mask.shape)
    for number, outcome in enumerate(outcomes):
        if outcome.spans:
            row = episodes.last[number]
            first, text = episodes.begins[number], episodes.answers[number]
            ids = episodes.samples.tokens[row, first:][mask[row, first:]].tolist()
            values = token_values(text, _offsets(policy, ids, len(text)), outcome.spans)
            rewards[row, first : first + len(ids)] = values.float()
    return rewards.to(mask.device)


def _offsets(policy: Policy, ids: list[int], length: int) -> list[tuple[int, int]]:
    """Characters [start, end) that each id adds to the decoded text."""
    decode = policy.tokenizer.decode
    texts = (decode(ids[:n], skip_special_tokens=True) for n in range(len(ids)))
    return list(pairwise([*(min(len(text), length) for text in texts), length]))


__all__ = ["grade", "span_rewards", "verdicts"]
