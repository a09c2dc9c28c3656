"""Fields of a Batch, each declared once: axes, kind of number, source and one line of text.

`FIELDS` holds a `Field` for every name; all other code reads a field's properties there.
The fields below are those of language models. A stage with a field of its own adds it with
`declare_field`.

Axes: `seq` responses, `tok` response tokens; any other name, such as `vocab`, is a last axis whose
size all fields that have it share. "seq [tok]" is one number per response or per token.

Sources:
    policy       the forward pass of each update, with the value head on it
    start        a pass of the policy or the critic before the first update on a rollout
    reference    the frozen reference policy
    sampler      generation: tokens, prompts and what the sampler reports of them
    environment  turns and tools
    reward       the reward function, a process reward model or a critique model
    schedule     a schedule stage
    recipe       other stages of the recipe, where the batch comes without the field
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, dataclass_transform, get_args

import torch

from proxpo.errors import ProxpoError, UnknownFieldError, nearest
from proxpo.ops.shapes import Tensor

T = TypeVar("T")
Kind = Literal["float", "bool", "int", "number"]  # "number": whole or not
Source = Literal[
    "policy", "start", "reference", "sampler", "environment", "reward", "schedule", "recipe"
]
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
DTYPES = {
    "float": FLOATS,
    "bool": frozenset({torch.bool}),
    "int": frozenset({torch.int64}),
    "number": FLOATS | {torch.int64},
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a Batch. As an attribute of the class it is the field, of a batch its value.

    text: words may stand for numbers
    missing: NaN says that a response has no value
    squared: a reward, of which variances take the square
    checked: `prepare` refuses NaN and infinity
    """

    name: str = ""
    axes: str
    kind: Kind
    source: Source
    doc: str
    text: bool = False
    missing: bool = False
    squared: bool = False
    checked: bool = True

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)
        FIELDS[name] = self

    def __get__(self, batch: Any, owner: type) -> "Field | None":
        return self if batch is None else None  # a present value hides this

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        return DTYPES[self.kind]

    @functools.cached_property
    def per_response(self) -> bool:
        """One number per response."""
        return self.axes == "seq"

    @functools.cached_property
    def per_token(self) -> bool:
        """Columns are tokens; for "seq [tok]" where there are any."""
        return self.axes.split()[1:2] in (["tok"], ["[tok]"])

    @functools.cached_property
    def last(self) -> str:
        """Name of the axis after responses and tokens; empty if there is none."""
        name = self.axes.split()[-1]
        return "" if name in ("seq", "tok", "[tok]") else name


FIELDS: dict[str, Field] = {}
LOADERS: list[Callable[[], None]] = []  # called at an unknown name: import what declares fields


@dataclass_transform(kw_only_default=True, frozen_default=True)
def by_keyword(cls: type[T]) -> type[T]:
    """Marks a class for editors and type checkers: its attributes are keyword arguments."""
    return cls


def _field(axes: str, kind: Kind, source: Source, doc: str, **facts: Any) -> Any:
    return Field(axes=axes, kind=kind, source=source, doc=doc, **facts)


