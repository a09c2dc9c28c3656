"""Episodes -> outcomes. Rewards see decoded text; training keeps the sampled ids."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from proxpo.rewards.spans import token_values
from proxpo.shapes import Float, Tensor
from proxpo.train.episodes import Episodes
from proxpo.train.models import Policy
from proxpo.train.rewards import Outcome, RewardItem, RewardPool
from proxpo.train.tasks import Problem


def grade(
    pool: RewardPool,
    problems: Sequence[Problem],
    episodes: Episodes,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """What the reward function says to every response, or to its last turn."""
    items = [
        RewardItem(prompt=p.prompt, completion=text, answer=p.answer, extra=p.extra)
        for p, text in zip(problems, episodes.answers)
    ]
    return pool.score(items, progress=progress)


def is_correct(outcome: Outcome) -> bool:
    """As the reward function says; where it does not, a positive reward is right."""
    return outcome.reward > 0 if outcome.correct is None else outcome.correct


def span_rewards(
    policy: Policy, episodes: Episodes, outcomes: Sequence[Outcome]
) -> Float[Tensor, "seq tok"]:
    """The marks a reward function put on the text it saw, on its tokens; 0 where there is none."""
    mask = episodes.samples.mask
    found = torch.zeros(mask.shape)
    for row, outcome in enumerate(outcomes):
        if outcome.spans:
            first, text = episodes.begins[row], episodes.answers[row]
            ids = episodes.samples.tokens[row, first:][mask[row, first:]].tolist()
            values = token_values(text, _offsets(policy, ids, len(text)), outcome.spans)
            found[row, first : first + len(ids)] = values.float()
    return found.to(mask.device)


def _offsets(policy: Policy, ids: list[int], length: int) -> list[tuple[int, int]]:
    """Characters [start, end) that each id adds to the decoded text."""
    decode = policy.tokenizer.decode
    texts = (decode(ids[:n], skip_special_tokens=True) for n in range(len(ids)))
    return list(pairwise([*(min(len(text), length) for text in texts), length]))


__all__ = ["grade", "is_correct", "span_rewards"]
