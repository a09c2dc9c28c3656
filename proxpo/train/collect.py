"""From prompts to an `Experience`: budget, sampling, rewards, and prompts in place of others.

A recipe's `budget` stages decide how many responses a prompt gets and how long they may be, its
`prompts` stages which prompts are trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.metering import free_name
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.ops.streams import derive, generator, turn_seed
from proxpo.rewards import Outcome, RewardPool
from proxpo.sampler import Sampler
from proxpo.train.episodes import Episodes, play, turn_fields
from proxpo.train.experience import Experience, join
from proxpo.train.grading import grade, span_rewards, verdicts
from proxpo.train.learning_signal import common_facts
from proxpo.train.observer import SILENT, Observer
from proxpo.train.rollout_metrics import SampledRound, rollout_metrics, sample_lines
from proxpo.train.tasks import Lazy, Problem, Task
from proxpo.types import Batch, Budget, Clock, Context, Recipe, State


@dataclass(kw_only=True)
class Source:
    """Training problems in an endless shuffled order; `cursor` is its only state.

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
class SamplingOptions:
    """Number, length and distribution of the responses to a prompt."""

    samples: int
    max_tokens: int
    temperature: float
    top_p: float
    max_prompt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Collector:
    """The parts of a run that a rollout needs."""

    policy: Policy
    sampler: Sampler
    task: Task
    pool: RewardPool
    recipe: Recipe
    options: SamplingOptions
    seed: int
    state: Mapping[str, State] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    trainer_state: Mapping[str, int | float] = field(default_factory=dict)
    observer: Observer = SILENT


class Collected(NamedTuple):
    """A rollout: tensors for training, metrics, and its responses as rows of samples.jsonl."""

    experience: Experience
    metrics: dict[str, float]
    lines: list[dict]


def collect(
    collector: Collector, source: Source, *, prompts: int, step: int, version: int
) -> Collected:
    """Samples and scores `options.samples` responses to each of `prompts` prompts.

    Prompt filters decide which prompts are kept; others are drawn in their place, as many at a time
    and for as many rounds as the filter says, and a surplus is dropped. `step` numbers the rollout,
    `version` the policy that samples.
    """
    recipe = collector.recipe
    prompts = round(prompts * prompt_factor(recipe))
    rounds, factor = (
        max((stage.options.get(name, 1) for stage in recipe.prompts), default=1)
        for name in ("max_rounds", "generation_factor")
    )
    kept: list[Experience] = []
    sampled: list[SampledRound] = []
    for number in range(rounds):
        missing = prompts - sum(len(part.group.unique()) for part in kept)
        if missing <= 0:
            break
        path = (collector.seed, "sample", step, number)
        drawn = _sample_round(collector, source.take(factor * missing), path, version)
        sampled.append(drawn)
        keep = _prompt_filter(collector, drawn.experience)
        rows = _rows_of_first(drawn.experience, keep, missing)
        if len(rows):
            kept.append(drawn.experience.rows(rows))
    metrics = rollout_metrics(sampled)
    if not kept:
        facts = "; ".join(common_facts(metrics, max_tokens=collector.options.max_tokens).values())
        raise ProxpoError(
            f"{recipe.name}: no prompt was worth training on in {rounds} rounds of {prompts} "
            f"({facts or 'all answers right or all wrong'}): choose another difficulty, or --set "
            "prompts=none"
        )
    return Collected(join(kept), metrics, sample_lines(sampled))


