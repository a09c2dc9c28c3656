"""Turns played in environments: every turn is a prompt and a response, a row of its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.streams import derive
from proxpo.sampler import Samples
from proxpo.train.tasks import Effect, Environment, Problem, Situation, Task

# Numbers of episodes, their prompts, number of the turn -> responses.
Draw = Callable[[list[int], list[list[int]], int], Samples]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an episode: its prompt and response as token ids, and its effect.

    history: ids of the unfolded prompt; empty where nothing was folded or it leaves no room for the
        response in the model's context
    """

    episode: int
    step: int
    situation: Situation
    prompt: list[int]
    history: list[int]
    tokens: list[int]
    logp: list[float]
    finished: bool
    text: str
    reward: float
    void: bool
    seconds: float

    @property
    def state(self) -> int:
        """A number of the state; all reflections of a task share one."""
        return derive(0, "state", "" if self.situation.reflect else "=" + self.situation.state)


@dataclass(frozen=True, kw_only=True)
class Played:
    """All turns of some episodes in order, with the success of each episode.

    crowded: the next prompt of the episode left no room for a response
    folds: as `Task.folds`
    """

    turns: list[Turn]
    success: list[bool]
    crowded: list[bool]
    folds: bool


def play_turns(
    policy: Policy, task: Task, problems: list[Problem], draw: Draw, limits: list[int], context: int
) -> Played:
    """Plays one episode per problem, all of them turn by turn; `limits` bound their responses."""
    assert task.environment is not None
    environments = [task.environment(problem) for problem in problems]
    crowded, turns = [False] * len(problems), []
    rows, step = list(range(len(problems))), 0
    while rows:
        open_rows, situations, prompts = [], [], []
        for row in rows:
            situation = environments[row].look()
            if situation is None:
                continue
            ids = task.encode_prompt(situation.prompt, policy.tokenizer)
            if len(ids) + limits[row] > context:
                _check_first(task, problems[row], step, len(ids), limits[row], context)
                crowded[row] = True
                continue
            open_rows.append(row)
            situations.append(situation)
            prompts.append(ids)
        rows = open_rows
        if not rows:
            break
        samples = draw(rows, prompts, step)
        lengths, ended = samples.mask.sum(dim=1).tolist(), samples.finished.tolist()
        columns = zip(samples.tokens.tolist(), samples.logp.tolist(), lengths, ended)
        for row, situation, prompt, (ids, logp, length, finished) in zip(
            rows, situations, prompts, columns
        ):
            history = _history(policy, task, situation, limits[row], context)
            text = policy.tokenizer.decode(ids[:length], skip_special_tokens=True)
            effect, seconds = _timed(environments[row], text, cut=not finished)
            turns.append(
                Turn(
                    episode=row,
                    step=step,
                    situation=situation,
                    prompt=prompt,
                    history=history,
                    tokens=ids[:length],
                    logp=logp[:length],
                    finished=bool(finished),
                    text=text,
                    reward=effect.reward,
                    void=effect.void,
                    seconds=seconds,
                )
            )
        step += 1
    turns.sort(key=lambda turn: (turn.episode, turn.step))
    success = [environment.success for environment in environments]
    return Played(turns=turns, success=success, crowded=crowded, folds=task.folds)


def _check_first(
    task: Task, problem: Problem, step: int, length: int, limit: int, context: int
) -> None:
    """Refuses an episode without any turn."""
    if step == 0:
        raise ProxpoError(
            f"task {task.name}: the first prompt of problem {problem.index} has {length} tokens, "
            f"and with a response of {limit} it exceeds the model's context of {context}: lower "
            "rollout.max_tokens, or take a model with a longer context"
        )


def _history(
    policy: Policy, task: Task, situation: Situation, limit: int, context: int
) -> list[int]:
    if not task.folds:
        return []
    prompt = situation.prompt if situation.history is None else situation.history
    ids = task.encode_prompt(prompt, policy.tokenizer)
    return ids if len(ids) + limit <= context else []


def _timed(environment: Environment, text: str, *, cut: bool) -> tuple[Effect, float]:
    started = time.perf_counter()
    effect = environment.act(text, cut=cut)
    return effect, time.perf_counter() - started


__all__ = ["Draw", "Played", "Turn", "play_turns"]
