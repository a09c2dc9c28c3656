"""The learner, and its models' log-probabilities and other numbers for sampled sequences."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from proxpo.exact.policy import ActionBatch, FlatPolicy
from proxpo.logp import (
    HeadInput,
    model_logp,
    model_states,
    score_features,
    thoughts_fed,
    token_kl,
    token_logp,
)
from proxpo.ops.attention import safe_attention
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.ops.streams import derive
from proxpo.optimizers import make_optimizer
from proxpo.replay.graphs import PolicyGraphs
from proxpo.replay.prefix import shares_prompts, states_before
from proxpo.train._schema import TrainConfig
from proxpo.train.cuts import Cut, Result, Rows, TokenBudget, restored
from proxpo.train.experience import Experience
from proxpo.types import FIELDS, Recipe, State

OLD = {"logp", "mean"}  # fields that a pass brings for the behaviour policy too
VOCABULARY = {name for name, field in FIELDS.items() if field.last == "vocab"}
STATES = {"hidden", "mean"} | VOCABULARY  # fields read off the states before the head
# Fields of a policy that is no language model: (model, critic, rows, wanted fields) -> fields.
FieldsOf = Callable[[Any, Any, Experience, frozenset[str]], dict[str, Tensor]]


@dataclass(kw_only=True)
class Learner:
    """The policy, critic, reference, optimizer and state that a step changes.

    policy: a `models.Policy`, or an object with the same `model`, `device` and `autocast`
    fields_of: the forward pass of a policy that is no language model
    critic_optimizer: of a critic that the recipe's loss does not train
    by_step: mini-batches are drawn from single tokens of the prepared rollout, not from responses
    graphs: replayed forward and backward passes of the policy, in place of its modules
    version: optimizer steps made so far
    budget: of the micro-batches that are cut by tokens
    fault: where the last gradient that was not finite came from, in words
    """

    policy: Any
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    fields_of: FieldsOf | None = None
    by_step: bool = False
    reference: nn.Module | None = None
    critic: nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    transform: Any = None
    graphs: PolicyGraphs | None = None
    state: Mapping[str, State] = field(default_factory=dict)
    version: int = 0
    budget: TokenBudget = field(default_factory=TokenBudget)
    fault: str = ""

    @property
    def by_layer(self) -> bool:
        """True under a transform that works in the model's own modules, on whole sequences."""
        return self.transform is not None and not self.transform.from_head

    def trainable(self) -> list[nn.Parameter]:
        extra = [] if self.critic is None else list(self.critic.parameters())
        return [p for p in [*self.policy.model.parameters(), *extra] if p.requires_grad]

    def shape(self, experience: Experience) -> Rows:
        """The rows with their groups, where micro-batches are to keep these together.

        A transform may compare the responses to a prompt; without one they may share the forward
        pass of their prompt.
        """
        compared = getattr(getattr(self.transform, "rule", None), "group_by", None) == "prompt"
        language = self.fields_of is None
        plain = language and not self.by_layer and shares_prompts(self.policy.model)
        shared = plain or self.graphs is not None
        together = experience.group if compared else experience.shared_prompt
        group = together if compared or shared else None
        once = self.graphs is not None and not self.by_layer
        return Rows(experience.mask, experience.attention_mask, group, compared, shared=once)


@dataclass(frozen=True, kw_only=True)
class LogpOptions:
    """Options of a forward pass over sampled sequences.

    micro_batch: sequences in one pass; None: as many as the learner's budget of tokens allows
    fields: batch fields that are wanted of the policy; its `logp` always comes
    old_is_current: the data are the current policy's own and get one update, so that `old_logp` is
        the pass's own `logp` without gradient
    """

    temperature: float
    micro_batch: int | None
    fields: frozenset[str] = frozenset()
    old_is_current: bool = False


def run_transform(recipe: Recipe, seed: int) -> Any:
    """The recipe's gradient transform, if any; it draws by the run's seed and its option `seed`."""
    if recipe.gradient is None:
        return None
    transform = recipe.gradient.apply()
    own = recipe.gradient.options.get("seed")  # 0 is its default: the run's seed alone
    transform.seed = derive(seed, "overlap", *([own] if own else [])) % 2**31
    return transform


