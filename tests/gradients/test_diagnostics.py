from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proxpo import gradients
from proxpo.errors import ProxpoError
from proxpo.exact import ActionBatch, FlatPolicy, mean_kl, scores
from proxpo.gradients.diagnostics import Diagnostics, cosine_to_npg, watch
from proxpo.gradients.proma import proma

VOCAB, LENGTH, ROWS = 5, 6, 4


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.up = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.up(self.embed(ids).cumsum(1)))))


@pytest.fixture
def model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


@pytest.fixture
def samples() -> ActionBatch:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=draw)
    lengths = torch.tensor([6, 3, 5, 2])
    return ActionBatch(ids[:, :-1], ids[:, 1:], torch.arange(LENGTH) < lengths[:, None])


ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -0.8], dtype=torch.float64)
TRANSFORMS = {
    "reinforce": lambda: gradients.isopo(preset="reinforce"),
    "fisher": lambda: gradients.isopo(overlap=5),
    "figure4": lambda: gradients.isopo(preset="figure4", overlap="all"),
    "ntk": gradients.isopo_ntk,
    "proma": proma,
}
ALL = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)


def backward(transform, model, samples, advantages=ADVANTAGES, **watching):
    """One block; with `see=True`, what was seen in it."""
    index = torch.where(samples.mask, torch.arange(len(samples.mask))[:, None], -1)
    see = watching.pop("see", bool(watching))
    with (
        transform.applied(model, sequences=index, advantages=advantages) as session,
        watch(session, **watching) if see else nullcontext() as observed,
    ):
        logp = model(samples.inputs).log_softmax(-1).gather(-1, samples.actions[..., None])[..., 0]
        (-(logp * samples.mask).sum()).backward()
    return observed


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def rows(model, samples) -> torch.Tensor:
    return scores(FlatPolicy(model), samples)


@ALL
def test_watching_changes_no_gradient(model, samples, make):
    plain, watched = make(), make()
    backward(plain, model, samples)
    expected = gradient(model)
    model.zero_grad()
    observed = backward(watched, model, samples, see=True)
    assert torch.equal(gradient(model), expected)
    assert set(observed.layers) == {name for name, _ in model.named_parameters()}
    assert all(torch.isfinite(torch.tensor(v)) for v in observed.metrics(per_layer=True).values())


def test_watching_the_head_alone_is_refused(model):
    index = torch.zeros(1, 2, dtype=torch.long)
    block = gradients.isopo(scope="head").applied(model, sequences=index, advantages=torch.ones(1))
    with (
        pytest.raises(
            ProxpoError, match=r"watch: scope=head .* watch a transform with scope=layer"
        ),
        block as session,
        watch(session),
    ):
        pass


def test_rule_comes_back_after_an_error(model):
    transform = gradients.isopo()
    index = torch.zeros(1, 2, dtype=torch.long)
    with transform.applied(model, sequences=index, advantages=torch.ones(1)) as session:
        rule = session.rule
        with pytest.raises(RuntimeError, match="stop"), watch(session):
            raise RuntimeError("stop")
        assert session.rule is rule


@pytest.mark.parametrize("name", ["fisher", "reinforce"])
def test_lengths_are_those_of_the_sequence_gradients(model, samples, name):
    """N from one backward per sequence; F = N where all positions are one sequence of one token."""
    transform = TRANSFORMS[name]()
    observed = backward(transform, model, samples, see=True)
    parts = rows(model, samples).split([p.numel() for p in model.parameters()], dim=1)
    for (name_, _), part in zip(model.named_parameters(), parts):
        assert_close(observed.layers[name_].norm, part.norm(dim=1), rtol=1e-9, atol=1e-12)
        ratio = observed.layers[name_].ratio
        assert ((ratio >= 0) & (ratio <= 1 + 1e-9)).all()
        assert_close(ratio * observed.layers[name_].norm, observed.layers[name_].fisher)


