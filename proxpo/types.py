"""The vocabulary: Batch, Context, Stage, Recipe and Loss.

    budget -> prompts -> reward -> filter -> advantage -> prune -> weights -> ratio -> trust
           -> regularisers -> select -> aggregate -> backward [gradient]
           -> optimizer [schedule]

Axes: `seq` responses, `tok` response tokens, `vocab` the vocabulary, `dim` hidden units, `latent`
components of a Gaussian action, `prompt` prompts of the next rollout. `compose.py` knows the order.
"""

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from proxpo.conversion import fits, fitted
from proxpo.errors import ProxpoError
from proxpo.fields import CORE, FIELDS, REQUIRED, BatchFields, find_field
from proxpo.ops.shapes import Float, Int, Num, Shaped, Tensor

Metrics = dict[str, Tensor]
PerToken = tuple[Float[Tensor, "seq tok"], Metrics]  # most stages return it
State = dict[str, Tensor]
States = Mapping[str, State]
MEMORY = "memory/"  # before the names of metrics that only a stage's memory reads
Scope = Literal["batch", "microbatch"]
Reach = Literal["batch", "microbatch", "rank"]


@runtime_checkable
class AllSum(Protocol):
    """Adds a tensor over the parts of one batch: data-parallel ranks and micro-batches.

    scope="microbatch" asks for the sum over ranks alone, as code that works per micro-batch does;
    "rank" for the sum over the micro-batches of this rank, which holds the groups it has whole.
    """

    def __call__(self, x: Tensor, scope: Reach = "batch") -> Tensor: ...


def whole(x: Tensor, scope: Reach = "batch") -> Tensor:
    """No sum: the batch is claimed to be the whole step, which `policy_loss` verifies."""
    return x


def local(x: Tensor, scope: Reach = "batch") -> Tensor:
    """No sum: statistics are those of the batch at hand, whole or cut."""
    return x


def _default(name: str) -> Any:
    return Parameter.empty if name in REQUIRED else None


class Batch(BatchFields):
    """B responses of up to T tokens. Values at masked positions are arbitrary, NaN included.

    `Batch(logp=..., mask=..., rewards=...)` takes every declared field (proxpo/fields.py); an
    absent field reads as None. Lists, numpy arrays and numbers of another dtype are converted where
    they have one meaning; wrong shapes are refused as in a batch file.
    """

    __signature__ = Signature(
        [Parameter(name, Parameter.KEYWORD_ONLY, default=_default(name)) for name in FIELDS]
        + [Parameter("extra", Parameter.VAR_KEYWORD)]
    )

    if not TYPE_CHECKING:  # type checkers and editors see the declared fields as arguments

        def __init__(self, **fields):
            present = {name: value for name, value in fields.items() if value is not None}
            vars(self).update(present if fits(present) else fitted(present))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a Batch has no attribute '{name}'")
        find_field(name)  # an error unless it is declared
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field '{name}': call batch.replace")

    def __repr__(self) -> str:
        shapes = (f"{name} {'x'.join(map(str, x.shape))}" for name, x in self.items())
        return f"Batch({', '.join(shapes)})"

    @property
    def extra(self) -> dict[str, Tensor]:
        """The present fields that stages have declared for themselves."""
        return {name: x for name, x in self.items() if name not in CORE}

    def replace(self, **changes: Any) -> "Batch":
        """The batch with other values of some fields."""
        return Batch(**{**vars(self), **changes})

    def rows(self, index: slice | Int[Tensor, " row"]) -> "Batch":
        """The responses `index` alone: a micro-batch of a prepared batch."""
        return Batch(**{name: value[index] for name, value in vars(self).items()})

    def items(self) -> list[tuple[str, Tensor]]:
        """The fields that are present, in the order of their declarations."""
        values = vars(self)
        return [(name, values[name]) for name in FIELDS if name in values]

    def require(self, name: str, *, by: str) -> Tensor:
        """The field's value, or an error that names it and who (`by`) needs it."""
        value = getattr(self, name)
        if value is None:
            raise ProxpoError(
                f"{by} needs the batch field '{name}' ({FIELDS[name].doc}), which is missing"
            )
        return value

    def clean(self, *names: str) -> "Batch":
        """Zeros where masked, half precision raised to float32: what every stage may rely on.

        With names, only those fields: the ones a new forward pass has brought.
        """
        chosen = {name: x for name, x in vars(self).items() if not names or name in names}
        return self.replace(
            **{
                name: _cleaned(x, self.mask)
                for name, x in chosen.items()
                if FIELDS[name].per_token or FIELDS[name].per_response
            }
        )


