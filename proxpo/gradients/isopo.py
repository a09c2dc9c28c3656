"""ISOPO: every sequence's gradient scaled by powers of its lengths, then by its advantage.

    U = Σ_i A_i s_i V_i      s_i = reg2(F_i)^p · reg2(N_i)^q · reg2(R_i)^r        layer by layer
    F_i² = Σ_{j∈J} ⟨V_i, G_j⟩² / Σ_{j∈J} |G_j|²      N_i = |V_i|      R_i = F_i / N_i
    reg2(x)² = x² + ρ E[x²] + ε

G_t is the gradient of the summed log-probabilities at position t, V_i = Σ_{t∈i} G_t that of
sequence i, J a random set of positions (eq. 6 and section 2 of arXiv:2512.23353).

The method is this file: `scale` computes s, `lengths2` defines F² and N², `Isopo` puts them
together, `isopo` makes the transform. Every layer calls `scale`, the language-model head too; the
CUDA kernels repeat it. `_engine` computes F² and N² without building V_i.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from proxpo.errors import ProxpoError, resolve
from proxpo.gradients._engine import measure
from proxpo.gradients._engine.cost import PATHS
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import (
    ALL,
    LengthRule,
    Measurement,
    ScaleOptions,
    SquaredLengths,
)
from proxpo.gradients._engine.options import check_count, check_numbers, refuse_unused
from proxpo.gradients._engine.position_gradients import AnyGradients
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.gradients._engine.transform import Transform
from proxpo.ops.shapes import Bool, Float, Int, Tensor

Three = tuple[float, float, float]


def scale(
    F2: Float[Tensor, " row"] | None,
    N2: Float[Tensor, " row"] | None,
    R2: Float[Tensor, " row"] | None = None,
    *,
    p: float,
    q: float,
    r: float,
    reg: Three = (0.0, 0.0, 0.0),
    mean: tuple[Float[Tensor, ""] | None, ...] = (None, None, None),
    eps: float = 0.0,
    keep_small: bool = False,
    history: str = "microbatch",
    defined: Bool[Tensor, ""] | None = None,
    times: Float[Tensor, " row"] | None = None,
    count: int | Float[Tensor, ""] | None = None,
) -> Float[Tensor, "*row"]:
    """s_i = reg2(F_i)^p · reg2(N_i)^q · reg2(R_i)^r,   reg2(x)² = x² + ρ E[x²] + ε.

    F2, N2, R2: F_i², N_i², R_i²; None where the exponent is 0. R2 follows from F2 and N2.
    reg: ρ of F, N and R.
    mean: E[x²] of F, N and R, trailing over earlier mini-batches: after each of them
        E ← 0.9 E + 0.1 · (mean of its x²), the first time E ← its mean. None before that.
    history: E[x²] then: the mean over these sequences ("microbatch"), or each sequence's own x²
        ("own").
    keep_small: reg2 divided by √(ρ E[x²]), which leaves short gradients as they are.
    defined: False where every gradient of J is 0, so that F is unknown and its factors are 1.
    times: A_i, multiplied from the left: the result is then A_i s_i.
    count: number of sequences, where rows with x² = 0 stand for padding.
    """
    if r and R2 is None and F2 is not None and N2 is not None:
        R2 = ratio2(F2, N2)
    s = times
    for name, x2, exponent, rho, E in zip("FNR", (F2, N2, R2), (p, q, r), reg, mean):
        if not exponent:
            continue
        assert x2 is not None
        if rho and E is None:
            E = _mean(x2, count) if history == "microbatch" else x2
        base = reg2(x2, rho, E, eps=eps, keep_small=keep_small)
        factor = base.pow(exponent / 2) if eps > 0 else power(base, exponent)
        if name != "N" and defined is not None:
            factor = torch.where(defined, factor, 1.0)
        s = factor if s is None else s * (factor if factor.dtype == s.dtype else factor.to(s))
    return torch.ones(()) if s is None else s


def _mean(x2: Float[Tensor, " row"], count: int | Float[Tensor, ""] | None) -> Float[Tensor, ""]:
    return x2.mean() if count is None else x2.sum() / count


def reg2(
    x2: Float[Tensor, " row"],
    rho: float,
    E: Float[Tensor, "*row"] | None,
    *,
    eps: float,
    keep_small: bool = False,
) -> Float[Tensor, " row"]:
    """reg2(x)² = x² + ρ E + ε; `keep_small` divides it by ρ E, leaving short x alone."""
    if rho == 0 or E is None:
        return x2 + eps
    unit = rho * E.to(x2)
    base = x2 + unit + eps
    if not keep_small:
        return base
    return torch.where(unit > 0, base / torch.where(unit > 0, unit, 1.0), 1.0)


def power(base2: Float[Tensor, " row"], exponent: float) -> Float[Tensor, " row"]:
    """(√base²)^exponent, and 1 where the base is 0: such a sequence has nothing to normalise."""
    return torch.where(base2 == 0, 1.0, base2).pow(exponent / 2)


def ratio2(top2: Float[Tensor, " row"], bottom2: Float[Tensor, "*row"]) -> Float[Tensor, " row"]:
    """top² / bottom², and 0 where the divisor vanishes (as the dividend does then)."""
    return torch.where(bottom2 == 0, 0.0, top2 / bottom2)


def lengths2(
    G: Float[Tensor, "pos *shape"], seq: Int[Tensor, " pos"], J: Int[Tensor, " pick"]
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """F_i² and N_i² by their definitions, from the gradient of every position of one parameter.

    For reading and for tests: `_engine` computes the same numbers without G and V.
    """
    G = G.flatten(1)
    V = torch.stack([G[seq == i].sum(0) for i in range(int(seq.max()) + 1)])
    F2 = ratio2((G[J] @ V.T).square().sum(0), G[J].square().sum())
    return F2, V.square().sum(1)


@dataclass(frozen=True)
class Isopo(LengthRule):
    """The options of `isopo`, and the weights A_i s_i of a layer's sequences."""

    p: float
    q: float
    r: float
    overlap_reg: float
    norm_reg: float
    rel_overlap_reg: float
    eps: float
    keep_small: bool
    overlap: int | None
    norm: str
    sketch: int
    scale: str
    history: str
    path: str
    scope: str

    quantities = ("F", "N", "R")

    @property
    def spreads(self) -> bool:
        """True where positions of one sequence may lie on several ranks."""
        return self.scope == "layer"

    @property
    def exponents(self) -> Three:
        """p, q and r."""
        return self.p, self.q, self.r

    @property
    def strengths(self) -> Three:
        """ρ of F, N and R."""
        return self.overlap_reg, self.norm_reg, self.rel_overlap_reg

    def gradient(
        self, handle: ParameterHandle, rows: AnyGradients, layout: Layout
    ) -> Tensor | None:
        """U = Σ_i A_i s_i V_i of one parameter."""
        return measure.weighted_by_lengths(self, handle, rows, layout)

    @property
    def degree(self) -> float:
        """1 + p + q: F and N grow with the objective, R does not."""
        return 1.0 + self.p + self.q

    def collect_zeros(self, handle: ParameterHandle) -> None:
        """Zeros for the lengths in use, one of each sequence."""
        zeros = torch.zeros_like(handle.session.advantages)
        for quantity, exponent in zip(self.quantities, self.exponents):
            if exponent:
                handle.session.collect(f"{handle.name}/{quantity}", zeros)

    def base_weights(self, session: Session) -> Float[Tensor, " row"]:
        """A_i, or A_i / m."""
        mean = self.scale == "mean"
        return session.advantages / session.count if mean else session.advantages

    def length_weights(
        self,
        handle: ParameterHandle,
        lengths: SquaredLengths,
        sequences: Int[Tensor, " some"] | slice = ALL,
    ) -> Float[Tensor, " some"]:
        """w_i = A_i s_i (/ m) of some sequences of this layer; their lengths are collected."""
        handle.done = True
        top, bottom, N2, _ = lengths
        F2, defined = None, None
        if top is not None and bottom is not None:
            defined = bottom != 0
            F2 = torch.where(defined, top / bottom, 0.0)
        R2 = ratio2(F2, N2) if self.r and F2 is not None and N2 is not None else None
        advantages = self.base_weights(handle.session)
        weights = scale(
            F2, N2, R2, p=self.p, q=self.q, r=self.r,
            reg=self.strengths, mean=self.means(handle), eps=self.eps,
            keep_small=self.keep_small, history=self.history, defined=defined,
            times=advantages if sequences is ALL else advantages[sequences],
            count=handle.session.count,
        )  # fmt: skip
        squares = {x: x2 for x, x2 in zip(self.quantities, (F2, N2, R2)) if x2 is not None}
        self.record(handle, squares, weights)
        return weights

    def means(self, handle: ParameterHandle) -> tuple[Float[Tensor, ""] | None, ...]:
        """E[x²] of F, N and R over earlier mini-batches, where they are in use."""
        if not self.regularised:
            return None, None, None
        averages = handle.session.averages
        used = zip(self.quantities, self.exponents, self.strengths)
        return tuple(
            averages.get(f"{handle.name}/{x}") if k and rho else None for x, k, rho in used
        )

    def record(self, handle: ParameterHandle, squares: dict[str, Tensor], weights: Tensor) -> None:
        """Feeds the trailing averages, the observer and the check for NaN and infinity.

        Lengths are checked beside weights: an infinite one has a weight of 0 and spoils E.
        """
        for quantity, exponent in zip(self.quantities, self.exponents):
            if exponent:
                handle.session.collect(f"{handle.name}/{quantity}", squares[quantity])
                handle.session.expect_finite(handle, squares[quantity])
        if handle.session.observer is not None:
            handle.observe(**{f"{x}2": value for x, value in squares.items()}, weights=weights)
        handle.session.expect_finite(handle, weights)

    @cached_property
    def regularised(self) -> bool:
        """True where some E[x²] is in use."""
        return any(k and rho > 0 for k, rho in zip(self.exponents, self.strengths))

    @cached_property
    def measurement(self) -> Measurement:
        """F where p or r is in use, N where q or r is."""
        return Measurement(
            overlap=bool(self.p or self.r),
            norm=bool(self.q or self.r),
            drawn=self.overlap,
            sketch=self.sketch if self.norm == "sketch" else None,
            path=self.path,
        )

    @cached_property
    def options(self) -> ScaleOptions:
        """Options of `scale`."""
        return ScaleOptions(*self.exponents, self.strengths, self.eps, self.keep_small)

    def needs_all(self, handle: ParameterHandle) -> bool:
        """True where E[x²] is the mean over the micro-batch, so that no s_i is known before it."""
        if self.history != "microbatch" or not self.regularised:
            return False
        used = zip(self.means(handle), self.exponents, self.strengths)
        return any(mean is None and k and rho > 0 for mean, k, rho in used)


