"""Patches the `forward` of modules with trained parameters while a block is open.

A module is recognised by what its forward computes, never by a model's name:
    nn.Linear, GPT-2's Conv1D, nn.Embedding, nn.LayerNorm, nn.RMSNorm
    any other *Norm* whose parameters are vectors as long as the last axis of its input, if a trial
    on random numbers shows that each position reads them by itself
    banks of experts (3-D weights, one slice per expert), see `experts.py`
    matrices and vectors that a module multiplies or adds itself (routers), see `proxies.py`; those
    of a child without a forward (ParameterDict) are the module's own
Everything else gets Σ_i A_i V_i, that is s_i = 1, by running the module a second time in the
backward pass (`fallback.py`), with one warning that names it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from proxpo.errors import ProxpoError
from proxpo.gradients._engine import compiled, experts, fallback
from proxpo.gradients._engine.inputs import from_head
from proxpo.gradients._engine.matrices import EmbeddingLayer, LinearLayer
from proxpo.gradients._engine.module import Forward, TrainedModule, containers
from proxpo.gradients._engine.operations import shows_positions
from proxpo.gradients._engine.position_order import OrderCheck
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.gradients._engine.vectors import (
    NormCall,
    VectorCall,
    VectorLayer,
    expand,
    layer_norm_derivative,
    rms_norm_derivative,
)
from proxpo.logp._model import bare_model
from proxpo.ops.shapes import Tensor

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean(name: str) -> str:
    """A module's name without the wrappers of DDP, torch.compile and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def trainable(module: nn.Module) -> list[str]:
    """Names of the parameters a module holds itself and that are trained."""
    own = module._parameters.items()
    return [name for name, value in own if value is not None and value.requires_grad]


class PatchedModel:
    """A model under a transform: its session, and a patched forward for each module.

    Made once and kept while the model stays the same, so that opening a block costs little and a
    compiled model meets the same functions in every block.
    """

    def __init__(self, model: nn.Module, session: Session, warn: Callable[[str], None]) -> None:
        self.session = session
        self.fingerprint = fingerprint(model)
        self._trained = {(id(part), own) for part in model.modules() for own in trainable(part)}
        self._forwards: list[tuple[nn.Module, Forward]] = []
        if from_head(session.rule):
            session.head = ParameterHandle(session, model, "head", "weight")
            self._forwards += _refusing_head(model, session, warn)
            return
        opaque: list[nn.Module] = []
        for name, module, names in _holders(model):
            build = _builder(module, names)
            opaque += [module] if build in (fallback.rerun_all, experts.bank) else []
            layer = build in _LAYERS or isinstance(build, partial)
            _refuse(module, clean(name), layer=layer)
            target = TrainedModule(session, module, clean(name), names, module.forward, warn)
            self._forwards.append((module, _switch(target, build(target), layer=layer)))
        root = bare_model(model)
        call = dict(self._forwards).get(root, root.forward)
        order = OrderCheck(model, opaque)
        self._forwards.append((root, _refusing_wrong_rows(root, call, session, order)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Gives the modules their patched forwards, and their own ones back afterwards."""
        own = [module.__dict__.get("forward") for module, _ in self._forwards]
        try:
            for module, forward in self._forwards:
                module.__dict__.update(_uncopied=_UNCOPIED, forward=forward)
            yield
        finally:
            for (module, _), before in zip(self._forwards, own):
                module.__dict__.pop("_uncopied", None)
                module.__dict__.pop("forward", None)
                if before is not None:
                    module.__dict__["forward"] = before

    def check_additions(self, model: nn.Module) -> None:
        """Refuses gradients of parameters that the model did not train when the block began."""
        if self.session.head is not None or fingerprint(model) == self.fingerprint:
            return
        for name, module in model.named_modules():
            for own in trainable(module):
                new = (id(module), own) not in self._trained
                if new and getattr(module, own).grad is not None:
                    raise ProxpoError(
                        f"gradients.applied: {clean(name)}.{own} began to be trained inside the "
                        "`with` block, so that its gradient did not pass through the transform; "
                        "unfreeze or replace modules before the block"
                    )


class _Uncopied:
    """Keeps a patched module from being copied: the copy would compute with the old weights."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ProxpoError(
            "gradients.applied: the model cannot be copied or pickled inside the `with` block, "
            "where the forward of its layers is another; do so before the block"
        )


_UNCOPIED = _Uncopied()


def _switch(target: TrainedModule, patched: Forward, *, layer: bool) -> Forward:
    """The patched forward, or the module's own where no gradient of it is wanted.

    layer: the patched forward takes its first input by position, and the compiler can look into
    it; any other runs between two graphs.
    """
    session, key, original = target.session, id(target.module), target.forward
    batch_norm = isinstance(target.module, _BATCH_NORM)
    first = next(iter(inspect.signature(original).parameters), "") if layer else ""

    def run(*args: Any, **kwargs: Any) -> Any:
        if first in kwargs and not args:
            args = (kwargs[first],)
            kwargs = {name: value for name, value in kwargs.items() if name != first}
        if session.called is not None and session.accepts.get(key, _always)(*args, **kwargs):
            session.called.add(key)
        plain = session.suspended or not torch.is_grad_enabled() or key in session.covered
        if batch_norm and torch.is_grad_enabled() and _passes_gradient(target, args, kwargs):
            _refuse_mixing(target.module, target.name)
        return original(*args, **kwargs) if plain else patched(*args, **kwargs)

    if layer or not _compiler_loaded():
        return run
    uncompiled = torch.compiler.disable(run)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled if torch.compiler.is_compiling() else run)(*args, **kwargs)

    return forward


