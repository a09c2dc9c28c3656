"""Episodes -> outcomes. Rewards see decoded text; training keeps the sampled ids."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

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


def span_values(
    policy: Policy, episodes: Episodes, outcomes: Sequence[Outcome]
) -> Float[Tensor, "seq tok"]:
    """The marks a reward function put on characters of the text it saw, on the tokens they touch.

    Where marks overlap, the last one counts; 0 where there is none.
    """
    mask = episodes.samples.mask
    found = torch.zeros(mask.shape)
    for row, outcome in enumerate(outcomes):
        if not outcome.spans:
            continue
        first = episodes.begins[row]
        ids = episodes.samples.tokens[row, first:][mask[row, first:]].tolist()
        texts = (
            policy.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids))
        )
        edges = [*map(len, texts), len(episodes.answers[row])]
        for start, end, value in outcome.spans:
            for place, (left, right) in enumerate(pairwise(edges)):
                if max(left, start) < min(right, end):
                    found[row, first + place] = value
    return found.to(mask.device)


__all__ = ["grade", "is_correct", "span_values"]
