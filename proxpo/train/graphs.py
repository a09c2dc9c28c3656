"""The policy's forward and backward pass as CUDA graphs, recorded once for each shape.

A small model launched kernel by kernel waits for Python. Here the kernels of a forward and of a
backward pass are recorded and replayed; the loss between them is computed as ever, so that every
recipe works. Prompts run once for all their responses. Micro-batches are padded to few shapes;
inputs, results and gradients lie in buffers that the graphs know.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.logp import token_logp
from proxpo.models import Policy
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.sampler._weights import read
from proxpo.train.experience import Experience
from proxpo.train.faults import is_out_of_memory
from proxpo.train.prefix import Prompts, Responses, computes, prompts_of, states_of
from proxpo.types import FIELDS, Recipe

MOST_SHAPES = 24  # further shapes run unrecorded
COLUMNS = 16  # prompts and responses are padded to multiples of this

Record = Callable[[Callable[[], None]], Callable[[], None]]


class PassInputs(NamedTuple):
    """Distinct prompts padded on the left, their responses padded on the right."""

    prompts: Int[Tensor, "group pos"]
    pad: Int[Tensor, " group"]
    which: Int[Tensor, " seq"]
    responses: Int[Tensor, "seq tok"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.prompts.shape, *self.responses.shape)

    def padded(self) -> "PassInputs":
        """The inputs in one of few shapes. Added prompts and responses are answered by nobody."""
        groups, positions, rows, tokens = self.shape
        more_groups, more_rows = _rounded(groups) - groups, _rounded(rows) - rows
        left, right = -positions % COLUMNS, -tokens % COLUMNS
        padding = torch.nn.functional.pad
        return PassInputs(
            padding(self.prompts, (left, 0, 0, more_groups)),
            padding(self.pad + left, (0, more_groups)),
            padding(self.which, (0, more_rows)),
            padding(self.responses, (0, right, 0, more_rows)),
        )


def _rounded(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def pass_inputs(experience: Experience) -> PassInputs:
    """The prompts and responses of some rows."""
    prompts = prompts_of(experience)
    return PassInputs(*prompts, experience.input_ids[:, -experience.mask.shape[1] :])


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


class PolicyPass:
    """Forward and backward of the policy on inputs of one shape, recorded or run anew each time."""

    def __init__(
        self,
        policy: Policy,
        inputs: PassInputs,
        gradients: GradientBuffers,
        *,
        temperature: float,
        entropy: bool,
    ) -> None:
        self.policy, self.gradients = policy, gradients
        self.temperature, self.entropy = temperature, entropy
        self.inputs = PassInputs(*(x.clone() for x in inputs))
        self.results: list[Tensor] = []
        self.result_gradients: list[Tensor] = []
        self.recorded = False
        self.forward: Callable[[], None] = self._forward
        self.backward: Callable[[], None] = self._backward

    def load(self, inputs: PassInputs) -> None:
        for buffer, value in zip(self.inputs, inputs):
            buffer.copy_(value)

    def _forward(self) -> None:
        model = self.policy.model
        prompts, pad, which, responses = self.inputs
        with torch.enable_grad():
            weights = read(model, self.policy.dtype, prompts.shape[1] + responses.shape[1])
            states = states_of(weights, Prompts(prompts, pad, which), Responses(responses[:, :-1]))
            scored: Any = token_logp(  # type: ignore[call-overload]
                states.to(weights.head.dtype),
                weights.head,
                responses,
                temperature=self.temperature,
                entropy=self.entropy,
            )
        self.results = list(scored) if self.entropy else [scored]

    def _backward(self) -> None:
        torch.autograd.backward(self.results, self.result_gradients)

    def record(self, record: Record) -> None:
        """Replaces both passes by their recordings; gradients are as they were before."""
        parameters = self.gradients.parameters
        before = [p.grad for p in parameters]
        kept = [buffer.clone() for buffer in self.gradients.buffers]
        self.results, self.result_gradients = [], []  # no node of an earlier pass stays alive
        for p in parameters:
            p.grad = None
        self.gradients.bind()
        try:
            self.forward = record(self._forward)
            self.result_gradients = [torch.zeros_like(x) for x in self.results]
            self.backward = record(self._backward)
            self.recorded = True
        except BaseException:
            self.forward, self.backward = self._forward, self._backward
            raise
        finally:
            torch._foreach_copy_(self.gradients.buffers, kept)
            for p, gradient in zip(parameters, before):
                p.grad = gradient


class _Replay(torch.autograd.Function):
    """Results of a pass as tensors that lead back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: "PolicyGraphs", run: PolicyPass) -> Any:
        run.forward()
        graphs.passes += 1
        ctx.graphs, ctx.run, ctx.number = graphs, run, graphs.passes
        return tuple(x.detach().clone() for x in run.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.number != ctx.graphs.passes:
            raise ProxpoError(
                "train.graphs: another forward pass came before this one's backward, and their "
                "buffers are the same: set train.graphs=off"
            )
        run = ctx.run
        if not run.result_gradients:
            run.result_gradients = [torch.empty_like(x) for x in run.results]
        for buffer, gradient in zip(run.result_gradients, gradients):
            buffer.copy_(gradient)
        run.gradients.bind()
        run.backward()
        return None, None, None


class PolicyGraphs:
    """Replayed passes of a policy, by shape. A shape is recorded when it comes a second time.

    record: makes a recording of a function; None records nothing and runs every pass anew
    """

    def __init__(self, policy: Policy, *, record: Record | None = None) -> None:
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        self.policy, self.record = policy, record
        self.gradients = GradientBuffers(trained)
        self.passes = 0
        self._runs: dict[Any, PolicyPass] = {}
        self._anchor = torch.zeros((), device=policy.device, requires_grad=True)

    def fields(
        self, experience: Experience, *, temperature: float, entropy: bool
    ) -> dict[str, Float[Tensor, "seq tok"]]:
        """`logp` of the response tokens, and their entropy if wanted; 0 at masked places."""
        inputs = pass_inputs(experience).padded()
        run = self._run(inputs, temperature=temperature, entropy=entropy)
        run.load(inputs)
        results = _Replay.apply(self._anchor, self, run)
        rows, tokens = experience.mask.shape
        names = ("logp", "entropy") if entropy else ("logp",)
        return {
            name: torch.where(experience.mask, result[:rows, :tokens], 0.0)
            for name, result in zip(names, results)
        }

    def _run(self, inputs: PassInputs, *, temperature: float, entropy: bool) -> PolicyPass:
        key = (inputs.shape, temperature, entropy)
        run = self._runs.get(key)
        if run is None:
            run = PolicyPass(
                self.policy, inputs, self.gradients, temperature=temperature, entropy=entropy
            )
            if len(self._runs) < MOST_SHAPES:
                self._runs[key] = run
        elif self.record is not None and not run.recorded:
            try:
                run.record(self.record)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self.record = None
                line = " ".join(str(error).split())[:200]
                warnings.warn(f"train.graphs: passes run unrecorded ({line})", stacklevel=2)
        return run


class CudaRecorder:
    """Records functions as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            function()
        return graph.replay


def unsuited(policy: Policy, recipe: Recipe, *, critic: bool) -> str:
    """The reason why the passes of a policy cannot be recorded; empty if they can."""
    if policy.device.type != "cuda":
        return "it needs a CUDA device"
    if recipe.gradient is not None:
        return f"gradient={recipe.gradient.name} works in the model's own modules"
    inner = sorted({name for name in recipe.needs() if FIELDS[name].last in ("vocab", "dim")})
    if inner or critic:
        return f"{recipe.name} reads {', '.join(inner) or 'hidden states, for its critic'}"
    if not computes(policy.model) or policy.model.get_output_embeddings().bias is not None:
        return "it knows the Llama family without adapters, hooks, dropout or checkpointing"
    return ""


__all__ = ["CudaRecorder", "PolicyGraphs", "pass_inputs", "unsuited"]
