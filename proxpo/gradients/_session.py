"""One backward pass under a transform: the micro-batch, its overlap sets and who asks for them."""

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import nn

from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients._layout import Layout
from proxpo.gradients._norms import Picks
from proxpo.gradients._place import Shape
from proxpo.gradients._rows import AnyRows, join
from proxpo.gradients._shard import Shard
from proxpo.ops.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from proxpo.gradients._audit import Audit
    from proxpo.gradients._averages import Averages

Observer = Callable[[str, dict[str, Tensor]], None]


@runtime_checkable
class Rule(Protocol):
    """A method: how the position gradients of one parameter become its gradient.

    A rule with `spreads = True` may be given positions of one rank out of several: it must make
    lengths whole with `layout.total` and `layout.fetch`, and return this rank's part.
    """

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the squared lengths it collects for trailing averages."""
        ...

    @property
    def overlap(self) -> int | None:
        """Size of the overlap set J; None for every position."""
        ...

    def gradient(self, site: "Site", rows: AnyRows, layout: Layout) -> Tensor:
        """Σ_i w_i V_i for the w of the method, shaped like the parameter."""
        ...

    def plain(self, session: "Session") -> Float[Tensor, " row"]:
        """The w of parameters whose sequence gradients cannot be told: A_i, in the same scale."""
        ...


class Stream(NamedTuple):
    """What makes the draws of one block reproducible."""

    seed: int
    step: int
    block: int
    rank: int

    def generator(self, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(repr(tuple(self)).encode()).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "big"))


class Site:
    """One parameter in one module: the place where a layer's gradient is transformed."""

    def __init__(self, session: "Session", module: nn.Module, name: str, attribute: str) -> None:
        self.session = session
        self.module = module
        self.name = name
        self.attribute = attribute
        self.number = -1  # the site's row in the table of overlap sets
        self.done = False

    @property
    def parameter(self) -> Tensor:
        own = self.module._parameters.get(self.attribute)
        return self.module.get_parameter(self.attribute) if own is None else own

    def picks(self, layout: Layout | None = None) -> Picks:
        """The overlap set J of this parameter in this backward."""
        return self.session.picks(self, self.session.layout if layout is None else layout)

    def gradient(self, rows: AnyRows, layout: Layout) -> Tensor:
        """The transformed gradient, in the dtype of the parameter's own gradient."""
        self.done = True
        return self.session.rule.gradient(self, rows, layout)

    def send(self, gradient: Tensor) -> Tensor:
        """Note that this very tensor goes to autograd as the parameter's gradient; returns it."""
        if self.session.audit is not None:
            self.session.audit.send(self, gradient)
        return gradient

    def observe(self, **values: Tensor) -> None:
        if self.session.observer is not None:
            self.session.observer(self.name, values)


class Call:
    """One run of a module whose backward is still to come; dies with its autograd graph.

    `mates` are the calls it was joined with, itself included, once their gradient has left.
    """

    __slots__ = ("__weakref__", "block", "layout", "mates", "nested")

    def __init__(self, layout: Layout, nested: bool, block: int) -> None:
        self.layout = layout
        self.nested = nested
        self.block = block
        self.mates: WeakSet[Call] | None = None