class _DocWithFields:
    """Docstring of `Batch` with its fields, those that stages have declared by then included."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def __get__(self, batch: Any, owner: type) -> str:
        lines = [
            f"{field.name} ({field.axes}; {field.kind}; {field.source})\n        {field.doc}"
            for field in FIELDS.values()
        ]
        return f"{self.text}\n    Fields (axes; kind of number; source):\n\n    " + "\n    ".join(
            lines
        )


Batch.__doc__ = _DocWithFields(Batch.__doc__)  # type: ignore[assignment]


def _cleaned(x: Tensor, mask: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    if not x.is_floating_point() or x.shape[:2] != mask.shape:
        return x
    return x.masked_fill(~mask.reshape(mask.shape + (1,) * (x.dim() - 2)), 0.0)


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Global counts of one optimizer step; micro-batches and ranks divide by the same numbers.

    tokens: tokens that are trained on
    sequences: responses with at least one such token
    rows: all responses
    prompts: groups with at least one such token; None without groups
    pairs: such groups whose rewards differ, a pair of responses each; None without rewards
    """

    tokens: Num[Tensor, ""]
    sequences: Num[Tensor, ""]
    rows: Num[Tensor, ""]
    prompts: Num[Tensor, ""] | None = None
    pairs: Num[Tensor, ""] | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Progress of a run: rollouts trained on so far, their planned number, the learning rate.

    `updates` counts optimizer steps.
    """

    step: int = 0
    steps: int | None = None
    updates: int = 0
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything that a loss and its stages use besides the batch, with single-process defaults.

    all_sum: adds over ranks and micro-batches; the default is for a whole batch and is verified
    denominators: counts of the optimizer step, from `prepare`
    states: memory of the recipe's stages by place; None stands for `Recipe.init_state()`
    state: memory of the stage being applied, set for each stage
    """

    all_sum: AllSum = whole
    denominators: Denominators | None = None
    generator: torch.Generator | None = None
    clock: Clock = Clock()
    states: States | None = None
    state: State = field(default_factory=dict)

    @property
    def counts(self) -> Denominators:
        """The denominators, which must be there."""
        if self.denominators is None:
            raise ProxpoError("the loss needs the denominators of the step: call proxpo.prepare")
        return self.denominators


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Plan of the next rollout: number of responses to each prompt and their longest length.

    A `budget` stage takes one and returns another: `apply(budget, ctx) -> (budget, metrics)`.
    """

    prompt_id: Int[Tensor, " prompt"]
    samples: Int[Tensor, " prompt"]
    max_tokens: Int[Tensor, " prompt"]

    def replace(self, **changes: Any) -> "Budget":
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a recipe: a pure function, its name and the options it was built with.

    apply: takes the arguments of its kind (see compose.py) and returns (value, metrics)
    needs, instead: the batch fields it reads, and those that do in place of one of them
    takes, gives: what it works on and what it returns ("ratio", "loss", ...), where that varies
    whole_batch: False if it looks at each micro-batch by itself
    live: an advantage that follows the current policy, computed anew by each update
    length: the longest response assumed while the option max_tokens is none; a host has its own
    decides: what a schedule settles whatever the host's settings
    adds: metrics that micro-batches add up, because a count of the step divides them
    draws: a field that `prepare` fills with numbers in [0, 1), drawn for each token
    idle: options that have no effect beside the others
    acts: False at a time when the stage does nothing and reads none of its fields
    prepare: returns fields to add to the batch, once per rollout
    init: makes the state of a stage with memory, and one of two makes the next state:
    update: once per rollout, from the state, the batch and its metrics
    step: after every optimizer step, from the mini-batch with the numbers of that step, its
        metrics and a context
    """

    kind: str
    name: str
    apply: Callable[..., Any] = field(compare=False, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    gives: str = ""
    whole_batch: bool = True
    live: bool = False
    length: float | None = None
    decides: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    draws: str = ""
    idle: tuple[str, ...] = ()
    acts: Callable[[Clock], bool] | None = field(default=None, compare=False, repr=False)
    prepare: Callable[[Batch], dict[str, Tensor]] | None = field(
        default=None, compare=False, repr=False
    )
    init: Callable[[], State] | None = field(default=None, compare=False, repr=False)
    update: Callable[[State, Batch, Metrics], State] | None = field(
        default=None, compare=False, repr=False
    )
    step: Callable[[Batch, Metrics, Context], State] | None = field(
        default=None, compare=False, repr=False
    )

    def active(self, clock: Clock) -> bool:
        """True unless the stage does nothing at this time."""
        return self.acts is None or self.acts(clock)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({shown})"


def memory_name(place: str, name: str) -> str:
    """Name under which a metric of a stage with memory reaches the memory at `place` alone."""
    return f"{MEMORY}{place}/{name}"


def own_metrics(metrics: Metrics, place: str) -> Metrics:
    """The metrics that the stage at `place` has returned, by the names it gave them.

    Metrics that come from no recipe, without any `memory_name`, are taken as they are.
    """
    if not any(name.startswith(MEMORY) for name in metrics):
        return metrics
    start = memory_name(place, "")
    return {
        name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)
    }


