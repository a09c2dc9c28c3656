"""Selection of tokens by the shift that their own step is predicted to cause in the last layer.

Only the head W moves in this model. A token with advantage A, hidden state h and K candidates of
probability π among themselves, e the one it drew, has v = e - π and the gradient G = A v hᵀ. A step
Δ along it, u = Δ h, is predicted to shift, with the learning rate η,

    objective   m_H = η A (v·u) + (η²/2) A [(v·u)² - uᵀ(diag π - π πᵀ) u]
    policy      m_F = (η²/2) (v·u)²

CAPO, arXiv:2510.00819.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.blocks import row_blocks
from proxpo.ops.masked import masked_mean, row_sum, spread
from proxpo.ops.prompt_memory import find
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics, PerToken, State

OFFICIAL_RATE = 1.5e-5  # learning rate of the paper's runs
MOST = 1 << 24  # entries of token x candidate x unit that exist at once


class Candidates(NamedTuple):
    """Tokens: advantage, hidden state, and the K likeliest next tokens: ids, π, v = e - π."""

    advantage: Float[Tensor, "*tokens"]
    hidden: Float[Tensor, "*tokens dim"]
    ids: Int[Tensor, "*tokens k"]
    share: Float[Tensor, "*tokens k"]
    pull: Float[Tensor, "*tokens k"]

    def at(self, mask: Bool[Tensor, "*tokens"]) -> "Candidates":
        """The chosen tokens alone."""
        return Candidates(*(x[mask] for x in self))


class Shifts(NamedTuple):
    """Predicted shifts of objective and policy by each token's own step."""

    objective: Float[Tensor, "*tokens"]
    policy: Float[Tensor, "*tokens"]


def candidates(batch: Batch, *, k: int) -> Candidates:
    """Candidates of every token; π is the softmax over the top k alone, e 0 outside them.

    All in the widest dtype of the three: a trainer in float64 may keep its hidden states narrower.
    """
    values = batch.advantages
    values = spread(values, batch.mask) if values.dim() == 1 else values
    every = batch.vocab_logp.detach()
    kind = torch.promote_types(values.dtype, every.dtype)
    kind = torch.promote_types(kind, batch.hidden.dtype)
    top, ids = _likeliest(every.to(kind), k)
    share = top.exp()  # the likeliest is at least 1/V: nothing to overflow, and not all vanish
    share /= share.sum(-1, keepdim=True)
    pull = (ids == batch.tokens[..., None]).to(kind).sub_(share)
    hidden = batch.hidden.detach().to(kind)
    return Candidates(values.to(kind), hidden, ids, share, pull)


def in_blocks(batch: Batch, *, k: int) -> Iterator[Candidates]:
    """`candidates` of some responses after the other: arrays as wide as K are dear to make."""
    rows, tokens = batch.mask.shape
    width = tokens * min(k, batch.vocab_logp.shape[-1])
    for part in row_blocks(rows, width, batch.mask.device):
        yield candidates(batch.rows(part), k=k)


def _likeliest(
    logp: Float[Tensor, "*tokens vocab"], k: int
) -> tuple[Float[Tensor, "*tokens k"], Int[Tensor, "*tokens k"]]:
    """The k largest log-probabilities and their ids; all, unsorted, where there are no more."""
    if k < logp.shape[-1]:
        return logp.topk(k, dim=-1)
    return logp, torch.arange(logp.shape[-1], device=logp.device).expand_as(logp)


def shifts(
    tokens: Candidates, u: Float[Tensor, "*tokens k"], *, rate: float | Float[Tensor, "*tokens"]
) -> Shifts:
    """m_H and m_F of the module's formulas; η may be another for each token."""
    product = tokens.share * u  # one array as wide as the candidates serves for all three sums
    mean = product.sum(-1)
    variance = product.mul_(u).sum(-1) - mean.square()
    along = torch.mul(tokens.pull, u, out=product).sum(-1)
    a, half, curved = tokens.advantage, rate**2 / 2, along.square() - variance
    return Shifts(rate * a * along + half * a * curved, half * along.square())


