"""Parameters that ROSA moves: LoRA weights, or an offset of the last hidden state."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from proxpo.adapt.responder import Responder, output_layer
from proxpo.exact.policy import ActionBatch, FlatPolicy
from proxpo.logp import HeadInput
from proxpo.ops.shapes import Float, Tensor


class Observed(NamedTuple):
    """π_θ as a function of θ on one observed answer, and a counter of passes over it."""

    policy: FlatPolicy
    samples: ActionBatch
    spend: Callable[[int], None]  # counts passes


@runtime_checkable
class Variables(Protocol):
    """θ of one conversation."""

    def observe(self, prompt: list[int], ids: list[int]) -> Observed:
        """The policy on the answer `ids` to the prompt, at the current θ."""

    def commit(self) -> None:
        """Hands θ to the sampler."""

    def reset(self) -> None:
        """Sets θ back to the value at the start of a conversation and hands it to the sampler."""


class LoraVariables:
    """θ = the weights of a LoRA adapter around the frozen model."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._flat = FlatPolicy(responder.policy.model)
        self._start = self._flat.vector()

    def observe(self, prompt: list[int], ids: list[int]) -> Observed:
        def read(model: Any, inputs: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the others know no second derivative
                logits = model(input_ids=inputs, use_cache=False).logits
            return logits[:, -len(ids) - 1 : -1]

        sequence = self._responder.sequence(prompt, ids)
        return Observed(
            FlatPolicy(self._responder.policy.model, read),
            _actions(sequence, ids),
            lambda passes: self._responder.count(prompt, ids, passes),
        )

    def commit(self) -> None:
        self._responder.sampler.sync()

    def reset(self) -> None:
        self._flat.load(self._start)
        self.commit()


class OffsetVariables:
    """θ = δ, added to the last hidden state at every position: logits W (h + δ) + b.

    To the sampler δ is the head's bias, b + W δ. The transformer below never sees δ, so one forward
    pass gives the states and all products stay in the head.
    """

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._offset = Offset(output_layer(responder.policy))

    def observe(self, prompt: list[int], ids: list[int]) -> Observed:
        head = self._responder.states(prompt, ids)._replace(bias=self._offset.bias)
        self._offset.head = head
        return Observed(
            FlatPolicy(self._offset),
            _actions(head.hidden[None], ids),
            lambda passes: self._responder.count_head(ids, passes),
        )

    @torch.no_grad()
    def commit(self) -> None:
        layer = output_layer(self._responder.policy)
        layer.bias.copy_(self._offset.bias + layer.weight @ self._offset.delta)
        self._responder.sampler.sync()

    def reset(self) -> None:
        nn.init.zeros_(self._offset.delta)
        self.commit()


class Offset(nn.Module):
    """δ, and the head it enters; `bias` is the head's own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.delta = nn.Parameter(weight.new_zeros(weight.shape[1]))
        self.bias = layer.bias.detach().clone()
        self.head = HeadInput(weight[:0], weight, self.bias)

    def forward(self, hidden: Float[Tensor, "seq tok dim"]) -> Float[Tensor, "seq tok vocab"]:
        logits = self.head.logits((hidden + self.delta).flatten(0, 1))
        return logits.unflatten(0, hidden.shape[:2])


def add_bias(model: Any) -> None:
    """Gives the head a bias of 0, which offsets of the last hidden state are written to."""
    head = model.get_output_embeddings()
    if head.bias is not None:
        return
    biased = nn.Linear(1, 1, bias=False)
    biased.in_features, biased.out_features = head.in_features, head.out_features
    biased.weight = head.weight  # shared, where it is tied to the embedding
    zeros = torch.zeros(head.out_features, dtype=head.weight.dtype, device=head.weight.device)
    biased.bias = nn.Parameter(zeros)
    model.set_output_embeddings(biased)


def _actions(inputs: Tensor, ids: list[int]) -> ActionBatch:
    actions = torch.tensor([ids], device=inputs.device)
    return ActionBatch(inputs, actions, torch.ones_like(actions, dtype=torch.bool))


__all__ = ["LoraVariables", "Observed", "Offset", "OffsetVariables", "Variables", "add_bias"]
