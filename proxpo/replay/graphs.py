"""The policy's forward and backward pass as CUDA graphs, recorded once for each shape.

A small model launched kernel by kernel waits for Python. Here the kernels of a forward and of a
backward pass are recorded and replayed; the loss between them is computed as ever, so that every
recipe works. Prompts run once for all their responses, where that saves much; under a gradient
transform of single layers whole sequences run. Micro-batches are padded to few shapes, those known
already first; inputs, results and gradients lie in buffers that the graphs know.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from proxpo.errors import ProxpoError
from proxpo.gradients import Transform
from proxpo.gradients._engine.groups import members_of
from proxpo.gradients._engine.inputs import by_prompt
from proxpo.gradients._engine.measure import KernelRule, LengthRule
from proxpo.gradients._engine.padded_rows import PaddedRows
from proxpo.models import Policy
from proxpo.ops.memory import free_memory, is_out_of_memory
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.replay.inputs import (
    PassInputs,
    PassShape,
    RowShape,
    Shape,
    pass_inputs,
    rounded,
    row_inputs,
)
from proxpo.replay.passes import (
    GradientBuffers,
    PolicyPass,
    Record,
    Scored,
    prompts_once,
    rows_alone,
    token_bytes,
    whole_rows,
)
from proxpo.replay.prefix import computes
from proxpo.replay.sequences import Sequences
from proxpo.types import FIELDS, Recipe

MOST_SHAPES = 24  # further shapes run unrecorded
SPARE = 1.25  # positions that a known shape may have for each one that is needed
SAVING = 0.8  # share of the positions of whole sequences below which prompts run once


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
                f"{ctx.graphs.setting}: another forward pass came before this one's backward, and "
                f"their buffers are the same: set {ctx.graphs.setting}=off"
            )
        run = ctx.run
        if not run.result_gradients:
            run.result_gradients = [torch.empty_like(x) for x in run.results]
        for buffer, gradient in zip(run.result_gradients, gradients):
            buffer.copy_(gradient)
        run.gradients.bind()
        run.backward()
        run.forget()
        return None, None, None


class PolicyGraphs:
    """Replayed passes of a policy, by shape. A shape is recorded when it comes a second time.

    transform: of the gradients; passes in an `applied` block are its own
    record: makes a recording of a function; None records nothing and runs every pass anew
    setting: what a user calls it, for messages
    """

    def __init__(
        self,
        policy: Policy,
        *,
        transform: Transform | None = None,
        record: Record | None = None,
        setting: str = "train.graphs",
    ) -> None:
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        self.policy, self.transform, self.record = policy, transform, record
        self.setting = setting
        self.gradients = GradientBuffers(trained)
        self.passes = 0
        self._runs: dict[tuple[Any, Any], PolicyPass] = {}  # by kind and shape
        self._open: PolicyPass | None = None
        self._said = False  # why passes are not recorded
        self.compared = record is None  # with the model's modules
        self._moves = 0  # of the trailing averages, whose addresses recordings know
        self._anchor = torch.zeros((), device=policy.device, requires_grad=True)

    def fields(
        self, sampled: Sequences, *, temperature: float, entropy: bool
    ) -> dict[str, Float[Tensor, "seq tok"]]:
        """`logp` of the response tokens, and their entropy if wanted; 0 at masked places."""
        wanted = Scored(temperature, entropy, gradient=torch.is_grad_enabled())
        run = self._open or self._plain(sampled, wanted)
        results = _Replay.apply(self._anchor, self, run)
        if not torch.is_grad_enabled():
            run.forget()
        rows, tokens = sampled.mask.shape
        names = ("logp", "entropy") if entropy else ("logp",)
        return {
            name: torch.where(sampled.mask, result[:rows, :tokens], 0.0)
            for name, result in zip(names, results)
        }

    def untransformed(
        self, sampled: Sequences, *, temperature: float, entropy: bool
    ) -> dict[str, Float[Tensor, "seq tok"]]:
        """`fields` of the pass that updates run, without the transform of single layers."""
        if self.transform is None or self.transform.from_head:
            return self.fields(sampled, temperature=temperature, entropy=entropy)
        scored, inputs = Scored(temperature, entropy), row_inputs(sampled)
        kind = "untransformed", scored
        shape = self._shape(kind, inputs.shape)
        run = self._known(kind, shape, lambda: self._row_pass(whole_rows, shape, scored, None))
        inputs = inputs.padded(shape)
        run.load((inputs.ids, inputs.start))
        self._record(run, lambda record: run.record(record))
        run.runs += 1
        self._open = run
        try:
            return self.fields(sampled, temperature=temperature, entropy=entropy)
        finally:
            self._open = None

    def give_up(self, reason: str) -> None:
        """Frees all recordings and says why passes are unrecorded from now on."""
        self.record = None
        self._runs.clear()
        self._notice(reason)

    @property
    def held_bytes(self) -> int:
        """Memory that recordings keep between passes."""
        return getattr(self.record, "bytes", 0)

    @contextmanager
    def applied(
        self,
        sampled: Sequences,
        *,
        advantages: Float[Tensor, " seq"],
        temperature: float,
        entropy: bool,
    ) -> Iterator[None]:
        """A block of the transform on these rows: `fields` inside is its forward pass."""
        assert self.transform is not None
        wanted = Scored(temperature, entropy)
        make = self._plain if self.transform.from_head else self._transformed
        run = make(sampled, wanted, advantages)
        assert run.rows is not None
        replayed = self.transform.replayed if run.recorded else self.transform.padded
        with replayed(self.policy.model, run.rows):
            self._open = run
            try:
                yield
            finally:
                self._open = None
        run.runs += self.transform.settled

    def _plain(
        self,
        sampled: Sequences,
        wanted: Scored,
        advantages: Float[Tensor, " seq"] | None = None,
    ) -> PolicyPass:
        """The pass for these rows without a transform of single layers, loaded with them.

        advantages: of the transform that scales responses at the head, if it is to be applied
        """
        shared, rows = pass_inputs(sampled), row_inputs(sampled)
        dtype = None if advantages is None else _advantage_dtype(advantages)
        if advantages is not None:
            self._drop_stale()

        def buffers(shape: PassShape | RowShape) -> PaddedRows | None:
            if dtype is None:
                return None
            return PaddedRows(shape.rows, shape.tokens, device=self.policy.device, dtype=dtype)

        def compute(*inputs: Tensor) -> list[Tensor]:
            return prompts_once(self.policy, PassInputs(*inputs), wanted)

        inputs: tuple[Tensor, ...]
        if shared.shape.positions < SAVING * rows.shape.positions:
            kind = "prompts", wanted, dtype
            shape = self._shape(kind, shared.shape)
            inputs = tuple(shared.padded(shape))
            run = self._known(
                kind,
                shape,
                lambda: PolicyPass(inputs, compute, self._buffers(wanted), rows=buffers(shape)),
            )
        else:
            kind = "rows", wanted, dtype
            whole = self._shape(kind, rows.shape)
            padded = rows.padded(whole)
            inputs = padded.ids, padded.start
            run = self._known(
                kind, whole, lambda: self._row_pass(rows_alone, whole, wanted, buffers(whole))
            )
        run.load(inputs)
        if advantages is not None:
            self._load_transformed(run, _response_sequences(sampled), advantages)
            return run
        self._record(run, lambda record: run.record(record))
        self._make_room(run)
        run.runs += 1
        return run

    def _row_pass(
        self,
        compute: Callable[..., list[Tensor]],
        shape: RowShape,
        wanted: Scored,
        buffers: PaddedRows | None,
    ) -> PolicyPass:
        """A pass over whole sequences, under a transform if there are buffers for it."""
        compute = partial(compute, self.policy, tokens=shape.tokens, wanted=wanted)
        size, device = (shape.rows, shape.prompt + shape.tokens), self.policy.device
        start = torch.ones(shape.rows, dtype=torch.long, device=device)
        ids = torch.zeros(size, dtype=torch.long, device=device)
        return PolicyPass((ids, start), compute, self._buffers(wanted), rows=buffers)

    def _buffers(self, wanted: Scored) -> GradientBuffers | None:
        return self.gradients if wanted.gradient else None

    def _transformed(
        self, sampled: Sequences, wanted: Scored, advantages: Float[Tensor, " seq"]
    ) -> PolicyPass:
        """The pass for these rows under a transform of single layers, loaded with them."""
        assert self.transform is not None
        self._drop_stale()
        dtype = _advantage_dtype(advantages)
        members = members_of(sampled.group) if by_prompt(self.transform.rule) else None
        sizes = None
        if members is not None:
            sizes = rounded(len(members)), rounded(max(map(len, members)))
        kind = ("transformed", sizes, wanted, dtype)
        inputs = row_inputs(sampled)
        shape = self._shape(kind, inputs.shape)
        inputs = inputs.padded(shape)

        def make() -> PolicyPass:
            columns, device = shape.prompt + shape.tokens, self.policy.device
            buffers = PaddedRows(shape.rows, columns, device=device, dtype=dtype, groups=sizes)
            return self._row_pass(whole_rows, shape, wanted, buffers)

        run = self._known(kind, shape, make)
        run.load((inputs.ids, inputs.start))
        self._load_transformed(run, inputs.sequences, advantages, members)
        return run

    def _load_transformed(
        self,
        run: PolicyPass,
        sequences: Int[Tensor, "seq pos"],
        advantages: Float[Tensor, " seq"],
        members: list[list[int]] | None = None,
    ) -> None:
        """Loads the transform's buffers, and records the pass when it comes a second time."""
        transform, buffers = self.transform, run.rows
        assert transform is not None
        assert buffers is not None
        right = buffers.sequences.shape[1] - sequences.shape[1]
        buffers.load(pad(sequences, (0, right), value=-1), advantages, members)

        def record(record: Record) -> None:
            with transform.recorded(self.policy.model, buffers) as session:
                run.record(record, last=session.keep_results)

        self._record(run, record)
        self._make_room(run)

    def _drop_stale(self) -> None:
        """Drops passes whose trailing averages have moved in memory."""
        transform = self.transform
        assert transform is not None
        transform.averages.to(self.policy.device)
        if transform.averages.moves != self._moves:
            self._moves = transform.averages.moves
            self._runs = {key: run for key, run in self._runs.items() if run.rows is None}

    def _shape(self, kind: Any, needed: Shape) -> Shape:
        """The smallest known shape that has room and little to spare, or else a new one."""
        known = [shape for other, shape in self._runs if other == kind]
        roomy = [
            shape
            for shape in known
            if shape.positions <= SPARE * needed.positions
            and all(new >= old for new, old in zip(shape, needed))
        ]
        return min(roomy, key=lambda shape: shape.positions, default=needed.rounded())

    def _known(self, kind: Any, shape: Any, make: Callable[[], PolicyPass]) -> PolicyPass:
        run = self._runs.get((kind, shape))
        if run is None:
            run = make()
            run.positions = shape.positions
            if len(self._runs) < MOST_SHAPES:
                self._runs[kind, shape] = run
        return run

    def _record(self, run: PolicyPass, make: Callable[[Record], None]) -> None:
        """Records a pass that comes for the second time, if nothing speaks against it."""
        if self.record is None or run.recorded or not run.runs or not self._fits(run):
            return
        for other in self._runs.values():
            other.forget()
        try:
            make(self.record)
        except RuntimeError as error:
            self.record = None
            *_, first = errors = list(_chain(error))
            if any(map(is_out_of_memory, errors)):
                self._runs.clear()  # with the memory of their recordings
            self._notice(" ".join(str(first).split())[:200])

    def _fits(self, run: PolicyPass) -> bool:
        """True if memory holds what a recording keeps from its forward to its backward pass."""
        needed = self._needed(run)
        fits = needed <= free_memory(self.policy.device)
        if not fits:
            self._notice(f"a recording would take {needed / 2**30:.1f} GiB more")
        return fits

    def _make_room(self, run: PolicyPass) -> None:
        """Gives all recordings up where a pass that is run anew has no room beside them.

        Their memory counts as free: the next recording uses it again, but nothing else does.
        """
        needed, held = self._needed(run), self.held_bytes
        if run.recorded or not held or needed <= free_memory(self.policy.device) - held:
            return
        self.give_up(
            f"a pass of {needed / 2**30:.1f} GiB has no room beside {held / 2**30:.1f} GiB of "
            "recordings, which are given up"
        )

    def _needed(self, run: PolicyPass) -> int:
        """Bytes from the forward to the backward pass, about half of what those of modules take.

        A pass without gradient keeps one layer at a time.
        """
        compares = self.transform is not None and self.transform.compares
        kept = run.positions * token_bytes(self.policy, compares=compares) // 2
        layers = self.policy.model.config.get_text_config().num_hidden_layers
        return kept if run.gradients is not None else kept // layers

    def _notice(self, reason: str) -> None:
        """Says once why passes are not recorded."""
        if not self._said:
            warnings.warn(f"{self.setting}: passes run unrecorded ({reason})", stacklevel=4)
        self._said = True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then those it followed: a recording that ends early raises one of its own."""
    while error is not None:
        yield error
        error = error.__context__


def _advantage_dtype(advantages: Float[Tensor, " seq"]) -> torch.dtype:
    return torch.float64 if advantages.dtype == torch.float64 else torch.float32


def _response_sequences(sampled: Sequences) -> Int[Tensor, "seq tok"]:
    """The number of each scored token's row, -1 elsewhere."""
    number = torch.arange(len(sampled.mask), device=sampled.mask.device)[:, None]
    return torch.where(sampled.mask, number, -1)


