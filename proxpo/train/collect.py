"""From prompts to experience: sample, score, and sample others where a recipe wants them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.shapes import Bool, Tensor
from proxpo.train.experience import Experience, join
from proxpo.train.grading import grade, is_correct
from proxpo.train.models import Policy
from proxpo.train.rewards import Outcome, RewardPool
from proxpo.train.rollouts import Rollout, Samples, inputs
from proxpo.train.streams import derive, generator
from proxpo.train.tasks import Problem, Task
from proxpo.types import Batch, Context, Recipe

Told = Callable[[str, int, int], None]  # phase, done, total


@dataclass(kw_only=True)
class Source:
    """An endless shuffled walk over the training problems; `cursor` is all it remembers."""

    problems: Sequence[Problem]
    seed: int
    cursor: int = 0
    _order: tuple[int, Tensor] | None = field(default=None, repr=False)

    def take(self, n: int) -> list[Problem]:
        """The next n problems; each passes once before any comes again."""
        taken = [self._at(self.cursor + i) for i in range(n)]
        self.cursor += n
        return taken

    def _at(self, place: int) -> Problem:
        epoch, number = divmod(place, len(self.problems))
        if self._order is None or self._order[0] != epoch:
            shuffle = generator(self.seed, "data", epoch)
            self._order = epoch, torch.randperm(len(self.problems), generator=shuffle)
        return self.problems[int(self._order[1][number])]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    max_prompt: int | None = None


class Collected(NamedTuple):
    """A rollout ready for training, what was seen, and a few responses to show."""

    experience: Experience
    metrics: dict[str, float]
    shown: list[dict]


def collect(
    *,
    policy: Policy,
    rollout: Rollout,
    task: Task,
    pool: RewardPool,
    source: Source,
    recipe: Recipe,
    prompts: int,
    how: Sampling,
    seed: int,
    step: int,
    version: int,
    greedy: bool,
    told: Told,
) -> Collected:
    """`prompts` prompts with `how.samples` responses each, all of them to the recipe's liking.

    A recipe's prompt filters decide which prompts are kept; others are drawn in their place, for as
    many rounds as the filter allows.
    """
    keep = _prompt_filter(recipe)
    rounds = max((stage.options.get("max_rounds", 1) for stage in recipe.prompts), default=1)
    kept: list[Experience] = []
    seen: list[_Round] = []
    for number in range(rounds):
        missing = prompts - sum(len(part.mask) for part in kept) // how.samples
        if missing <= 0:
            break
        path = (seed, "sample", step, number)
        drawn = _draw(
            policy, rollout, task, pool, source.take(missing), how, path, version, greedy, told
        )
        seen.append(drawn)
        good = keep(drawn.experience).nonzero()[:, 0]
        if len(good):
            kept.append(drawn.experience.rows(good))
    if not kept:
        raise ProxpoError(
            f"{recipe.name}: no prompt was worth training on in {rounds} rounds of {prompts} (all "
            "answers right or all wrong): choose another difficulty, or --set prompts=none"
        )
    experience = join(kept)
    most = prompts * how.samples
    full = experience.rows(
        torch.arange(min(most, len(experience.mask)), device=experience.mask.device)
    )
    return Collected(full, _metrics(seen, how), _shown(seen[0], step))


class _Round(NamedTuple):
    experience: Experience
    problems: list[Problem]
    texts: list[str]
    outcomes: list[Outcome]


def _draw(
    policy: Policy,
    rollout: Rollout,
    task: Task,
    pool: RewardPool,
    problems: list[Problem],
    how: Sampling,
    path: tuple,
    version: int,
    greedy: bool,
    told: Told,
) -> _Round:
    """One round: responses to these problems, scored."""
    repeated = [problem for problem in problems for _ in range(how.samples)]
    ids = [task.encode(problem, policy.tokenizer, limit=how.max_prompt) for problem in problems]
    prompts = [prompt for prompt in ids for _ in range(how.samples)]
    samples = rollout.sample(
        prompts,
        seeds=[derive(*path, i // how.samples, i % how.samples) for i in range(len(prompts))],
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        progress=lambda done, total: told("sampling", done, total),
    )
    texts, outcomes = grade(
        policy, pool, repeated, samples, progress=lambda done, total: told("scoring", done, total)
    )
    experience = _experience(policy, samples, outcomes, how, path, version)
    if greedy:
        best = rollout.sample(ids, seeds=[0] * len(ids), max_tokens=how.max_tokens, temperature=0.0)
        _, greedy_outcomes = grade(policy, pool, problems, best)
        rewards = torch.tensor([o.reward for o in greedy_outcomes]).to(policy.device)
        experience = Experience(
            **experience.tensors(), greedy_rewards=rewards.repeat_interleave(how.samples)
        )
    return _Round(experience, repeated, texts, outcomes)


def _experience(
    policy: Policy,
    samples: Samples,
    outcomes: list[Outcome],
    how: Sampling,
    path: tuple,
    version: int,
) -> Experience:
    given = inputs(samples, policy.pad_id)
    device = policy.device
    prompts = len(outcomes) // how.samples
    first = derive(*path, "group") % 2**40
    rewards = torch.tensor([outcome.reward for outcome in outcomes], device=device)
    right = [is_correct(outcome) for outcome in outcomes]
    return Experience(
        input_ids=given.input_ids,
        attention_mask=given.attention_mask,
        mask=samples.mask,
        rollout_logp=samples.logp.float(),
        rewards=rewards,
        correct=torch.tensor(right, device=device),
        truncated=~samples.finished,
        group=(first + torch.arange(prompts, device=device)).repeat_interleave(how.samples),
        version=torch.full_like(rewards, version, dtype=torch.long),
    )


def _prompt_filter(recipe: Recipe) -> Callable[[Experience], Bool[Tensor, " seq"]]:
    def keep(rows: Experience) -> Bool[Tensor, " seq"]:
        batch = Batch(
            logp=rows.rollout_logp,
            mask=rows.mask,
            rewards=rows.rewards,
            group=rows.group,
            correct=rows.correct,
        )
        kept = torch.ones_like(rows.truncated)
        for stage in recipe.prompts:
            kept = kept & stage.apply(batch, Context())[0]
        return kept

    return keep


def _metrics(seen: list[_Round], how: Sampling) -> dict[str, float]:
    """TRL's names where TRL has one; taken over everything sampled, kept or not."""
    outcomes = [outcome for part in seen for outcome in part.outcomes]
    status = Counter(outcome.status for outcome in outcomes)
    rewards = torch.cat([part.experience.rewards for part in seen]).float().cpu()
    scored = rewards[~rewards.isnan()]
    lengths = torch.cat([part.experience.mask.sum(1) for part in seen]).float().cpu()
    truncated = torch.cat([part.experience.truncated for part in seen]).float().cpu()
    grouped = rewards.view(-1, how.samples)
    flat = (grouped == grouped[:, :1]).all(dim=1).float()
    spread = scored.std() if len(scored) > 1 else torch.tensor(0.0)
    right = torch.cat([part.experience.correct for part in seen]).float().cpu()
    return {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(spread),
        "frac_reward_zero_std": float(flat.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "proxpo/train_accuracy": float(right.mean()),
        "proxpo/rounds": float(len(seen)),
        "proxpo/samples": float(len(outcomes)),
        "proxpo/tokens": float(lengths.sum()),
        **{f"proxpo/reward_{name}": float(status[name]) for name in ("timeout", "error", "nan")},
    }


def _shown(part: _Round, step: int) -> list[dict]:
    rows = zip(part.problems, part.texts, part.outcomes)
    return [
        {"step": step, "prompt": p.prompt, "completion": t, "answer": p.answer, "reward": o.reward}
        for p, t, o in list(rows)[:2]
    ]


__all__ = ["Collected", "Sampling", "Source", "collect"]
