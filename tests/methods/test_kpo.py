import pytest
import torch
from helpers import close, crafted, f64, make_batch, method, on_policy, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import filtered_loss, gains_of
from proxpo.stages.ratio import kalman

CASES = {
    "kpo": Case(
        "kpo",
        {"q": 0.1, "clip_low": 0.02, "clip_high": 0.02},
        lambda b: filtered_loss(b, gains_of(b, q=0.1, p0=0.0)),
    ),
    "kpo-skip": Case(
        "kpo",
        {"q": 0.1, "mask_mode": "skip", "clipped": False},
        lambda b: filtered_loss(b, gains_of(b, q=0.1, p0=0.0), skip=True, clip=None),
    ),
}


RNG = torch.Generator().manual_seed(0)


def filtered(z: torch.Tensor, mask: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    """x̂ for log-ratios z."""
    batch = crafted(z, [1.0] * len(z), mask=mask)
    ratio, _ = kalman(**options).apply(batch, proxpo.Context())
    return ratio.log()


def drawn(rows: int = 2, tokens: int = 40) -> torch.Tensor:
    return 0.3 * torch.randn(rows, tokens, generator=RNG, dtype=torch.float64)


@pytest.mark.checks("kpo", "logp = old: nothing is clipped, GRPO's on-policy gradient")
@pytest.mark.parametrize("options", [{}, {"clipped": False}], ids=["clipped", "unclipped"])
def test_on_policy(options: dict) -> None:
    batch = on_policy(make_batch(1))
    found = policy_gradient(method("kpo", **options), batch)
    close(found, policy_gradient(method("grpo"), batch))


@pytest.mark.checks("kpo", "Q → ∞: GRPO with KPO's clip; Q = 0 from P0 = 0: r̂ = 1, REINFORCE")
def test_limits_of_the_noise() -> None:
    batch = make_batch(1, spread=3e-4)
    free = {"q": 1e12, "ratio.clamp": False}
    grpo = policy_gradient(method("grpo", clip_low=3e-4, clip_high=4e-4), batch)
    close(policy_gradient(method("kpo", **free), batch), grpo)
    assert grpo[batch.mask].eq(0).any()  # some tokens are clipped
    still = policy_gradient(method("kpo", q=0.0, **{"ratio.clamp": False}), batch)
    reinforce = method("reinforce", advantage="group_relative", aggregate="seq_mean_token_mean")
    close(still, policy_gradient(reinforce, batch))


@pytest.mark.checks("kpo", "z = c: x̂ rises to c as c·(1 - Π(1-K))")
def test_constant_input() -> None:
    x = filtered(torch.full((1, 60), 0.5).double(), q=0.05)
    assert (x.diff() > 0).all()
    close(x[0, -1], 0.5, rtol=1e-3)
    p, left = 0.0, 1.0
    for t in range(60):
        gain = (p + 0.05) / (p + 1.05)
        left, p = left * (1 - gain), gain
        close(x[0, t], 0.5 * (1 - left))


@pytest.mark.checks("kpo", "a change at token s moves x̂ from s on, never before")
@pytest.mark.parametrize("q", [1e-6, 0.1])
def test_causal(q: float) -> None:
    z = drawn()
    moved = z.clone()
    moved[:, 17] += 1.0
    change = filtered(moved, q=q) - filtered(z, q=q)
    close(change[:, :17], 0.0 * z[:, :17])
    assert (change[:, 17:] > 0).all()


@pytest.mark.checks("kpo", "the filter is linear")
def test_linear() -> None:
    z, y = drawn(), drawn()
    both = filtered(2 * z - 0.5 * y, q=0.1)
    close(both, 2 * filtered(z, q=0.1) - 0.5 * filtered(y, q=0.1))


def jacobian(r: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """dr_t/dlogp_s."""
    rows = [torch.autograd.grad(one, logp, retain_graph=True)[0][0] for one in r]
    return torch.stack(rows)


def test_filter_is_detached() -> None:
    """A token receives no gradient from the ratio of a later one, as an attached filter gives."""
    batch = crafted(drawn(1, 6), [1.0])
    logp = batch.logp.clone().requires_grad_()
    r, _ = kalman(q=0.5).apply(batch.replace(logp=logp), proxpo.Context())
    close(jacobian(r[0], logp), torch.diag(r[0].detach()))
    close(policy_gradient(method("kpo", q=0.5, clipped=False), batch), -r.detach() / 6)
    x, attached = f64(0.0), []
    for z in (logp - batch.old_logp)[0]:  # any gain: the shape of the Jacobian matters
        x = 0.5 * x + 0.5 * z
        attached.append(x.exp())
    assert jacobian(torch.stack(attached), logp).tril(-1).abs().sum() > 0.1


def test_starts_from_zero_variance() -> None:
    """The released code starts at P0 = 0: the first gain is 1e-6, not the 0.5 of P0 = 1."""
    z = torch.ones(1, 3).double()
    close(filtered(z)[0, 0], 1e-6, rtol=1e-4)
    close(filtered(z, p0=1.0)[0, 0], 0.5, rtol=1e-5)
    assert method("kpo").ratio.options["p0"] == 0.0


@pytest.mark.parametrize(
    ("p0", "expected"),
    [
        (0.0, [9.99999e-7, 1.099949e-5, 1.006529e-4, 7.617235e-4, 9.636335e-4, 9.989471e-4]),
        (1.0, [0.5000002, 8.333685e-2, 9.837400e-3, 1.311091e-3, 1.036663e-3, 1.000053e-3]),
    ],
)
def test_gains_by_position(p0: float, expected: list[float]) -> None:
    """An impulse at token t alone gives x̂_t = K_t."""
    positions = [0, 10, 100, 1000, 2000, 4095]
    z = torch.zeros(len(positions), 4096).double()
    z[range(len(positions)), positions] = 1.0
    x = filtered(z, p0=p0, clamp=False)
    found = x[range(len(positions)), positions]
    close(found, f64(expected), rtol=1e-6)


def test_holes_and_padding() -> None:
    z = drawn(1, 5)
    mask = torch.tensor([[True, True, False, True, True]])
    zero = z.clone()
    zero[0, 2] = 0.0
    counted = filtered(z, mask, q=0.1)[mask]
    close(counted, filtered(zero, q=0.1)[mask])
    skipped = filtered(z, mask, q=0.1, mask_mode="skip")[mask]
    close(skipped, filtered(z[:, [0, 1, 3, 4]], q=0.1)[0])
    assert not torch.allclose(counted, skipped)
    right = torch.tensor([[True, True, True, False, False]])
    close(filtered(z, right, q=0.1)[right], filtered(z[:, :3], q=0.1)[0])


def test_large_log_ratios_are_held() -> None:
    batch = crafted([[50.0]], [1.0])
    made = method("kpo", q=1e9, clipped=False, **{"ratio.clamp": False})
    assert policy_gradient(made, batch) == 0  # beyond the limit of 10 the ratio is constant
