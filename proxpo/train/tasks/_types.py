"""Types of a task: problems to train on, held-out ones, reward function, tool, environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol, overload, runtime_checkable

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.rewards._types import Messages, RewardSpec
from proxpo.train.tasks._identity import identity, question

DRAWS = 20  # generated problems looked at for each different one that is wanted


@dataclass(frozen=True)
class Problem:
    """A prompt (text, or chat messages), its answer, and what the reward function may want.

    index: its place in the split, for messages; a problem that comes twice has two
    hidden: words for what the prompt does not show, such as the seed of a game
    solution: a right response with its steps, for `proxpo warmup`; empty: none is known
    """

    prompt: str | Messages
    answer: Any
    index: int
    extra: dict[str, Any] = field(default_factory=dict)
    hidden: str = ""
    solution: str = ""

    @cached_property
    def id(self) -> int:
        """A number of the prompt, the same wherever it occurs, by which methods remember it."""
        own = identity(self.prompt)
        return derive(own, "hidden", self.hidden) if self.hidden else own

    @cached_property
    def question(self) -> str:
        """The prompt's text, by which training and held-out problems are kept apart."""
        return question(self.prompt) + self.hidden


def with_system(prompt: str | Messages, system: str) -> str | Messages:
    """The prompt behind a system prompt: a message, or a paragraph before a text."""
    if not system:
        return prompt
    if isinstance(prompt, str):
        return f"{system}\n\n{prompt}"
    return [{"role": "system", "content": system}, *prompt]


@dataclass(frozen=True)
class Lazy(Sequence[Problem]):
    """Problems by number, made when asked for; len() of them in all."""

    make: Callable[[int], Problem]
    size: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(index % self.size)


class Reply(NamedTuple):
    """Reply of a tool to a turn; no text ends the episode. Void: neither a call nor an answer."""

    text: str
    void: bool


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The next turn of an environment, as the policy meets it.

    prompt: everything that the policy is shown; history: the same without folding, where the policy
        has replaced a part of it by a summary
    state: equal for equal states of the environment
    attempt: number of the attempt; reflect: the turn looks back between two attempts
    summary: the response replaces the history
    """

    prompt: str | Messages
    state: str
    history: str | Messages | None = None
    attempt: int = 0
    reflect: bool = False
    summary: bool = False


class Effect(NamedTuple):
    """Effect of a response in an environment. void: it was no valid action."""

    reward: float = 0.0
    void: bool = False


@runtime_checkable
class Environment(Protocol):
    """One episode of turns, each with a prompt of its own and a reward."""

    @property
    def success(self) -> bool:
        """True if the episode has reached its goal."""

    def look(self) -> Situation | None:
        """The next turn; None at the end of the episode."""

    def act(self, response: str, *, cut: bool) -> Effect:
        """Takes the policy's response to the last situation. cut: at the length limit."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems by number: `train` and `test` know their length and may be generated on demand.

    With a `tool`, an episode goes on for up to `max_turns` turns; the reward sees the last one.
    With an `environment`, each turn is a sequence of its own, and rewards come from there.
    folds: the policy replaces its history by summaries
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: RewardSpec
    template: Mapping[str, Any] = field(default_factory=dict)
    tool: Callable[[str], Reply] | None = None
    max_turns: int = 1
    environment: Callable[[Problem], Environment] | None = None
    folds: bool = False

    @property
    def system(self) -> str:
        """The system prompt of its problems; empty where they have none."""
        prompt = self.test[0].prompt if len(self.test) else ""
        first = {} if isinstance(prompt, str) else prompt[0]
        return first["content"] if first.get("role") == "system" else ""

    def encode(self, problem: Problem, tokenizer: Any, *, limit: int | None = None) -> list[int]:
        """The prompt's token ids, chat template applied; refused beyond `limit` tokens."""
        ids = self.encode_prompt(problem.prompt, tokenizer)
        if not ids:
            raise ProxpoError(f"task {self.name}: the prompt of problem {problem.index} is empty")
        if limit is not None and len(ids) > limit:
            raise ProxpoError(
                f"task {self.name}: the prompt of problem {problem.index} has {len(ids)} tokens, "
                f"the limit is {limit}: raise rollout.max_prompt or set task.drop_long=true"
            )
        return ids

    def encode_prompt(self, prompt: str | Messages, tokenizer: Any) -> list[int]:
        """Token ids of a text or of messages."""
        return self.encode_prompts([prompt], tokenizer)[0]

    def encode_prompts(self, prompts: Sequence[str | Messages], tokenizer: Any) -> list[list[int]]:
        """Token ids of each prompt; all go to the tokenizer in one call, equal texts once."""
        texts = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        ids = dict(zip(texts, _encode_texts(texts, tokenizer)))
        chats = iter(self._encode_chats([p for p in prompts if not isinstance(p, str)], tokenizer))
        return [ids[prompt] if isinstance(prompt, str) else next(chats) for prompt in prompts]

    @cached_property
    def held_out(self) -> frozenset[str]:
        """The questions of the test split."""
        return frozenset(problem.question for problem in self.test)

    def overlap(self) -> int:
        """Number of held-out questions that are also trained on.

        Generated problems are 0 by construction: `Source` refuses to hand out one that is held out.
        """
        if isinstance(self.train, Lazy):
            return 0
        return len(self.held_out.intersection(problem.question for problem in self.train))

    def _encode_chats(self, chats: list[Messages], tokenizer: Any) -> list[list[int]]:
        if not chats:
            return []
        if not getattr(tokenizer, "chat_template", None):
            raise ProxpoError(
                f"task {self.name} speaks in chat messages, but this model's tokenizer has no chat "
                "template: take an instruct model, or text prompts (--set task.options.chat=false, "
                "where the task has it)"
            )
        return tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.template,
        )


