"""The vocabulary: Batch in, Loss out, and what a stage and a recipe are.

    budget -> prompts -> reward -> filter -> advantage -> prune -> weights -> ratio -> trust
           -> regularisers -> select -> aggregate -> backward [gradient]
           -> optimizer [schedule]

Axes: `seq` responses, `tok` response tokens, `vocab` the vocabulary, `dim` hidden units, `latent`
components of a Gaussian action, `prompt` prompts of the next rollout. `compose.py` knows the order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import ROWS, fit, fitted
from proxpo.ops.shapes import Bool, Float, Int, Num, Shaped, Tensor

Metrics = dict[str, Tensor]
State = dict[str, Tensor]
States = Mapping[str, State]
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


FIELDS: dict[str, str] = {
    "logp": "log-probability of each response token under the policy, from its forward pass",
    "mask": "1 where a token is trained on, 0 for padding and tool output, from the sampler",
    "old_logp": "log-probability under the policy at the start of the step, from the trainer",
    "ref_logp": "log-probability under the frozen reference policy, from a second model",
    "rollout_logp": "log-probability reported by the sampler when it drew the token",
    "prox_logp": "log-probability under the proximal policy, from a recent snapshot of the learner",
    "prev_logp": "log-probability under the policy before the last rollout's updates, from "
    "schedule=reincarnation",
    "entropy": "entropy of the next-token distribution, from the trainer's forward pass",
    "values": "critic's value of each token, from a value head",
    "old_values": "critic's values at rollout time, from a value head",
    "returns": "the critic's target; computed by the recipe when absent",
    "token_rewards": "reward on single tokens, e.g. from a process reward model",
    "step_end": "1 on the last token of each scored step, from the process reward model",
    "lag": "policy versions since the one that sampled the token, from the sampler",
    "vocab_logp": "log-probabilities of the whole vocabulary, from the policy's forward pass",
    "old_vocab_logp": "log-probabilities of the whole vocabulary under the sampling policy, from a "
    "pass before the first update",
    "ref_kl": "KL(π_old‖π_ref) at each token over the whole vocabulary, from the trainer's pass of "
    "both policies",
    "tokens": "token ids of the response, from the sampler",
    "turn": "number of the turn each token belongs to, from the environment",
    "span_rewards": "+1, -1 or 0 on tokens inside spans that a critique marked, from a critique "
    "model through proxpo.stages.reward.spans",
    "hidden": "hidden state that produced each token's distribution, from the trainer's forward "
    "pass",
    "features": "mean over a response of d log π/d hidden, from proxpo.logp.score_features on the "
    "sampling policy",
    "mean": "mean of the Gaussian policy at each denoising step, from the current model",
    "old_mean": "mean of the Gaussian policy at each denoising step, from the sampler",
    "ref_mean": "mean of the Gaussian policy at each denoising step, from the frozen reference",
    "noise": "standard deviation of the Gaussian policy at each denoising step, from the sampler",
    "step_size": "length Δt of each denoising step, from the sampler",
    "time": "time in (0, 1) of each denoising step, from the sampler",
    "rewards": "one reward per response, from the reward function; NaN (null) where missing",
    "group": "number of the prompt each response answers, from the sampler",
    "prompt_id": "number of the prompt in its dataset, the same at every visit, from the sampler",
    "duration": "seconds that running the response took in its environment, from the environment",
    "void": "1 if a turn of the response neither calls a tool nor answers, from the environment",
    "greedy_rewards": "reward of the greedy response to the same prompt, from one extra rollout",
    "correct": "1 if the response is right, before any reward shaping, from the reward function",
    "truncated": "1 if the response was cut at the length limit, from the sampler",
    "group_tokens": "valid tokens of all responses to the same prompt, over the whole step; "
    "computed by the recipe when absent",
    "refresh": "1 where each update computes the advantage anew, because it follows the current "
    "policy; set by the recipe when it computes the advantages",
    "pair": "1 for the best response to a prompt, -1 for the worst, 0 for the others; set by "
    "aggregate=pairwise_logistic",
    "gate": "1 where a token's entropy lets its loss through; set by weights=entropy_gate",
    "conflict": "weight of tokens shared by good and bad responses; set by weights=conflict_tokens",
    "advantages": "advantage per response or per token; computed by the recipe when absent",
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B responses of up to T tokens. Values at masked positions are arbitrary, NaN included.

    Lists, numpy arrays and numbers of another dtype are converted where they have one meaning;
    wrong shapes are refused as in a batch file. See proxpo/fields.py.
    """

    __no_type_check__ = True  # by tests: what is given here need not be a tensor yet

    logp: Float[Tensor, "seq tok"]
    mask: Bool[Tensor, "seq tok"]
    old_logp: Float[Tensor, "seq tok"] | None = None
    ref_logp: Float[Tensor, "seq tok"] | None = None
    rollout_logp: Float[Tensor, "seq tok"] | None = None
    prox_logp: Float[Tensor, "seq tok"] | None = None
    prev_logp: Float[Tensor, "seq tok"] | None = None
    entropy: Float[Tensor, "seq tok"] | None = None
    values: Float[Tensor, "seq tok"] | None = None
    old_values: Float[Tensor, "seq tok"] | None = None
    returns: Float[Tensor, "seq tok"] | None = None
    token_rewards: Float[Tensor, "seq tok"] | None = None
    step_end: Bool[Tensor, "seq tok"] | None = None
    lag: Num[Tensor, "seq tok"] | None = None
    vocab_logp: Float[Tensor, "seq tok vocab"] | None = None
    old_vocab_logp: Float[Tensor, "seq tok vocab"] | None = None
    ref_kl: Float[Tensor, "seq tok"] | None = None
    tokens: Int[Tensor, "seq tok"] | None = None
    turn: Int[Tensor, "seq tok"] | None = None
    span_rewards: Float[Tensor, "seq tok"] | None = None
    hidden: Float[Tensor, "seq tok dim"] | None = None
    features: Float[Tensor, "seq dim"] | None = None
    mean: Float[Tensor, "seq tok latent"] | None = None
    old_mean: Float[Tensor, "seq tok latent"] | None = None
    ref_mean: Float[Tensor, "seq tok latent"] | None = None
    noise: Float[Tensor, "seq tok"] | None = None
    step_size: Float[Tensor, "seq tok"] | None = None
    time: Float[Tensor, "seq tok"] | None = None
    rewards: Float[Tensor, " seq"] | None = None
    group: Int[Tensor, " seq"] | None = None
    prompt_id: Int[Tensor, " seq"] | None = None
    duration: Float[Tensor, " seq"] | None = None
    void: Bool[Tensor, " seq"] | None = None
    greedy_rewards: Float[Tensor, " seq"] | None = None
    correct: Bool[Tensor, " seq"] | None = None
    truncated: Bool[Tensor, " seq"] | None = None
    group_tokens: Num[Tensor, " seq"] | None = None
    refresh: Bool[Tensor, " seq"] | None = None
    pair: Int[Tensor, " seq"] | None = None
    gate: Bool[Tensor, "seq tok"] | None = None
    conflict: Float[Tensor, "seq tok"] | None = None
    advantages: Float[Tensor, "seq tok"] | Float[Tensor, " seq"] | None = None

    def __post_init__(self) -> None:
        if not fit(vars(self)):
            for name, value in fitted(vars(self)).items():
                object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> "Batch":
        return Batch(**{**vars(self), **changes})

    def rows(self, index: slice | Int[Tensor, " row"]) -> "Batch":
        """The responses `index` alone: a micro-batch of a prepared batch."""
        return Batch(**{name: value[index] for name, value in self.items()})

    def items(self) -> list[tuple[str, Tensor]]:
        """The fields that are there."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [(name, value) for name, value in named if value is not None]

    def require(self, name: str, *, by: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ProxpoError(
                f"{by} needs the batch field '{name}' ({FIELDS[name]}), which is missing"
            )
        return value

    def clean(self, *names: str) -> "Batch":
        """Zeros where masked, half precision raised to float32: what every stage may rely on.

        With names, only those fields: the ones a new forward pass has brought.
        """
        chosen = [(name, value) for name, value in self.items() if not names or name in names]
        wide = [(name, value) for name, value in chosen if name not in ROWS]
        return self.replace(**{name: _cleaned(value, self.mask) for name, value in wide})


def _cleaned(x: Tensor, mask: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    if not x.is_floating_point() or x.shape[:2] != mask.shape:
        return x
    return x.masked_fill(~mask.reshape(mask.shape + (1,) * (x.dim() - 2)), 0.0)


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Global counts of one optimizer step; micro-batches and ranks divide by the same numbers."""

    tokens: Num[Tensor, ""]
    sequences: Num[Tensor, ""]
    rows: Num[Tensor, ""]
    prompts: Num[Tensor, ""] | None = None
    pairs: Num[Tensor, ""] | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where the run is: rollouts trained on so far, how many there will be, the rate in use.

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
        if self.denominators is None:
            raise ProxpoError("the loss needs the denominators of the step: call proxpo.prepare")
        return self.denominators


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the next rollout will draw: how many responses to each prompt, and how long they may be.

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

    `apply` takes what its kind is given by compose.py and returns (value, metrics). `needs` lists
    the batch fields it reads, `instead` those that do in their place. `prepare` returns fields to
    add to the batch, once per rollout. `live` marks an advantage that follows the current policy:
    each update computes it anew. `length` is the longest response assumed while the option
    max_tokens is none; a host replaces it by its own limit. `decides` names what a schedule settles
    whatever the host's settings. `adds` names metrics that micro-batches add up, because a count of
    the step divides them. A stage with memory has `init`, which makes its state, and one of two
    that make the next: `update`, once per rollout, from the state, the batch and its metrics; or
    `step`, after every optimizer step, from the mini-batch with the numbers that the step was made
    from, its metrics and a context.
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

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({shown})"


