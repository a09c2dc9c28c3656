"""A gradient transform: a rule, its trailing averages, and the block it is applied in."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import rms_norm

from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients._engine import head, inputs
from proxpo.gradients._engine.audit import Audit
from proxpo.gradients._engine.averages import Averages
from proxpo.gradients._engine.axis_order import AxisOrder
from proxpo.gradients._engine.device import capturing
from proxpo.gradients._engine.draws import DrawSeed
from proxpo.gradients._engine.measure import LengthRule
from proxpo.gradients._engine.padded_rows import PaddedRows, check_advantages
from proxpo.gradients._engine.patching import PatchedModel, fingerprint
from proxpo.gradients._engine.session import (
    ModuleHandle,
    Observer,
    ParameterHandle,
    Rule,
    Session,
)
from proxpo.gradients._engine.vectors import VectorCall, norm_weight
from proxpo.logp.head import replaced_backward
from proxpo.ops.attention import safe_attention
from proxpo.ops.shapes import Float, Shaped, Tensor

_OPEN: list[tuple[nn.Module, Session]] = []


class Transform:
    """Turns the gradient of a sum of log-probabilities into the gradient of a method.

        with transform.applied(model, sequences=seq_index, advantages=A):
            nll = -(token_logp * mask).sum()     # no advantages in the objective
            nll.backward()                       # p.grad is what the optimizer should descend
        optimizer.step(); transform.step()       # step(skipped=True) where the first is left out

    Forward and backward both belong inside the block; one block per micro-batch, any number of
    blocks per optimizer step. Whatever is backpropagated in the block is weighted by advantages:
    a KL or entropy term needs a backward of its own, outside. Ranks number their sequences each
    for themselves, and gradients are reduced between them as ever; where ranks share sequences,
    each holding some of their positions, pass `token_group`.
    """

    def __init__(self, rule: Rule, *, seed: int = 0) -> None:
        self.rule = rule
        self.seed = seed
        self.averages = Averages()
        self._steps = 0
        self._blocks = 0
        self._not_finite = False
        self._names: dict[str, None] = {}
        self._warned: set[str] = set()
        self._patched: tuple[nn.Module, PatchedModel] | None = None
        self._order: AxisOrder

    def __repr__(self) -> str:
        return f"Transform({self.rule!r}, seed={self.seed})"

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, which shares no model with the original."""
        return self.__dict__ | {"_patched": None}

    @property
    def spreads(self) -> bool:
        """True where positions of one sequence may lie on several ranks, see `applied`."""
        return bool(getattr(self.rule, "spreads", False))

    @property
    def compares(self) -> bool:
        """True where what a sequence adds to the gradient depends on the others."""
        return not isinstance(self.rule, LengthRule)

    @property
    def from_head(self) -> bool:
        """True where the head gives each response one weight for all parameters."""
        return inputs.from_head(self.rule)

    @contextmanager
    def applied(
        self,
        model: nn.Module,
        *,
        sequences: Shaped[Tensor, "..."],
        advantages: Shaped[Tensor, "..."],
        groups: Shaped[Tensor, "..."] | None = None,
        observe: Observer | None = None,
        token_group: Any = None,
    ) -> Iterator[Session]:
        """Transforms the gradients of `model` while the block is open.

        sequences: shaped like input_ids (padded B x L, or packed 1 x T); the number of the
            sequence each position belongs to, prompt included, and -1 for padding.
        advantages: one number per sequence.
        groups: one prompt number per sequence, for `group_by="prompt"`.
        observe: called with (parameter name, tensors) for every layer, to log its lengths.
        token_group: the ProcessGroup over whose ranks the positions of these sequences are spread
            (Ulysses, context parallelism). Each rank passes the numbers of its own positions, and
            the advantages of all sequences; its p.grad is its part of the gradient, so the parts
            of the group are to be added, or averaged with advantages times the group's size. What
            is backpropagated must be the whole objective in its own scale, not times that size,
            through the same modules in the same order on every rank.

        The block can be recorded in a CUDA graph after one ordinary run with the same tensors. In
        replays each overlap set is drawn anew, values are not checked, `sequences` are those of the
        ordinary run, and the trailing averages stay as they were. (The trainer's own recordings,
        `recorded`, have none of these limits.)
        """
        patched = self._open(model, sequences, advantages, groups, observe, token_group)
        watch = None if self.from_head else self._order.watched(sequences)
        safe = safe_attention(sequences.shape[-1], patched.session.layout.seq.device)
        with safe, self._counted(patched.session), self._patching(model, patched, watch):
            yield patched.session

    @contextmanager
    def padded(self, model: nn.Module, rows: PaddedRows) -> Iterator[Session]:
        """`applied` on padded rows in fixed memory.

        Modules see the rows one after the other: every position in the first axis.
        """
        check_advantages(rows.advantages)
        patched = self._open_rows(model, rows, recorded=False)
        with self._counted(patched.session), self._patching(model, patched):
            yield patched.session

    @contextmanager
    def recorded(self, model: nn.Module, rows: PaddedRows) -> Iterator[Session]:
        """Opens a block whose forward and backward are recorded, for `replayed`.

        The block before it must have been an ordinary one on these rows, with trailing averages
        (`settled`) that lie on the device. What the recorded one computes counts for nothing, so
        that a recorder may execute it or not. The recording of the backward ends with
        `session.keep_results()`.
        """
        patched = self._open_rows(model, rows, recorded=True)
        with self._patching(model, patched):
            yield patched.session
        if any(True for handle in patched.session.module_handles for _ in handle.waiting):
            raise RuntimeError("a gradient of the recorded block was not sent")

    @contextmanager
    def replayed(self, model: nn.Module, rows: PaddedRows) -> Iterator[None]:
        """A block in which a recording of these rows is replayed, forward and backward."""
        self._begin(model)
        rows.redraw(self._draw_seed(None).generator(rows.sequences.device))
        with self._counted(rows):
            yield

    @property
    def settled(self) -> bool:
        """True once an update has been made, so that every trailing average in use exists."""
        return self._steps > 0

    @contextmanager
    def _patching(
        self,
        model: nn.Module,
        patched: PatchedModel,
        watch: AbstractContextManager[None] | None = None,
    ) -> Iterator[None]:
        """Patches the model, and checks that each parameter receives what is sent to it."""
        session = patched.session
        _OPEN.append((model, session))
        audit = Audit(session.handles)
        try:
            with (
                patched.installed(),
                session.audited(audit),
                watch or nullcontext(),
                replaced_backward(partial(head.head_transform, session)),
            ):
                yield
            session.check_passes()
            session.check_reruns()
            audit.check()
            patched.check_additions(model)
            if session.head is not None and not session.head.done:
                raise ProxpoError(
                    "gradients.applied: scope=head weighs responses in the backward pass of "
                    "model_logp or token_logp, and none ran in this block; p.grad must not be used"
                )
        finally:
            session.closed = True
            _OPEN.remove((model, session))

    @contextmanager
    def _counted(self, results: Session | PaddedRows) -> Iterator[None]:
        """One more block of this update; its lengths are collected, unless it fails."""
        self._blocks += 1
        collected = self._collected()
        try:
            yield
            if isinstance(results, Session):
                _finish_waiting(results)
            results.check_finite()
            self.averages.collect(results.collected())
        except BaseException as error:
            self._not_finite |= isinstance(error, NotFiniteError)
            self._restore(self._nothing() if self._not_finite else collected)
            raise

    def step(self, *, skipped: bool = False) -> None:
        """Ends an update: moves the trailing averages by what its blocks have collected.

        skipped: the optimizer step was left out, so the transform stays as it was before the
            update, on every rank if one of them says so. An update in which a block raised
            NotFiniteError is a skipped one by itself.
        """
        self._refuse_open("step")
        keys = [f"{name}/{x}" for name in self._names for x in self.rule.quantities]
        self._steps += self.averages.step(keys, skipped=skipped or self._not_finite)
        self._blocks, self._not_finite = 0, False

    def _collected(self) -> dict[str, Any]:
        """State that the earlier blocks of this update have left."""
        return {"averages": self.averages.pending(), "blocks": self._blocks - 1}

    def _nothing(self) -> dict[str, Any]:
        """`_collected` of an update without blocks."""
        return {"averages": 0, "blocks": 0}

    def _restore(self, kept: dict[str, Any]) -> None:
        """Restores what `_collected` returned."""
        self.averages.keep(kept["averages"])
        self._blocks = kept["blocks"]

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter and quantity, and the number of steps made."""
        values = {f"average.{key}": value.clone() for key, value in self.averages.values.items()}
        return {"steps": self._steps, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`; anything collected since the last step is dropped.

        The next block may be on another model.
        """
        self._refuse_open("load_state_dict")
        unknown = [key for key in state if key != "steps" and not key.startswith("average.")]
        if unknown or "steps" not in state:
            raise ProxpoError(
                "gradients: not the state of a transform: expected 'steps' and 'average.*', got "
                + (f"'{unknown[0]}'" if unknown else "no 'steps'")
            )
        averages = {
            key.removeprefix("average."): torch.as_tensor(value).clone()
            for key, value in state.items()
            if key != "steps"
        }
        self.averages.load(averages)
        self._steps, self._blocks = int(state["steps"]), 0
        self._patched = None

    def _open(
        self,
        model: nn.Module,
        sequences: Tensor,
        advantages: Tensor,
        groups: Tensor | None,
        observe: Observer | None,
        token_group: Any,
    ) -> PatchedModel:
        """Checks the inputs and starts a block on the patched model."""
        device = self._begin(model)
        groups = groups if inputs.by_prompt(self.rule) else None
        shard = None
        if not capturing():
            inputs.check_tensors(self.rule, sequences, advantages, groups)
            shard = inputs.shard(self.rule, sequences, advantages, groups, token_group, device)
            inputs.check_values(sequences, advantages, shard)
        elif token_group is not None:
            raise ProxpoError("gradients.applied: a CUDA graph cannot record a `token_group`")
        elif self._patched is None or not self._patched[1].session.is_last(
            sequences, advantages.numel()
        ):
            raise ProxpoError(
                "gradients.applied: a CUDA graph can only record a block whose model and "
                "`sequences` tensor an earlier block has seen: run it once before"
            )
        kind = torch.float64 if advantages.dtype == torch.float64 else torch.float32
        patched = self._patch(model)
        patched.session.open(
            seed=self._draw_seed(token_group),
            sequences=sequences.to(device),
            advantages=advantages.detach().to(device, kind, copy=True),
            groups=None if groups is None else groups.to(device, copy=True),
            observer=observe,
            shard=shard,
        )
        return patched

    def _open_rows(self, model: nn.Module, rows: PaddedRows, *, recorded: bool) -> PatchedModel:
        """Starts a block on padded rows."""
        self._begin(model)
        rows.open(recorded=recorded)
        patched = self._patch(model)
        patched.session.open(
            seed=self._draw_seed(None),
            sequences=rows.sequences.view(-1),
            advantages=rows.advantages,
            padded=rows,
        )
        return patched

    def _draw_seed(self, token_group: Any) -> DrawSeed:
        return DrawSeed(self.seed, self._steps, self._blocks, inputs.first_rank(token_group))

    def _begin(self, model: nn.Module) -> torch.device:
        """Forgets a failed update that lies behind, and refuses a block within a block."""
        device = _device(model)
        if self._not_finite and _finite_gradients(model):  # they belong to another update
            self._not_finite = False
            self._restore(self._nothing())
        if _OPEN:
            own = {id(module) for module in model.modules()}
            if any(id(module) in own for other, _ in _OPEN[:] for module in other.modules()):
                raise ProxpoError(
                    "gradients.applied: a transform is already applied to this model; close its "
                    "`with` block first"
                )
        return device

    @property
    def _is_open(self) -> bool:
        """True while a block of this transform is open."""
        return any(session.averages is self.averages for _, session in _OPEN[:])

    def _refuse_open(self, method: str) -> None:
        """Refuses what belongs between two updates while a block is open."""
        if self._is_open:
            raise ProxpoError(
                f"gradients: transform.{method}() inside an `applied` block, whose lengths are "
                "collected when it ends; call it after the block"
            )

    @property
    def _keeps_lengths(self) -> bool:
        """True where numbers of an earlier block have a part in the next one."""
        kept = bool(self.averages.values) or self.averages.pending() > 0
        read = getattr(self.rule, "regularised", True)  # without reg, ISOPO only writes them
        return (kept and read) or self._is_open

    def _refuse_other(self, model: nn.Module) -> None:
        """Refuses a model without any module of the one whose lengths are kept."""
        if self._patched is None or self._patched[0] is model or not self._keeps_lengths:
            return
        own = {id(module) for module in model.modules()}
        if not any(id(module) in own for module in self._patched[0].modules()):
            raise ProxpoError(
                "gradients.applied: this transform keeps lengths of another model's layers; "
                "make one transform for each model (a new one can load this one's state_dict)"
            )

    def _patch(self, model: nn.Module) -> PatchedModel:
        """Handles for the parameters the model trains now; the old ones if it has not changed."""
        self._refuse_other(model)
        if self._patched is not None:
            known, patched = self._patched
            if known is model and patched.fingerprint == fingerprint(model):
                return patched
        patched = PatchedModel(model, Session(self.rule, self.averages), self._warn)
        self._patched = (model, patched)
        self._order = AxisOrder(model)
        head = patched.session.head
        self._names.update(dict.fromkeys([head.name] if head else patched.session.handles))
        return patched

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"gradients.applied: no per-sequence form for {what}; it gets the "
                "advantage-weighted gradient without normalisation (s = 1)",
                stacklevel=2,
            )


