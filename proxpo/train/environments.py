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
    histories: turns have their unfolded prompts
    """

    turns: list[Turn]
    success: list[bool]
    crowded: list[bool]
    histories: bool


def play_turns(
    policy: Policy,
    task: Task,
    problems: list[Problem],
    draw: Draw,
    limits: list[int],
    context: int,
    *,
    histories: bool = False,
) -> Played:
    """Plays one episode per problem, all of them turn by turn; `limits` bound their responses.

    histories: turns of a task that folds keep their unfolded prompts
    """
    assert task.environment is not None
    environments = [task.environment(problem) for problem in problems]
    crowded, turns = [False] * len(problems), []
    rows, step = list(range(len(problems))), 0
    while rows:
        met = [(row, environments[row].look()) for row in rows]
        asked = [(row, situation) for row, situation in met if situation is not None]
        shown = task.encode_prompts([s.prompt for _, s in asked], policy.tokenizer)
        open_rows, situations, prompts = [], [], []
        for (row, situation), ids in zip(asked, shown):
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
        tokens, logps = samples.tokens.tolist(), samples.logp.tolist()
        kept = [context - limits[row] for row in rows]
        unfolded = _unfolded(policy, task, situations, kept, wanted=histories)
        texts = policy.tokenizer.batch_decode(
            [ids[:length] for ids, length in zip(tokens, lengths)], skip_special_tokens=True
        )
        columns = zip(rows, situations, prompts, unfolded, tokens, logps, lengths, ended, texts)
        for row, situation, prompt, history, ids, logp, length, finished, text in columns:
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
    return Played(turns=turns, success=success, crowded=crowded, histories=histories)


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


def _unfolded(
    policy: Policy, task: Task, situations: list[Situation], most: list[int], *, wanted: bool
) -> list[list[int]]:
    """Ids of the unfolded prompts; empty where more than `most`, and where none are wanted."""
    if not wanted:
        return [[] for _ in situations]
    whole = [s.prompt if s.history is None else s.history for s in situations]
    rows = task.encode_prompts(whole, policy.tokenizer)
    return [ids if len(ids) <= limit else [] for ids, limit in zip(rows, most)]


def _timed(environment: Environment, text: str, *, cut: bool) -> tuple[Effect, float]:
    started = time.perf_counter()
    effect = environment.act(text, cut=cut)
    return effect, time.perf_counter() - started


__all__ = ["Draw", "Played", "Turn", "play_turns"]
