"""Forward and backward pass of a policy on inputs of one shape: what graphs.py records.

The passes are of the Llama family's weights, in few large products: prompts once for all their
responses, or whole rows. Inputs, results and gradients lie in buffers that stay where they are.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from proxpo.gradients._engine.device import recording
from proxpo.gradients._engine.padded_rows import PaddedRows
from proxpo.logp._tile import Warp
from proxpo.logp._token import scored_logp
from proxpo.logp.head import HeadCall
from proxpo.models import Policy, recomputes_layers
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.replay.inputs import PassInputs
from proxpo.replay.prefix import Prompts, Responses, states_of
from proxpo.replay.whole import states_of_rows
from proxpo.sampler._lean import attention_before
from proxpo.sampler._lean import run as run_model
from proxpo.sampler._weights import read

Record = Callable[[Callable[[], None]], Callable[[], None]]


class GradientBuffers:
    """Gradients of the trained parameters in memory that stays where it is."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.buffers = [torch.zeros_like(p) for p in parameters]

    def bind(self) -> None:
        """Makes the buffers the parameters' gradients; gradients that are there are kept."""
        empty = [buffer for p, buffer in zip(self.parameters, self.buffers) if p.grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for p, buffer in zip(self.parameters, self.buffers):
            if p.grad is not None and p.grad is not buffer:
                buffer.copy_(p.grad)
            p.grad = buffer


class Scored(NamedTuple):
    """Options of a pass: the temperature of the log-probabilities, and the entropy if wanted.

    gradient: a backward pass may follow
    """

    temperature: float
    entropy: bool
    gradient: bool = True


def prompts_once(
    policy: Policy, inputs: PassInputs, wanted: Scored
) -> list[Float[Tensor, "seq tok"]]:
    """Log-probabilities of the responses, from one run of every prompt."""
    prompts, padding, which, responses = inputs
    weights = read(policy.model, policy.dtype, prompts.shape[1] + responses.shape[1])
    states = states_of(weights, Prompts(prompts, padding, which), Responses(responses[:, :-1]))
    return _scored(
        states.to(weights.head.dtype),
        responses,
        HeadCall(weights.head, None, responses.flatten().shape, None),
        wanted,
    )


def rows_alone(
    policy: Policy,
    ids: Int[Tensor, "seq pos"],
    start: Int[Tensor, " seq"],
    *,
    tokens: int,
    wanted: Scored,
) -> list[Float[Tensor, "seq tok"]]:
    """Log-probabilities of the responses, from a run of whole sequences in few large products."""
    count, length = ids.shape
    weights = read(policy.model, policy.dtype, length)

    def attend(_: int, *qkv: Tensor) -> Tensor:
        return attention_before(*(x.unflatten(0, (count, length)) for x in qkv))

    states = run_model(weights, ids.flatten(), torch.arange(length, device=ids.device), attend)
    at = response_places(ids, start, tokens)
    states = states.index_select(0, at.flatten() - 1).unflatten(0, at.shape)
    call = HeadCall(weights.head, None, at.flatten().shape, None)
    return _scored(states.to(weights.head.dtype), ids.take(at), call, wanted)


def whole_rows(
    policy: Policy,
    ids: Int[Tensor, "seq pos"],
    start: Int[Tensor, " seq"],
    *,
    tokens: int,
    wanted: Scored,
) -> list[Float[Tensor, "seq tok"]]:
    """Log-probabilities of the responses, from a run of whole sequences through the modules."""
    count, length = ids.shape
    with policy.autocast():
        states = states_of_rows(policy.model, ids, policy.dtype)
        at = response_places(ids, start, tokens)
        before = at.flatten() - 1
        head = policy.model.get_output_embeddings()
        call = HeadCall(head.weight, head.bias, torch.Size([count * length]), before)
        states = states.index_select(0, before).unflatten(0, at.shape)
        return _scored(states, ids.take(at), call, wanted)


def response_places(
    ids: Int[Tensor, "seq pos"], start: Int[Tensor, " seq"], tokens: int
) -> Int[Tensor, "seq tok"]:
    """Places of the response tokens, counted over all rows."""
    rows, length = ids.shape
    first = torch.arange(rows, device=ids.device) * length + start
    return first[:, None] + torch.arange(tokens, device=ids.device)


def _scored(
    states: Float[Tensor, "seq tok dim"],
    responses: Int[Tensor, "seq tok"],
    call: HeadCall,
    wanted: Scored,
) -> list[Float[Tensor, "seq tok"]]:
    scored = scored_logp(
        states.flatten(0, 1),
        responses.flatten(),
        call,
        warp=Warp(wanted.temperature),
        entropy=wanted.entropy,
    )
    return [x.view(responses.shape) for x in scored]


def token_bytes(policy: Policy, *, compares: bool) -> int:
    """Bytes that a token takes between forward and backward pass, from the model's shape."""
    shape = policy.model.config.get_text_config()
    hidden = shape.hidden_size
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    kept = shape.num_hidden_layers * (32 * hidden + 6 * inner) * policy.dtype.itemsize
    if recomputes_layers(policy.model):
        kept //= 10
    return kept * (2 if compares else 1)


class PolicyPass:
    """Forward and backward of the policy on inputs of one shape, recorded or run anew each time.

    compute: the results from the buffers of the inputs
    gradients: where the backward pass adds them; None for a pass that has no backward
    rows: buffers of the gradient transform that the pass runs under, if there is one
    runs: passes that were run anew under the formulas to be recorded
    """

    def __init__(
        self,
        inputs: tuple[Tensor, ...],
        compute: Callable[..., list[Tensor]],
        gradients: GradientBuffers | None,
        *,
        rows: PaddedRows | None = None,
    ) -> None:
        self.inputs = tuple(x.clone() for x in inputs)
        self.compute, self.gradients, self.rows = compute, gradients, rows
        self.runs = 0
        self.positions = 0  # of a forward pass
        self.results: list[Tensor] = []
        self.result_gradients: list[Tensor] = []
        self.recorded = False
        self.forward: Callable[[], None] = self._forward
        self.backward: Callable[[], None] = self._backward

    def load(self, inputs: tuple[Tensor, ...]) -> None:
        for buffer, value in zip(self.inputs, inputs):
            buffer[: len(value)].copy_(value)

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.gradients is not None):
            self.results = self.compute(*self.inputs)

    def _backward(self) -> None:
        torch.autograd.backward(self.results, self.result_gradients)

    def forget(self) -> None:
        """Drops the nodes of a pass that was run anew: alive, they would spoil a recording."""
        if not self.recorded:
            self.results, self.result_gradients = [], []

    def record(self, record: Record, *, last: Callable[[], None] = lambda: None) -> None:
        """Replaces the passes by their recordings; gradients are as they were before.

        last: ends the backward pass, in its recording
        """
        if self.gradients is None:
            with recording():
                self.forward = record(self._forward)
            self.recorded = True
            return

        def backward() -> None:
            self._backward()
            last()

        parameters = self.gradients.parameters
        for p in parameters:
            renew_accumulator(p)
        before = [p.grad for p in parameters]
        kept = [buffer.clone() for buffer in self.gradients.buffers]
        for p in parameters:
            p.grad = None
        self.gradients.bind()
        try:
            with recording():
                self.forward = record(self._forward)
            self.result_gradients = [torch.zeros_like(x) for x in self.results]
            with recording():
                self.backward = record(backward)
            self.results = [x.detach() for x in self.results]
            self.recorded = True
        except BaseException:
            self.forward, self.backward = self._forward, self._backward
            self.results, self.result_gradients = [], []
            raise
        finally:
            torch._foreach_copy_(self.gradients.buffers, kept)
            for p, gradient in zip(parameters, before):
                p.grad = gradient


def renew_accumulator(parameter: Tensor) -> None:
    """Gives a parameter a new node for its gradient in the graphs to come.

    All graphs share the node while any of them is alive, and it stays on the stream of the first.
    Another graph of the parameter may still be held at a recording, by a loss or by what has not
    been collected yet: its node would then send a recorded gradient to the default stream, which
    cannot be recorded. A change of dtype, and back, makes PyTorch drop its reference to the node;
    graphs that exist keep theirs.
    """
    value = parameter.data
    other = torch.float32 if value.dtype != torch.float32 else torch.float64
    parameter.data = value.new_empty(0, dtype=other)
    parameter.data = value


__all__ = [
    "GradientBuffers",
    "PolicyPass",
    "Record",
    "Scored",
    "prompts_once",
    "renew_accumulator",
    "rows_alone",
    "token_bytes",
    "whole_rows",
]