def active_handle(parameter: Tensor) -> ParameterHandle | None:
    """The handle of a parameter in the open block, for uses outside its module; None for none.

    A tied weight is found at the module that multiplies by it (the head), not at the embedding.
    """
    handles = (session.handle_of(parameter) for _, session in _OPEN[::-1])
    return next((handle for handle in handles if handle is not None), None)


def scaled_norm(
    x: Float[Tensor, "*lead wide"], weight: Float[Tensor, " wide"], eps: float
) -> Float[Tensor, "*lead wide"]:
    """RMS norm of x times a weight outside its module, trained by position if a block trains it."""
    handle = active_handle(weight)
    kind = torch.promote_types(x.dtype, weight.dtype)
    x, scale = x.to(kind), weight.to(kind)
    if handle is None:
        return rms_norm(x, x.shape[-1:], scale, eps)
    session, attribute = handle.session, handle.attribute
    owner = next(m for m in session.module_handles if m.handles.get(attribute) is handle)
    vectors = VectorCall(session, {attribute: owner}, x.shape[:-1])
    y = rms_norm(x, x.shape[-1:], scale.detach(), eps)
    return norm_weight(y, weight, x, eps, attribute, vectors)


def _device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if parameter.requires_grad:
            return parameter.device
    raise ProxpoError(
        "gradients.applied: no parameter of the model requires a gradient; unfreeze some or add "
        "an adapter"
    )


def _finite_gradients(model: nn.Module) -> bool:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [getattr(grad, "_local_tensor", grad) for grad in grads]
    return all(bool(torch.isfinite(grad).all()) for grad in local)


def _finish_waiting(session: Session) -> None:
    """Adds postponed gradients, and those that wait for calls which never reached a backward."""
    for module_handle in session.module_handles:
        for nested in module_handle.waiting:
            _check_late(module_handle)
            for attribute, gradient in module_handle.flush(nested).items():
                module_handle.handles[attribute].add(gradient)
    session.finish()


def _check_late(module_handle: ModuleHandle) -> None:
    """Refuses gradients that would be wrong, or come too late for the other processes."""
    if module_handle.reopened:
        raise module_handle.partial_backward()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ProxpoError(
            f"gradients.applied: a forward of {module_handle.name} in this block never reached "
            "backward(), so that its gradient comes after the processes have exchanged theirs; run "
            "such a forward under torch.no_grad() or outside the block"
        )