def _refusing_wrong_rows(
    root: nn.Module, call: Forward, session: Session, order: OrderCheck
) -> Forward:
    """The model's forward, which refuses one row of several: its layers would repeat that row.

    So does it positions in another order, see `OrderCheck`.
    """

    @wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            shape = tuple(session.shape)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
            alone = len(shape) == 2 and shape[0] > 1 and all(len(x) == 1 for x in inputs)
            if alone and any(x.shape[:2] == (1, shape[1]) for x in inputs):
                raise ProxpoError(
                    f"gradients.applied: the model is called with one row, and `sequences` has "
                    f"{shape[0]}; pass all rows in one call, or open a block for each call"
                )
            return order.call(root, call, session, args, kwargs)
        return call(*args, **kwargs)

    return forward


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _compiler_loaded() -> bool:
    """True where the compiler is loaded, which takes seconds; a compiled model has done so."""
    return "torch._dynamo" in sys.modules


def fingerprint(model: nn.Module) -> list[Any]:
    """Marks that stay equal while the same modules train the same parameters with the same code."""
    mark: list[Any] = [_compiler_loaded()]
    visited: set[int] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        todo.extend(child for child in module._modules.values() if child is not None)
        own = module.__dict__.get("forward")
        mark += [id(module), type(module), id(own) if own else None, *trainable(module)]
    return mark


def _refusing_head(
    model: nn.Module, session: Session, warn: Callable[[str], None]
) -> list[tuple[nn.Module, Forward]]:
    """The head with a forward that refuses: no weight of a response can be read off its logits."""
    head: Any = getattr(bare_model(model), "get_output_embeddings", lambda: None)()
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        return []
    target = TrainedModule(session, head, "head", [], head.forward, warn)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ProxpoError(
            "gradients.applied: scope=head takes log-probabilities of model_logp or token_logp, "
            "but the model's head was called for logits; compute these under torch.no_grad()"
        )

    return [(head, _switch(target, refuse, layer=False))]


