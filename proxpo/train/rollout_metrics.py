"""Metrics of a rollout, under TRL's names where TRL has one, and its rows of samples.jsonl."""

import math
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

    rewards = torch.tensor([outcome.reward for outcome in outcomes])
    group = torch.cat([part.experience.group[_last(part)] for part in rounds]).cpu()
    scored = rewards[~rewards.isnan()]
    lengths = torch.cat([part.episodes.samples.mask.sum(1) for part in rounds]).float().cpu()
    equal = not len(scored) or bool((scored == scored[0]).all())
    spread = torch.tensor(0.0) if equal else scored.std()
    drawn = [part.episodes.samples for part in rounds]
    surprise = sum(-float(s.logp.double()[s.mask].sum()) for s in drawn)
    return {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(spread),
        "frac_reward_zero_std": equal_rewards(rewards, group),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(column("truncated").float().mean()),
        "entropy": surprise / max(float(lengths.sum()), 1.0),  # E[-log π] = H
        "proxpo/rounds": float(len(rounds)),
        "proxpo/samples": float(len(outcomes)),
        "proxpo/tokens": float(lengths.sum()),
        **{f"proxpo/reward_{name}": float(count) for name, count in tally(outcomes).items()},
        **_accuracy(rounds),
        **_parsed(outcomes),
        **_turns(rounds),
        **_environments(rounds),
        **rounds[-1].metrics,
    }


def _accuracy(rounds: list[SampledRound]) -> dict[str, float]:
    """Share of right responses, if the reward function or a setting tells right from wrong."""
    right = [
        None if part.experience.correct is None else part.experience.correct[_last(part)]
        for part in rounds
    ]
    if any(part is None for part in right):
        return {}
    return {"proxpo/train_accuracy": float(torch.cat(right).float().mean())}  # type: ignore[arg-type]


def _parsed(outcomes: list[Outcome]) -> dict[str, float]:
    """Share of responses in which the reward function found an answer, if it says so."""
    found = [outcome.parsed for outcome in outcomes if outcome.parsed is not None]
    return {"proxpo/parsed": sum(found) / len(found)} if found else {}


def _last(part: SampledRound) -> Tensor:
    """Row of the last turn of each episode."""
    return torch.tensor(part.episodes.last, device=part.experience.mask.device)


def equal_rewards(rewards: Tensor, group: Tensor) -> float:
    """Share of prompts all of whose responses with a reward earned the same."""
    prompts, index = group.unique(return_inverse=True)
    low, high = (
        rewards.new_full((len(prompts),), missing).scatter_reduce(
            0, index, rewards.nan_to_num(nan=missing), rule
        )
        for rule, missing in (("amin", math.inf), ("amax", -math.inf))
    )
    return float((low >= high).float().mean())


def _turns(rounds: list[SampledRound]) -> dict[str, float]:
    """Mean number of turns and share of void episodes, if one took more than one turn."""
    last = torch.cat([part.episodes.turn.amax(dim=1)[_last(part)] for part in rounds]).float().cpu()
    if not bool(last.any()):
        return {}
    void = torch.cat([part.episodes.void for part in rounds]).float().cpu()
    return {"proxpo/turns": float(last.mean()) + 1, "proxpo/void": float(void.mean())}


def _environments(rounds: list[SampledRound]) -> dict[str, float]:
    """Successes by attempt, and episodes that ended because their next prompt had no room."""
    played = [part.episodes.played for part in rounds if part.episodes.played is not None]
    if not played:
        return {}
    crowded = [flag for part in played for flag in part.crowded]
    attempts: dict[int, int] = {}
    for part in played:
        final = {turn.episode: turn.situation.attempt for turn in part.turns}
        for episode, number in final.items():
            if part.success[episode]:
                attempts[number] = attempts.get(number, 0) + 1
    total = len(crowded)
    most = max(turn.situation.attempt for part in played for turn in part.turns)
    return {
        "proxpo/crowded": sum(crowded) / total,
        **{
            f"proxpo/success@{n + 1}": sum(attempts.get(i, 0) for i in range(n + 1)) / total
            for n in range(most + 1)
        },
    }


def sample_lines(rounds: list[SampledRound]) -> list[dict]:
    """Every response of the rollout as a row of samples.jsonl, with what the reward logged."""
    return [
        {
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


__all__ = ["SampledRound", "equal_rewards", "rollout_metrics", "sample_lines"]
