"""Optimizers by name, from the libraries that maintain them; none is written here.

They take the `.grad` that a loss or a gradient transform left behind:

    adamw    torch.optim.AdamW                                           arXiv:1711.05101
    sgd      torch.optim.SGD, which leaves the gradient's lengths as they are
    muon     torch.optim.Muon on hidden matrices, AdamW on the rest      arXiv:2502.16982
    soap     pytorch_optimizer.SOAP, whose first step only sets up its bases    arXiv:2409.11321
    shampoo  pytorch_optimizer.Shampoo on hidden matrices, AdamW on the rest    arXiv:1802.09568
    kfac     singd.SINGD in its K-FAC form on hidden linear layers, AdamW on the rest
             (inverse-free K-FAC, arXiv:2312.05705)

The learning rate means what it means to AdamW for `adamw`, `muon` and `soap`; `sgd` multiplies the
gradient by it, `shampoo` has no grafting and `kfac` steps along a natural gradient, so these want a
rate of their own.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxpo.errors import ProxpoError, imported, nearest, resolve
from proxpo.stages._options import brief, coerce

ALONE = ("adamw", "sgd", "soap")  # optimizers of every parameter, without an AdamW for the rest
PLAIN = (bool, int, float, str, type(None))
# Last part of the name of an output head, for models that do not say which module it is.
HEADS = ("lm_head", "head", "output", "embed_out", "unembed")


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.01,
    rest: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """The optimizer called `name` for the trainable parameters of `model`.

    `options` go to the named optimizer, `rest` to the AdamW that `muon`, `shampoo` and `kfac` pair
    with for embeddings, the head and vectors (`rest={"lr": ...}` gives it a rate of its own).
    Weight decay is decoupled and the same for every parameter. Options of a wrong type, and those
    with which no step can be made, are refused at once.
    """
    name = resolve(name, _MAKERS, what="optimizer")
    if not any(p.requires_grad for p in model.parameters()):
        raise ProxpoError(f"optimizer '{name}': the model has no trainable parameter")
    if not isinstance(rest, Mapping | None):
        raise ProxpoError(f"optimizer '{name}': rest takes a block of options, got {brief(rest)}")
    for option, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (isinstance(value, int | float | Tensor) and 0 <= value < float("inf")):
            raise ProxpoError(
                f"optimizer '{name}': {option} takes a number from 0 on, got {brief(value)}"
            )
    main = {"lr": lr, "weight_decay": weight_decay, **options}
    others = {"lr": lr, "weight_decay": weight_decay, **(rest or {})}
    if rest and name in ALONE:
        raise ProxpoError(f"optimizer '{name}' has no option 'rest': it takes every parameter")
    if options or rest:
        _try_steps(name, main, others, next(model.parameters()).device)
    return _MAKERS[name](model, main, others)


def _try_steps(name: str, options: "Options", rest: "Options", device: torch.device) -> None:
    """Makes two steps with a small model, since some options are first read there."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3), nn.Linear(3, 2)).to(device)
        ids = torch.arange(3, device=device)[None]
        try:
            optimizer = _MAKERS[name](model, options, rest)
            for _ in range(2):
                optimizer.zero_grad()
                model(ids).square().sum().backward()
                optimizer.step()
        except ProxpoError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ProxpoError(
                f"optimizer '{name}' cannot work with these options: {reason}"
            ) from error


def state_size(optimizer: Optimizer) -> int:
    """About the bytes of the optimizer's state after its first step: two moments a weight.

    SGD has one with momentum, else none; Shampoo, SOAP and K-FAC have matrices beside them.
    """
    total = 0
    for group in optimizer.param_groups:
        moments = 2 if "momentum" not in group or "betas" in group else int(group["momentum"] > 0)
        total += moments * sum(p.nbytes for p in group["params"] if p.requires_grad)
    return total


