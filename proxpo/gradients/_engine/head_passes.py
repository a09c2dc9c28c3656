"""Backward passes of the head: weighted gradients of weight and bias, tile by tile.

The weight's position gradient is g_t h_tᵀ and the bias's is g_t 1ᵀ, so both are g_t s_tᵀ for a
`side` s. ISOPO goes over whole sequences once: their logit gradients give lengths, weights and
update in one go. Rules that mix sequences (ISOPO-NTK, a first average) and sequences longer than
the tile take two passes over vocabulary blocks: one to measure, one to add up. The weights are
those of the rule, as in every other layer.

Axes: `tok` scored tokens, `row` sequences, `pick` the overlap set J.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from proxpo.gradients._engine import cost, inner_products
from proxpo.gradients._engine.device import matmul
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import KernelRule, LengthRule, Measurement, SquaredLengths
from proxpo.gradients._engine.position_gradients import Outer
from proxpo.gradients._engine.session import ParameterHandle
from proxpo.logp.head import (
    Head,
    HeadGradients,
    HeadTokens,
    add_matmul_,
    blocks,
    head_backward,
)
from proxpo.ops.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class HeadParameter:
    """One parameter of the head: Σ_t w_t g_t s_tᵀ with weights w of the rule."""

    handle: ParameterHandle
    side: Float[Tensor, "tok _"]

    def weighted(self, weights: Float[Tensor, " tok"], rows: slice = slice(None)) -> Tensor:
        return (self.side[rows] * weights[:, None]).to(self.side.dtype)


class ScoredOverlap(NamedTuple):
    """J among the scored tokens; `keep` is 0 for positions without a loss, whose g is 0."""

    rows: Int[Tensor, " pick"]
    keep: Float[Tensor, " pick"]


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a micro-batch: the sequence and the position of each."""

    layout: Layout
    index: Int[Tensor, " tok"] | None

    def overlap(self, handle: ParameterHandle, dtype: torch.dtype) -> ScoredOverlap:
        if handle is handle.session.head:  # J among the scored tokens alone
            overlap_set = handle.overlap_set(self.layout)
            return ScoredOverlap(overlap_set.index, overlap_set.valid.to(dtype))
        overlap_set = handle.overlap_set()
        if self.index is None:
            return ScoredOverlap(overlap_set.index, overlap_set.valid.to(dtype))
        place = torch.full_like(handle.session.layout.seq, -1)
        place[self.index] = torch.arange(self.layout.size, device=place.device)
        rows = place[overlap_set.index]
        return ScoredOverlap(rows.clamp(min=0), (overlap_set.valid & (rows >= 0)).to(dtype))


