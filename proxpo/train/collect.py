"""From prompts to experience: share out the budget, sample, score, and draw other prompts.

A recipe's `budget` stages say how many responses a prompt gets and how long they may be, its
`prompts` stages which prompts are worth training on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.ops.streams import derive, generator, turn_seed
from proxpo.rewards import Logged, Outcome, RewardPool, tally
from proxpo.sampler import Rollout
from proxpo.train.episodes import Episodes, play
from proxpo.train.experience import Experience, join
from proxpo.train.grading import grade, span_rewards, verdicts
from proxpo.train.tasks import Lazy, Problem, Task
from proxpo.types import Batch, Budget, Clock, Context, Recipe, State

Told = Callable[[str, int, int], None]  # phase, done, total


@dataclass(kw_only=True)
class Source:
    """An endless shuffled walk over the training problems; `cursor` is all it remembers.

    held_out: questions that a generated task must not give to training
    """

    problems: Sequence[Problem]
    seed: int
    held_out: frozenset[str] = frozenset()
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
        problem = self.problems[int(self._order[1][number])]
        if isinstance(self.problems, Lazy) and problem.question in self.held_out:
            raise ProxpoError(f"held-out problem given to training: {problem.question[:200]!r}")
        return problem


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    max_prompt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Who samples what, for whom: the parts of the run that a rollout needs."""

    policy: Policy
    rollout: Rollout
    task: Task
    pool: RewardPool
    recipe: Recipe
    how: Sampling
    seed: int
    state: Mapping[str, State] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    progress: Mapping[str, int | float] = field(default_factory=dict)  # as `Job.progress`
    told: Told = lambda phase, done, total: None


class Collected(NamedTuple):
    """A rollout ready for training, what was seen, and its responses as lines to show."""

    experience: Experience
    metrics: dict[str, float]
    shown: list[dict]


def collect(
    sampler: Sampler, source: Source, *, prompts: int, step: int, version: int
) -> Collected:
    """`prompts` prompts with `how.samples` responses each, all of them to the recipe's liking.

    Prompt filters decide which prompts are kept; others are drawn in their place, as many at a time
    and for as many rounds as the filter says, and a surplus is dropped. `step` numbers the rollout,
    `version` the policy that samples.
    """
    recipe = sampler.recipe
    prompts = round(prompts * _factor(recipe))
    rounds, factor = (
        max((stage.options.get(name, 1) for stage in recipe.prompts), default=1)
        for name in ("max_rounds", "generation_factor")
    )
    kept: list[Experience] = []
    seen: list[_Round] = []
    for number in range(rounds):
        missing = prompts - sum(len(part.group.unique()) for part in kept)
        if missing <= 0:
            break
        path = (sampler.seed, "sample", step, number)
        drawn = _draw(sampler, source.take(factor * missing), path, version)
        seen.append(drawn)
        good = _first(drawn.experience, _worth(sampler, drawn.experience), missing)
        if len(good):
            kept.append(drawn.experience.rows(good))
    if not kept:
        raise ProxpoError(
            f"{recipe.name}: no prompt was worth training on in {rounds} rounds of {prompts} (all "
            "answers right or all wrong): choose another difficulty, or --set prompts=none"
        )
    return Collected(join(kept), _metrics(seen), _shown(seen, step))


class _Round(NamedTuple):
    experience: Experience
    problems: list[Problem]
    episodes: Episodes
    outcomes: list[Outcome]
    logged: Logged
    metrics: dict[str, float]


def _draw(sampler: Sampler, problems: list[Problem], path: tuple, version: int) -> _Round:
    """One round: responses to these problems, scored."""
    policy, task, how, told = sampler.policy, sampler.task, sampler.how, sampler.told
    ids = [task.encode(problem, policy.tokenizer, limit=how.max_prompt) for problem in problems]
    budget, metrics = _budget(sampler, problems, path)
    which = [i for i, n in enumerate(budget.samples.tolist()) for _ in range(n)]
    place = [j for n in budget.samples.tolist() for j in range(n)]
    limits = budget.max_tokens.tolist()
    episodes = play(
        policy,
        sampler.rollout,
        task,
        [ids[i] for i in which],
        seeds=lambda row, turn: turn_seed((*path, which[row], place[row]), turn),
        max_tokens=[limits[i] for i in which],
        temperature=how.temperature,
        top_p=how.top_p,
        progress=lambda done, total: told("sampling", done, total),
    )
    repeated = [problems[i] for i in which]
    outcomes = grade(
        sampler.pool,
        repeated,
        episodes,
        progress=lambda done, total: told("scoring", done, total),
        state=sampler.progress,
    )
    logged = sampler.pool.logged
    metrics |= {f"reward_log/{name}": value for name, value in logged.metrics.items()}
    experience = _experience(sampler, problems, which, episodes, outcomes, path, version)
    return _Round(experience, repeated, episodes, outcomes, logged, metrics)


