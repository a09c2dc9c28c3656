"""Games of the package textarena, `textarena:GAME`: for one player, rewards from the game."""

import copy
import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any, TypeVar

from proxpo.errors import ProxpoError, imported, resolve
from proxpo.ops.streams import derive
from proxpo.train.tasks._session import EARNED, Memory, Move, Script, Session, Show, sessions
from proxpo.train.tasks._types import Lazy, Problem, Task
from proxpo.train.tasks.arithmetic import TRAIN_SIZE

T = TypeVar("T")
LISTING = "python -c 'import textarena as t; t.pprint_registry_detailed()'"
RAW = "-raw"  # a game without the package's own wrapping of observations and actions


class ArenaGame:
    """A game of textarena with its own stream of random numbers, which other games do not share."""

    system = ""

    def __init__(self, game: str, seed: int, config: dict[str, Any]) -> None:
        self._first, self._random = _begun(game, seed, json.dumps(config, sort_keys=True))
        self._env, self.won = copy.deepcopy(self._first), False
        self.rules, self._opening = _told(self._env)

    def start(self) -> str:
        self._env, self.won = copy.deepcopy(self._first), False
        self._env.get_observation()
        self._state = self._random
        return self._opening

    def move(self, action: str) -> Move:
        env = self._env
        (done, _), self._state = _alone(lambda: env.step(action), self._state)
        rewards, info = env.close() if done else (None, {})
        reward = float((rewards or {}).get(0, 0.0))
        self.won = done and reward >= 1
        rules, text = _told(env)
        void = bool(env.state.error_count) or bool(info.get(0, {}).get("invalid_move"))
        return Move(rules + text, reward=reward, done=bool(done), void=void)


@functools.lru_cache(maxsize=1024)  # some games take long to make
def _begun(game: str, seed: int, config: str) -> tuple[Any, tuple]:
    """A game at its beginning, and the state of its stream of random numbers."""
    arena = _package()

    def begin() -> Any:
        env = arena.make(game, **json.loads(config))
        env.reset(num_players=1, seed=seed % 2**32)
        return env

    try:
        return _alone(begin, random.Random(seed).getstate())
    except Exception as error:  # of any kind: words to download, players, options
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ProxpoError(
            f"task textarena:{game.removesuffix(RAW)} cannot start a game for one player: {reason}"
        ) from None


def _told(env: Any) -> tuple[str, str]:
    """The messages since the last call: instructions, and the rest without the own action."""
    kinds = _package().ObservationType
    messages = env.get_observation()[1]
    rules = [text for _, text, kind in messages if kind == kinds.PROMPT]
    hidden = (kinds.PROMPT, kinds.PLAYER_ACTION)
    rest = [text for _, text, kind in messages if kind not in hidden]
    return "".join(f"{text}\n" for text in rules), "".join(f"{text}\n" for text in rest)


def _alone(work: Callable[[], T], state: tuple) -> tuple[T, tuple]:
    """Runs `work` with this state of the global generator, which games draw from; the next state.

    Everything else finds the generator as it was.
    """
    outside = random.getstate()
    random.setstate(state)
    try:
        return work(), random.getstate()
    finally:
        random.setstate(outside)


def textarena(
    *,
    name: str,
    attempts: int = 1,
    memory: Memory = "reflection",
    show: Show = "course",
    fold: bool = False,
    max_turns: int = 20,
    chat: bool = True,
    test_size: int = 64,
    seed: int = 0,
    config: dict | None = None,
    template: dict | None = None,
) -> Task:
    """The game `name`, such as Sokoban-v0 or FrozenLake; `config` goes to it (size and the like).

    attempts: tries at each game, with a reflection between them, of `max_turns` actions each; a
    game that is not over by then earns nothing. fold: the policy replaces the course of a game by
    summaries. chat=False writes plain text.
    """
    game = _game(name)
    script = Script(
        attempts=attempts, memory=memory, show=show, fold=fold, max_turns=max_turns, chat=chat
    )

    def begin(number: int) -> ArenaGame:
        return ArenaGame(game, number, config or {})

    def problem(stream: str, number: int) -> Problem:
        own = derive(seed, stream, number)
        first = Session(begin(own), script).look()
        assert first is not None
        return Problem(first.prompt, None, number, {"seed": own}, hidden=f"{stream} {own}")

    return Task(
        name=f"textarena:{game.removesuffix(RAW)}",
        train=Lazy(lambda number: problem("textarena", number), TRAIN_SIZE),
        test=Lazy(lambda number: problem("textarena test", number), test_size)[:],
        reward=EARNED,
        template=template or {},
        environment=sessions(lambda problem: begin(problem.extra["seed"]), script),
        max_turns=attempts * max_turns,
        folds=fold,
    )


def _game(name: str) -> str:
    """The registered name of a game, without the package's wrappers."""
    registry = _package().envs.registration.ENV_REGISTRY
    games = {game.removesuffix(RAW).removesuffix("-v0"): game for game in registry
             if game.endswith(RAW)}  # fmt: skip
    short = re.sub("-v0$", "", name, flags=re.IGNORECASE)
    return games[resolve(short, games, what="game of textarena", listing=LISTING)]


def _package() -> Any:
    needs = "task textarena needs the agents extra: pip install 'proxpo[agents]'"
    return imported("textarena", needs)


__all__ = ["ArenaGame", "textarena"]