def _holders(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Modules that hold or use trained parameters, with the names of those they hold."""
    covered: set[int] = set()
    readers: dict[int, list[str]] = {}  # names of the modules that read a container
    for name, module in model.named_modules():
        if id(module) in covered:
            continue
        names = trainable(module)
        parts = _parts(module)
        if parts:
            covered.update(id(child) for part in parts.values() for child in part.modules())
            names += [
                f"{path}.{own}"
                for path, part in parts.items()
                for own, value in part.named_parameters()
                if value.requires_grad
            ]
        for path, container in containers(module):
            covered.add(id(container))
            above = readers.setdefault(id(container), [])
            if not any(f"{name}.".startswith(prefix) for prefix in above):
                above.append(f"{name}." if name else "")
                names += [f"{path}.{own}" for own in trainable(container)]
        # A convolution's weight is often used by the module above, not by calling the convolution.
        uses_children = any(isinstance(child, nn.Conv1d) for child in module.children())
        if names or uses_children or isinstance(module, _BATCH_NORM):
            yield name, module, names


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Children whose parameters the module uses without calling them, by name."""
    if isinstance(module, nn.MultiheadAttention):
        return dict(module.named_children())
    made = module._modules.get("parametrizations")
    return {} if made is None else {"parametrizations": made}


def _refuse(module: nn.Module, name: str, *, layer: bool) -> None:
    """Raises for modules whose gradients would be wrong, with the reason."""
    where = f"gradients.applied: {name or 'the model itself'} ({type(module).__name__})"
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            raise ProxpoError(
                f"{where} computes its {hook._tensor_name} in a hook of torch.nn.utils.prune, "
                "before its forward; make the pruning permanent with prune.remove first"
            )
        if isinstance(hook, WeightNorm | SpectralNorm):
            kind = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
            raise ProxpoError(
                f"{where} computes its {hook.name} in a hook of torch.nn.utils.{kind}, before its "
                f"forward; use torch.nn.utils.parametrizations.{kind} instead"
            )
    for attribute in ("weight", "bias") if layer else ():
        value = vars(module).get(attribute)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ProxpoError(
                f"{where} computes its {attribute} before its forward; compute it with "
                "torch.nn.utils.parametrize instead"
            )
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        raise ProxpoError(f"{where} has positions before sequences; build it with batch_first=True")
    if isinstance(module, nn.Embedding) and module.max_norm is not None and trainable(module):
        raise ProxpoError(
            f"{where} rescales its rows in its forward (max_norm); rescale them after each "
            "optimizer step instead, and build it with max_norm=None"
        )
    if isinstance(module, _BATCH_NORM) and trainable(module):
        _refuse_mixing(module, name)


def _passes_gradient(target: TrainedModule, args: Any, kwargs: Any) -> bool:
    """False for a frozen module of constants, such as a layer of a frozen vision tower."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return bool(target.names) or any(x.requires_grad for x in inputs)


def _refuse_mixing(module: Any, name: str) -> None:
    """Refuses a batch norm that takes its statistics from the micro-batch."""
    if module.training or module.running_mean is None:
        reason = "call eval() on it" if module.track_running_stats else "replace it"
        raise ProxpoError(
            f"gradients.applied: {name} ({type(module).__name__}) mixes the sequences of a "
            f"micro-batch in its statistics, so no gradient belongs to one sequence; {reason}"
        )


def _builder(module: nn.Module, names: list[str]) -> Callable[[TrainedModule], Forward]:
    """The function that makes the patched forward of a module with these trained parameters."""
    kind = type(module)
    opaque = _parts(module) or isinstance(module, nn.RNNBase) or not names
    if opaque or "forward" in module.__dict__:
        return fallback.rerun_all
    if any("." in name for name in names):
        return fallback.tracked
    if kind.forward is nn.Linear.forward:
        return partial(_linear, transposed=False)
    if kind.__name__ == "Conv1D" and hasattr(module, "nf"):
        return partial(_linear, transposed=True)
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return _embedding if plain else fallback.rerun_all
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        usual = kind.forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
        return _fused_norm if usual and len(module.normalized_shape) == 1 else fallback.rerun_all
    if _looks_like_norm(module):
        return _elementwise
    if experts.recognised(module):
        return experts.bank
    return fallback.tracked


def _looks_like_norm(module: nn.Module) -> bool:
    """True for a norm by name that has vectors only, no children, and applies them by position."""
    mixing = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
    vectors = all(value is None or value.dim() == 1 for value in module._parameters.values())
    leaf = not any(module.children())
    named = "norm" in type(module).__name__.lower()
    usual = named and vectors and leaf and not isinstance(module, mixing)
    return usual and _applies_vectors_by_position(module)


@torch.no_grad()
def _applies_vectors_by_position(module: nn.Module) -> bool:
    """True where a trial shows that vectors repeated for every position give the same output.

    A forward that reads their shape or a sum over them (`F.layer_norm(x, self.weight.shape, ...)`)
    fails it. Tensors are passed for all arguments without a default. The trial changes neither the
    module nor the state of random generators.
    """
    own = {name: value for name, value in module._parameters.items() if value is not None}
    first = next(iter(own.values()))
    kind = torch.promote_types(first.dtype, torch.float32)
    draws = torch.Generator().manual_seed(0)
    required = [each for each in _positional(module.forward) if each.default is each.empty]
    inputs = max(1, len(required))
    numbers = torch.randn(inputs + len(own), 2, 3, len(first), generator=draws)
    x, *others = numbers.to(first.device, kind)
    others, rows = others[: inputs - 1], others[inputs - 1 :]
    vectors = {name: 1 + row[0, 0] / 4 for name, row in zip(own, rows)}
    repeated = {name: vector.expand_as(x).clone() for name, vector in vectors.items()}
    moved = {name: value.clone() for name, value in repeated.items()}
    for value in moved.values():
        value[0, 0] += 1
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    cards = [x.device] if x.is_cuda else []
    outputs: list[Tensor] = []
    with torch.random.fork_rng(devices=cards), torch.autocast(x.device.type, enabled=False):
        try:
            for values in (vectors, repeated, moved):
                module._parameters.update(values)  # type: ignore[arg-type]
                outputs.append(module.forward(x.clone(), *others))
        except Exception:  # any code may run here; the fallback, which warns, takes the module
            return False
        finally:
            module._parameters.update(own)
            for name, value in module.named_buffers():
                value.copy_(buffers[name])
    if not all(isinstance(y, Tensor) and y.shape == x.shape for y in outputs):
        return False
    plain, wide, other = (y.flatten(0, 1) for y in outputs)
    return torch.allclose(plain, wide, rtol=1e-4, atol=1e-5) and torch.equal(wide[1:], other[1:])


def _positional(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that are passed by their place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in inspect.signature(call).parameters.values() if each.kind in kinds]


def _linear(target: TrainedModule, *, transposed: bool) -> Forward:
    layer = LinearLayer(target.session, target.handle(draws=True), transposed=transposed)
    layer.number = compiled.numbered(layer)
    module = target.module
    _accept_positions(target)
    return lambda input: layer(input, module.weight, module.bias)


def _embedding(target: TrainedModule) -> Forward:
    module = target.module
    handle = target.handle(draws=True)
    layer = EmbeddingLayer(target.session, handle, "weight", module.padding_idx)
    layer.number = compiled.numbered(layer)
    return lambda input: layer(input, module.weight)


def _fused_norm(target: TrainedModule) -> Forward:
    module, session, handles = target.module, target.session, target.separate_handles()
    layers = {own: VectorLayer(session, handle, own) for own, handle in handles.items()}
    _accept_positions(target)

    def apply(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        shape = tuple(module.normalized_shape)
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, shape, weight, bias, module.eps)
        return F.rms_norm(x, shape, weight, module.eps)

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            out = apply(input, None, None)
            for own, value in module._parameters.items():
                if value is not None and own in layers:
                    value = compiled.expand(value, input, layers[own].number)
                if value is not None:
                    out = out * value if own == "weight" else out + value
            return out
        small = _default_eps(input) if module.eps is None else module.eps
        derivative = partial(_DERIVATIVES[isinstance(module, nn.LayerNorm)], eps=small)
        norm = NormCall(apply, derivative, VectorCall(session, handles, input.shape[:-1]))
        return norm(input, module.weight, getattr(module, "bias", None))

    return forward


def _default_eps(x: Tensor) -> float:
    """The eps of `F.rms_norm` where none is given: that of x, or of float32 in later torch."""
    return _measured_eps(x.dtype, x.device, torch.is_autocast_enabled(x.device.type))


@cache
def _measured_eps(kind: torch.dtype, device: torch.device, autocast: bool) -> float:
    small = torch.full((1, 2), 1e-2, dtype=kind, device=device)
    kept = bool(F.rms_norm(small, (2,)).mean() > 0.5)  # 0.1 with the eps of bfloat16
    wide = torch.promote_types(kind, torch.float32)
    return torch.finfo(wide if kept else kind).eps


def _elementwise(target: TrainedModule) -> Forward:
    """Runs the module's own code with its vectors repeated for every position."""
    module, names, handles = target.module, target.names, target.separate_handles()
    other = fallback.rerun(target, {own: handles[own].handles[own] for own in names})
    layers = {own: VectorLayer(target.session, handles[own], own) for own in names}
    _accept_positions(target)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        own_values = {own: module._parameters[own] for own in names}
        lead, width = x.shape[:-1], x.shape[-1]
        for value in own_values.values():
            if value.shape[0] != width:
                return other(x, *args, **kwargs)  # its vectors run over several axes
        traced = torch.compiler.is_compiling()
        vectors = None if traced else VectorCall(target.session, handles, lead)
        try:
            for own, value in own_values.items():
                module._parameters[own] = (
                    compiled.expand(value, x, layers[own].number)
                    if vectors is None
                    else expand(value, lead, own, vectors)
                )
            return target.forward(x, *args, **kwargs)
        finally:
            module._parameters.update(own_values)

    return forward


def _accept_positions(target: TrainedModule) -> None:
    """Counts a call as one with positions where the leading axes of its input show them."""
    target.session.accepts[id(target.module)] = partial(shows_positions, target.session)


_DERIVATIVES = (rms_norm_derivative, layer_norm_derivative)
_LAYERS = (_embedding, _fused_norm, _elementwise)  # and linear ones
