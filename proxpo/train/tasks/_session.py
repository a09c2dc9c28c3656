"""Sessions: games of text played by a policy, in one attempt or several, with or without folding.

A game knows its rules alone. The session writes the prompts: the course of the attempt, or in its
place the policy's own summary of it, and what the policy has written between attempts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from proxpo.errors import ProxpoError
from proxpo.rewards._types import Messages, RewardSpec
from proxpo.train.tasks._types import Effect, Problem, Situation

Memory = Literal["reflection", "history", "both"]
Show = Literal["course", "latest"]
EARNED = RewardSpec(where="proxpo.rewards.environment:earned", trusted=True)


class Move(NamedTuple):
    """A game's answer to an action. done: the attempt is over; void: it was no valid action."""

    text: str
    reward: float = 0.0
    done: bool = False
    void: bool = False


@runtime_checkable
class Game(Protocol):
    """A game of text. rules: shown at the head of every prompt; system: before them, as such."""

    rules: str
    system: str

    @property
    def won(self) -> bool:
        """True if the present attempt has reached the goal."""

    def start(self) -> str:
        """Begins an attempt, always in the same state; returns the first observation."""

    def move(self, action: str) -> Move:
        """Takes an action."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The course of a session and its words.

    attempts: at most so many; max_turns: actions of an attempt
    memory: what a later attempt is shown: reflections, earlier attempts, or both
    show: the whole course of the attempt, or its latest observation alone
    fold: after each action the policy writes a summary, which replaces the course of the attempt
    chat: prompts are messages, otherwise text
    notes: reflections that are kept; longest: characters of each, and of a summary
    whole: a response that was cut at the length limit is void; otherwise it counts as it is
    """

    attempts: int = 1
    max_turns: int = 1
    memory: Memory = "reflection"
    show: Show = "course"
    fold: bool = False
    chat: bool = False
    notes: int = 8
    longest: int = 2000
    whole: bool = True
    reflect: str = "The attempt failed. In a few words, what will you do differently next time?\n"
    note: str = "Remember from your last attempt: {}\n"
    summarise: str = "Summarise everything that matters so far, for yourself.\n"
    summary: str = "Your summary so far: {}\n"

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_turns < 1:
            raise ProxpoError(
                f"attempts and max_turns are at least 1, got {self.attempts}, {self.max_turns}"
            )


class Line(NamedTuple):
    """A piece of a conversation; own: the policy has written it."""

    text: str
    own: bool = False


@dataclass
class Session:
    """One episode of a game, for `play_turns`."""

    game: Game
    script: Script
    attempt: int = 0
    course: list[Line] = field(default_factory=list)  # of the present attempt
    earlier: list[Line] = field(default_factory=list)  # of attempts before it
    notes: list[str] = field(default_factory=list)
    summary: str | None = None
    latest: list[Line] = field(default_factory=list)  # since the last summary
    moves: int = 0
    phase: Literal["play", "reflect", "summarise", "over"] = "play"

    def __post_init__(self) -> None:
        self._begin()

    @property
    def success(self) -> bool:
        return self.game.won

    def look(self) -> Situation | None:
        if self.phase == "over":
            return None
        script, before = self.script, [Line(self.game.rules), *self._memory()]
        whole = before + self.course
        lines = whole
        if script.fold and self.summary is not None:
            lines = [*before, Line(script.summary.format(self.summary)), *self.latest]
        elif script.show == "latest":
            lines = [*before, self.course[-1]]
        asked = {"reflect": script.reflect, "summarise": script.summarise}.get(self.phase)
        if asked:
            lines, whole = [*lines, Line(asked)], [*whole, Line(asked)]
        return Situation(
            prompt=self._written(lines),
            history=self._written(whole) if script.fold else None,
            state=self.course[-1].text,
            attempt=self.attempt,
            reflect=self.phase == "reflect",
            summary=self.phase == "summarise",
        )

    def act(self, response: str, *, cut: bool) -> Effect:
        if self.phase == "reflect":
            self.notes.append(response[: self.script.longest])
            self.attempt += 1
            self._begin()
            return Effect()
        if self.phase == "summarise":
            self.summary, self.latest = response[: self.script.longest], self.course[-1:]
            self.phase = "play"
            return Effect()
        void = cut and self.script.whole
        move = Move("", void=True, done=True) if void else self.game.move(response)
        self.moves += 1
        said = [Line(response, own=True), Line(move.text)]
        self.course += said
        self.latest += said
        self._next_phase(over=move.done or self.moves >= self.script.max_turns)
        return Effect(reward=move.reward, void=move.void)

    def _next_phase(self, *, over: bool) -> None:
        if not over:
            self.phase = "summarise" if self.script.fold else "play"
        elif self.game.won or self.attempt + 1 >= self.script.attempts:
            self.phase = "over"
        else:
            self.phase = "reflect"

    def _begin(self) -> None:
        self.earlier += self.course
        self.course = [Line(self.game.start())]
        self.latest, self.summary = [], None
        self.moves, self.phase = 0, "play"

    def _memory(self) -> list[Line]:
        """Lines of the prompt on earlier attempts: their course, the reflections, or both."""
        lines = self.earlier if self.script.memory in ("history", "both") else []
        if self.script.memory != "history":
            kept = self.notes[-self.script.notes :]
            lines = [*lines, *(Line(self.script.note.format(text)) for text in kept)]
        return lines

    def _written(self, lines: list[Line]) -> str | Messages:
        """The lines as text, or as messages whose roles take turns."""
        system = self.game.system
        if not self.script.chat:
            return system + "".join(line.text for line in lines)
        messages: Messages = [{"role": "system", "content": system}] if system else []
        for line in filter(lambda line: line.text, lines):
            role = "assistant" if line.own else "user"
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + line.text
            else:
                messages.append({"role": role, "content": line.text})
        return messages


def sessions(game: Callable[[Problem], Game], script: Script) -> Callable[[Problem], Session]:
    """Starts a session for a problem."""
    return lambda problem: Session(game(problem), script)


__all__ = ["EARNED", "Game", "Memory", "Move", "Script", "Session", "sessions"]
