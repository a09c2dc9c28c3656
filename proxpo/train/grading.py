"""Samples -> texts -> outcomes. Rewards see decoded text; training keeps the sampled ids."""

from collections.abc import Callable, Sequence

from proxpo.train.models import Policy
from proxpo.train.rewards import Outcome, RewardItem, RewardPool
from proxpo.train.rollouts import Samples
from proxpo.train.tasks import Problem


def grade(
    policy: Policy,
    pool: RewardPool,
    problems: Sequence[Problem],
    samples: Samples,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[str], list[Outcome]]:
    """The text of every response and what its reward function said."""
    rows = zip(samples.tokens.cpu(), samples.mask.cpu())
    texts = [policy.tokenizer.decode(row[mask], skip_special_tokens=True) for row, mask in rows]
    items = [
        RewardItem(prompt=p.prompt, completion=text, answer=p.answer, extra=p.extra)
        for p, text in zip(problems, texts)
    ]
    return texts, pool.score(items, progress=progress)


def is_correct(outcome: Outcome) -> bool:
    """As the reward function says; where it does not, a positive reward is right."""
    return outcome.reward > 0 if outcome.correct is None else outcome.correct


__all__ = ["grade", "is_correct"]