def hidden_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable matrices of hidden layers: no embedding, no head, no vector, nothing tied."""
    outer = {id(p) for module in _outer_modules(model) for p in module.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and id(p) not in outer
    }


def _outer_modules(model: nn.Module) -> list[nn.Module]:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        or module is head
        or (head is None and name.rpartition(".")[2] in HEADS)
    ]


class Combined(Optimizer):
    """Several optimizers, each with its own parameters, as one: a step, a schedule, a state.

    Groups and state are shared with the parts, so that a scheduler's change of `lr` reaches them
    and the state dict has torch's usual form; what a part keeps beside them goes to "extra".
    """

    complete = False

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        self.complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the parts are there: none of them would step the new parameters."""
        if self.complete:
            raise ProxpoError("this optimizer takes no further parameters: make it anew")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        foreign = [part for part in self.parts if not type(part).__module__.startswith("torch.")]
        if foreign:
            raise ProxpoError(
                f"{type(foreign[0]).__name__} cannot be copied: make another optimizer and load "
                "the state_dict"
            )
        return {**super().__getstate__(), "parts": self.parts, "complete": True}

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict; tensors, numbers and containers only."""
        return {**super().state_dict(), "extra": [_extra(part) for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        extra = state_dict["extra"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "extra"})
        self._share()
        for part, values in zip(self.parts, extra):
            _restore_extra(part, values)


def _extra(part: Optimizer) -> dict[str, Any]:
    """State that a part keeps outside `state` (SINGD's factors), as plain tensors."""
    return {
        name: _each_matrix(getattr(part, name), lambda m: m.to_dense().clone())
        for name in getattr(part, "STATE_ATTRIBUTES", ())
    }


def _restore_extra(part: Any, extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        side = 0 if "K" in name else 1
        structure = part.SUPPORTED_STRUCTURES[part.param_groups[0]["structures"][side]]
        setattr(part, name, _each_matrix(value, structure.from_dense))


def _each_matrix(value: Any, f: Callable[[Any], Any]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: v if isinstance(v, int | float) else f(v) for k, v in value.items()}


Options = dict[str, Any]


def _adamw(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    return _make_adamw([p for p in model.parameters() if p.requires_grad], options, "adamw")


def _sgd(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    options = _check_options("sgd", torch.optim.SGD, options)
    if options.get("momentum") and options["weight_decay"]:
        raise ProxpoError(
            "optimizer 'sgd': with momentum torch mixes the weight decay into it; set "
            "weight_decay=0"
        )
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **options)


def _muon(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    weights = list(hidden_weights(model).values())
    # With this adjustment AdamW's learning rates carry over.
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    return _split("muon", torch.optim.Muon, weights, model, options, rest)


def _soap(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    cls = _load("pytorch_optimizer", "SOAP", "soap")
    options = _check_options("soap", cls, options)
    return cls([p for p in model.parameters() if p.requires_grad], **options)


def _shampoo(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    cls = _load("pytorch_optimizer", "Shampoo", "shampoo")
    weights = list(hidden_weights(model).values())
    return _split("shampoo", cls, weights, model, {"weight_decouple": True, **options}, rest)


def _kfac(model: nn.Module, options: Options, rest: Options) -> Optimizer:
    """Inverse-free K-FAC, with factors from the backward it sees.

    The factors begin as the identity, and a step changes them by about `lr_cov` / 2: with SINGD's
    0.01 the first hundred steps stay near the plain gradient, with 0.1 they reach the inverses.

    While a gradient transform is applied that is the advantage-free sum of log-probs, whose factors
    are those of the Fisher matrix; under an ordinary loss they contain the advantages.
    """
    cls = _load("singd.optim.optimizer", "SINGD", "kfac")
    defaults = {
        "kfac_like": True, "alpha1": 0.0, "loss_average": None, "T": 1, "normalize_lr_cov": True,
    }  # fmt: skip
    hidden = {id(p) for p in hidden_weights(model).values()}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in hidden]
    frozen = next((m for m in layers if m.bias is not None and not m.bias.requires_grad), None)
    if frozen is not None:
        raise ProxpoError(f"optimizer 'kfac': {frozen} trains its weight but not its bias")
    params = [p for layer in layers for p in layer.parameters()]
    return _split("kfac", _decoupled(cls), params, model, {**defaults, **options}, rest, model)


def _decoupled(cls: Any) -> type[Any]:
    """SINGD with its weight decay apart from the step that its momentum averages."""

    class SINGD(cls):
        def _get_param_group_entry(self, module: nn.Module, entry: str) -> Any:
            return 0.0 if entry == "weight_decay" else super()._get_param_group_entry(module, entry)

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
            return super().step(closure)

    return SINGD


def _split(
    name: str,
    cls: type[Any],
    params: list[nn.Parameter],
    model: nn.Module,
    options: Options,
    rest: Options,
    *first: Any,
) -> Combined:
    if not params:
        raise ProxpoError(
            f"optimizer '{name}': the model has no trainable hidden matrix; use adamw"
        )
    options = _check_options(name, cls, options)
    taken = {id(p) for p in params}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    parts = [cls(*first, params, **options)]
    return Combined([*parts, _make_adamw(others, rest, "adamw (rest)")] if others else parts)


def _make_adamw(params: list[nn.Parameter], options: Options, name: str) -> Optimizer:
    options = _check_options(name, torch.optim.AdamW, options)
    fused = {"fused": True} if all(p.is_cuda for p in params) else {}
    return torch.optim.AdamW(params, **{**fused, **options})


def _check_options(name: str, cls: type[Optimizer], options: Options) -> Options:
    """Options in their types; some optimizers take any keyword and any value."""
    skipped = ("self", "model", "params", "kwargs")
    kinds = typing.get_type_hints(cls.__init__)
    valid = [p for p in inspect.signature(cls.__init__).parameters if p not in skipped]
    for option in options:
        if option not in valid:
            raise ProxpoError(
                f"optimizer '{name}' has no option '{option}'{nearest(str(option), valid)}"
            )
    return {
        option: _in_type(value, kinds.get(option, Any), f"optimizer '{name}': option '{option}'")
        for option, value in options.items()
    }


def _in_type(value: Any, kind: Any, option: str) -> Any:
    """Converts `value` to `kind`, where a list may stand for a tuple, or raises."""
    allowed = typing.get_args(kind) if _is_union(kind) else (kind,)
    for type_ in allowed:
        inner = typing.get_args(type_)
        if typing.get_origin(type_) is tuple:
            if isinstance(value, (list, tuple)) and len(value) == len(inner):
                return tuple(_in_type(x, k, option) for x, k in zip(value, inner))
        elif type_ in (Tensor, torch.dtype):
            if isinstance(value, type_):
                return value
        elif type_ is Any or (typing.get_origin(type_) is Callable and callable(value)):
            return value
    plain = [
        type_ for type_ in allowed if type_ in PLAIN or typing.get_origin(type_) is typing.Literal
    ]
    if not plain:
        names = " or ".join(str(type_).removeprefix("typing.") for type_ in allowed)
        raise ProxpoError(f"{option} takes {names}, got {brief(value)}")
    return coerce(value, typing.Union[tuple(plain)], option=option)  # noqa: UP007


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


def _load(package: str, cls: str, name: str) -> Any:
    extra = f"the package {package.partition('.')[0]}: pip install 'proxpo[optimizers]'"
    return getattr(imported(package, f"optimizer '{name}' needs {extra}"), cls)


_MAKERS: dict[str, Callable[[nn.Module, Options, Options], Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "muon": _muon,
    "soap": _soap,
    "shampoo": _shampoo,
    "kfac": _kfac,
}

NAMES = tuple(_MAKERS)

__all__ = ["NAMES", "Combined", "hidden_weights", "make_optimizer"]