def _budget(
    sampler: Sampler, problems: list[Problem], path: tuple
) -> tuple[Budget, dict[str, float]]:
    """The even share, as the recipe's budget stages change it."""
    how, device = sampler.how, sampler.policy.device
    numbers = torch.tensor([problem.id for problem in problems], device=device)
    budget = Budget(
        prompt_id=numbers,
        samples=torch.full_like(numbers, how.samples),
        max_tokens=torch.full_like(numbers, how.max_tokens),
    )
    metrics: dict[str, float] = {}
    for stage in sampler.recipe.budget:
        budget, seen = stage.apply(budget, _context(sampler, f"budget.{stage.name}", path))
        metrics |= {name: float(value) for name, value in seen.items()}
    samples, most = budget.samples, budget.max_tokens
    if sampler.recipe.budget:
        moved = (samples != how.samples) | (most.clamp(max=how.max_tokens) != how.max_tokens)
        metrics["budget/moved"] = float(moved.double().mean())
    if not bool((samples >= 0).all()) or not bool(samples.any()) or not bool((most >= 1).all()):
        raise ProxpoError(
            f"{sampler.recipe.name}: the budget must give no prompt fewer than 0 samples or 1 "
            f"token, and some prompt a sample; got samples {samples.tolist()[:8]}, tokens "
            f"{most.tolist()[:8]}"
        )
    return budget.replace(max_tokens=most.clamp(max=how.max_tokens)), metrics


def _factor(recipe: Recipe) -> float:
    """By how much a recipe that prunes responses draws more prompts, to fill the room it makes."""
    stages = (*recipe.budget, *recipe.prune)
    return max((float(one.options.get("prompt_factor") or 1) for one in stages), default=1.0)


def _context(sampler: Sampler, place: str, path: tuple) -> Context:
    return Context(
        state=sampler.state.get(place, {}),
        clock=sampler.clock,
        generator=generator(*path, place),
    )


def _experience(
    sampler: Sampler,
    problems: list[Problem],
    which: list[int],
    episodes: Episodes,
    outcomes: list[Outcome],
    path: tuple,
    version: int,
) -> Experience:
    policy, samples = sampler.policy, episodes.samples
    given, device = episodes.inputs(policy.pad_id), policy.device
    number = torch.tensor(which, device=device)
    numbers = torch.tensor([problem.id for problem in problems], device=device)
    rewards = torch.tensor([outcome.reward for outcome in outcomes], device=device)
    right = verdicts(sampler.pool, outcomes)
    return Experience(
        input_ids=given.input_ids,
        attention_mask=given.attention_mask,
        mask=samples.mask,
        rollout_logp=samples.logp.float(),
        rewards=rewards,
        correct=None if right is None else torch.tensor(right, device=device),
        truncated=~samples.finished,
        group=derive(*path, "group") % 2**40 + number,
        version=torch.full_like(rewards, version, dtype=torch.long),
        prompt_id=numbers[number],
        **_extras(sampler, problems, which, episodes, outcomes),
    )


def _extras(
    sampler: Sampler,
    problems: list[Problem],
    which: list[int],
    episodes: Episodes,
    outcomes: list[Outcome],
) -> dict[str, Tensor]:
    """What only some recipes read, and what costs something to have."""
    wanted, device, found = sampler.recipe.needs(), sampler.policy.device, {}
    if "greedy_rewards" in wanted:
        found["greedy_rewards"] = _greedy(sampler, problems)[torch.tensor(which, device=device)]
    if "turn" in wanted or (sampler.recipe.budget and sampler.task.tool):  # limits hold for turns
        found["turn"] = episodes.turn
    if "void" in wanted:
        found["void"] = episodes.void
    if "duration" in wanted:
        spent = [a + one.seconds for a, one in zip(episodes.seconds, outcomes)]
        found["duration"] = torch.tensor(spent, device=device)
    if "span_rewards" in wanted:
        if not any(one.spans for one in outcomes):
            raise ProxpoError(
                f"{sampler.recipe.name} needs the batch field 'span_rewards', and the reward "
                f'{sampler.pool.spec.where} marks no spans: return {{"score": ..., "spans": '
                "[[start, end, value], ...]}, in characters of the response"
            )
        found["span_rewards"] = span_rewards(sampler.policy, episodes, outcomes)
    return found


