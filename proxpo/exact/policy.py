"""A small model as a function of one flat parameter vector, and a batch of its actions.

Axes: `seq` sequences, `tok` positions, `vocab` the vocabulary, `param` trainable parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call, vjp

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Int, Shaped, Tensor


@dataclass(frozen=True)
class ActionBatch:
    """Inputs of a model and actions taken: `actions[i, t]` answers logits row (i, t).

    For a language model: `inputs = ids[:, :-1]`, `actions = ids[:, 1:]`, `mask` on the response.
    """

    inputs: Shaped[Tensor, "_ ..."]
    actions: Int[Tensor, "_ _"]
    mask: Bool[Tensor, "_ _"]

    def __post_init__(self) -> None:
        if self.actions.shape != self.mask.shape or len(self.inputs) != len(self.mask):
            raise ProxpoError(
                f"samples: actions {tuple(self.actions.shape)}, mask {tuple(self.mask.shape)} and "
                f"inputs {tuple(self.inputs.shape)} must agree: one row per sequence, one action "
                "per position"
            )


def read_logits(model: Any, inputs: Tensor) -> Tensor:
    """`model(inputs)`, or its `.logits` where the model wraps them (Hugging Face)."""
    out = model(inputs)
    return out if isinstance(out, Tensor) else out.logits


@dataclass(frozen=True)
class FlatPolicy:
    """π_θ(·|s) with θ the trainable parameters of `model`, flattened in their order.

    `read` maps (model, inputs) to logits of shape (seq, tok, vocab); the default suits modules
    that return logits and Hugging Face causal models. The model itself is only changed by `load`.
    """

    model: nn.Module
    read: Callable[[Any, Tensor], Tensor] = read_logits

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise ProxpoError("policy: the model has no trainable parameter")
        return trained

    def vector(self) -> Float[Tensor, " param"]:
        """A copy of θ."""
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def split(self, theta: Float[Tensor, " param"]) -> dict[str, Tensor]:
        """θ cut into the shapes, and cast to the dtypes, of the parameters."""
        parameters = self.parameters
        pieces = theta.split([p.numel() for p in parameters.values()])
        return {
            name: piece.view_as(p).to(p.dtype)
            for (name, p), piece in zip(parameters.items(), pieces)
        }

    @torch.no_grad()
    def load(self, theta: Float[Tensor, " param"]) -> None:
        """Writes θ into the model."""
        for p, value in zip(self.parameters.values(), self.split(theta).values()):
            p.copy_(value)

    def log_probs(
        self, theta: Float[Tensor, " param"], samples: ActionBatch
    ) -> Float[Tensor, "seq tok vocab"]:
        """log π_θ(v | s_t) for the whole vocabulary; 0 where masked."""
        call = _Call(self.model, self.split(theta))
        log_probs = self.read(call, samples.inputs).log_softmax(-1)
        if log_probs.shape[:2] != samples.mask.shape:
            raise ProxpoError(
                f"policy: logits of shape {tuple(log_probs.shape)} for actions of shape "
                f"{tuple(samples.mask.shape)}; expected one row of logits per action"
            )
        return log_probs.masked_fill(~samples.mask[..., None], 0.0)

    def logp(
        self, theta: Float[Tensor, " param"], samples: ActionBatch
    ) -> Float[Tensor, "seq tok"]:
        """log π_θ(a_t | s_t); 0 where masked."""
        actions = samples.actions.masked_fill(~samples.mask, 0)
        return self.log_probs(theta, samples).gather(-1, actions[..., None]).squeeze(-1)


@dataclass(frozen=True)
class _Call:
    """The model at other parameters, callable like the model."""

    model: nn.Module
    values: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.values, args, kwargs)


def scores(policy: FlatPolicy, samples: ActionBatch) -> Float[Tensor, "seq param"]:
    """J, row i = ∇_θ Σ_t log π(a_t|s_t) of sequence i, one pullback each."""
    return _jacobian(lambda theta: policy.logp(theta, samples).sum(1), policy.vector())


def token_scores(policy: FlatPolicy, samples: ActionBatch) -> Float[Tensor, "action param"]:
    """∇_θ log π(a_t|s_t), one row per valid token, in the order of `mask.nonzero()`."""
    return _jacobian(lambda theta: policy.logp(theta, samples)[samples.mask], policy.vector())


def vocab_scores(policy: FlatPolicy, samples: ActionBatch) -> Float[Tensor, "action param"]:
    """√π(v|s_t) ∇_θ log π(v|s_t), one row per valid position and vocabulary entry v."""

    def weighted(theta: Tensor) -> Tensor:
        log_probs = policy.log_probs(theta, samples)[samples.mask]
        return (log_probs * (log_probs / 2).exp().detach()).flatten()

    return _jacobian(weighted, policy.vector())


def _jacobian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    value, pullback = pull(f, theta)
    if not value.numel():
        return theta.new_zeros(0, theta.numel())
    units = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
    return torch.stack([pullback(unit) for unit in units])


def pull(f: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """f(θ), and the map from a cotangent of it to the gradient in θ."""
    value, pullback = cast(tuple[Tensor, Callable], vjp(f, theta))
    return value, lambda cotangent: pullback(cotangent)[0]


@dataclass(frozen=True)
class Linearised:
    """f near θ: its value, v ↦ J v and u ↦ Jᵀ u with J = ∂f/∂θ, from one forward pass.

    J v is the derivative of Jᵀ u in u, a pass over the recorded backward pass: it needs no
    forward-mode derivative, and takes a fraction of the time of `torch.func.jvp`.
    """

    value: Tensor
    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]


def linearise(f: Callable[[Tensor], Tensor], theta: Float[Tensor, " param"]) -> Linearised:
    """f at θ and its Jacobian as two linear maps; the graph lives as long as the result."""
    with torch.enable_grad():
        point = theta.detach().requires_grad_()
        value = f(point)
        u = torch.zeros_like(value, requires_grad=True)
        (pulled,) = torch.autograd.grad(value, point, u, create_graph=True)

    def push(v: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, u, v, retain_graph=True)[0]

    def pull(cotangent: Tensor) -> Tensor:
        return torch.autograd.grad(value, point, cotangent, retain_graph=True)[0]

    return Linearised(value.detach(), push, pull)


def token_kl(
    log_p: Float[Tensor, "seq tok vocab"], log_q: Float[Tensor, "seq tok vocab"]
) -> Float[Tensor, "seq tok"]:
    """KL(p ‖ q) over the whole vocabulary, position by position; 0 log 0 = 0."""
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)
