"""Jobs of recipes in control: episodes become rollouts, a step of an environment is a token.

A recipe with a critic trains on segments: `rollout.max_tokens` steps of every environment, each
piece of an episode a row, with γV of what follows added to the last reward of a piece that did not
end. Others train on whole episodes: `rollout.samples_per_prompt` from each of
`rollout.prompts_per_step` starts, which are their groups.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from proxpo.control.checks import by_step, check_recipe
from proxpo.control.environments import Environments, Normaliser, read_options
from proxpo.control.networks import Actor, RecurrentActor, make_actor, make_critic
from proxpo.control.play import Play, examine, policy_inputs, result
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.settings import at_length
from proxpo.train.collect import Collected
from proxpo.train.config import Config
from proxpo.train.experience import Experience
from proxpo.train.job import Examined
from proxpo.train.observer import SILENT, Observer
from proxpo.train.refusals import unused
from proxpo.train.rollout_metrics import equal_rewards
from proxpo.train.rollouts import RolloutJob
from proxpo.train.scoring import VOCABULARY, Learner, run_optimizer, run_transform
from proxpo.types import Recipe


@dataclass
class ControlPolicy:
    """A network over environment steps, in the place of a language model's `Policy`."""

    model: Any
    name: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


@dataclass(kw_only=True)
class Steps:
    """The steps of a rollout, each of all environments: observations, policy inputs, draws."""

    seen: list[Tensor] = field(default_factory=list)
    x: list[Tensor] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)


@dataclass(kw_only=True)
class Piece:
    """Consecutive steps of one episode: `length` from step `first` on, in environment `index`.

    after: the policy's input behind the last step; ended: the episode is over there; truncated: it
    was cut by a limit
    """

    index: int
    first: int = 0
    length: int = 0
    after: Tensor | None = None
    ended: bool = False
    truncated: bool = False
    group: int = 0


class Rollout(NamedTuple):
    """Pieces of episodes, and the steps that they are cut from."""

    steps: Steps
    pieces: list[Piece]

    def mask(self) -> Bool[Tensor, "seq tok"]:
        """True at the steps of each piece."""
        lengths = torch.tensor([piece.length for piece in self.pieces])
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def rows(self, values: list[Tensor]) -> Float[Tensor, "step ..."]:
        """The values of all pieces, one after the other."""
        stacked = torch.stack(values)
        return torch.cat([stacked[p.first : p.first + p.length, p.index] for p in self.pieces])