class CudaRecorder:
    """Records functions as CUDA graphs that share one pool of memory, of so many bytes.

    What other threads do meanwhile does not disturb a recording, nor what the garbage collector
    would free in its midst (graphs of earlier recordings, events).
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.bytes = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # again after a failed capture
                _no_collection(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                before = torch.cuda.memory_reserved()  # entering gave back what was free
                function()
                self.bytes += torch.cuda.memory_reserved() - before
        except BaseException:
            generator.graphsafe_set_state(state)  # the capture still holds the present one
            raise
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def unsuited(
    policy: Policy, recipe: Recipe, *, critic: bool, transform: Transform | None = None
) -> str:
    """The reason why the passes of a policy cannot be recorded; empty if they can."""
    if policy.device.type != "cuda":
        return "it needs a CUDA device"
    if transform is not None and not isinstance(transform.rule, LengthRule | KernelRule):
        name = recipe.gradient.name if recipe.gradient else "this one"
        return f"gradient={name} keeps tensors from one micro-batch to the next"
    inner = sorted({name for name in recipe.needs() if FIELDS[name].last in ("vocab", "dim")})
    if inner or critic:
        return f"{recipe.name} reads {', '.join(inner) or 'hidden states, for its critic'}"
    if not computes(policy.model) or policy.model.get_output_embeddings().bias is not None:
        return (
            "it knows the Llama family with weights in float32, without adapters, hooks, dropout "
            "or checkpointing"
        )
    return ""


__all__ = ["CudaRecorder", "PolicyGraphs", "unsuited"]