def run_optimizer(
    train: TrainConfig, policy: nn.Module, critic: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the settings name, of the policy and of a critic trained beside it."""
    trained = policy if critic is None else nn.ModuleDict({"policy": policy, "critic": critic})
    return make_optimizer(
        train.optimizer,
        trained,
        train.lr,
        weight_decay=train.weight_decay,
        **train.optimizer_options,
    )


def in_micro_batches(
    learner: Learner,
    experience: Experience,
    options: LogpOptions,
    work: Callable[[Cut], Result],
    *,
    undo: Callable[[], None] = lambda: None,
    runs_twice: Callable[[], bool] = lambda: False,
) -> Result:
    """`work` on the row numbers of each micro-batch.

    Where they are cut by tokens, `undo` and `work` run again on finer ones when memory runs out.
    """
    if options.micro_batch is None:
        shape = learner.shape(experience)
        return learner.budget.run(shape, work, undo=undo, runs_twice=runs_twice)
    rows = torch.arange(len(experience.mask), device=experience.mask.device)
    return work(list(rows.split(options.micro_batch)))


def forward(
    learner: Learner,
    experience: Experience,
    options: LogpOptions,
    *,
    without: frozenset[str] | set[str] = frozenset(),
) -> dict[str, Tensor]:
    """Runs the policy: `logp` of the response tokens, and the other wanted fields that it gives.

    Prompts run once for all their responses where that comes to the same; gradient transforms work
    in the model's own modules, on whole sequences, and so do latent thoughts. `without` names
    fields to leave out.
    """
    model, wanted = learner.policy.model, options.fields - without
    if learner.fields_of is not None:
        fields = learner.fields_of(model, learner.critic, experience, frozenset(wanted))
        return fields | ({"old_logp": fields["logp"].detach()} if options.old_is_current else {})
    if learner.graphs is not None:
        entropy = "entropy" in wanted
        fields = learner.graphs.fields(experience, temperature=options.temperature, entropy=entropy)
        return fields | ({"old_logp": fields["logp"].detach()} if options.old_is_current else {})
    shared = prompts_run_once(learner, model, experience)
    hidden = learner.critic is not None or bool(wanted & STATES)
    with learner.policy.autocast():
        fields, states = _logp(
            model, experience, options, shared=shared, entropy="entropy" in wanted, hidden=hidden
        )
        if wanted & VOCABULARY:
            before_head = states if shared else None
            fields["vocab_logp"] = vocabulary_logp(
                model, experience, options.temperature, states=before_head
            )
    if learner.critic is not None:
        # The critic does not move the policy.
        fields["values"] = learner.critic(states.detach().float())[..., 0]
    if "hidden" in wanted:
        fields["hidden"] = states.detach().float()
    if "mean" in wanted:
        fields["mean"] = thought_means(states, experience)
    if options.old_is_current:
        fields |= {f"old_{name}": fields[name].detach() for name in OLD & fields.keys()}
    return fields


@torch.no_grad()
def score(learner: Learner, experience: Experience, options: LogpOptions) -> dict[str, Tensor]:
    """`forward` without gradient, a micro-batch at a time, on all rows."""
    width = experience.mask.shape[1]

    def run(rows: Experience) -> dict[str, Tensor]:
        fields = forward(learner, rows, options)
        return {name: widened(value, width) for name, value in fields.items()}

    return _scored(learner, experience, options, run)


def other_logp(
    learner: Learner, model: Any, experience: Experience, options: LogpOptions
) -> Float[Tensor, "seq tok"]:
    """log π of the response tokens under another model or other weights, for all rows."""
    return other_fields(learner, model, experience, options, {"logp"})["logp"]


@torch.no_grad()
def other_fields(
    learner: Learner,
    model: Any,
    experience: Experience,
    options: LogpOptions,
    names: Collection[str],
) -> dict[str, Tensor]:
    """Fields of a pass under another model or other weights.

    names: of a language model `logp`, and `mean` of latent thoughts
    """
    if learner.fields_of is not None:
        return learner.fields_of(model, None, experience, frozenset(names))
    width, mean = experience.mask.shape[1], "mean" in names
    shared = prompts_run_once(learner, model, experience)

    def run(rows: Experience) -> dict[str, Tensor]:
        with learner.policy.autocast():
            fields, states = _logp(model, rows, options, shared=shared, hidden=mean)
        if mean:
            fields["mean"] = thought_means(states, rows)
        return {name: widened(value, width) for name, value in fields.items()}

    return _scored(learner, experience, options, run)


def thought_means(
    states: Float[Tensor, "seq tok dim"], experience: Experience
) -> Float[Tensor, "seq tok dim"]:
    """μ: the states that latent thoughts are drawn around; 0 at tokens."""
    assert experience.thoughts is not None
    return widened(states[:, : experience.thoughts.shape[1]].float(), states.shape[1])


@torch.no_grad()
def features(
    learner: Learner, experience: Experience, options: LogpOptions
) -> Float[Tensor, "seq dim"]:
    """d log π/d hidden, averaged over each response, a micro-batch at a time."""
    model, temperature = learner.policy.model, options.temperature
    shared = experience.thoughts is None and shares_prompts(model)
    head = model.get_output_embeddings()

    def run(rows: Experience) -> dict[str, Tensor]:
        with learner.policy.autocast():
            _, states = _logp(model, rows, options, shared=shared, hidden=True)
        targets = rows.input_ids[:, -rows.mask.shape[1] :]
        mean = score_features(
            states, head.weight, targets, rows.token_mask, bias=head.bias, temperature=temperature
        )
        return {"features": mean}

    return _scored(learner, experience, options, run)["features"]


@torch.no_grad()
def reference_kl(
    learner: Learner, experience: Experience, options: LogpOptions
) -> Float[Tensor, "seq tok"]:
    """KL(π‖π_ref) at each token, exact over the vocabulary, in tiles; 0 at padding."""
    assert learner.reference is not None
    models, width = (learner.policy.model, learner.reference), experience.mask.shape[1]

    def run(rows: Experience) -> dict[str, Tensor]:
        ids, mask, attention = rows.input_ids, rows.token_mask, rows.attention_mask

        def states(model: nn.Module) -> HeadInput:
            with _thinking(model, rows):
                return model_states(model, ids, mask, attention_mask=attention)

        with learner.policy.autocast():
            own, reference = map(states, models)
            kl = token_kl(own, reference, temperature=options.temperature).kl
        per_token = kl.new_zeros(mask.shape).masked_scatter(mask, kl)
        return {"ref_kl": widened(per_token, width)}

    return _scored(learner, experience, options, run)["ref_kl"]


def vocabulary_logp(
    model: Any, experience: Experience, temperature: float, *, states: Tensor | None = None
) -> Float[Tensor, "seq tok vocab"]:
    """log π of every token of the vocabulary, from the states that enter the head or a whole run.

    All of it is held at once: rows x tokens x vocabulary.
    """
    if states is not None:
        head = model.get_output_embeddings()
        logits = nn.functional.linear(states, head.weight, head.bias)
    else:
        width, ids = experience.mask.shape[1], experience.input_ids
        with _thinking(model, experience), safe_attention(ids.shape[1], ids.device) as follow:
            logits = model(
                input_ids=ids,
                attention_mask=experience.attention_mask,
                position_ids=_positions(experience),
                use_cache=False,
            ).logits[:, -width - 1 : -1]
        follow(logits)
    return (logits.float() / temperature).log_softmax(dim=-1)


def exact_policy(
    model: Any, experience: Experience, mask: Bool[Tensor, "seq tok"], *, temperature: float
) -> tuple[FlatPolicy, ActionBatch]:
    """The model as a function of its parameters, and the sequences it is judged on."""
    width = experience.mask.shape[1]
    inputs = {
        "attention_mask": experience.attention_mask,
        "position_ids": _positions(experience),
        "use_cache": False,
    }

    def read(model: Any, ids: Tensor) -> Tensor:
        # The other kernels know no forward-mode derivative.
        with sdpa_kernel(SDPBackend.MATH), _thinking(model, experience):
            logits = model(input_ids=ids, **inputs).logits
        return logits[:, -width - 1 : -1].float() / temperature

    ids = experience.input_ids
    return FlatPolicy(model, read), ActionBatch(ids, ids[:, -width:], mask)


def widened(x: Tensor, tokens: int) -> Tensor:
    """Pads on the right to this many tokens."""
    behind = [0, 0] * (x.dim() - 2)
    return nn.functional.pad(x, (*behind, 0, tokens - x.shape[1]))


def _scored(
    learner: Learner,
    experience: Experience,
    options: LogpOptions,
    run: Callable[[Experience], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The results of `run` on every micro-batch, for all rows."""

    def work(cut: Cut) -> dict[str, Tensor]:
        parts = [run(experience.rows(index)) for index in cut]
        return {
            name: restored([part[name] for part in parts], cut, sorted_rows=by_tokens)
            for name in parts[0]
        }

    by_tokens = options.micro_batch is None
    return in_micro_batches(learner, experience, options, work)


def _positions(experience: Experience) -> Int[Tensor, "seq pos"]:
    return (experience.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _logp(
    model: Any,
    rows: Experience,
    options: LogpOptions,
    *,
    shared: bool,
    entropy: bool = False,
    hidden: bool = False,
) -> tuple[dict[str, Tensor], Any]:
    """logp, with the entropy if wanted, and the states that each token is predicted from."""
    asked = {"temperature": options.temperature, "entropy": entropy}
    run = _prompts_once if shared else _whole_sequences
    scored, states = run(model, rows, asked, hidden=hidden)
    return dict(scored._asdict()) if entropy else {"logp": scored}, states


def _prompts_once(
    model: Any, rows: Experience, asked: dict[str, Any], *, hidden: bool
) -> tuple[Any, Tensor | None]:
    """Runs every prompt once for all its responses (prefix.py)."""
    states, head = states_before(model, rows), model.get_output_embeddings()
    targets = rows.input_ids[:, -rows.mask.shape[1] :]
    scored = token_logp(states, head.weight, targets, bias=head.bias, mask=rows.mask, **asked)
    return scored, states if hidden else None


def _whole_sequences(
    model: Any, rows: Experience, asked: dict[str, Any], *, hidden: bool
) -> tuple[Any, Tensor | None]:
    """Runs the model on every sequence."""
    head = model.get_output_embeddings()
    with _head_inputs(head, wanted=hidden) as states, _thinking(model, rows):
        scored = model_logp(
            model, rows.input_ids, rows.token_mask, attention_mask=rows.attention_mask, **asked
        )
    # The last call of the head is the one for these rows: model_logp may run the model on a few
    # positions before. A token's value belongs to the state before it.
    return scored, states[-1][:, -rows.mask.shape[1] - 1 : -1] if hidden else None


def prompts_run_once(learner: Learner, model: Any, experience: Experience) -> bool:
    """True if prompts run once for all their responses."""
    return not learner.by_layer and experience.thoughts is None and shares_prompts(model)


def _thinking(model: Any, rows: Experience) -> AbstractContextManager[None]:
    """The block in which the model reads the latent thoughts of these rows."""
    return thoughts_fed(model, rows.thoughts, tokens=rows.mask.shape[1])


@contextmanager
def _head_inputs(head: nn.Module, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the hidden states that enter the head during the block, if they are wanted."""
    caught: list[Tensor] = []
    if not wanted:
        yield caught
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        yield caught
    finally:
        handle.remove()


__all__ = [
    "VOCABULARY",
    "Learner",
    "LogpOptions",
    "exact_policy",
    "features",
    "forward",
    "in_micro_batches",
    "other_fields",
    "other_logp",
    "prompts_run_once",
    "reference_kl",
    "run_optimizer",
    "run_transform",
    "score",
    "vocabulary_logp",
    "widened",
]
