"""Metrics of a rollout, under TRL's names where TRL has one, and its rows of samples.jsonl."""

from typing import NamedTuple

import torch

from proxpo.ops.shapes import Tensor
from proxpo.rewards import Logged, Outcome, tally
from proxpo.train.episodes import Episodes
from proxpo.train.experience import Experience
from proxpo.train.tasks import Problem


class SampledRound(NamedTuple):
    """One round of sampling, row by row; a rollout takes several where prompts are filtered."""

    experience: Experience
    problems: list[Problem]
    episodes: Episodes
    outcomes: list[Outcome]
    logged: Logged
    metrics: dict[str, float]


def rollout_metrics(rounds: list[SampledRound]) -> dict[str, float]:
    """Metrics over everything that was sampled, kept or not."""
    outcomes = [outcome for part in rounds for outcome in part.outcomes]

    def column(name: str) -> Tensor:
        return torch.cat([getattr(part.experience, name) for part in rounds]).cpu()

    rewards = column("rewards").float()
    scored = rewards[~rewards.isnan()]
    lengths = torch.cat([part.experience.mask.sum(1) for part in rounds]).float().cpu()
    spread = scored.std() if len(scored) > 1 else torch.tensor(0.0)
    return {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(spread),
        "frac_reward_zero_std": _equal_rewards(rewards, column("group")),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(column("truncated").float().mean()),
        "proxpo/rounds": float(len(rounds)),
        "proxpo/samples": float(len(outcomes)),
        "proxpo/tokens": float(lengths.sum()),
        **{f"proxpo/reward_{name}": float(count) for name, count in tally(outcomes).items()},
        **_accuracy(rounds),
        **_turns(rounds),
        **rounds[-1].metrics,
    }


def _accuracy(rounds: list[SampledRound]) -> dict[str, float]:
    """Share of right responses, if the reward function or a setting tells right from wrong."""
    right = [part.experience.correct for part in rounds]
    if any(part is None for part in right):
        return {}
    return {"proxpo/train_accuracy": float(torch.cat(right).float().mean())}  # type: ignore[arg-type]


def _equal_rewards(rewards: Tensor, group: Tensor) -> float:
    """Share of prompts all of whose responses earned the same."""
    prompts, index = group.unique(return_inverse=True)
    low, high = (
        rewards.new_zeros(len(prompts)).scatter_reduce(0, index, rewards, rule, include_self=False)
        for rule in ("amin", "amax")
    )
    return float((low == high).float().mean())


def _turns(rounds: list[SampledRound]) -> dict[str, float]:
    """Mean number of turns and share of void episodes, if one took more than one turn."""
    last = torch.cat([part.episodes.turn.amax(dim=1) for part in rounds]).float().cpu()
    if not bool(last.any()):
        return {}
    void = torch.cat([part.episodes.void for part in rounds]).float().cpu()
    return {"proxpo/turns": float(last.mean()) + 1, "proxpo/void": float(void.mean())}


def sample_lines(rounds: list[SampledRound], step: int) -> list[dict]:
    """Every response of the rollout as a row of samples.jsonl, with what the reward logged."""
    return [
        {
            "step": step,
            "prompt": problem.prompt,
            "completion": text,
            "answer": problem.answer,
            "reward": outcome.reward,
            **(
                {"extra": {name: column[row] for name, column in columns.items()}}
                if columns
                else {}
            ),
        }
        for part in rounds
        for columns in [part.logged.columns]
        for row, (problem, text, outcome) in enumerate(
            zip(part.problems, part.episodes.texts, part.outcomes)
        )
    ]


__all__ = ["SampledRound", "rollout_metrics", "sample_lines"]