def _greedy(sampler: Sampler, problems: list[Problem]) -> Float[Tensor, " prompt"]:
    """The reward of the likeliest response to each prompt."""
    policy, task, how = sampler.policy, sampler.task, sampler.how
    best = play(
        policy,
        sampler.rollout,
        task,
        [task.encode(problem, policy.tokenizer, limit=how.max_prompt) for problem in problems],
        seeds=lambda row, turn: 0,
        max_tokens=how.max_tokens,
        temperature=0.0,
    )
    outcomes = grade(sampler.pool, problems, best, state=sampler.progress)
    return torch.tensor([outcome.reward for outcome in outcomes], device=policy.device)


def _worth(sampler: Sampler, rows: Experience) -> Bool[Tensor, " seq"]:
    """Which rows the recipe's prompt filters keep."""
    batch = Batch(
        logp=rows.rollout_logp,
        mask=rows.mask,
        rewards=rows.rewards,
        group=rows.group,
        prompt_id=rows.prompt_id,
        correct=rows.correct,
        truncated=rows.truncated,
    )
    kept = torch.ones_like(rows.truncated)
    for stage in sampler.recipe.prompts:
        kept = kept & stage.apply(batch, Context(clock=sampler.clock))[0]
    return kept


def _first(rows: Experience, kept: Bool[Tensor, " seq"], prompts: int) -> Int[Tensor, " row"]:
    """Numbers of the kept rows of the first `prompts` prompts that have any."""
    chosen = rows.group[kept].unique()[:prompts]  # groups are numbered in the order of drawing
    return (kept & torch.isin(rows.group, chosen)).nonzero()[:, 0]


def _metrics(seen: list[_Round]) -> dict[str, float]:
    """TRL's names where TRL has one; taken over everything sampled, kept or not."""
    outcomes = [outcome for part in seen for outcome in part.outcomes]

    def column(name: str) -> Tensor:
        return torch.cat([getattr(part.experience, name) for part in seen]).cpu()

    rewards = column("rewards").float()
    scored = rewards[~rewards.isnan()]
    lengths = torch.cat([part.experience.mask.sum(1) for part in seen]).float().cpu()
    spread = scored.std() if len(scored) > 1 else torch.tensor(0.0)
    return {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(spread),
        "frac_reward_zero_std": _flat(rewards, column("group")),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(column("truncated").float().mean()),
        "proxpo/rounds": float(len(seen)),
        "proxpo/samples": float(len(outcomes)),
        "proxpo/tokens": float(lengths.sum()),
        **{f"proxpo/reward_{name}": float(count) for name, count in tally(outcomes).items()},
        **_accuracy(seen),
        **_turns(seen),
        **seen[-1].metrics,
    }


def _accuracy(seen: list[_Round]) -> dict[str, float]:
    """Share of right responses, where it is said what is right."""
    right = [part.experience.correct for part in seen]
    if any(part is None for part in right):
        return {}
    return {"proxpo/train_accuracy": float(torch.cat(right).float().mean())}  # type: ignore[arg-type]


def _flat(rewards: Tensor, group: Tensor) -> float:
    """Share of prompts all of whose responses earned the same."""
    prompts, index = group.unique(return_inverse=True)
    low, high = (
        rewards.new_zeros(len(prompts)).scatter_reduce(0, index, rewards, how, include_self=False)
        for how in ("amin", "amax")
    )
    return float((low == high).float().mean())


def _turns(seen: list[_Round]) -> dict[str, float]:
    """How many turns the episodes took, where there is more than one."""
    last = torch.cat([part.episodes.turn.amax(dim=1) for part in seen]).float().cpu()
    if not bool(last.any()):
        return {}
    void = torch.cat([part.episodes.void for part in seen]).float().cpu()
    return {"proxpo/turns": float(last.mean()) + 1, "proxpo/void": float(void.mean())}


def _shown(seen: list[_Round], step: int) -> list[dict]:
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
        for part in seen
        for columns in [part.logged.columns]
        for row, (problem, text, outcome) in enumerate(
            zip(part.problems, part.episodes.texts, part.outcomes)
        )
    ]


__all__ = ["Collected", "Sampler", "Sampling", "Source", "collect"]