# fmt: off
@by_keyword
class BatchFields:
    """The fields that a batch of a language model may have."""

    logp: Tensor = _field("seq tok", "float", "policy",
        "log-probability of each response token under the policy, from its forward pass")
    mask: Tensor = _field("seq tok", "bool", "sampler",
        "1 where a token is trained on, 0 for padding and tool output, from the sampler")
    old_logp: Tensor | None = _field("seq tok", "float", "start",
        "log-probability under the policy at the start of the step, from the trainer")
    ref_logp: Tensor | None = _field("seq tok", "float", "reference",
        "log-probability under the frozen reference policy, from a second model")
    rollout_logp: Tensor | None = _field("seq tok", "float", "sampler",
        "log-probability reported by the sampler when it drew the token")
    prox_logp: Tensor | None = _field("seq tok", "float", "start",
        "log-probability under the proximal policy, from a recent snapshot of the learner")
    prev_logp: Tensor | None = _field("seq tok", "float", "schedule",
        "log-probability under the policy before the last rollout's updates, from "
        "schedule=reincarnation")
    entropy: Tensor | None = _field("seq tok", "float", "policy",
        "entropy of the next-token distribution, from the trainer's forward pass")
    values: Tensor | None = _field("seq tok", "float", "policy",
        "critic's value of each token, from a value head")
    old_values: Tensor | None = _field("seq tok", "float", "start",
        "critic's values at rollout time, from a value head")
    returns: Tensor | None = _field("seq tok", "float", "recipe",
        "the critic's target; computed by the recipe when absent")
    token_rewards: Tensor | None = _field("seq tok", "float", "reward",
        "reward on single tokens, e.g. from a process reward model", squared=True)
    step_end: Tensor | None = _field("seq tok", "bool", "reward",
        "1 on the last token of each scored step, from the process reward model")
    lag: Tensor | None = _field("seq tok", "number", "sampler",
        "policy versions since the one that sampled the token, from the sampler")
    vocab_logp: Tensor | None = _field("seq tok vocab", "float", "policy",
        "log-probabilities of the whole vocabulary, from the policy's forward pass")
    old_vocab_logp: Tensor | None = _field("seq tok vocab", "float", "start",
        "log-probabilities of the whole vocabulary under the sampling policy, from a pass before "
        "the first update")
    ref_kl: Tensor | None = _field("seq tok", "float", "reference",
        "KL(π_old‖π_ref) at each token over the whole vocabulary, from the trainer's pass of both "
        "policies")
    tokens: Tensor | None = _field("seq tok", "int", "sampler",
        "token ids of the response, from the sampler", text=True)
    turn: Tensor | None = _field("seq tok", "int", "environment",
        "number of the turn each token belongs to, from the environment")
    span_rewards: Tensor | None = _field("seq tok", "float", "reward",
        "+1, -1 or 0 on tokens inside spans that a critique marked, from a critique model through "
        "proxpo.stages.reward.spans")
    hidden: Tensor | None = _field("seq tok dim", "float", "policy",
        "hidden state that produced each token's distribution, from the trainer's forward pass")
    features: Tensor | None = _field("seq dim", "float", "start",
        "mean over a response of d log π/d hidden, from proxpo.logp.score_features on the "
        "sampling policy")
    rewards: Tensor | None = _field("seq", "float", "reward",
        "one reward per response, from the reward function; NaN (null) where missing",
        missing=True, squared=True)
    group: Tensor | None = _field("seq", "int", "sampler",
        "number of the prompt each response answers, from the sampler", text=True)
    prompt_id: Tensor | None = _field("seq", "int", "sampler",
        "number of the prompt in its dataset, the same at every visit, from the sampler")
    duration: Tensor | None = _field("seq", "float", "environment",
        "seconds that running the response took in its environment, from the environment",
        checked=False)
    void: Tensor | None = _field("seq", "bool", "environment",
        "1 if a turn of the response neither calls a tool nor answers, from the environment")
    greedy_rewards: Tensor | None = _field("seq", "float", "reward",
        "reward of the greedy response to the same prompt, from one extra rollout", squared=True)
    correct: Tensor | None = _field("seq", "bool", "reward",
        "1 if the response is right, before any reward shaping, from the reward function")
    truncated: Tensor | None = _field("seq", "bool", "sampler",
        "1 if the response was cut at the length limit, from the sampler")
    group_tokens: Tensor | None = _field("seq", "number", "recipe",
        "valid tokens of all responses to the same prompt, over the whole step; computed by the "
        "recipe when absent")
    advantages: Tensor | None = _field("seq [tok]", "float", "recipe",
        "advantage per response or per token; computed by the recipe when absent")
# fmt: on


REQUIRED = ("logp", "mask")
CORE = frozenset(FIELDS)  # the fields above; a batch has all others in `extra`


def declare_field(
    name: str,
    axes: str,
    *,
    kind: Kind = "float",
    source: Source = "recipe",
    doc: str,
    **facts: Any,
) -> Field:
    """Adds a field to every Batch: `Batch(gate=...)`, `batch.gate`, batch files, micro-batches.

        proxpo.declare_field("gate", "seq tok", kind="bool", doc="1 where ..., set by weights=...")

    `doc` is one line that says where the field comes from; error messages quote it. `facts` are the
    flags of `Field`. Declaring the same field twice changes nothing.
    """
    field = Field(name=name, axes=axes, kind=kind, source=source, doc=doc, **facts)
    if FIELDS.get(name) == field:
        return FIELDS[name]
    classes = (BatchFields, *BatchFields.__subclasses__())
    if not name.isidentifier() or name.startswith("_") or any(hasattr(c, name) for c in classes):
        raise ProxpoError(f"the field '{name}' cannot be declared: the name is taken or no name")
    if not re.fullmatch(r"seq( \[tok\]|( tok)?( [a-z]\w*)?)", axes):
        raise ProxpoError(f"the field '{name}': unknown axes '{axes}', expected e.g. 'seq tok'")
    for what, word, words in (("kind", kind, Kind), ("source", source, Source)):
        if word not in get_args(words):
            hint = nearest(word, get_args(words))
            raise ProxpoError(f"the field '{name}': unknown {what} '{word}'{hint}")
    setattr(BatchFields, name, field)
    FIELDS[name] = field
    return field


def find_field(name: str) -> Field:
    """The field of this name; modules that may declare it are imported first."""
    if name not in FIELDS:
        for load in LOADERS:
            load()
    if name not in FIELDS:
        raise UnknownFieldError(f"unknown field '{name}'{nearest(name, FIELDS)}")
    return FIELDS[name]


__all__ = [
    "CORE",
    "FIELDS",
    "LOADERS",
    "REQUIRED",
    "BatchFields",
    "Field",
    "declare_field",
    "find_field",
]