PRESETS: dict[str, dict[str, float]] = {
    "fisher": {"p": -1.0, "q": 0.0, "r": 0.0},
    "nearest-npg": {"p": 0.0, "q": 0.0, "r": -2.0},
    "figure4": {"p": 0.0, "q": -1.0, "r": -2.0},
    "euclidean": {"p": 0.0, "q": -1.0, "r": 0.0},
    "reinforce": {"p": 0.0, "q": 0.0, "r": 0.0},
}


def isopo(
    *,
    p: float | None = None,
    q: float | None = None,
    r: float | None = None,
    reg: float = 0.0,
    overlap_reg: float | None = None,
    norm_reg: float | None = None,
    rel_overlap_reg: float | None = None,
    eps: float = 1e-8,
    keep_small: bool = False,
    overlap: int | str = 64,
    norm: str = "exact",
    sketch: int = 64,
    scale: str = "sum",
    history: str = "microbatch",
    path: str = "auto",
    scope: str = "layer",
    preset: str | None = None,
    seed: int = 0,
) -> Transform:
    """ISOPO: every sequence's gradient scaled by powers of its lengths, then by its advantage.

        U = Σ_i A_i s_i V_i      s_i = reg2(F_i)^p · reg2(N_i)^q · reg2(R_i)^r
        F_i² = Σ_{j∈J} ⟨V_i, G_j⟩² / Σ_{j∈J} |G_j|²      N_i = |V_i|      R_i = F_i / N_i
        reg2(x) = √(x² + reg · E[x²] + eps)

    per layer, V_i = Σ_{t∈i} G_t the gradient of sequence i's log-probability, J an overlap set of
    `overlap` positions drawn anew for every layer and backward ("all": every position); linear
    layers that multiply the same input (q, k, v; gate, up) share it. Exponents carry the paper's
    signs: negative ones normalise. Reference: arXiv:2512.23353.

    preset: fisher (p=-1), nearest-npg (r=-2), figure4 (q=-1, r=-2), euclidean (q=-1), reinforce;
        it sets p, q and r together, and is refused beside any of them.
    reg: multiple of E[x²] that is added to the square of each length x. E[x²] trails over earlier
        mini-batches.
    history: E[x²] with no earlier mini-batch: the mean of the micro-batch, or each sequence's own
        x² ("own").
    overlap_reg, norm_reg, rel_overlap_reg: reg for F, N and R alone, as in the released code;
        None takes `reg`.
    keep_small: reg2 divided by √(reg E[x²]), which leaves short gradients as they are.
    norm: "sketch" estimates N_i from `sketch` random projections, to within √(2/sketch) of N_i².
    scale: "mean" divides by the number of sequences in the micro-batch.
    path: how lengths are computed; all paths agree, "auto" takes the cheapest for each layer.
    scope: "layer" computes s_i in every layer; "head" takes that of the head's weight for the whole
        model, J among the scored tokens: response i's loss is scaled by A_i s_i, and all other
        layers get its plain gradient. Log-probabilities must come from model_logp or token_logp.
    p: exponent of F, the Fisher length; None is -1, or what the preset says
    q: exponent of N, the plain length; None is 0, or what the preset says
    r: exponent of R = F/N; None is 0, or what the preset says
    eps: added under the root of reg2
    overlap: positions in the overlap set J, or "all"
    sketch: random projections of norm="sketch"
    seed: seed of the random draws
    """
    named = {k: x for k, x in {"p": p, "q": q, "r": r}.items() if x is not None}
    check_numbers("isopo", named)
    chosen = PRESETS[resolve(preset or "fisher", PRESETS, what="preset of isopo")]
    for name, exponent in named.items() if preset is not None else ():
        raise ProxpoError(
            f"isopo: preset={preset} sets {name} to {chosen[name]:g}, so {name}={exponent:g} "
            "has no effect: leave one of them out"
        )
    p, q, r = ((chosen | named)[name] for name in "pqr")
    own = {"overlap_reg": overlap_reg, "norm_reg": norm_reg, "rel_overlap_reg": rel_overlap_reg}
    strengths = {name: value for name, value in own.items() if value is not None}
    check_numbers("isopo", {"reg": reg, "eps": eps, **strengths}, least=0.0)
    rhos = {name: reg if value is None else value for name, value in own.items()}
    for (name, rho), (letter, exponent) in zip(rhos.items(), {"p": p, "q": q, "r": r}.items()):
        if strengths.get(name) and not exponent:
            raise ProxpoError(f"isopo: {name}={rho} has no effect while {letter} is 0")
        if keep_small and exponent and rho == 0:
            what = name if name in strengths else "reg"
            raise ProxpoError(
                f"isopo: keep_small divides by {what} * E[x²], so it needs {what} > 0, got 0"
            )
    if keep_small and not any(rhos.values()):
        raise ProxpoError("isopo: keep_small divides by reg * E[x²], so it needs reg > 0, got 0")
    drawn = overlap if isinstance(overlap, int) and not isinstance(overlap, bool) else None
    if overlap != "all" and (drawn is None or drawn < 1):
        raise ProxpoError(f"isopo: overlap must be a count of positions or 'all', got {overlap!r}")
    if scope == "head" and not (p or q or r):
        raise ProxpoError("isopo: scope=head has no effect while p, q and r are 0")
    check_count("isopo", "sketch", sketch, least=1)
    rule = Isopo(
        p=p,
        q=q,
        r=r,
        **rhos,
        eps=eps,
        keep_small=keep_small,
        overlap=drawn,
        norm=resolve(norm, ("exact", "sketch"), what="norm of isopo"),
        sketch=sketch,
        scale=resolve(scale, ("sum", "mean"), what="scale of isopo"),
        history=resolve(history, ("microbatch", "own"), what="history of isopo"),
        path=resolve(path, PATHS, what="path of isopo"),
        scope=resolve(scope, ("layer", "head"), what="scope of isopo"),
    )
    if not (p or q or r):
        refuse_unused(isopo, {"reg": reg, "eps": eps}, "while p, q and r are 0", "p=-1")
    if not (p or r):
        refuse_unused(isopo, {"overlap": drawn}, "while p and r are 0", "p=-1")
    if not (q or r):
        refuse_unused(isopo, {"norm": rule.norm}, "while q and r are 0", "q=-1")
    if rule.norm == "exact":
        refuse_unused(isopo, {"sketch": sketch}, "with norm=exact", "norm=sketch")
    if not rule.regularised:
        refuse_unused(isopo, {"history": rule.history}, "on lengths without reg", "reg=1")
        for name in strengths:  # 0, or the exponent is
            refuse_unused(isopo, {"reg": reg}, f"beside {name}=0", f"{name}=none")
    return Transform(rule, seed=seed)