class Unit:
    """One module. Positions of several calls within a backward are treated as one long list.

    The gradient leaves with the call whose backward runs last; the others return none. A second
    backward over the same graph (retain_graph=True) joins the same calls again. Calls made while a
    backward runs (reentrant checkpointing) are counted apart: they form one list per checkpointed
    segment. As later segments do not exist yet, a module in several of them is refused.
    """

    def __init__(self, session: "Session", sites: dict[str, Site]) -> None:
        self.session = session
        self.sites = sites
        self._open: tuple[WeakSet[Call], WeakSet[Call]] = (WeakSet(), WeakSet())
        self._held: tuple[list[_Held], list[_Held]] = ([], [])
        self._sent: set[bool] = set()  # the kinds of calls, nested or not, whose gradient has left
        self.reopened = False

    @property
    def name(self) -> str:
        site = next(iter(self.sites.values()))
        return site.name.rpartition(".")[0] or site.name

    def reset(self) -> None:
        """Forget calls whose backward never came; a new block starts."""
        for calls, held in zip(self._open, self._held):
            calls.clear()
            held.clear()
        self._sent.clear()
        self.reopened = False

    def begin(self, layout: Layout) -> Call:
        nested = torch._C._current_graph_task_id() != -1
        call = Call(layout, nested, self.session.block)
        self._open[nested].add(call)
        return call

    def finish(self, call: Call, rows: dict[str, AnyRows]) -> dict[str, Tensor]:
        """Gradients by parameter; empty while other calls of the module are still to come."""
        self.session.expect(call.block, self)
        waiting, held = self._open[call.nested], self._held[call.nested]
        if call.mates is not None:
            self.reopened = True
            waiting.update(call.mates)
            for mate in list(call.mates):
                mate.mates = None
        if any(part.call is call for part in held):
            raise self.torn()
        waiting.discard(call)
        if call.layout.whole.size:
            held.append(_Held(call, rows))
        return {} if waiting else self.flush(call.nested)

    def torn(self) -> ProxpoError:
        """The error for a second backward that passes by some calls of the module."""
        return ProxpoError(
            f"gradients.applied: a second backward reached only some of the calls of {self.name}; "
            "call backward() once on the sum of the losses"
        )

    def flush(self, nested: bool) -> dict[str, Tensor]:
        """The gradients of everything held back so far."""
        held = list(self._held[nested])
        self._held[nested].clear()
        if held and (True in self._sent or (nested and self._sent)):
            raise ProxpoError(
                f"gradients.applied: {self.name} is used by several segments under reentrant "
                "checkpointing, or by one and outside, whose gradients cannot be joined; take "
                "use_reentrant=False"
            )
        if held:
            self._sent.add(nested)
        mates = WeakSet(part.call for part in held)
        out = {}
        for part in held:
            part.call.mates = mates
        for attribute in dict.fromkeys(key for part in held for key in part.rows):
            parts = [part for part in held if attribute in part.rows]
            layouts = [part.call.layout for part in parts]
            layout = layouts[0] if len(parts) == 1 else Layout.join(layouts)
            rows = [part.rows[attribute] for part in parts]
            out[attribute] = self.sites[attribute].gradient(
                rows[0] if len(parts) == 1 else join(rows), layout
            )
        return out

    @property
    def waiting(self) -> Iterator[bool]:
        return (nested for nested in (False, True) if self._held[nested])


class _Held(NamedTuple):
    call: Call
    rows: dict[str, AnyRows]