@ALL
def test_angles_shares_and_motion(model, samples, make):
    transform = make()
    observed = backward(transform, model, samples, see=True)
    update, j = gradient(model), rows(model, samples)
    plain = -(ADVANTAGES @ j)
    cosine = float(torch.cosine_similarity(update, plain, dim=0))
    assert observed.cosine == pytest.approx(cosine, abs=1e-9)
    assert_close(observed.moved, j @ -update, rtol=1e-8, atol=1e-10)
    share = observed.share()
    assert sum(share.values()) == pytest.approx(1.0)
    size = model.up.weight.grad.square().sum() / update.square().sum()
    assert share["up.weight"] == pytest.approx(float(size))


def test_reinforce_has_cosine_one(model, samples):
    transform = gradients.isopo(preset="reinforce")
    observed = backward(transform, model, samples, see=True)
    assert observed.cosine == pytest.approx(1.0)
    assert observed.metrics(per_layer=True)["gradient/cosine_reinforce/up.weight"] == pytest.approx(
        1.0
    )


def test_kl_of_the_step_is_the_second_order_kl(model, samples):
    """All continuations would give the exact KL; many samples of the policy give it nearly."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.zeros(4000, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(3):
            p = model(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=draw)], dim=1)
    many = ActionBatch(ids[:, :-1], ids[:, 1:], torch.ones(4000, 3).bool())
    advantages = (ids[:, 1:] == 1).double().mean(1)
    transform = gradients.isopo(preset="reinforce", scale="mean")
    observed = backward(transform, model, many, advantages - advantages.mean(), see=True)
    policy, lr = FlatPolicy(model), 0.05
    theta = policy.vector()
    exact = float(mean_kl(policy, many, theta, theta - lr * gradient(model)))
    assert observed.kl(lr) == pytest.approx(exact, rel=0.1)
    assert observed.metrics()["gradient/kl_unit_step"] == pytest.approx(observed.kl(1.0))


@pytest.mark.parametrize("tied", [False, True])
def test_kl_of_a_step_already_made(samples, tied):
    """Any optimizer: the step is what the parameters say it was."""
    torch.manual_seed(0)
    model = Net(tied=tied).double()
    before = {p: p.detach().clone() for p in model.parameters()}
    transform = gradients.isopo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backward(transform, model, samples)
    optimizer.step()
    optimizer.zero_grad()
    observed = backward(transform, model, samples, since=before)
    step = torch.cat([(p.detach() - old).flatten() for p, old in before.items()])
    moved = rows(model, samples) @ step
    assert_close(observed.moved, moved, rtol=1e-8, atol=1e-12)
    assert observed.metrics()["gradient/kl"] == pytest.approx(float(moved.square().mean() / 2))


def test_blocks_are_pooled(model, samples):
    transform = gradients.isopo(overlap="all")
    halves = [
        ActionBatch(samples.inputs[part], samples.actions[part], samples.mask[part])
        for part in (slice(0, 2), slice(2, 4))
    ]
    observed = Diagnostics()
    for half, adv in zip(halves, ADVANTAGES.split(2)):
        assert backward(transform, model, half, adv, into=observed) is observed
    assert len(observed.moved) == 4
    assert len(observed.layers["up.weight"].norm) == 4


def test_cosine_to_the_exact_natural_gradient(model, samples):
    policy = FlatPolicy(model)
    backward(gradients.isopo(preset="reinforce"), model, samples)
    # Strong damping makes the natural gradient the plain one.
    assert cosine_to_npg(policy, samples, ADVANTAGES, damping=1e9) == pytest.approx(1.0)
    assert cosine_to_npg(policy, samples, ADVANTAGES, damping=1e-2) < 0.99


def test_errors_say_what_was_expected(model, samples):
    transform = gradients.isopo()
    with pytest.raises(ProxpoError, match=r"'embed\.weight' has no gradient yet"):
        cosine_to_npg(FlatPolicy(model), samples, ADVANTAGES)
    with pytest.raises(ProxpoError, match=r"no entry for the parameter head\.weight"):
        backward(transform, model, samples, since={model.up.weight: model.up.weight})
    with pytest.raises(ProxpoError, match="nothing was seen"):
        Diagnostics().kl()