def sgd_shifts(tokens: Candidates, *, rate: float) -> Shifts:
    """Shifts by the step Δ = G: its u = A |h|² v is v itself at the rate η A |h|²."""
    length = tokens.advantage * torch.linalg.vector_norm(tokens.hidden, dim=-1).square()
    return shifts(tokens, tokens.pull, rate=rate * length)


def adam_step(
    tokens: Candidates, state: State, *, beta1: float, beta2: float, eps: float
) -> Float[Tensor, "*tokens k"]:
    """u of the step Adam would make from the moments of each candidate's row, as if G came next."""
    t = float(state["steps"]) + 1
    moments = [state[name].to(tokens.hidden) for name in ("first", "second")]
    every = Candidates(tokens.advantage.flatten(), *(x.flatten(0, -2) for x in tokens[1:]))
    parts = []
    size = max(1, MOST // max(every.ids.shape[1] * every.hidden.shape[1], 1))
    for at in range(0, max(len(every.ids), 1), size):
        some = Candidates(*(x[at : at + size] for x in every))
        place, known = find(state["token_id"].to(some.ids.device), some.ids.contiguous())
        first, second = (torch.where(known[..., None], x[place], 0.0) for x in moments)
        g = gradient(some)
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g.square()
        step = first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + eps)
        parts.append((step @ some.hidden[..., None])[..., 0])
    return torch.cat(parts).view_as(tokens.pull)


def gradient(tokens: Candidates) -> Float[Tensor, "*tokens k dim"]:
    """G = A v hᵀ of each token."""
    return (tokens.advantage[..., None] * tokens.pull)[..., None] * tokens.hidden[..., None, :]


