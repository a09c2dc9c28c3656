"""A gradient transform: a rule, its trailing averages, and the block it is applied in."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients import _batch
from proxpo.gradients._audit import Audit
from proxpo.gradients._averages import Averages
from proxpo.gradients._modules import Fitting, fingerprint
from proxpo.gradients._order import Order
from proxpo.gradients._session import Observer, Rule, Session, Site, Stream, Unit, capturing
from proxpo.ops.shapes import Shaped, Tensor

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
        self._spoilt = False
        self._names: dict[str, None] = {}
        self._warned: set[str] = set()
        self._fitted: tuple[nn.Module, Fitting] | None = None
        self._order: Order

    def __repr__(self) -> str:
        return f"Transform({self.rule!r}, seed={self.seed})"

    @property
    def spreads(self) -> bool:
        """Whether positions of one sequence may lie on several ranks, see `applied`."""
        return bool(getattr(self.rule, "spreads", False))

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
        """Transform the gradients of `model` while the block is open.

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
        ordinary run, and the trailing averages stay as they were.
        """
        fitting = self._open(model, sequences, advantages, groups, observe, token_group)
        session = fitting.session
        _OPEN.append((model, session))
        audit = Audit(session)
        collected = self._collected()
        try:
            with fitting.exchanged(), audit.watching(), self._order.watched(sequences):
                yield session
            audit.check()
            _settle(session)
        except BaseException as error:
            self._spoilt |= isinstance(error, NotFiniteError)
            self._forget(self._nothing() if self._spoilt else collected)
            raise
        finally:
            session.closed = True
            _OPEN.remove((model, session))

    def step(self, *, skipped: bool = False) -> None:
        """Ends an update: moves the trailing averages by what its blocks have collected.

        skipped: the optimizer step was left out, so the transform stays as it was before the
            update, on every rank if one of them says so. An update in which a block raised
            NotFiniteError is a skipped one by itself.
        """
        keys = [f"{name}/{x}" for name in self._names for x in self.rule.quantities]
        self._steps += self.averages.step(keys, skipped=skipped or self._spoilt)
        self._blocks, self._spoilt = 0, False

    def _collected(self) -> dict[str, Any]:
        """What the blocks of the update before this one have left behind."""
        return {"averages": self.averages.pending(), "blocks": self._blocks - 1}

    def _nothing(self) -> dict[str, Any]:
        """`_collected` of an update without blocks."""
        return {"averages": {}, "blocks": 0}

    def _forget(self, kept: dict[str, Any]) -> None:
        """Goes back to what `_collected` returned."""
        self.averages.keep(kept["averages"])
        self._blocks = kept["blocks"]

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter and quantity, and how many steps were made."""
        values = {f"average.{key}": value.clone() for key, value in self.averages.values.items()}
        return {"steps": self._steps, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; anything collected since the last step is dropped."""
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

    def _open(
        self,
        model: nn.Module,
        sequences: Tensor,
        advantages: Tensor,
        groups: Tensor | None,
        observe: Observer | None,
        token_group: Any,
    ) -> Fitting:
        device = _device(model)
        if self._spoilt and _finite_gradients(model):  # they belong to another update
            self._spoilt = False
            self._forget(self._nothing())
        if _OPEN:
            own = {id(module) for module in model.modules()}
            if any(id(module) in own for other, _ in _OPEN for module in other.modules()):
                raise ProxpoError(
                    "gradients.applied: a transform is already applied to this model; close its "
                    "`with` block first"
                )
        groups = groups if _batch.by_prompt(self.rule) else None
        shard = None
        if not capturing():
            _batch.check(self.rule, sequences, advantages, groups)
            shard = _batch.shard(self.rule, sequences, advantages, groups, token_group, device)
            _batch.check_numbers(sequences if shard is None else shard.whole.seq, advantages)
        elif token_group is not None:
            raise ProxpoError("gradients.applied: a CUDA graph cannot record a `token_group`")
        elif self._fitted is None or not self._fitted[1].session.knows(
            sequences, advantages.numel()
        ):
            raise ProxpoError(
                "gradients.applied: a CUDA graph can only record a block whose model and "
                "`sequences` tensor an earlier block has seen: run it once before"
            )
        kind = torch.float64 if advantages.dtype == torch.float64 else torch.float32
        fitting = self._fit(model)
        fitting.session.open(
            stream=Stream(self.seed, self._steps, self._blocks, _batch.first_rank(token_group)),
            sequences=sequences.to(device),
            advantages=advantages.detach().to(device, kind, copy=True),
            groups=None if groups is None else groups.to(device, copy=True),
            observer=observe,
            shard=shard,
        )
        self._blocks += 1
        return fitting

    def _fit(self, model: nn.Module) -> Fitting:
        """Sites for the parameters the model trains now; as before if it has not changed."""
        if self._fitted is not None:
            fitted, fitting = self._fitted
            if fitted is model and fitting.mark == fingerprint(model):
                return fitting
        fitting = Fitting(model, Session(self.rule, self.averages), self._warn)
        self._fitted = (model, fitting)
        self._order = Order(model)
        self._names.update(dict.fromkeys(fitting.session.sites))
        return fitting

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"gradients.applied: no per-sequence form for {what}; it gets the "
                "advantage-weighted gradient without normalisation (s = 1)",
                stacklevel=2,
            )


def active(parameter: Tensor) -> Site | None:
    """The open block's site for a parameter used outside its module; None where none is open.

    A tied weight is found at the module that multiplies by it (the head), not at the embedding.
    """
    for _, session in reversed(_OPEN):
        found = [
            s for s in session.sites.values() if s.module._parameters.get(s.attribute) is parameter
        ]
        if found and not session.layout.alone:
            raise ProxpoError(
                f"token_logp: {found[0].name} is under a transform with a `token_group`; take the "
                "log-probabilities from logits of the model's own head"
            )
        if found:
            return next((s for s in found if not isinstance(s.module, nn.Embedding)), found[0])
    return None


def _device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if parameter.requires_grad:
            return parameter.device
    raise ProxpoError(
        "gradients.applied: no parameter of the model requires a gradient; unfreeze some or add "
        "an adapter"
    )


def _finite_gradients(model: nn.Module) -> bool:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    local = [getattr(grad, "_local_tensor", grad) for grad in found]
    return all(bool(torch.isfinite(grad).all()) for grad in local)


def _settle(session: Session) -> None:
    """Finish what waits for calls that never reached their backward."""
    for unit in session.units:
        for nested in unit.waiting:
            _check_late(unit)
            for attribute, gradient in unit.flush(nested).items():
                _accumulate(unit.sites[attribute].parameter, gradient)
    session.check()


def _check_late(unit: Unit) -> None:
    """Refuses gradients that would be wrong, or come too late for the other processes."""
    if unit.reopened:
        raise unit.torn()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ProxpoError(
            f"gradients.applied: a forward of {unit.name} in this block never reached backward(), "
            "so that its gradient comes after the processes have exchanged theirs; run such a "
            "forward under torch.no_grad() or outside the block"
        )


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """A call of the module never reached its backward, so autograd is not waiting for this."""
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
