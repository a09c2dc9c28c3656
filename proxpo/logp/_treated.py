"""The head under a gradient transform: weighted gradients of weight and bias, tile by tile.

The weight's position gradient is g_t h_tᵀ and the bias's is g_t 1ᵀ, so both are g_t s_tᵀ for a
`side` s. ISOPO goes over whole sequences once: their logit gradients give lengths, weights and
update in one go. What mixes sequences (ISOPO-NTK, a first average), or has sequences longer than
the tile, goes over vocabulary blocks twice: once to measure, once to add up. arXiv:2512.23353.

Axes: `tok` scored tokens, `row` sequences, `pick` the overlap set J.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from proxpo.gradients import _norms
from proxpo.gradients._isopo import Isopo
from proxpo.gradients._layout import Layout, matmul
from proxpo.gradients._ntk import Ntk
from proxpo.gradients._rows import Outer
from proxpo.gradients._session import Site
from proxpo.logp._head import Head, Rows, add_matmul_, pull_back
from proxpo.logp._tile import blocks
from proxpo.ops.shapes import Float, Int, Tensor

Pulled = tuple[Float[Tensor, "tok dim"] | None, list[Float[Tensor, "vocab _"]]]


@dataclass(frozen=True)
class Spot:
    """One parameter of the head: Σ_t w_t g_t s_tᵀ with weights w that its site decides."""

    site: Site
    side: Float[Tensor, "tok _"]

    def weighted(self, weights: Float[Tensor, " tok"], rows: slice = slice(None)) -> Tensor:
        return (self.side[rows] * weights[:, None]).to(self.side.dtype)


class Overlap(NamedTuple):
    """J among the scored tokens; `keep` is 0 for positions without a loss, whose g is 0."""

    rows: Int[Tensor, " pick"]
    keep: Float[Tensor, " pick"]


@dataclass(frozen=True)
class Scored:
    """The scored tokens of a micro-batch: the sequence of each, and where it stands."""

    layout: Layout
    index: Int[Tensor, " tok"] | None

    def overlap(self, site: Site, dtype: torch.dtype) -> Overlap:
        picks = site.picks()
        if self.index is None:
            return Overlap(picks.index, picks.valid.to(dtype))
        place = torch.full_like(site.session.layout.seq, -1)
        place[self.index] = torch.arange(self.layout.size, device=place.device)
        rows = place[picks.index]
        return Overlap(rows.clamp(min=0), (picks.valid & (rows >= 0)).to(dtype))


def treated(
    head: Head, tokens: Rows, spots: Sequence[Spot], scored: Scored, *, to_hidden: bool
) -> Pulled:
    """Plain gradient of the hidden states, transformed gradients of the parameters."""
    rule = spots[0].site.session.rule
    if not len(tokens.hidden) or not scored.layout.count:  # no sequence, nothing to weigh
        for spot in spots:
            spot.site.done = True
        sides = [torch.zeros_like(spot.side) for spot in spots]
        return pull_back(head, tokens, sides, to_hidden=to_hidden)
    if isinstance(rule, Isopo):
        if not (rule.needs_overlap or rule.needs_norm):
            sides = [spot.weighted(scored.layout.spread(rule.weights(spot.site))) for spot in spots]
            return pull_back(head, tokens, sides, to_hidden=to_hidden)
        if _one_pass(head, rule, spots, scored.layout):
            return by_sequences(head, tokens, spots, scored, rule, to_hidden=to_hidden)
    if isinstance(rule, Isopo | Ntk):
        return by_vocabulary(head, tokens, spots, scored, rule, to_hidden=to_hidden)
    return at_once(head, tokens, spots, scored, to_hidden=to_hidden)


def by_sequences(
    head: Head,
    tokens: Rows,
    spots: Sequence[Spot],
    scored: Scored,
    rule: Isopo,
    *,
    to_hidden: bool,
) -> Pulled:
    """ISOPO in one pass: g of some whole sequences at a time, measured, weighted and added up."""
    order = scored.layout.order
    if not bool((order[1:] > order[:-1]).all()):
        return _sorted(head, tokens, spots, scored, rule, order, to_hidden)
    precise = tokens.pull.logp.dtype
    picked = [_picked(head, tokens, spot, scored, rule) for spot in spots]
    d_hidden = torch.empty_like(tokens.hidden) if to_hidden else None
    outs = [s.side.new_zeros(len(head.weight), s.side.shape[1], dtype=precise) for s in spots]

    def add(rows: slice, some: slice) -> None:
        g = head.grad(tokens.take(rows), slice(0, len(head.weight)))
        if d_hidden is not None:
            torch.mm(g, head.weight, out=d_hidden[rows])
        if some.stop == some.start:
            return  # padding takes no part in the parameters' gradients
        local = Layout(scored.layout.seq[rows] - some.start, some.stop - some.start)
        for spot, overlap, out in zip(spots, picked, outs):
            position = Outer(spot.side[rows], g)
            top, bottom = (None, None) if overlap is None else overlap.against(position, local)
            norm2 = _norm2(rule, spot.site, position, local) if rule.needs_norm else None
            weights = rule.weights(spot.site, top, bottom, norm2, some)
            add_matmul_(out, g.T, spot.weighted(local.spread(weights), rows))

    for rows, some in _whole_sequences(scored.layout, _limit(head)):
        add(rows, some)
    return d_hidden, [out.to(spot.side.dtype) for out, spot in zip(outs, spots)]


def by_vocabulary(
    head: Head,
    tokens: Rows,
    spots: Sequence[Spot],
    scored: Scored,
    rule: Isopo | Ntk,
    *,
    to_hidden: bool,
) -> Pulled:
    """Two passes over vocabulary blocks of g: lengths or kernels, then the weighted sum."""
    precise = tokens.pull.logp.dtype
    measures = [_Measure(spot, scored, rule, precise) for spot in spots]
    d_hidden = torch.zeros_like(tokens.hidden, dtype=precise) if to_hidden else None
    cols = max(1, head.budget // len(tokens.hidden))
    if isinstance(rule, Ntk) or rule.needs_norm:  # V_i of a block for all i, in one piece
        stack = _norms.BLOCK // (scored.layout.count * tokens.hidden.shape[1])
        cols = min(cols, max(stack, 128))
    for col in blocks(len(head.weight), cols):
        g = head.grad(tokens, col)
        if d_hidden is not None:
            add_matmul_(d_hidden, g, head.weight[col])
        for measure in measures:
            measure.add(g)
        del g  # before the next block needs as much
    sides = [m.spot.weighted(scored.layout.spread(m.weights())) for m in measures]
    return d_hidden, pull_back(head, tokens, sides, to_hidden=False)[1]


def at_once(
    head: Head, tokens: Rows, spots: Sequence[Spot], scored: Scored, *, to_hidden: bool
) -> Pulled:
    """An unknown rule gets the gradients of all logits at once, as it would from a layer."""
    g = head.grad(tokens, slice(0, len(head.weight)))
    outs = []
    for spot in spots:
        side, layout, full = spot.side, spot.site.session.layout, g
        if scored.index is not None:
            side, full = (
                x.new_zeros(layout.size, x.shape[1]).index_copy_(0, scored.index, x)
                for x in (side, g)
            )
        outs.append(spot.site.gradient(Outer(side, full), layout).to(side.dtype))
    return (g @ head.weight if to_hidden else None), outs


class _Picked(NamedTuple):
    """g and s of the overlap set."""

    g: Float[Tensor, "pick vocab"]
    side: Float[Tensor, "pick _"]
    bottom: Float[Tensor, ""]

    def against(
        self, rows: Outer, layout: Layout
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
        """Σ_j ⟨V_i, G_j⟩² and Σ_j |G_j|²."""
        inner = matmul(self.g, rows.g.T) * matmul(self.side, rows.a.T)
        return layout.sum_columns(inner).square().sum(dim=0), self.bottom


def _picked(head: Head, tokens: Rows, spot: Spot, scored: Scored, rule: Isopo) -> _Picked | None:
    if not rule.needs_overlap:
        return None
    rows, keep = scored.overlap(spot.site, tokens.pull.logp.dtype)
    picked, side = tokens.take(rows), spot.side[rows]
    # Without a pull there is no gradient: this is what `keep` = 0 means.
    pull = picked.pull._replace(logp=picked.pull.logp * keep)
    if pull.d_entropy is not None:
        pull = pull._replace(d_entropy=pull.d_entropy * keep)
    g = head.grad(picked._replace(pull=pull), slice(0, len(head.weight)))
    return _Picked(g, side, Outer(side, g).squares().sum())


class _Measure:
    """What a rule wants to know of one parameter, summed over vocabulary blocks."""

    def __init__(self, spot: Spot, scored: Scored, rule: Isopo | Ntk, precise: torch.dtype) -> None:
        self.spot, self.layout, self.rule = spot, scored.layout, rule
        self.norm2: Tensor | None = None
        self.kernel: Tensor | None = None
        self.overlap: Overlap | None = None
        if isinstance(rule, Isopo) and rule.needs_overlap:
            self.overlap = scored.overlap(spot.site, precise)
            size = (len(self.overlap.rows), self.layout.size)
            self.gram = spot.side.new_zeros(size, dtype=precise)

    def add(self, g: Float[Tensor, "tok col"]) -> None:
        rows = Outer(self.spot.side, g)
        if isinstance(self.rule, Ntk):
            part = _norms.kernel_materialised(rows, self.layout)
            self.kernel = part if self.kernel is None else self.kernel + part
            return
        if self.overlap is not None:
            add_matmul_(self.gram, g[self.overlap.rows], g.T)
        if self.rule.needs_norm:
            part = _norm2(self.rule, self.spot.site, rows, self.layout)
            self.norm2 = part if self.norm2 is None else self.norm2 + part

    def weights(self) -> Float[Tensor, " row"]:
        if isinstance(self.rule, Ntk):
            assert self.kernel is not None
            return self.rule.weights(self.spot.site, self.kernel)
        if self.overlap is None:
            return self.rule.weights(self.spot.site, norm2=self.norm2)
        side, (rows, keep) = self.spot.side, self.overlap
        inner = self.gram * matmul(side[rows], side.T)
        bottom = keep @ inner.gather(1, rows[:, None])[:, 0]  # ⟨G_j, G_j⟩ stands among the rest
        top = keep @ self.layout.sum_columns(inner).square()
        return self.rule.weights(self.spot.site, top, bottom, self.norm2)


def _norm2(rule: Isopo, site: Site, rows: Outer, layout: Layout) -> Float[Tensor, " row"]:
    """N_i², or of a vocabulary block its share in N_i²."""
    if rule.norm == "sketch":
        return _norms.norm_sketch(rows, layout, rule.sketch, site.session.generator)
    out, inp = rows.shape
    if max(layout.lengths) * (out + inp) < out * inp:
        return _norms.norm_gram(rows, layout)
    return _norms.materialised(rows, layout, None)[2]


def _limit(head: Head) -> int:
    """Tokens whose logits may exist at once when sequences are kept whole."""
    return max(1, 2 * head.budget // len(head.weight))


def _one_pass(head: Head, rule: Isopo, spots: Sequence[Spot], layout: Layout) -> bool:
    longest = max(layout.lengths)
    picks = len(spots[0].site.picks().index) if rule.needs_overlap else 0
    fits = max(longest, picks) <= _limit(head)
    return fits and not any(rule.needs_all(spot.site) for spot in spots)


def _whole_sequences(layout: Layout, limit: int) -> Iterator[tuple[slice, slice]]:
    """Rows and sequences of consecutive chunks of at most `limit` tokens; padding goes first."""
    start = layout.size - sum(layout.lengths)
    if start:
        yield from ((rows, slice(0, 0)) for rows in blocks(start, limit))
    stop, first = start, 0
    for number, length in enumerate(layout.lengths):
        if stop + length - start > limit:
            yield slice(start, stop), slice(first, number)
            start, first = stop, number
        stop += length
    yield slice(start, stop), slice(first, layout.count)


def _sorted(
    head: Head,
    tokens: Rows,
    spots: Sequence[Spot],
    scored: Scored,
    rule: Isopo,
    order: Int[Tensor, " tok"],
    to_hidden: bool,
) -> Pulled:
    """`by_sequences` for tokens that do not come sequence by sequence."""
    index = order if scored.index is None else scored.index[order]
    sorted_ = Scored(scored.layout.take(order), index)
    moved = [Spot(spot.site, spot.side[order]) for spot in spots]
    d_hidden, outs = by_sequences(
        head, tokens.take(order), moved, sorted_, rule, to_hidden=to_hidden
    )
    if d_hidden is not None:
        d_hidden = torch.empty_like(d_hidden).index_copy_(0, order, d_hidden)
    return d_hidden, outs
