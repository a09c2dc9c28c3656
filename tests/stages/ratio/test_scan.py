"""The Kalman gains and the parallel scan against recursions that are slow and obviously correct."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from proxpo.stages.ratio._scan import (
    _cached_table,
    ema_scan,
    filter_fixed,
    filter_log_ratio,
    kalman_gains,
    scan_table,
)

QS = [1e-6, 1e-4, 1e-2, 1.0]


def gains_reference(tokens, q, v, p0):
    """The covariance recursion, one token at a time."""
    gains, p = [], p0
    for _ in range(tokens):
        prior = p + q
        gains.append(1.0 if math.isinf(prior) else prior / (prior + v))
        p = v * gains[-1]
    return torch.tensor(gains, dtype=torch.float64)


def scan_reference(z, gains):
    """The filter, one token at a time, in the precision of its inputs."""
    keep, states = 1.0 - gains, []
    state = torch.zeros_like((gains * z)[..., 0])
    for k, a, z_t in zip(keep.unbind(-1), gains.unbind(-1), z.unbind(-1)):
        state = k * state + a * z_t
        states.append(state)
    return torch.stack(states, dim=-1)


def filter_reference(z, mask, gains, mask_mode):
    """One row and one token at a time, with Python floats: holes are zeros, or are passed over."""
    rows = []
    for z_row, mask_row in zip(z.tolist(), mask.tolist()):
        state, used, row = 0.0, 0, []
        for z_t, valid in zip(z_row, mask_row):
            if valid or mask_mode == "zero":
                k = gains[used].item()
                state, used = (1.0 - k) * state + k * (z_t if valid else 0.0), used + 1
            row.append(state)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def spiky(tokens, rows=8):
    """z ~ N(0.02, 0.1²) with 200 spikes of ±5 in each row."""
    generator = torch.Generator().manual_seed(0)
    z = 0.02 + 0.1 * torch.randn(rows, tokens, generator=generator)
    for row in z:
        where = torch.randperm(tokens, generator=generator)[:200]
        row[where] = 5.0 * torch.randn(200, generator=generator).sign()
    return z


def noise(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def everything(z):
    return torch.ones_like(z, dtype=torch.bool)


# --- gains


@pytest.mark.parametrize("q", [*QS, 1e6])
@pytest.mark.parametrize("p0", [0.0, 1.0, 100.0])
@pytest.mark.checks("ema-kpo", "the closed-form gains are those of the covariance recursion")
def test_gains_equal_the_recursion(q, p0):
    tokens = 65_536 if q == 1e-6 else 8_192
    for v in (1.0, 0.3):
        expected = gains_reference(tokens, q, v, p0)
        assert_close(kalman_gains(tokens, q=q, v=v, p0=p0), expected, rtol=1e-12, atol=0.0)


GOLDEN = {  # p0 -> gains at 0-based tokens 0, 10, 100, 1000, 2000, 4095 for q = 1e-6, v = 1
    0.0: (9.99999e-7, 1.099949e-5, 1.006529e-4, 7.617235e-4, 9.636335e-4, 9.989471e-4),
    1.0: (0.5000002, 8.333685e-2, 9.837400e-3, 1.311091e-3, 1.036663e-3, 1.000053e-3),
}


@pytest.mark.parametrize(("p0", "within_one_percent"), [(0.0, 2646), (1.0, 2650)])
@pytest.mark.checks(
    "kpo", "P0 = 0 starts at 1e-6 and rises, P0 = 1 starts at 0.5 and falls, to K_∞"
)
def test_golden_gains(p0, within_one_percent):
    gains = kalman_gains(65_536, q=1e-6, p0=p0)
    golden = torch.tensor(GOLDEN[p0], dtype=torch.float64)
    assert_close(gains[[0, 10, 100, 1000, 2000, 4095]], golden, rtol=5e-7, atol=0.0)
    limit = math.sqrt(1e-6 + 1e-12 / 4) - 5e-7
    assert limit == pytest.approx(9.995001e-4, rel=1e-7)
    assert gains[-1].item() == pytest.approx(limit, rel=1e-12)
    close = (gains / limit - 1.0).abs() < 0.01
    assert close.nonzero()[0].item() == within_one_percent


@pytest.mark.parametrize("p0", [0.0, 0.5, 1.0])
def test_no_process_noise(p0):
    n = torch.arange(1, 101, dtype=torch.float64)
    assert_close(kalman_gains(100, q=0.0, p0=p0), p0 / (1.0 + n * p0), rtol=1e-15, atol=0.0)


def test_diffuse_start_takes_the_first_observation():
    n = torch.arange(1, 101, dtype=torch.float64)
    assert_close(kalman_gains(100, q=0.0, p0=math.inf), 1.0 / n)
    assert_close(
        kalman_gains(100, q=0.1, p0=math.inf),
        gains_reference(100, 0.1, 1.0, math.inf),
        rtol=1e-12,
        atol=0,
    )


@pytest.mark.parametrize("q", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("p0", [0.0, 1e-300, 1.0, 1e300, math.inf])
def test_extreme_variances_stay_gains(q, p0):
    gains = kalman_gains(1_000, q=q, p0=p0)
    assert bool(((gains >= 0.0) & (gains <= 1.0)).all())


def test_clamp_lifts_gains_below_one_millionth():
    """At P0 = 0 the first default gain is q/(1+q) < 1e-6; for q < 1e-12 all of them are."""
    free, clamped = kalman_gains(50, q=1e-6), kalman_gains(50, q=1e-6, clamp=True)
    assert free[0] < 1e-6
    assert clamped[0] == 1e-6
    assert torch.equal(free[1:], clamped[1:])
    assert bool((kalman_gains(50, q=1e-13, clamp=True) == 1e-6).all())
    assert bool((kalman_gains(50, q=1e30, clamp=True) == 1.0 - 1e-6).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": -1.0}, "q .* >= 0, got -1.0"),
        ({"q": math.inf}, "q .* finite"),
        ({"q": 1.0, "v": 0.0}, "v .* > 0, got 0.0"),
        ({"q": 1.0, "p0": math.nan}, "p0 .* >= 0, got nan"),
    ],
)
def test_bad_variances_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        kalman_gains(4, **options)


# --- scan


@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize("p0", [0.0, 1.0])
@pytest.mark.checks("ema-kpo", "the chunked scan equals the recursion to 1e-12 in float64")
def test_scan_equals_the_loop(q, p0):
    z, gains = noise(3, 3_000), kalman_gains(3_000, q=q, p0=p0)
    assert_close(ema_scan(z, gains), scan_reference(z, gains), rtol=0.0, atol=1e-12)


@given(
    data=st.data(),
    rows=st.integers(0, 4),
    tokens=st.integers(1, 70),
    chunk=st.sampled_from([None, 1, 2, 4, 8, 64]),
)
@settings(max_examples=120, deadline=None)
def test_any_gains_and_any_chunk(data, rows, tokens, chunk):
    """Gains of exactly 0 and, where the chunk is chosen for them, exactly 1 included."""
    top = 1.0 if chunk in (None, 1) else 0.9
    gain = st.one_of(st.floats(0.0, top), st.sampled_from([0.0, top]))
    gains = torch.tensor(data.draw(st.lists(gain, min_size=tokens, max_size=tokens)))
    z, gains = noise(rows, tokens, seed=tokens), gains.double()
    rho = ema_scan(z, gains, chunk=chunk)
    assert_close(rho, scan_reference(z, gains), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("q", QS)
@pytest.mark.checks("ema-kpo", "the result does not depend on the chunk length, to 65,536 tokens")
def test_chunk_length_is_immaterial(q):
    z, gains = spiky(65_536, rows=2), kalman_gains(65_536, q=q, p0=1.0)
    whole, whole32 = ema_scan(z.double(), gains), ema_scan(z, gains)
    for chunk in (4, 16, 32):
        rho, rho32 = ema_scan(z.double(), gains, chunk=chunk), ema_scan(z, gains, chunk=chunk)
        assert_close(rho, whole, rtol=0.0, atol=1e-12)
        assert_close(rho32, whole32, rtol=0.0, atol=3e-7 * 5.0)


@pytest.mark.parametrize("tokens", [4_096, 65_536])
@pytest.mark.checks("ema-kpo", "float32 stays within 2e-7 of float64 on spiky log-ratios")
@pytest.mark.checks("kpo", "finite and exact to 65,536 tokens for Q from 1e-6 to 1")
def test_long_responses(tokens):
    """At q = 1 the filtered values reach 5, where float32 itself is only good to 2.4e-7."""
    z = spiky(tokens)
    schedules = [(q, p0) for q in QS for p0 in (0.0, 1.0)]
    gains = torch.stack([kalman_gains(tokens, q=q, p0=p0, clamp=True) for q, p0 in schedules])
    exact = scan_reference(z.double(), gains[:, None])  # all schedules in one slow loop
    for (q, p0), expected in zip(schedules, exact):
        filtered = filter_log_ratio(z, everything(z), q=q, p0=p0)
        assert (filtered - expected).abs().max() <= (2e-7 if q < 1.0 else 3 * 2.4e-7)


def test_float32_is_no_worse_than_a_float32_loop():
    z, gains = spiky(4_096), kalman_gains(4_096, q=1e-2, p0=1.0)
    exact = scan_reference(z.double(), gains)
    loop = (scan_reference(z, gains.float()) - exact).abs().max()
    assert (ema_scan(z, gains) - exact).abs().max() <= 1.5 * loop


def test_narrow_rows_are_computed_in_float32():
    z, gains = spiky(512, rows=2).bfloat16(), kalman_gains(512, q=1e-2)
    rho = ema_scan(z, gains)
    assert rho.dtype == torch.float32
    assert (rho - scan_reference(z.double(), gains)).abs().max() <= 5e-7


@pytest.mark.parametrize("alpha", [1e-3, 0.01, 0.03, 0.1, 0.5, 0.9, 0.999])
def test_tables_leave_half_of_float32_to_the_data(alpha):
    for tokens in (4_096, 16_384):
        table = scan_table(torch.full((tokens,), alpha))
        assert table.into.max() <= math.exp(44.0)
        assert table.out.min() >= math.exp(-44.0)


def test_too_long_a_chunk_is_refused():
    with pytest.raises(ValueError, match="chunks of 64 tokens are too long"):
        scan_table(torch.full((64,), 0.99), chunk=64)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_gains_outside_the_unit_interval_are_refused(bad):
    with pytest.raises(ValueError, match=r"gains must lie in \[0, 1\]"):
        scan_table(torch.tensor([0.5, bad]))


@pytest.mark.checks("ema-kpo", "α ≡ 1 returns z, α ≡ 0 returns zero")
def test_full_and_no_gain():
    z = noise(3, 300)
    assert torch.equal(ema_scan(z, torch.ones(300)), z)
    assert torch.equal(ema_scan(z, torch.zeros(300)), torch.zeros_like(z))


@pytest.mark.parametrize("tokens", [1, 7, 40, 65])
def test_adjoint(tokens):
    """First and second derivatives, over several chunks and a last one that is not full."""
    gains = kalman_gains(tokens, q=0.1, p0=2.0)
    z, weight = noise(2, tokens).requires_grad_(), noise(2, tokens, seed=1)
    (grad,) = torch.autograd.grad(
        (ema_scan(z, gains, chunk=8, differentiable=True) * weight).sum(), z
    )
    (expected,) = torch.autograd.grad((scan_reference(z, gains) * weight).sum(), z)
    assert_close(grad, expected, rtol=0.0, atol=1e-13)
    assert not ema_scan(z, gains).requires_grad

    def scan(z):
        return ema_scan(z, gains, chunk=8, differentiable=True)

    assert torch.autograd.gradcheck(scan, (z,), fast_mode=True)
    assert torch.autograd.gradgradcheck(scan, (z,), fast_mode=True)


def test_narrow_rows_get_their_own_gradient_dtype():
    z = noise(2, 9).bfloat16().requires_grad_()
    ema_scan(z, kalman_gains(9, q=0.1), differentiable=True).sum().backward()
    assert z.grad is not None
    assert z.grad.dtype == torch.bfloat16


# --- filter


@given(
    tokens=st.integers(1, 90),
    q=st.sampled_from([0.0, *QS]),
    p0=st.sampled_from([0.0, 1.0, math.inf]),
    mask_mode=st.sampled_from(["zero", "skip"]),
    keep=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_filter_equals_the_reference_on_any_mask(tokens, q, p0, mask_mode, keep, seed):
    z, mask = noise(3, tokens, seed=seed), noise(3, tokens, seed=seed + 1).sigmoid() < keep
    garbage = torch.where(mask, z, math.nan)
    filtered = filter_log_ratio(garbage, mask, q=q, p0=p0, mask_mode=mask_mode, clamp=False)
    expected = filter_reference(z, mask, gains_reference(tokens, q, 1.0, p0), mask_mode)
    assert_close(filtered, expected, rtol=0.0, atol=1e-12)


@pytest.mark.checks("kpo", "a masked hole is an observation of zero, or is passed over, as asked")
def test_hole_by_hand():
    z = torch.tensor([[1.0, math.nan, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True]])
    k0, k1, k2 = kalman_gains(3, q=1.0, p0=1.0).tolist()
    zero = filter_log_ratio(z, mask, q=1.0, p0=1.0)
    skip = filter_log_ratio(z, mask, q=1.0, p0=1.0, mask_mode="skip")
    assert zero[0, 2].item() == pytest.approx((1 - k2) * (1 - k1) * k0 + k2 * 3.0, abs=1e-14)
    assert skip[0, 2].item() == pytest.approx((1 - k1) * k0 + k1 * 3.0, abs=1e-14)


@pytest.mark.parametrize("mask_mode", ["zero", "skip"])
@pytest.mark.checks("ema-kpo", "the content and the amount of right padding change nothing")
def test_right_padding_is_harmless(mask_mode):
    z = noise(4, 50)
    bare = filter_log_ratio(z, everything(z), q=1e-2, mask_mode=mask_mode)
    padded = torch.cat([z, torch.full((4, 5_000), math.inf)], dim=1)
    mask = torch.arange(5_050).expand(4, -1) < 50
    filtered = filter_log_ratio(padded, mask, q=1e-2, mask_mode=mask_mode)
    assert_close(filtered[:, :50], bare, rtol=0.0, atol=1e-14)
    assert bool(filtered.isfinite().all())


@pytest.mark.checks("ema-kpo", "inserting a masked hole changes nothing in skip mode")
def test_holes_are_passed_over_in_skip_mode():
    z = noise(3, 40)
    bare = filter_log_ratio(z, everything(z), q=1e-2, p0=1.0, mask_mode="skip")
    hole = torch.full((3, 6), math.nan, dtype=torch.float64)
    holed = torch.cat([hole, z[:, :15], hole, z[:, 15:]], dim=1)
    mask = holed.isfinite()
    filtered = filter_log_ratio(holed, mask, q=1e-2, p0=1.0, mask_mode="skip")
    assert_close(filtered[mask].view(3, 40), bare, rtol=0.0, atol=1e-14)
    zero = filter_log_ratio(holed, mask, q=1e-2, p0=1.0)
    assert (zero[mask].view(3, 40) - bare).abs().max() > 0.1


@pytest.mark.checks("kpo", "on-policy: log-ratio 0 is filtered to exactly 0")
def test_zero_stays_zero():
    z = torch.zeros(2, 100)
    assert torch.equal(filter_log_ratio(z, everything(z)), z)


@pytest.mark.checks("kpo", "Q → ∞ returns the raw log-ratio; Q = 0 with P0 = 0 returns 0")
def test_limits_of_the_process_noise():
    z = noise(2, 200)
    raw = filter_log_ratio(z, everything(z), q=1e30, clamp=False)
    assert_close(raw, z, rtol=0.0, atol=1e-12)
    none = filter_log_ratio(z, everything(z), q=0.0, clamp=False)
    assert torch.equal(none, torch.zeros_like(z))


@pytest.mark.parametrize("p0", [0.0, 1.0])
@pytest.mark.checks("kpo", "constant z = c gives c·(1 − ∏(1 − K)), monotone towards c")
def test_constant_input(p0):
    z = torch.full((1, 5_000), -0.7, dtype=torch.float64)
    filtered = filter_log_ratio(z, everything(z), q=1e-4, p0=p0, clamp=False)
    keep = (1.0 - gains_reference(5_000, 1e-4, 1.0, p0)).cumprod(0)
    assert_close(filtered[0], -0.7 * (1.0 - keep), rtol=0.0, atol=1e-12)
    assert bool((filtered.diff() <= 1e-15).all())
    assert bool((filtered.abs() <= 0.7 + 1e-15).all())


@pytest.mark.checks("kpo", "causal: token s changes the filter at t ≥ s only")
def test_causal():
    z = noise(1, 3_000)
    changed = z.clone()
    changed[0, 1_500] += 1.0
    before, after = (filter_log_ratio(x, everything(x), q=1e-2) for x in (z, changed))
    assert torch.equal(before[:, :1_500], after[:, :1_500])
    assert after[0, 1_500] != before[0, 1_500]


@pytest.mark.checks("kpo", "the filter is linear")
def test_linear():
    z, y = noise(2, 500), noise(2, 500, seed=1)
    x_z, x_y, both = (
        filter_log_ratio(x, everything(x), q=1e-2, p0=1.0) for x in (z, y, 2.0 * z - 3.0 * y)
    )
    assert_close(both, 2.0 * x_z - 3.0 * x_y, rtol=0.0, atol=1e-13)


@pytest.mark.checks("ema-kpo", "P0 = 1 and Q = 0 give Σ z / (t + 2)")
def test_running_mean_with_one_pseudo_observation():
    z = noise(2, 2_000)
    filtered = filter_log_ratio(z, everything(z), q=0.0, p0=1.0)
    t = torch.arange(2_000, dtype=torch.float64)
    assert_close(filtered, z.cumsum(1) / (t + 2.0), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 0.01, 0.5, 1.0])
def test_fixed_gain(alpha):
    z = noise(2, 700)
    filtered = filter_fixed(z, everything(z), alpha=alpha)
    expected = scan_reference(z, torch.full((700,), alpha, dtype=torch.float64))
    assert_close(filtered, expected, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("mask_mode", ["zero", "skip"])
def test_gradient_only_when_asked_for(mask_mode):
    z = noise(2, 60).requires_grad_()
    mask = noise(2, 60, seed=1) < 0.5
    options = {"q": 1e-2, "p0": 1.0, "mask_mode": mask_mode}
    assert not filter_log_ratio(z, mask, **options).requires_grad

    def attached(z):
        return filter_log_ratio(z, mask, differentiable=True, **options)

    assert torch.autograd.gradcheck(attached, (z,), fast_mode=True)
    (grad,) = torch.autograd.grad(attached(z).sum(), z)
    assert bool((grad[~mask] == 0.0).all())


def test_rows_are_independent_and_may_be_absent():
    z = noise(3, 100)
    together = filter_log_ratio(z, everything(z), q=1e-2)
    alone = torch.cat([filter_log_ratio(row, everything(row), q=1e-2) for row in z.split(1)])
    assert torch.equal(together, alone)
    for empty in (z[:0], z[:, :0]):
        assert filter_log_ratio(empty, everything(empty)).shape == empty.shape


def test_tables_are_cached_across_lengths_and_serve_training_after_inference():
    _cached_table.cache_clear()
    with torch.inference_mode():
        filter_log_ratio(torch.zeros(1, 900), torch.ones(1, 900, dtype=torch.bool))
    z = torch.zeros(1, 1_024, requires_grad=True)
    filter_log_ratio(z, everything(z), differentiable=True).sum().backward()
    assert _cached_table.cache_info().misses == 1


def test_bad_options_are_named():
    z = torch.zeros(1, 3)
    with pytest.raises(ValueError, match='"zero" or "skip", got "hold"'):
        filter_log_ratio(z, everything(z), mask_mode="hold")
    with pytest.raises(ValueError, match=r"gains must lie in \[0, 1\], got 1.5"):
        filter_fixed(z, everything(z), alpha=1.5)