def finite(moved: State, before: State) -> State:
    """The next state of a stage, or the one before if the next holds NaN or infinity."""
    return moved if all(bool(x.isfinite().all()) for x in moved.values()) else before


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A method: a frozen composition of stages."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: tuple[Stage, ...] = ()
    prompts: tuple[Stage, ...] = ()
    reward: tuple[Stage, ...] = ()
    filter: tuple[Stage, ...] = ()
    advantage: Stage | None = None
    prune: tuple[Stage, ...] = ()
    weights: tuple[Stage, ...] = ()
    ratio: Stage
    trust: Stage
    regularisers: tuple[Stage, ...] = ()
    select: tuple[Stage, ...] = ()
    aggregate: Stage
    value: Stage | None = None
    gradient: Stage | None = None
    schedule: Stage | None = None

    def __repr__(self) -> str:
        lines = [f"{place} = {stage}" for place, stage in self.stages()]
        return "\n    ".join([f"Recipe {self.name or 'without a name'}", *lines])

    def replace(self, **changes: Any) -> "Recipe":
        """The recipe with other stages: `grpo.replace(advantage=stage)`."""
        return replace(self, **changes)

    def stages(self) -> list[tuple[str, Stage]]:
        """Every stage with its place, in pipeline order: ("regularisers.kl_to_ref", Stage)."""
        places: list[tuple[str, Stage]] = []
        for kind in KINDS:
            value = getattr(self, kind)
            if isinstance(value, tuple):
                places += [(f"{kind}.{stage.name}", stage) for stage in value]
            elif value is not None:
                places.append((kind, value))
        return places

    def needs(self, clock: Clock | None = None) -> set[str]:
        """Batch fields that the recipe's stages read, at some time or at that of the clock."""
        stages = [stage for _, stage in self.stages() if clock is None or stage.active(clock)]
        return {name for stage in stages for name in stage.needs}

    def init_state(self) -> dict[str, State]:
        """Fresh state of every stage that has memory, by place."""
        return {place: stage.init() for place, stage in self.stages() if stage.init is not None}

    def update_state(self, states: States, batch: Batch, metrics: Metrics) -> dict[str, State]:
        """The states after a rollout, from its batch and its metrics; each stage gets its own."""
        return {
            place: finite(
                stage.update(states[place], batch, own_metrics(metrics, place)), states[place]
            )
            if stage.update
            else states[place]
            for place, stage in self.stages()
            if place in states
        }

    def step_state(
        self, states: States, batch: Batch, metrics: Metrics, ctx: Context
    ) -> dict[str, State]:
        """The states after one optimizer step; `ctx` has the clock and the sum over ranks."""
        return {
            place: finite(
                stage.step(batch, own_metrics(metrics, place), replace(ctx, state=states[place])),
                states[place],
            )
            if stage.step
            else states[place]
            for place, stage in self.stages()
            if place in states
        }


MOST_SKIPPED = 5  # updates in a row without a finite gradient before a run stops
KINDS = tuple(f.name for f in fields(Recipe) if f.name not in ("name", "options"))
MANY = tuple(f.name for f in fields(Recipe) if f.default == ())  # kinds with several stages


class Loss(NamedTuple):
    """A scalar to minimise, and metrics.

    value: the loss, with gradient
    metrics: scalars by name, such as "ratio/ess"
    """

    value: Float[Tensor, ""]
    metrics: Metrics


__all__ = [
    "FIELDS",
    "KINDS",
    "MANY",
    "AllSum",
    "Batch",
    "Budget",
    "Clock",
    "Context",
    "Denominators",
    "Loss",
    "Metrics",
    "PerToken",
    "Reach",
    "Recipe",
    "Scope",
    "Shaped",
    "Stage",
    "State",
    "States",
    "local",
    "whole",
]