def _sample_round(
    collector: Collector, problems: list[Problem], path: tuple, version: int
) -> SampledRound:
    """Samples and scores responses to these problems."""
    policy, task, options = collector.policy, collector.task, collector.options
    on_progress, limit = collector.observer.on_progress, options.max_prompt
    ids = [task.encode(problem, policy.tokenizer, limit=limit) for problem in problems]
    budget, metrics = _budget(collector, problems, path)
    which = [i for i, n in enumerate(budget.samples.tolist()) for _ in range(n)]
    place = [j for n in budget.samples.tolist() for j in range(n)]
    limits = budget.max_tokens.tolist()
    episodes = play(
        policy,
        collector.sampler,
        task,
        [ids[i] for i in which],
        seeds=lambda row, turn: turn_seed((*path, which[row], place[row]), turn),
        max_tokens=[limits[i] for i in which],
        temperature=options.temperature,
        top_p=options.top_p,
        problems=[problems[i] for i in which],
        histories="full_logp" in collector.recipe.needs(),
        progress=lambda done, total: on_progress("sampling", done, total),
    )
    repeated = [problems[i] for i in which]
    outcomes = grade(
        collector.pool,
        repeated,
        episodes,
        progress=lambda done, total: on_progress("scoring", done, total),
        trainer_state=collector.trainer_state,
    )
    logged = collector.pool.logged
    metrics |= {f"reward_log/{name}": value for name, value in logged.metrics.items()}
    experience = _experience(collector, problems, which, episodes, outcomes, path, version)
    return SampledRound(experience, repeated, episodes, outcomes, logged, metrics)


def _budget(
    collector: Collector, problems: list[Problem], path: tuple
) -> tuple[Budget, dict[str, float]]:
    """The even share of responses and tokens, as the recipe's budget stages change it."""
    options, device = collector.options, collector.policy.device
    numbers = torch.tensor([problem.id for problem in problems], device=device)
    budget = Budget(
        prompt_id=numbers,
        samples=torch.full_like(numbers, options.samples),
        max_tokens=torch.full_like(numbers, options.max_tokens),
    )
    metrics: dict[str, float] = {}
    for stage in collector.recipe.budget:
        budget, numbers = stage.apply(budget, _context(collector, f"budget.{stage.name}", path))
        for name, value in numbers.items():
            metrics[free_name(name, metrics)] = float(value)
    samples, most = budget.samples, budget.max_tokens
    if collector.recipe.budget:
        limit = options.max_tokens
        moved = (samples != options.samples) | (most.clamp(max=limit) != limit)
        metrics["budget/moved"] = float(moved.double().mean())
    if not bool((samples >= 0).all()) or not bool(samples.any()) or not bool((most >= 1).all()):
        raise ProxpoError(
            f"{collector.recipe.name}: the budget must give no prompt fewer than 0 samples or 1 "
            f"token, and some prompt a sample; got samples {samples.tolist()[:8]}, tokens "
            f"{most.tolist()[:8]}"
        )
    return budget.replace(max_tokens=most.clamp(max=options.max_tokens)), metrics


def prompt_factor(recipe: Recipe) -> float:
    """Factor on the number of prompts of a recipe that prunes responses, to fill their places."""
    stages = (*recipe.budget, *recipe.prune)
    return max((float(stage.options.get("prompt_factor") or 1) for stage in stages), default=1.0)


def _context(collector: Collector, place: str, path: tuple) -> Context:
    return Context(
        state=collector.state.get(place, {}),
        clock=collector.clock,
        generator=generator(*path, place),
    )


def _experience(
    collector: Collector,
    problems: list[Problem],
    which: list[int],
    episodes: Episodes,
    outcomes: list[Outcome],
    path: tuple,
    version: int,
) -> Experience:
    policy, samples, thoughts = collector.policy, episodes.samples, episodes.samples.thoughts
    inputs, device = episodes.inputs(policy.pad_id), policy.device
    owner = episodes.owner
    number = torch.tensor(which, device=device)[owner]
    numbers = torch.tensor([problem.id for problem in problems], device=device)
    rewards = torch.tensor([outcome.reward for outcome in outcomes], device=device)[owner]
    right = verdicts(collector.pool, outcomes)
    return Experience(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        mask=samples.real if "latent" in collector.recipe.needs() else samples.mask,
        rollout_logp=samples.logp.float(),
        rewards=rewards,
        correct=None if right is None else torch.tensor(right, device=device)[owner],
        truncated=~samples.finished,
        group=derive(*path, "group") % 2**40 + number,
        version=torch.full_like(rewards, version, dtype=torch.long),
        prompt_id=numbers[number],
        thoughts=thoughts and thoughts.value,
        thought_means=thoughts and thoughts.mean,
        **_extras(collector, problems, which, episodes, outcomes),
        **turn_fields(episodes, path, device),
    )