@dataclass(kw_only=True)
class ControlJob(RolloutJob):
    """A policy of an environment, trained by a recipe."""

    play: Play
    exam: Environments
    normaliser: Normaliser | None
    segments: bool

    @property
    def actor(self) -> Actor | RecurrentActor:
        return self.learner.policy.model

    @property
    def most_parts(self) -> int:
        rollout = self.config.rollout
        steps = rollout.max_tokens if self.learner.by_step else 1
        return len(self.play.environments) * steps

    def remarks(self) -> list[str]:
        rollout, count = self.config.rollout, len(self.play.environments)
        kind = (
            f"segments of {rollout.max_tokens} steps in {count} environments"
            if self.segments
            else f"whole episodes, {rollout.samples_per_prompt} from each of "
            f"{rollout.prompts_per_step} starts, of {rollout.max_tokens} steps at most"
        )
        cut = "steps" if self.learner.by_step else "rows"
        line = f"{self.learner.recipe.name}: trains on {kind}; mini-batches are drawn from {cut}"
        return [*unused(self.config, self.learner.recipe).values(), line]

    # --- rollouts

    def collect(self, number: int, observer: Observer = SILENT) -> Collected:
        before = self.play.state()
        try:
            rollout = (self._segments if self.segments else self._episodes)(number, observer)
        except BaseException:
            self.play.load(before)
            raise
        if self.normaliser is not None:  # of the next rollout on
            self.normaliser.update(rollout.rows(rollout.steps.seen))
        experience, returns = self._experience(rollout, number)
        lines = _lines(rollout.pieces, returns.tolist())
        metrics = self._metrics(rollout.pieces)
        if not self.segments:
            metrics["frac_reward_zero_std"] = equal_rewards(returns, experience.group)
        return Collected(experience, metrics, lines)

    def _segments(self, number: int, observer: Observer) -> Rollout:
        """The next steps of every environment, as pieces of episodes."""
        play, draws = self.play, generator(self.config.seed, "sample", number)
        count, steps = len(play.environments), self.config.rollout.max_tokens
        done, pieces, every = Steps(), list[Piece](), list(range(count))
        current = [Piece(index=index) for index in every]
        for index in every:
            if play.over[index]:
                play.begin(index, self._seed(index))
        for t in range(steps):
            if t % 64 == 0:
                observer.on_progress("sampling", t, steps)
            policy = self._sampling_policy(done, draws, t)
            ended = self._step(done, current, draws, every, policy)
            for index in every if t == steps - 1 else ended:
                current[index].after = self._inputs(
                    play.environments.observations[index, None], play.memory[index, None]
                )[0]
                pieces.append(current[index])
                current[index] = Piece(index=index, first=t + 1)
            for index in ended:
                play.begin(index, self._seed(index))
        return Rollout(done, pieces)

    def _episodes(self, number: int, observer: Observer) -> Rollout:
        """Whole episodes: some from each start, with groups in the order of the starts."""
        play, draws = self.play, generator(self.config.seed, "sample", number)
        samples, steps = self.config.rollout.samples_per_prompt, self.config.rollout.max_tokens
        count, done = len(play.environments), Steps()
        pieces = [Piece(index=index, group=index // samples) for index in range(count)]
        for index in range(count):
            play.begin(index, derive(self.config.seed, "start", number, index // samples) % 2**31)
        active = list(range(count))
        for t in range(steps):
            if t % 64 == 0:
                observer.on_progress("sampling", t, steps)
            ended = self._step(done, pieces, draws, active, self.actor)
            active = [index for index in active if index not in ended]
            if not active:
                break
        for index in active:
            pieces[index].truncated = True
            play.end(index)
        return Rollout(done, pieces)

    def _sampling_policy(self, done: Steps, draws: torch.Generator, t: int) -> Any:
        """The policy that draws step t of a segment, after these steps: the one that learns."""
        return self.actor

    def _step(
        self,
        done: Steps,
        pieces: list[Piece],
        draws: torch.Generator,
        active: list[int],
        actor: Any,
    ) -> list[int]:
        """One step of the active environments with a policy; those whose episode is over."""
        play = self.play
        if self.normaliser is not None:
            done.seen.append(torch.from_numpy(play.environments.observations.copy()))
        x = self._inputs(play.environments.observations, play.memory)
        drawn = actor.draw(x, draws)
        actions = actor.action(drawn).double().numpy()
        outcomes = play.environments.step(actions[active], active)
        play.memory = actor.remember(drawn)
        rewards = [0.0] * len(pieces)
        for index, reward, terminated, over in zip(active, *outcomes):
            piece, rewards[index] = pieces[index], reward
            piece.length += 1
            piece.ended, piece.truncated = terminated, over and not terminated
            play.count(index, reward, over=over)
        done.x.append(x)
        done.drawn.append(drawn)
        done.rewards.append(torch.tensor(rewards, dtype=torch.float64))
        return [index for index in active if play.over[index]]

    def _inputs(self, observations: np.ndarray, memory: Tensor) -> Float[Tensor, "env obs"]:
        return policy_inputs(self.actor, self.normaliser, observations, memory)

    def _seed(self, index: int) -> int:
        return derive(self.config.seed, "episode", index, self.play.begun[index]) % 2**31

    def _experience(self, rollout: Rollout, number: int) -> tuple[Experience, Tensor]:
        """The rollout as rows of steps, and the sum of the rewards of each."""
        actor, learner = self.actor, self.learner
        pieces, steps, mask = rollout.pieces, rollout.steps, rollout.mask()

        def padded(values: list[Tensor]) -> Tensor:
            rows = rollout.rows(values)
            return rows.new_zeros(*mask.shape, *rows.shape[1:]).index_put_((mask,), rows)

        x, drawn = padded(steps.x), padded(steps.drawn)
        rewards = padded(steps.rewards).to(x.dtype)
        returns = rewards.sum(dim=1)
        first = derive(self.config.seed, "group", number) % 2**40
        group = [piece.group for piece in pieces] if not self.segments else range(len(pieces))
        with torch.no_grad():
            logp = actor.score(x, drawn).logp
            if self.segments:
                rewards = rewards + self._bootstrap(pieces, mask)
        ids = drawn[..., 0].long() if actor.actions.discrete else torch.zeros_like(mask).long()
        by_token = self.segments or takes_token_rewards(learner.recipe)
        experience = Experience(
            input_ids=ids,
            attention_mask=mask,
            mask=mask,
            rollout_logp=logp.masked_fill(~mask, 0.0),
            rewards=torch.zeros_like(returns) if self.segments else returns,
            token_rewards=rewards if by_token else None,
            truncated=torch.tensor([piece.truncated for piece in pieces]),
            group=first + torch.tensor(list(group)),
            version=torch.full((len(pieces),), learner.version),
            observations=x,
            actions=drawn,
        )
        return experience, returns

    def _bootstrap(self, pieces: list[Piece], mask: Tensor) -> Float[Tensor, "seq tok"]:
        """γV(what follows) on the last step of pieces that did not end, 0 elsewhere."""
        advantage, critic = self.learner.recipe.advantage, self.learner.critic
        assert advantage is not None
        assert critic is not None
        after = torch.stack([piece.after for piece in pieces if piece.after is not None])
        going = torch.tensor([not piece.ended for piece in pieces])
        values = advantage.options.get("gamma", 1.0) * critic(after)[:, 0] * going
        last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
        return torch.where(last, values[:, None], 0.0)

    def _metrics(self, pieces: list[Piece]) -> dict[str, float]:
        steps = sum(piece.length for piece in pieces)
        counts = {"proxpo/samples": float(len(pieces)), "proxpo/tokens": float(steps)}
        return {
            **counts,
            **(self.play.metrics() if self.segments else self.play.metrics(len(pieces))),
        }

    # --- evaluation and checkpoints

    def examine(self, observer: Observer) -> Examined:
        size = self.config.evaluate.size
        return examine(self.actor, self.normaliser, self.exam, size, observer)

    def parts(self) -> dict[str, Any]:
        normaliser = {} if self.normaliser is None else {"normaliser": self.normaliser.state()}
        return {**super().parts(), **normaliser, "play": self.play.state()}

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        super().load(parts, info)
        if self.normaliser is not None:
            self.normaliser.load(parts["normaliser"])
        self.play.load(parts["play"])

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return result(before, after, steps=self.tokens, seconds=self.seconds)

    def close(self) -> None:
        self.play.environments.close()
        self.exam.close()


def takes_token_rewards(recipe: Recipe) -> bool:
    """True if every stage that reads rewards can do with those of single steps."""
    readers = [stage for _, stage in recipe.stages() if "rewards" in stage.needs]
    return bool(readers) and all(
        stage.instead.get("rewards") == "token_rewards" for stage in readers
    )


def step_fields(
    model: Any, critic: Any, rows: Experience, wanted: frozenset[str]
) -> dict[str, Tensor]:
    """Fields of the present policy at every step: logp, and what else is wanted of it."""
    assert rows.observations is not None
    assert rows.actions is not None
    scored = model.score(rows.observations, rows.actions)
    fields = {"logp": scored.logp}
    if "entropy" in wanted:
        fields["entropy"] = scored.entropy
    if critic is not None:
        fields["values"] = critic(rows.observations)[..., 0]
    if wanted & VOCABULARY:
        fields["vocab_logp"] = model.logits(rows.observations).log_softmax(-1)
    return fields


def _lines(pieces: list[Piece], returns: list[float]) -> list[dict[str, Any]]:
    """A few pieces of the rollout, for samples.jsonl."""
    return [
        {
            "prompt": f"row {i}",
            "completion": f"{piece.length} steps, {'ended' if piece.ended else 'cut'}",
            "answer": "",
            "reward": returns[i],
        }
        for i, piece in enumerate(pieces[:8])
    ]


def build_recipe_job(
    config: Config, recipe: Recipe, kind: type[ControlJob] = ControlJob
) -> ControlJob:
    """Builds the job of a task gym:NAME for a recipe: environments, networks, optimizer."""
    rollout = config.rollout
    name = config.task.name.partition(":")[2]
    options = read_options(name, config.task.options)
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    environments = Environments(name, count, options)
    actor = make_actor(config, environments)
    check_recipe(recipe, environments, actor)
    recipe = at_length(recipe, rollout.max_tokens)
    segments = bool(recipe.needs() & {"values", "old_values"}) or recipe.value is not None
    critic = make_critic(config, environments, actor) if segments else None
    transform = run_transform(recipe, config.seed)
    if transform is not None and transform.from_head:
        raise ProxpoError("isopo: scope=head needs a language model, whose head it measures")
    wanted = recipe.needs()
    learner = Learner(
        policy=ControlPolicy(actor, config.model.name),
        recipe=recipe,
        optimizer=run_optimizer(config.train, actor, critic),
        fields_of=step_fields,
        by_step=by_step(recipe),
        reference=copy.deepcopy(actor).requires_grad_(False) if "ref_logp" in wanted else None,
        critic=critic,
        transform=transform,
        state=recipe.init_state(),
    )
    job = kind(
        config=config,
        learner=learner,
        play=Play(environments=environments, memory=actor.start(count)),
        exam=Environments(name, min(config.evaluate.size, 10), options),
        normaliser=Normaliser(environments.width) if options.normalise else None,
        segments=segments,
    )
    if recipe.schedule is None and config.train.mini_batches > job.most_parts:
        raise ProxpoError(
            f"train.mini_batches={config.train.mini_batches} cuts a rollout into as many parts, "
            f"and it has {job.most_parts}: rollout.prompts_per_step x rollout.samples_per_prompt "
            "environments" + (" x rollout.max_tokens steps" if learner.by_step else "")
        )
    return job


__all__ = ["ControlJob", "build_recipe_job", "step_fields"]
