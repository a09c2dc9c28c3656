"""The public factories: ISOPO in its two variants."""

import math
from typing import Any, get_args

from proxpo.errors import ProxpoError, resolve
from proxpo.gradients._isopo import Isopo
from proxpo.gradients._ntk import Ntk
from proxpo.gradients._plan import Path
from proxpo.gradients._transform import Transform

PRESETS: dict[str, dict[str, float]] = {
    "fisher": {"p": -1.0, "q": 0.0, "r": 0.0},
    "nearest-npg": {"p": 0.0, "q": 0.0, "r": -2.0},
    "figure4": {"p": 0.0, "q": -1.0, "r": -2.0},
    "euclidean": {"p": 0.0, "q": -1.0, "r": 0.0},
    "reinforce": {"p": 0.0, "q": 0.0, "r": 0.0},
}


def isopo(
    *,
    p: float = -1.0,
    q: float = 0.0,
    r: float = 0.0,
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
    preset: str | None = None,
    seed: int = 0,
) -> Transform:
    """ISOPO: every sequence's gradient scaled by powers of its lengths, then by its advantage.

        U = Σ_i A_i s_i V_i      s_i = reg2(F_i)^p · reg2(N_i)^q · reg2(R_i)^r
        F_i² = Σ_{j∈J} ⟨V_i, G_j⟩² / Σ_{j∈J} |G_j|²      N_i = |V_i|      R_i = F_i / N_i
        reg2(x) = √(x² + reg · E[x²] + eps)

    per layer, V_i = Σ_{t∈i} G_t the gradient of sequence i's log-probability, J an overlap set of
    `overlap` positions drawn anew for every layer and backward ("all": every position). Exponents
    carry the paper's signs: negative ones normalise. Reference: arXiv:2512.23353.

    preset: fisher (p=-1), nearest-npg (r=-2), figure4 (q=-1, r=-2), euclidean (q=-1), reinforce;
        it sets p, q and r together.
    reg, history: E[x²] trails over earlier mini-batches; with none yet it is the mean of the
        micro-batch, or each sequence's own x² ("own").
    overlap_reg, norm_reg, rel_overlap_reg: reg for F, N and R alone, as in the released code;
        None takes `reg`.
    keep_small: reg2 divided by √(reg E[x²]), which leaves short gradients as they are.
    norm: "sketch" estimates N_i from `sketch` random projections, to within √(2/sketch) of N_i².
    scale: "mean" divides by the number of sequences in the micro-batch.
    path: how lengths are computed; all paths agree, "auto" takes the cheapest for each layer.
    """
    if preset is not None:
        chosen = PRESETS[resolve(preset, PRESETS, what="preset of isopo")]
        exponents = {"p": p, "q": q, "r": r}
        for name, default in PRESETS["fisher"].items():
            if exponents[name] not in (default, chosen[name]):
                raise ProxpoError(
                    f"isopo: preset={preset} sets {name} to {chosen[name]:g}, so {name}="
                    f"{exponents[name]:g} has no effect: leave one of them out"
                )
        p, q, r = chosen["p"], chosen["q"], chosen["r"]
    given = {"overlap_reg": overlap_reg, "norm_reg": norm_reg, "rel_overlap_reg": rel_overlap_reg}
    strengths = {name: value for name, value in given.items() if value is not None}
    positive = {"reg": reg, "eps": eps, **strengths}
    for name, number in {"p": p, "q": q, "r": r, **positive}.items():
        if not math.isfinite(number) or (name in positive and number < 0):
            kind = "a finite number" + (" >= 0" if name in positive else "")
            raise ProxpoError(f"isopo: {name} must be {kind}, got {number}")
    rhos = {name: reg if value is None else value for name, value in given.items()}
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
    drawn = overlap if isinstance(overlap, int) else None
    if overlap != "all" and (drawn is None or drawn < 1):
        raise ProxpoError(f"isopo: overlap must be a count of positions or 'all', got {overlap!r}")
    if sketch < 1:
        raise ProxpoError(f"isopo: sketch must be at least 1, got {sketch}")
    rule = Isopo(
        p=p,
        q=q,
        r=r,
        **rhos,
        eps=eps,
        keep_small=keep_small,
        overlap=drawn,
        norm=_one_of("isopo", "norm", norm, ("exact", "sketch")),
        sketch=sketch,
        scale=_one_of("isopo", "scale", scale, ("sum", "mean")),
        history=_one_of("isopo", "history", history, ("microbatch", "own")),
        path=_one_of("isopo", "path", path, get_args(Path)),
    )
    return Transform(rule, seed=seed)


def isopo_ntk(
    *,
    rho: float = 1.0,
    scale: str = "c",
    group_by: str = "microbatch",
    path: str = "auto",
) -> Transform:
    """ISOPO-NTK: per layer, the advantages of a micro-batch replaced by (K + cI)⁻¹ A.

        U = Σ_i Ã_i V_i      Ã = (K + cI)⁻¹ A      K_ij = ⟨V_i, V_j⟩      c = ρ E[tr K / m]

    the damped natural gradient of the layer within the span of the sequences. Reference:
    arXiv:2512.23353, section 3.

    scale: "paper" is U as above; "c" multiplies it by c, which bounds it by REINFORCE (its limit
        for large c).
    group_by: which sequences interact: the micro-batch, or those of one prompt (pass `groups` to
        `applied`).
    """
    if not (math.isfinite(rho) and rho > 0):
        raise ProxpoError(f"isopo_ntk: rho must be a finite number > 0, got {rho}")
    return Transform(
        Ntk(
            rho=rho,
            scale=_one_of("isopo_ntk", "scale", scale, ("c", "paper")),
            group_by=_one_of("isopo_ntk", "group_by", group_by, ("microbatch", "prompt")),
            path=_one_of("isopo_ntk", "path", path, ("auto", "gram", "materialise")),
        )
    )


def _one_of(method: str, option: str, value: str, valid: tuple[str, ...]) -> Any:
    return resolve(value, valid, what=f"{option} of {method}")