def _encode_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids with the tokenizer's own start token and without its end token."""
    end = tokenizer.eos_token_id
    rows = tokenizer(texts)["input_ids"] if texts else []
    return [ids[:-1] if ids and ids[-1] == end else ids for ids in rows]


def fit_prompts(task: Task, tokenizer: Any, *, limit: int, drop: bool = False) -> Task:
    """The task with prompts of at most `limit` tokens: longer ones are refused, or left out.

    Generated problems have prompts of one shape; `encode` checks each as it comes.
    """

    def fitting(problems: Sequence[Problem], split: str) -> Sequence[Problem]:
        if not isinstance(problems, list):
            return problems
        encoded = task.encode_prompts([problem.prompt for problem in problems], tokenizer)
        lengths = [len(ids) for ids in encoded]
        if 0 in lengths:
            task.encode(problems[lengths.index(0)], tokenizer)  # refuses it
        long = sum(length > limit for length in lengths)
        if long and not drop:
            raise ProxpoError(
                f"task {task.name}: {long} of {len(problems)} {split} prompts are longer than "
                f"{limit} tokens (the longest has {max(lengths)}): raise rollout.max_prompt or set "
                "task.drop_long=true"
            )
        kept = [problem for problem, length in zip(problems, lengths) if length <= limit]
        if problems and not kept:
            raise ProxpoError(
                f"task {task.name}: no {split} prompt has {limit} tokens or fewer "
                f"(the shortest has {min(lengths)}): raise rollout.max_prompt"
            )
        return kept

    return replace(task, train=fitting(task.train, "train"), test=fitting(task.test, "test"))


def take_pool(task: Task, size: int) -> Task:
    """The task with its first `size` different training problems, or all if there are fewer."""
    pool: dict[int, Problem] = {}
    for problem in islice(task.train, DRAWS * size if isinstance(task.train, Lazy) else None):
        pool.setdefault(problem.id, problem)
        if len(pool) == size:
            break
    return replace(task, train=list(pool.values()))


__all__ = [
    "Effect",
    "Environment",
    "Lazy",
    "Problem",
    "Reply",
    "Situation",
    "Task",
    "fit_prompts",
    "take_pool",
    "with_system",
]