class Session:
    """What a transform knows of one model, and of the micro-batch of the open block."""

    def __init__(self, rule: Rule, averages: "Averages") -> None:
        self.rule = rule
        self.averages = averages
        self.layout: Layout
        self.sites: dict[str, Site] = {}
        self.units: list[Unit] = []
        self.closed = True
        self.audit: "Audit | None" = None
        self.quiet = False  # while an unknown module is run again, its children stay as they are
        self.called: set[int] | None = None  # modules called, while a module above asks
        self.covered: set[int] = set()  # modules whose parameters a running module above handles
        self.fits: dict[int, Callable[..., bool]] = {}  # can a module place its input?
        self.block = 0
        self._known: tuple[Tensor | None, int] = (None, 0)
        self._drawing = 0  # how many sites have a row in the table of overlap sets

    def open(
        self,
        *,
        stream: Stream,
        sequences: Int[Tensor, "..."],
        advantages: Float[Tensor, " row"],
        groups: Int[Tensor, " row"] | None = None,
        observer: Observer | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Start a block."""
        if not capturing():
            self._lay_out(sequences, advantages.numel(), shard)
            single = shard is None and max(self.layout.lengths, default=0) <= 1
            self.shape = Shape(tuple(sequences.shape), single=single)
        self.advantages = advantages
        self.groups = groups
        self.observer = observer
        self.closed = False
        self.block += 1
        # A graph replays its kernels, not this line: only torch's own generator moves on with it.
        device = sequences.device
        if capturing():
            self._generator = torch.cuda.default_generators[device.index]
        else:
            self._generator = stream.generator(device)
        self._table: list[tuple[Tensor, Tensor]] | None = None
        self._numbers: list[tuple[str, Tensor]] = []
        for unit in self.units:
            unit.reset()
        for site in self.sites.values():
            site.done = False

    def _lay_out(self, sequences: Int[Tensor, "..."], count: int, shard: Shard | None) -> None:
        """The layout of these numbers; that of the block before if they are equal.

        It holds a copy: the numbers may change outside, through numpy or `.data` even unnoticed by
        their version.
        """
        numbers = sequences.reshape(-1).long()
        before = self._known[0] if shard is None else None
        same = before is not None and self.layout.count == count
        if not (same and torch.equal(self.layout.seq, numbers)):
            self.layout = Layout(numbers.clone(), count, shard).settle()
        self._known = (sequences, sequences._version) if shard is None else (None, 0)

    def knows(self, sequences: Int[Tensor, "..."], count: int) -> bool:
        """Whether this is the tensor of the block before, as far as its version tells.

        For the recording of CUDA graphs, during which values cannot be read.
        """
        before, version = self._known
        same = before is sequences and version == sequences._version
        return same and self.layout.count == count

    def expect(self, block: int, where: "Unit | Site") -> None:
        """A backward belongs to the block its forward ran in."""
        if self.closed or block != self.block:
            raise ProxpoError(
                f"gradients.applied: backward reached {where.name} after the `with` block of its "
                "forward had ended; call backward() inside it"
            )

    def add(self, module: nn.Module, name: str, attributes: list[str], *, draws: bool) -> Unit:
        """A module under this session; `draws` gives its parameters a row in the table of J."""
        sites = {}
        for attribute in attributes:
            full = f"{name}.{attribute}" if name else attribute
            site = Site(self, module, full, attribute)
            if draws:
                site.number, self._drawing = self._drawing, self._drawing + 1
            self.sites[full] = sites[attribute] = site
        unit = Unit(self, sites)
        self.units.append(unit)
        return unit

    def picks(self, site: Site, layout: Layout) -> Picks:
        size = self.rule.overlap
        if size is None or size >= layout.whole.size:
            return Picks.all(layout)
        if layout is not self.layout or site.number < 0:
            return Picks.at(self._draw(layout.whole, 1, size)[0], layout)
        if self._table is None:
            index = self._draw(layout.whole, self._drawing, size)
            self._table = list(zip(index, layout.whole.valid[index]))
        return Picks(*self._table[site.number])

    def _draw(self, layout: Layout, rows: int, size: int) -> Int[Tensor, "site pick"]:
        """`size` positions without replacement for each of `rows` parameters, padding last."""
        step = max(1, (1 << 25) // layout.size)
        drawn = []
        for start in range(0, rows, step):
            shape = (min(step, rows - start), layout.size)
            score = torch.rand(shape, generator=self._generator, device=layout.seq.device)
            score = score.masked_fill_(~layout.valid, -1.0)
            drawn.append(score.topk(size, dim=1, sorted=False).indices)
        return torch.cat(drawn)

    def flag(self, site: Site, numbers: Float[Tensor, " some"]) -> None:
        """Remember weights or lengths of a layer, to be looked at once, when the block ends."""
        self._numbers.append((site.name, numbers))

    def check(self) -> None:
        """Refuse what is not finite: activations or gradients held NaN or infinity."""
        if not self._numbers or capturing():
            return
        if bool(torch.isfinite(torch.cat([numbers for _, numbers in self._numbers])).all()):
            return
        name = next(n for n, x in self._numbers if not bool(torch.isfinite(x).all()))
        raise NotFiniteError(
            f"gradients.applied: the gradient of {name} is not finite: its input or the gradient "
            "of its output holds NaN or infinity; p.grad must not be used"
        )

    @property
    def generator(self) -> torch.Generator:
        """The stream of this block."""
        return self._generator


def capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing can be asked of the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