def mean_gradients(
    tokens: Candidates, vocabulary: int, ctx: Context
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row dim"]]:
    """Ids of the head's rows that were candidates, and the mean gradient of each over all ranks."""
    count = ctx.all_sum(torch.bincount(tokens.ids.flatten(), minlength=vocabulary).double())
    ids = count.nonzero()[:, 0]
    row, _ = find(ids, tokens.ids)
    total = tokens.hidden.new_zeros(len(ids), tokens.hidden.shape[1], dtype=torch.float64)
    for k in range(tokens.ids.shape[1]):  # a candidate at a time: no token x candidate x unit
        part = (tokens.advantage * tokens.pull[:, k])[:, None] * tokens.hidden
        total.index_add_(0, row[:, k], part.double())
    return ids.cpu(), (ctx.all_sum(total) / count[ids][:, None]).cpu()


def next_moments(
    state: State,
    ids: Int[Tensor, " row"],
    mean: Float[Tensor, "row dim"],
    *,
    beta1: float,
    beta2: float,
) -> State:
    """Adam's two moments of the head's rows after a step; rows without a gradient rest."""
    every = torch.cat([state["token_id"], ids]).unique()
    now, _ = find(every, ids)
    before, _ = find(every, state["token_id"])
    table: State = {"token_id": every, "steps": state["steps"] + 1}
    for name, beta, value in (("first", beta1, mean), ("second", beta2, mean.square())):
        column = mean.new_zeros(len(every), mean.shape[1])
        column[before] = state[name].reshape(len(before), mean.shape[1])
        column[now] = beta * column[now] + (1 - beta) * value
        table[name] = column
    return table


@stage("select", needs=("hidden", "vocab_logp", "tokens"))
def curvature_mask(
    *,
    tau_policy: float = 1e-4,
    tau_objective: float = 0.01,
    optimizer: Literal["adam", "sgd"] = "adam",
    sides: Literal["two", "one"] = "two",
    k: int = 50,
    learning_rate: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    normalise: Literal["sequence", "all"] = "sequence",
):
    """1 on tokens with m_F < tau_policy and |m_H| < tau_objective, else 0. arXiv:2510.00819.

    sides="one": 0 ≤ m_H < tau_objective instead. A bound of 0 is none. normalise="sequence" divides
    each response by its kept tokens under a mean over them; "all" leaves the divisor.
    learning_rate=None: η is the trainer's at the moment, 1.5e-5 without a trainer. The Adam model
    remembers two moments for each row of the head that was a candidate; they move after every
    optimizer step, by the tokens that all ranks have kept.

    tau_policy, tau_objective: largest shift of the policy and of the objective; 0: no bound
    optimizer: step that is foreseen: "adam" or "sgd"
    sides: bound |m_H| ("two"), or m_H from 0 up ("one")
    k: candidates of each token
    learning_rate: η; none: the trainer's
    beta1, beta2: Adam's, in the foreseen step
    eps: Adam's, in the foreseen step
    normalise: divide each response by its kept tokens ("sequence"), or by "all"
    """
    check_numbers("curvature_mask", "[0, inf]", tau_policy=tau_policy, tau_objective=tau_objective)
    check_numbers("curvature_mask", "[0, 1)", beta1=beta1, beta2=beta2)
    check_numbers("curvature_mask", "(0, inf)", eps=eps)
    if k < 1:
        raise ProxpoError(f"curvature_mask: k must be at least 1, got {k}")
    check_numbers("curvature_mask", "[0, inf)", learning_rate=learning_rate)

    def init() -> State:
        if optimizer == "sgd":
            return {}
        empty = torch.zeros(0, dtype=torch.float64)
        ids = torch.zeros(0, dtype=torch.int64)
        steps = torch.zeros((), dtype=torch.float64)
        return {"token_id": ids, "first": empty, "second": empty, "steps": steps}

    def rate(ctx: Context) -> float:
        """η: the option, or the trainer's at this moment, or that of the paper's runs."""
        if learning_rate is not None:
            return learning_rate
        return OFFICIAL_RATE if ctx.clock.learning_rate is None else ctx.clock.learning_rate

    def judge(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, "seq tok"], Shifts]:
        """The valid tokens that stay, and the shifts."""
        eta = rate(ctx)
        # Before the first moments Δ = G for Adam too.
        plain = optimizer == "sgd" or not ctx.state or not float(ctx.state["steps"])

        def foreseen(tokens: Candidates) -> Shifts:
            if plain:
                return sgd_shifts(tokens, rate=eta)
            u = adam_step(tokens, ctx.state, beta1=beta1, beta2=beta2, eps=eps)
            return shifts(tokens, u, rate=eta)

        shift = Shifts(*map(torch.cat, zip(*(foreseen(c) for c in in_blocks(batch, k=k)))))
        keep = batch.mask
        if tau_policy:
            keep = keep & (shift.policy < tau_policy)
        if tau_objective:
            two = sides == "two"
            keep = keep & ((shift.objective.abs() if two else shift.objective) < tau_objective)
            keep = keep if two else keep & (shift.objective >= 0)
        return keep, shift

    def step(batch: Batch, metrics: Metrics, ctx: Context) -> State:
        """Moments after a step: each row takes the mean of its kept gradients."""
        if optimizer == "sgd":
            return ctx.state
        keep, _ = judge(batch, ctx)
        vocabulary = batch.require("vocab_logp", by="select=curvature_mask").shape[-1]
        ids, mean = mean_gradients(candidates(batch, k=k).at(keep), vocabulary, ctx)
        return next_moments(ctx.state, ids, mean, beta1=beta1, beta2=beta2)

    def select(batch: Batch, ctx: Context) -> PerToken:
        keep, shift = judge(batch, ctx)
        weight = keep.to(batch.logp.dtype)
        if normalise == "sequence":
            kept = row_sum(keep, batch.mask).clamp(min=1)
            weight = weight * (batch.mask.sum(dim=1) / kept).to(weight.dtype)[:, None]
        largest = torch.where(batch.mask, shift.policy, 0.0)  # m_F is never below 0
        metrics = {
            "select/kept": masked_mean(keep, batch.mask),
            "select/policy_shift_max": largest.max() if largest.numel() else largest.sum(),
            "select/learning_rate": torch.tensor(rate(ctx), dtype=torch.float64),
        }
        return weight, metrics

    moments = ("beta1", "beta2", "eps") if optimizer == "sgd" else ()
    unbounded = () if tau_objective else ("sides",)
    return Parts(apply=select, init=init, step=step, idle=moments + unbounded)


__all__ = [
    "Candidates",
    "Shifts",
    "adam_step",
    "candidates",
    "curvature_mask",
    "sgd_shifts",
    "shifts",
]