def finite(moved: State, before: State) -> State:
    """A stage's next state, or the one before if that would hold NaN or infinity for good."""
    return moved if all(bool(x.isfinite().all()) for x in moved.values()) else before


@dataclass(frozen=True, kw_only=True)
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

    def replace(self, **changes: Any) -> "Recipe":
        return replace(self, **changes)

    def stages(self) -> list[tuple[str, Stage]]:
        """Every stage with its place, in pipeline order: ("regularisers.kl_to_ref", Stage)."""
        places: list[tuple[str, Stage]] = []
        for kind in KINDS:
            found = getattr(self, kind)
            if isinstance(found, tuple):
                places += [(f"{kind}.{stage.name}", stage) for stage in found]
            elif found is not None:
                places.append((kind, found))
        return places

    def needs(self) -> set[str]:
        """Batch fields that the recipe's stages read."""
        return {name for _, stage in self.stages() for name in stage.needs}

    def init_state(self) -> dict[str, State]:
        """Fresh state of every stage that has memory, by place."""
        return {place: stage.init() for place, stage in self.stages() if stage.init is not None}

    def update_state(self, states: States, batch: Batch, metrics: Metrics) -> dict[str, State]:
        """The states after a rollout: each stage with memory sees the batch and the metrics."""
        return {
            place: finite(stage.update(states[place], batch, metrics), states[place])
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
                stage.step(batch, metrics, replace(ctx, state=states[place])), states[place]
            )
            if stage.step
            else states[place]
            for place, stage in self.stages()
            if place in states
        }


MOST_SKIPPED = 5  # updates in a row without a finite gradient before a run stops
KINDS = (
    "budget",
    "prompts",
    "reward",
    "filter",
    "advantage",
    "prune",
    "weights",
    "ratio",
    "trust",
    "regularisers",
    "select",
    "aggregate",
    "value",
    "gradient",
    "schedule",
)
MANY = ("budget", "prompts", "reward", "filter", "prune", "weights", "regularisers", "select")


class Loss(NamedTuple):
    """A scalar to minimise and what was seen on the way."""

    value: Float[Tensor, ""]
    metrics: Metrics


__all__ = [
    "FIELDS",
    "KINDS",
    "MANY",
    "ROWS",
    "AllSum",
    "Batch",
    "Budget",
    "Clock",
    "Context",
    "Denominators",
    "Loss",
    "Metrics",
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
