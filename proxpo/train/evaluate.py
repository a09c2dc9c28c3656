"""Evaluation of a policy on held-out problems, with seeds that never change during a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import nn

from proxpo.logp import HeadInput, KlEntropy, model_states, thoughts_fed, token_kl
from proxpo.models import Policy
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import turn_seed
from proxpo.rewards import Outcome, RewardPool
from proxpo.sampler import Sampler
from proxpo.train.cuts import Cut, Rows, TokenBudget
from proxpo.train.episodes import Episodes, play
from proxpo.train.experience import used_columns
from proxpo.train.grading import grade, verdicts
from proxpo.train.observer import SILENT, Observer
from proxpo.train.tasks import Problem, Task

Progress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Held-out problems, number of answers to each, their longest length and distribution.

    micro_batch: answers in one pass of the model; None: as many as a budget of tokens allows
    """

    problems: list[Problem]
    samples: int
    max_tokens: int
    temperature: float
    micro_batch: int | None
    seed: int


def evaluate(
    *,
    policy: Policy,
    initial: nn.Module | None,
    sampler: Sampler,
    task: Task,
    pool: RewardPool,
    exam: Examination,
    budget: TokenBudget | None = None,
    observer: Observer = SILENT,
    trainer_state: Mapping[str, int | float] | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """Rewards, accuracy, avg@k and pass@k, KL to the initial policy and entropy; a few answers.

    Greedy answers, but for avg@k and pass@k. There are accuracies if the reward function or the
    setting task.correct_above tells right from wrong. With no samples (k = 0), KL and entropy are
    those along the greedy answers. `observer.on_progress` is called all along, so that an error
    raised there gives the evaluation up. budget: of passes without a fixed number of answers.
    trainer_state: as `Job.trainer_state`.
    """
    progress = partial(observer.on_progress, "evaluating")
    prompts = [task.encode(problem, policy.tokenizer) for problem in exam.problems]
    greedy = play(
        policy,
        sampler,
        task,
        prompts,
        seeds=lambda row, turn: 0,
        max_tokens=exam.max_tokens,
        temperature=0.0,
        problems=exam.problems,
        progress=progress,
    )
    outcomes = grade(pool, exam.problems, greedy, progress=progress, trainer_state=trainer_state)
    logged = {f"eval/reward_log/{name}": value for name, value in pool.logged.metrics.items()}
    right = verdicts(pool, outcomes)
    drawn: Episodes = greedy
    chances: dict[str, float] = {}
    if exam.samples:
        drawn, chances = _sampled(
            policy, sampler, task, pool, exam, prompts, progress, trainer_state
        )
    kl, entropy = distance(policy, initial, drawn, exam, budget=budget, progress=progress)
    numbers = {
        **({} if right is None else {"eval/accuracy": float(torch.tensor(right).float().mean())}),
        "eval/reward": _mean_reward(outcomes),
        **chances,
        **logged,
        "eval/entropy": entropy,
        "eval/mean_length": float(drawn.samples.mask.sum(dim=1).float().mean()),
    }
    if initial is not None:
        numbers["eval/kl"] = kl
    shown = [
        {"prompt": p.prompt, "completion": t, "answer": p.answer, "correct": r}
        for p, t, r in zip(exam.problems[:8], greedy.texts, right or repeat(None))
    ]
    return numbers, shown


def _sampled(
    policy: Policy,
    sampler: Sampler,
    task: Task,
    pool: RewardPool,
    exam: Examination,
    prompts: list[list[int]],
    progress: Progress,
    trainer_state: Mapping[str, int | float] | None,
) -> tuple[Episodes, dict[str, float]]:
    """k answers to every problem, their mean reward, avg@k and pass@k."""
    k = exam.samples
    repeated = [problem for problem in exam.problems for _ in range(k)]
    drawn = play(
        policy,
        sampler,
        task,
        [prompt for prompt in prompts for _ in range(k)],
        seeds=lambda row, turn: turn_seed((exam.seed, "eval", row // k, row % k), turn),
        max_tokens=exam.max_tokens,
        temperature=exam.temperature,
        problems=repeated,
        progress=progress,
    )
    outcomes = grade(pool, repeated, drawn, progress=progress, trainer_state=trainer_state)
    earned = {f"eval/reward@{k}": _mean_reward(outcomes)}
    right = verdicts(pool, outcomes)
    if right is None:
        return drawn, earned
    sampled = torch.tensor(right).float()
    hits = sampled.view(-1, k).sum(dim=1)
    chances = {f"eval/pass@{n}": pass_at(hits, k, n) for n in _powers(k)}
    return drawn, {f"eval/avg@{k}": float(sampled.mean()), **chances, **earned}


def pass_at(hits: Float[Tensor, " problem"], samples: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right, 1 - C(n-c, k)/C(n, k)."""
    total = math.comb(samples, k)
    missed = [math.comb(samples - int(c), k) / total for c in hits]
    return 1.0 - sum(missed) / max(len(missed), 1)


@torch.no_grad()
def distance(
    policy: Policy,
    initial: nn.Module | None,
    episodes: Episodes,
    exam: Examination,
    *,
    budget: TokenBudget | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[float, float]:
    """KL(π‖π_initial) in nats per episode and entropy per token, exact over the vocabulary.

    The contexts are those the current policy has just sampled, latent thoughts included, which
    count neither as tokens nor in the KL. Logits exist one tile at a time.
    """
    (ids, attention), mask = episodes.inputs(policy.pad_id), episodes.samples.mask
    thoughts = episodes.samples.thoughts

    def sums(rows: Tensor) -> KlEntropy:
        columns, used = used_columns(mask[rows], attention[rows])
        fed = thoughts and thoughts.value[rows]

        def states(model: nn.Module) -> HeadInput:
            with thoughts_fed(model, fed, tokens=used):
                return model_states(
                    model,
                    ids[rows, columns],
                    mask[rows, :used],
                    attention_mask=attention[rows, columns],
                )

        with policy.autocast():
            own = states(policy.model)
            start = own if initial is None or initial is policy.model else states(initial)
            tokens = token_kl(own, start, temperature=exam.temperature or 1.0)
        return KlEntropy(*(x.sum() for x in tokens))

    def whole(cut: Cut) -> tuple[float, float]:
        kl = entropy = 0.0
        done = 0
        for rows in cut:
            progress(done, len(mask))
            part = sums(rows)
            kl, entropy, done = kl + float(part.kl), entropy + float(part.entropy), done + len(rows)
        return kl / len(episodes.answers), entropy / max(float(mask.sum()), 1.0)

    if exam.micro_batch is None:
        return (budget or TokenBudget()).run(Rows(mask, attention), whole)
    return whole(list(torch.arange(len(mask)).split(exam.micro_batch)))


def _mean_reward(outcomes: Sequence[Outcome]) -> float:
    """The mean over the responses that have a reward; NaN if none has."""
    return float(torch.tensor([outcome.reward for outcome in outcomes]).nanmean())


def _powers(k: int) -> list[int]:
    """2, 4, 8 ... up to k, and k."""
    return sorted({k, *(2**i for i in range(1, k.bit_length()) if 2**i <= k)})


__all__ = ["Examination", "evaluate", "pass_at"]