@dataclass(frozen=True)
class HeadPass:
    """One backward pass of the head."""

    head: Head
    tokens: HeadTokens
    parameters: Sequence[HeadParameter]
    scored: ScoredTokens
    to_hidden: bool

    @property
    def precise(self) -> torch.dtype:
        """Dtype of sums."""
        return self.tokens.grads.d_logp.dtype

    @property
    def vocabulary(self) -> slice:
        """All columns of the logits."""
        return slice(0, len(self.head.weight))

    def transformed(self) -> HeadGradients:
        """Plain gradient of the hidden states, transformed gradients of the parameters."""
        rule = self.parameters[0].handle.session.rule
        if not len(self.tokens.hidden) or not self.scored.layout.count:  # nothing to weigh
            for parameter in self.parameters:
                parameter.handle.done = True
            return self.backward([torch.zeros_like(x.side) for x in self.parameters])
        if isinstance(rule, LengthRule):
            if rule.measurement.empty:
                weights = [rule.length_weights(x.handle, SquaredLengths()) for x in self.parameters]
                return self.backward(self.weighted(weights))
            if _one_pass(self, rule):
                return by_sequences(self, rule)
        if isinstance(rule, LengthRule | KernelRule):
            return by_vocabulary(self, rule)
        return all_logits(self)

    def vocabulary_blocks(
        self, rule: LengthRule | KernelRule
    ) -> Iterator[tuple[slice, Float[Tensor, "tok col"]]]:
        """Yields g of all tokens, a vocabulary block at a time."""
        head, tokens = self.head, self.tokens
        cols = max(1, head.budget // len(tokens.hidden))
        # V_i of a block for all i, in one piece
        if isinstance(rule, LengthRule) and rule.measurement.norm:
            stack = inner_products.BLOCK // (self.scored.layout.count * tokens.hidden.shape[1])
            cols = min(cols, max(stack, 128))
        if tokens.hidden.is_cuda:
            cols = inner_products.even_step(len(head.weight), cols)
        for col in blocks(len(head.weight), cols):
            yield col, head.grad(tokens, col)

    def weighted(self, weights: Sequence[Float[Tensor, " row"]]) -> list[Tensor]:
        """The side of every parameter, times the weights of its sequences."""
        spread = self.scored.layout.spread
        return [x.weighted(spread(weight)) for x, weight in zip(self.parameters, weights)]

    def backward(self, sides: Sequence[Tensor], *, to_hidden: bool | None = None) -> HeadGradients:
        """`head_backward` of these tokens."""
        wanted = self.to_hidden if to_hidden is None else to_hidden
        return head_backward(self.head, self.tokens, sides, to_hidden=wanted)


def by_sequences(work: HeadPass, rule: LengthRule) -> HeadGradients:
    """One pass: g of some whole sequences at a time, measured, weighted and added up."""
    head, tokens, layout = work.head, work.tokens, work.scored.layout
    if not layout.sorted:
        return _sorted(work, rule, layout.order)
    picked = [_overlap_gradients(work, parameter, rule) for parameter in work.parameters]
    d_hidden = torch.empty_like(tokens.hidden) if work.to_hidden else None
    outs = [
        x.side.new_zeros(len(head.weight), x.side.shape[1], dtype=work.precise)
        for x in work.parameters
    ]

    def add(rows: slice, some: slice) -> None:
        g = head.grad(tokens.take(rows), work.vocabulary)
        if d_hidden is not None:
            torch.mm(g, head.weight, out=d_hidden[rows])
        if some.stop == some.start:
            return  # padding takes no part in the parameters' gradients
        local = layout.part(rows, some)
        for parameter, overlap, out in zip(work.parameters, picked, outs):
            position = Outer(parameter.side[rows], g)
            top, bottom = (None, None) if overlap is None else overlap.against(position, local)
            norm2 = _norm2(rule.measurement, parameter.handle, position, local)
            weights = rule.length_weights(
                parameter.handle, SquaredLengths(top, bottom, norm2), some
            )
            add_matmul_(out, g.T, parameter.weighted(local.spread(weights), rows))

    for rows, some in _whole_sequences(layout, _limit(head)):
        add(rows, some)
    return d_hidden, [out.to(x.side.dtype) for out, x in zip(outs, work.parameters)]


def by_vocabulary(work: HeadPass, rule: LengthRule | KernelRule) -> HeadGradients:
    """Two passes over vocabulary blocks of g: lengths or kernels, then the weighted sum."""
    head, tokens = work.head, work.tokens
    blockwise = [
        _KernelSums(work, parameter, rule)
        if isinstance(rule, KernelRule)
        else _BlockSums(work, parameter, rule)
        for parameter in work.parameters
    ]
    d_hidden = torch.zeros_like(tokens.hidden, dtype=work.precise) if work.to_hidden else None
    for col, g in work.vocabulary_blocks(rule):
        if d_hidden is not None:
            add_matmul_(d_hidden, g, head.weight[col])
        for sums in blockwise:
            sums.add(g)
        del g  # before the next block needs as much
    sides = work.weighted([sums.weights() for sums in blockwise])
    return d_hidden, work.backward(sides, to_hidden=False)[1]


def response_weights(work: HeadPass, rule: LengthRule) -> Float[Tensor, " row"]:
    """One pass over vocabulary blocks: the weight of each response by the first parameter."""
    sums = _BlockSums(work, work.parameters[0], rule)
    for _, g in work.vocabulary_blocks(rule):
        sums.add(g)
        del g  # before the next block needs as much
    return sums.weights()


def all_logits(work: HeadPass) -> HeadGradients:
    """Any other rule: gradients of all logits at once, as from a layer."""
    g = work.head.grad(work.tokens, work.vocabulary)
    outs = []
    for parameter in work.parameters:
        side, layout, full = parameter.side, parameter.handle.session.layout, g
        if work.scored.index is not None:
            side, full = (
                x.new_zeros(layout.size, x.shape[1]).index_copy_(0, work.scored.index, x)
                for x in (side, g)
            )
        gradient = parameter.handle.gradient(Outer(side, full), layout)
        assert gradient is not None
        outs.append(gradient.to(side.dtype))
    return (g @ work.head.weight if work.to_hidden else None), outs


class _OverlapGradients(NamedTuple):
    """g and s of the overlap set, and Σ_j |G_j|²."""

    g: Float[Tensor, "pick vocab"]
    side: Float[Tensor, "pick _"]
    bottom: Float[Tensor, ""]

    def against(
        self, rows: Outer, layout: Layout
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
        """Σ_j ⟨V_i, G_j⟩² and Σ_j |G_j|²."""
        inner = matmul(self.g, rows.g.T) * matmul(self.side, rows.a.T)
        return layout.sum_columns(inner).square().sum(dim=0), self.bottom


def _overlap_gradients(
    work: HeadPass, parameter: HeadParameter, rule: LengthRule
) -> _OverlapGradients | None:
    if not rule.measurement.overlap:
        return None
    rows, keep = work.scored.overlap(parameter.handle, work.precise)
    picked, side = work.tokens.take(rows), parameter.side[rows]
    # Where `keep` is 0 no gradient reaches the token.
    g = work.head.grad(picked.scaled(keep), work.vocabulary)
    return _OverlapGradients(g, side, Outer(side, g).squares().sum())


class _BlockSums:
    """Lengths of one parameter, summed over vocabulary blocks."""

    def __init__(self, work: HeadPass, parameter: HeadParameter, rule: LengthRule) -> None:
        self.parameter, self.layout, self.rule = parameter, work.scored.layout, rule
        self.norm2: Tensor | None = None
        self.overlap: ScoredOverlap | None = None
        if rule.measurement.overlap:
            self.overlap = work.scored.overlap(parameter.handle, work.precise)
            size = (len(self.overlap.rows), self.layout.size)
            self.gram = parameter.side.new_zeros(size, dtype=work.precise)

    def add(self, g: Float[Tensor, "tok col"]) -> None:
        """Adds the share of a vocabulary block."""
        rows = Outer(self.parameter.side, g)
        if self.overlap is not None:
            add_matmul_(self.gram, g[self.overlap.rows], g.T)
        part = _norm2(self.rule.measurement, self.parameter.handle, rows, self.layout)
        if part is not None:
            self.norm2 = part if self.norm2 is None else self.norm2 + part

    def weights(self) -> Float[Tensor, " row"]:
        """Weights of the rule, once all blocks are added."""
        if self.overlap is None:
            return self.rule.length_weights(self.parameter.handle, SquaredLengths(norm2=self.norm2))
        side, (rows, keep) = self.parameter.side, self.overlap
        inner = self.gram * matmul(side[rows], side.T)
        bottom = keep @ inner.gather(1, rows[:, None])[:, 0]  # ⟨G_j, G_j⟩ stands among the rest
        top = keep @ self.layout.sum_columns(inner).square()
        return self.rule.length_weights(
            self.parameter.handle, SquaredLengths(top, bottom, self.norm2)
        )


class _KernelSums:
    """Kernel of one parameter, summed over vocabulary blocks.

    In Gram form, which few scored tokens make the cheaper one, g_t·g_t' of all tokens is held.
    """

    def __init__(self, work: HeadPass, parameter: HeadParameter, rule: KernelRule) -> None:
        self.parameter, self.layout, self.rule = parameter, work.scored.layout, rule
        self.groups = parameter.handle.session.groups
        self.kernel: Tensor | None = None
        self.gram: Tensor | None = None
        everyone, size = Groups.whole(self.layout.count), (self.layout.size, self.layout.size)
        rows = Outer(parameter.side, work.tokens.hidden)
        kind = inner_products.stack_dtype(rows, self.layout, rounded=True)
        shape = (len(work.head.weight), parameter.side.shape[1])
        held = size[0] ** 2 * work.precise.itemsize <= inner_products.STACK
        stacked = cost.holds_stack(shape, self.layout, everyone, kind)
        if held and cost.gram_kernel(shape, self.layout, everyone, rule.path, kind, held=stacked):
            self.gram = parameter.side.new_zeros(size, dtype=work.precise)

    def add(self, g: Float[Tensor, "tok col"]) -> None:
        """Adds the share of a vocabulary block."""
        if self.gram is not None:
            add_matmul_(self.gram, g, g.T)
            return
        rows = Outer(self.parameter.side, g)
        kind = inner_products.stack_dtype(rows, self.layout, rounded=True)
        part, _ = inner_products.kernel_materialised(rows, self.layout, self.groups, kind=kind)
        self.kernel = part if self.kernel is None else self.kernel + part

    def weights(self) -> Float[Tensor, " row"]:
        """Weights of the rule, once all blocks are added."""
        kernel = self.kernel if self.gram is None else self._from_gram(self.gram)
        assert kernel is not None
        return self.rule.kernel_weights([self.parameter.handle], kernel[None])[0]

    def _from_gram(self, gram: Float[Tensor, "tok tok"]) -> Float[Tensor, "group member member"]:
        """Σ_{t in i, t' in j} (g_t·g_t')(s_t·s_t')."""
        side, tokens = self.parameter.side, self.layout.size
        inner = [
            self.layout.sum_columns(gram[rows] * matmul(side[rows], side.T))
            for rows in blocks(tokens, max(1, inner_products.TILE // tokens))
        ]
        return self.groups.blocks(self.layout.sum_rows(torch.cat(inner)))


def _norm2(
    wanted: Measurement, handle: ParameterHandle, rows: Outer, layout: Layout
) -> Float[Tensor, " row"] | None:
    """N_i², or of a vocabulary block its share in N_i²; None where it is not asked for."""
    if not wanted.norm:
        return None
    if wanted.sketch is not None:
        return inner_products.norm_sketch(rows, layout, wanted.sketch, handle.session.signs)
    out, inp = rows.shape
    if max(layout.lengths) * (out + inp) < out * inp:
        return inner_products.norm_gram(rows, layout)
    return inner_products.materialised(rows, layout, None)[2]


def _limit(head: Head) -> int:
    """Tokens whose logits may exist at once when sequences are kept whole."""
    return max(1, 2 * head.budget // len(head.weight))


def _one_pass(work: HeadPass, rule: LengthRule) -> bool:
    """True where whole sequences and J fit into the logits held at once, and are all it takes."""
    handles = [parameter.handle for parameter in work.parameters]
    picked = len(handles[0].overlap_set()) if rule.measurement.overlap else 0
    fits = max(*work.scored.layout.lengths, picked) <= _limit(work.head)
    return fits and not any(rule.needs_all(handle) for handle in handles)


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


def _sorted(work: HeadPass, rule: LengthRule, order: Int[Tensor, " tok"]) -> HeadGradients:
    """`by_sequences` for tokens that are not grouped by sequence."""
    scored = work.scored
    index = order if scored.index is None else scored.index[order]
    in_order = replace(
        work,
        tokens=work.tokens.take(order),
        parameters=[HeadParameter(x.handle, x.side[order]) for x in work.parameters],
        scored=ScoredTokens(scored.layout.take(order), index),
    )
    d_hidden, outs = by_sequences(in_order, rule)
    if d_hidden is not None:
        d_hidden = torch.empty_like(d_hidden).index_copy_(0, order, d_hidden)
    return d_hidden, outs
