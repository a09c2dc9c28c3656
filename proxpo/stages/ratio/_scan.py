"""The scalar Kalman filter of KPO and EMA-KPO as a schedule of gains and a parallel scan.

    ρ_t = (1 − α_t) ρ_{t−1} + α_t z_t,   ρ_{−1} = 0

The gains never look at the data, so they come from a closed form and are tabulated once. The
recursion is a scan: inside chunks of C tokens a rescaled cumulative sum, between chunks a doubling
of the carried state, so nothing is sequential in the number of tokens. Products of (1 − α) are
formed inside a chunk only, where they stay above e⁻⁴⁴: over a whole response they underflow.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Tensor

ONE_CHUNK = 4096  # a response this short is scanned in one piece if its gains allow it
MANY_CHUNKS = 1024  # a longer one in pieces of this length, padded to a whole number of them
LARGEST_EXPONENT = 44.0  # half of what float32 can hold (e⁸⁸); the other half is left to z
CLAMP = (1e-6, 1.0 - 1e-6)


def kalman_gains(
    tokens: int, *, q: float, v: float = 1.0, p0: float = 0.0, clamp: bool = False
) -> Float[Tensor, " tok"]:
    """Gains K_0 … K_{tokens−1} of a random walk (variance q) seen through noise (variance v).

        P⁻_t = P_{t−1} + q,   K_t = P⁻_t / (P⁻_t + v),   P_t = v · K_t,   P_{−1} = p0

    in closed form: with s = √(q/v), x = p0/v, η = 2 asinh(s/2), n = t + 1 and E = e^{−2nη},

        K_t = [x (e^{−η/2} + E e^{η/2}) + s (1 − E)] / [(x/s)(1 − E) + e^{η/2} + E e^{−η/2}]

    and K_t = x / (1 + n x) for q = 0. `p0=inf` is the diffuse start, K_0 = 1. `clamp` limits the
    gains to [1e-6, 1 − 1e-6] as the code released with KPO does: a schedule that should stay below
    1e-6 (q < 1e-12 v, or the first token at q = 1e-6 and p0 = 0) becomes the constant 1e-6, and
    q = p0 = 0 no longer means ρ = 0. float64. Kalman Policy Optimization, arXiv:2602.10609.
    """
    check_variances(q=q, v=v, p0=p0)
    n = torch.arange(1, tokens + 1, dtype=torch.float64)
    # Numerator and denominator are both divided by 1 + x, so that x may be infinite.
    prior = 1.0 / (1.0 + v / p0) if p0 > 0.0 else 0.0
    rest = 1.0 / (1.0 + p0 / v)
    s = math.sqrt(q / v)
    if s == 0.0:
        gains = prior / (rest + n * prior) if prior else torch.zeros_like(n)
    else:
        half = math.asinh(s / 2.0)  # η/2
        up = s / 2.0 + math.hypot(1.0, s / 2.0)  # e^{η/2} without the rounding of exp at large s
        e, gap = torch.exp(-4.0 * half * n), -torch.expm1(-4.0 * half * n)  # E and 1 − E
        over = prior * (1.0 / up + e * up) + rest * s * gap
        gains = over / (prior / s * gap + rest * (up + e / up))
    return gains.clamp(*CLAMP) if clamp else gains.clamp(max=1.0)


def check_variances(*, q: float, v: float, p0: float) -> None:
    """Raises for variances from which no gain within [0, 1] follows."""
    if not (0.0 <= q < math.inf):
        raise ProxpoError(f"kalman: q (process noise) must be finite and >= 0, got {q}")
    if not (0.0 < v < math.inf):
        raise ProxpoError(f"kalman: v (observation noise) must be finite and > 0, got {v}")
    if not p0 >= 0.0:
        raise ProxpoError(f"kalman: p0 (initial variance) must be >= 0, got {p0}")


@dataclass(frozen=True)
class ScanTable:
    """A gain schedule prepared for scanning, cut into `n` chunks of `C` tokens.

    With S the running sum of `into`·z inside a chunk, ρ = `out`·(S + o), where o is what enters
    from the chunk before: o_c = f_c (S_{c−1,last} + o_{c−1}), f_0 = 0. `links` holds f over 1, 2,
    4, … chunks, each zero where it would reach back before the first.
    """

    into: Float[Tensor, "n C"]
    out: Float[Tensor, "n C"]
    links: tuple[Float[Tensor, " n"], ...]

    def first(self, tokens: int) -> "ScanTable":
        """The schedule of a shorter response: gains depend on the position alone."""
        n = -(-tokens // self.into.shape[1])
        if n == len(self.into) > 1:
            return self
        columns = tokens if n == 1 else self.into.shape[1]  # one chunk needs no padding
        links = (f[:n] for f in self.links[: (n - 1).bit_length()])
        return ScanTable(self.into[:n, :columns], self.out[:n, :columns], tuple(links))

    def transposed(self) -> "ScanTable":
        """The transposed linear map: time reversed, inputs and outputs exchanged."""
        links = (f.flip(0).roll(1 << k) for k, f in enumerate(self.links))
        return ScanTable(self.out.flip(0, 1), self.into.flip(0, 1), tuple(links))

    def to(self, device: torch.device, dtype: torch.dtype) -> "ScanTable":
        links = (f.to(device, dtype) for f in self.links)
        return ScanTable(self.into.to(device, dtype), self.out.to(device, dtype), tuple(links))


def scan_table(gains: Float[Tensor, " tok"], *, chunk: int | None = None) -> ScanTable:
    """Tabulates `gains` for `ema_scan` in float64; the gains decide the chunk length if not given.

    Products start at the second token of a chunk: the first may then have α = 1 (a diffuse start,
    or no smoothing at all, with chunks of one token) and nothing is divided by zero.
    """
    gains = gains.double()
    if not bool(((gains >= 0.0) & (gains <= 1.0)).all()):
        bad = gains[~((gains >= 0.0) & (gains <= 1.0))][0].item()
        raise ValueError(f"kalman: gains must lie in [0, 1], got {bad}")
    log_keep = torch.log1p(-gains)
    chunk = chunk or _chunk_length(log_keep)
    g = _in_chunks(log_keep, chunk)
    enter = g[:, 0].exp()
    g[:, 0] = 0.0
    out = g.cumsum(-1).exp()
    into = _in_chunks(gains, chunk) / out
    if not bool((into < torch.finfo(torch.float32).max).all()):
        raise ValueError(f"kalman: chunks of {chunk} tokens are too long for these gains")
    return ScanTable(into, out, _links(enter * out[:, -1].roll(1)))


def _links(f: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], ...]:
    """f over 1, 2, 4, … chunks: F_{k+1,c} = F_{k,c} F_{k,c−2ᵏ}, and nothing before chunk 0."""
    f = f.clone()
    f[:1] = 0.0
    links = []
    for k in range((len(f) - 1).bit_length()):
        links.append(f)
        f = f * f.roll(1 << k)
    return tuple(links)


def _chunk_length(log_keep: Float[Tensor, " tok"]) -> int:
    """The longest power of two whose products of (1 − α) stay above e⁻⁴⁴ in every chunk."""
    size = _power_of_two(len(log_keep))
    chunk = size if size <= ONE_CHUNK else MANY_CHUNKS
    while chunk > 1 and _in_chunks(log_keep, chunk)[:, 1:].sum(-1).min() < -LARGEST_EXPONENT:
        chunk //= 2
    return chunk


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _in_chunks(x: Float[Tensor, " tok"], chunk: int) -> Float[Tensor, "n C"]:
    """A copy cut into rows of `chunk`; the zeros that fill the last row leave the state alone."""
    return torch.nn.functional.pad(x, (0, -len(x) % chunk)).view(-1, chunk).clone()


def ema_scan(
    z: Float[Tensor, "seq tok"],
    gains: Float[Tensor, " tok"] | ScanTable,
    *,
    chunk: int | None = None,
    differentiable: bool = False,
) -> Float[Tensor, "seq tok"]:
    """ρ_t = (1 − α_t) ρ_{t−1} + α_t z_t for every row, in parallel, in float32 or float64.

    Rows narrower than float32 are computed and returned in float32. Without `differentiable` the
    result carries no gradient; with it the backward pass is the same scan run backwards.
    """
    if isinstance(gains, ScanTable):
        table = gains
    else:
        table = scan_table(gains, chunk=chunk).to(z.device, _at_least_float32(z.dtype))
    table = table.first(z.shape[1])
    return _Scan.apply(z, table) if differentiable else _scan(z.detach(), table)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Scan(torch.autograd.Function):
    """The scan as a linear map. Its adjoint is one too, so it differentiates any number of times.

    ∂L/∂z_t = α_t b_t,   b_t = ∂L/∂ρ_t + (1 − α_{t+1}) b_{t+1}
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, table: ScanTable, backwards: bool = False) -> Tensor:
        ctx.table, ctx.backwards = table, backwards
        if not backwards:
            return _scan(z, table)
        tokens = z.shape[1]
        padded = torch.nn.functional.pad(z, (0, table.into.numel() - tokens))
        return _scan(padded.flip(1), table.transposed()).flip(1)[:, :tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Scan.apply(grads[0], ctx.table, not ctx.backwards), None, None


def _scan(z: Float[Tensor, "seq tok"], table: ScanTable) -> Float[Tensor, "seq tok"]:
    tokens = z.shape[1]
    if short := table.into.numel() - tokens:
        z = torch.nn.functional.pad(z, (0, short))
    sums = z.reshape(len(z), *table.into.shape) * table.into
    torch.cumsum(sums, -1, out=sums)
    if table.links:
        sums += _carry(sums.select(-1, -1), table.links).unsqueeze(-1)
    sums *= table.out
    return sums.flatten(1)[:, :tokens]


def _carry(
    last: Float[Tensor, "seq n"], links: tuple[Float[Tensor, " n"], ...]
) -> Float[Tensor, "seq n"]:
    """o_c = f_c (last_{c−1} + o_{c−1}) by doubling: after step k, o_c has seen 2ᵏ chunks back."""
    o = last.roll(1, 1) * links[0]
    for k, f in enumerate(links):
        o = torch.addcmul(o, f, o.roll(1 << k, 1))
    return o


def filter_log_ratio(
    log_ratio: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    q: float = 1e-6,
    v: float = 1.0,
    p0: float = 0.0,
    clamp: bool = True,
    mask_mode: str = "zero",
    differentiable: bool = False,
) -> Float[Tensor, "seq tok"]:
    """Log-ratios smoothed along each response, x̂_t = (1 − K_t) x̂_{t−1} + K_t z_t.

    A masked position before a valid one is an observation z = 0 that also uses up a gain
    (`mask_mode="zero"`, what the code released with KPO does) or is passed over: state and
    schedule wait (`"skip"`). Padding on the right never matters. Values at masked positions are
    never read; the result there is the state.
    """
    schedule = KalmanSchedule(q, v, p0, clamp)
    return _filter(log_ratio, mask, schedule, mask_mode, differentiable)


def filter_fixed(
    log_ratio: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    alpha: float,
    mask_mode: str = "zero",
    differentiable: bool = False,
) -> Float[Tensor, "seq tok"]:
    """The same with one gain for every token, ρ_t = (1 − α) ρ_{t−1} + α z_t."""
    return _filter(log_ratio, mask, alpha, mask_mode, differentiable)


class KalmanSchedule(NamedTuple):
    q: float
    v: float
    p0: float
    clamp: bool


def _filter(
    log_ratio: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    schedule: KalmanSchedule | float,
    mask_mode: str,
    differentiable: bool,
) -> Float[Tensor, "seq tok"]:
    if mask_mode not in ("zero", "skip"):
        raise ProxpoError(f'kalman: mask_mode must be "zero" or "skip", got "{mask_mode}"')
    size, dtype = _power_of_two(log_ratio.shape[1]), _at_least_float32(log_ratio.dtype)
    table = _cached_table(schedule, size, dtype, log_ratio.device)
    z = torch.where(mask, log_ratio, 0.0)
    if mask_mode == "zero":
        return ema_scan(z, table, differentiable=differentiable)
    # Valid tokens move to the front, are filtered without holes, and every position reads the
    # state of the last valid token up to it; the column of zeros is the state before the first.
    valid_so_far = mask.cumsum(1)
    packed = torch.zeros_like(z).scatter_add(1, (valid_so_far - 1).clamp(min=0), z)
    states = ema_scan(packed, table, differentiable=differentiable)
    return torch.nn.functional.pad(states, (1, 0)).gather(1, valid_so_far)


@lru_cache(maxsize=32)
def _cached_table(
    schedule: KalmanSchedule | float, tokens: int, dtype: torch.dtype, device: torch.device
) -> ScanTable:
    with torch.device("cpu"):  # float64 does not exist on every default device
        if isinstance(schedule, KalmanSchedule):
            gains = kalman_gains(tokens, **schedule._asdict())
        else:
            gains = torch.full((tokens,), schedule, dtype=torch.float64)
        return scan_table(gains).to(device, dtype)