def _extras(
    collector: Collector,
    problems: list[Problem],
    which: list[int],
    episodes: Episodes,
    outcomes: list[Outcome],
) -> dict[str, Tensor]:
    """Fields that only some recipes read."""
    recipe, device = collector.recipe, collector.policy.device
    wanted, extras = recipe.needs(), {}
    if "greedy_rewards" in wanted:
        which_problem = torch.tensor(which, device=device)[episodes.owner]
        extras["greedy_rewards"] = _greedy_rewards(collector, problems)[which_problem]
    if "turn" in wanted or (recipe.budget and collector.task.tool):  # limits hold for turns
        extras["turn"] = episodes.turn
    if "void" in wanted:
        extras["void"] = episodes.void
    if "duration" in wanted:
        spent = [tool + outcome.seconds for tool, outcome in zip(episodes.seconds, outcomes)]
        extras["duration"] = torch.tensor(spent, device=device)[episodes.owner]
    if "feasible" in wanted:
        if any(outcome.feasible is None for outcome in outcomes if outcome.status == "ok"):
            raise ProxpoError(
                f"{recipe.name} needs the batch field 'feasible', and the reward "
                f'{collector.pool.spec.where} does not say it: return {{"score": ..., "feasible": '
                "true or false}"
            )
        allowed = [bool(outcome.feasible) for outcome in outcomes]
        extras["feasible"] = torch.tensor(allowed, device=device)[episodes.owner]
    if "span_rewards" in wanted:
        if not any(outcome.spans for outcome in outcomes):
            raise ProxpoError(
                f"{recipe.name} needs the batch field 'span_rewards', and the reward "
                f'{collector.pool.spec.where} marks no spans: return {{"score": ..., "spans": '
                "[[start, end, value], ...]}, in characters of the response"
            )
        extras["span_rewards"] = span_rewards(collector.policy, episodes, outcomes)
    return extras


def _greedy_rewards(collector: Collector, problems: list[Problem]) -> Float[Tensor, " prompt"]:
    """The reward of the greedy response to each prompt."""
    policy, task, options = collector.policy, collector.task, collector.options
    greedy = play(
        policy,
        collector.sampler,
        task,
        [task.encode(problem, policy.tokenizer, limit=options.max_prompt) for problem in problems],
        seeds=lambda row, turn: 0,
        max_tokens=options.max_tokens,
        temperature=0.0,
        problems=problems,
    )
    outcomes = grade(collector.pool, problems, greedy, trainer_state=collector.trainer_state)
    return torch.tensor([outcome.reward for outcome in outcomes], device=policy.device)


def _prompt_filter(collector: Collector, rows: Experience) -> Bool[Tensor, " seq"]:
    """True for rows that the recipe's prompt filters keep."""
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
    for stage in collector.recipe.prompts:
        kept = kept & stage.apply(batch, Context(clock=collector.clock))[0]
    return kept


def _rows_of_first(
    rows: Experience, kept: Bool[Tensor, " seq"], prompts: int
) -> Int[Tensor, " row"]:
    """Numbers of the kept rows of the first `prompts` prompts that have any."""
    chosen = rows.group[kept].unique()[:prompts]  # groups are numbered in the order of drawing
    return (kept & torch.isin(rows.group, chosen)).nonzero()[:, 0]


__all__ = ["Collected", "Collector", "SamplingOptions", "Source", "collect", "prompt_factor"]
