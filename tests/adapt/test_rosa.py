"""ROSA's target, its linear solve and its two kinds of parameters, in float64."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proxpo.adapt.responder import Responder
from proxpo.adapt.rosa import rosa_step, target_gap
from proxpo.adapt.settings import load_settings
from proxpo.adapt.variables import LoraVariables, OffsetVariables, add_bias
from proxpo.errors import ProxpoError
from proxpo.exact import ActionBatch, FlatPolicy, linearise
from proxpo.exact.policy import token_kl
from proxpo.models import load_policy
from proxpo.ops.streams import derive
from proxpo.rewards import RewardPool
from proxpo.sampler import LocalSampler
from proxpo.train.tasks import make_task

VOCAB = 8


class Logits(nn.Module):
    """A categorical answerer: one row of logits for each position, all of them parameters."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(inputs), -1, -1)


class Net(nn.Module):
    """More parameters than outputs, so that J has a null space."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def answerer(seed: int = 0, tokens: int = 1) -> tuple[FlatPolicy, ActionBatch]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, tokens, VOCAB, generator=g, dtype=torch.float64)
    actions = torch.randint(VOCAB, (1, tokens), generator=g)
    ones = torch.ones(1, tokens, dtype=torch.bool)
    return FlatPolicy(Logits(logits)), ActionBatch(torch.zeros(1, 1), actions, ones)


@pytest.fixture
def net() -> tuple[FlatPolicy, ActionBatch]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Net().double(), torch.randn(1, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, True]])
    return FlatPolicy(model), ActionBatch(x, torch.tensor([[0, 3, 1, 2, 2]]), mask)


def system(policy: FlatPolicy, samples: ActionBatch, **target: float):
    """J as a matrix, p, and p* - p, flattened over positions and vocabulary."""

    def probs(theta: torch.Tensor) -> torch.Tensor:
        return policy.log_probs(theta, samples)[samples.mask].exp()

    theta = policy.vector()
    jacobian = torch.autograd.functional.jacobian(probs, theta)
    gap = target_gap(probs(theta), samples.actions[samples.mask], **target)
    return jacobian.flatten(0, 1), probs(theta), gap.flatten()


@pytest.mark.checks(
    "rosa", "free logits, no damping: J Δθ = p* - p; after a failure KL(p*‖π) falls"
)
@pytest.mark.parametrize("reward", [-1.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_free_logits_match_to_first_order(seed, reward):
    """With r = +1, which the method never uses, the step to an unlikely answer is far too long."""
    policy, samples = answerer(seed, tokens=2)
    jacobian, p, gap = system(policy, samples, reward=reward, beta=0.5)
    result = rosa_step(
        policy, samples, reward=reward, beta=0.5, damping=0.0, iterations=50, tolerance=1e-13
    )
    assert_close(jacobian @ result.step, gap, rtol=1e-9, atol=1e-12)
    target = p + gap.view_as(p)
    after = policy.log_probs(policy.vector(), samples)[samples.mask]
    for found, logp in ((result.kl_before, p.log()), (result.kl_after, after)):
        assert found == pytest.approx(float(token_kl(target.log()[None], logp[None]).sum()))
    assert result.kl_after < result.kl_before or reward > 0


@pytest.mark.checks("rosa", "r = -1 lowers and r = +1 raises p(y); p*(y)/p(y) = e^{r/β}/Z")
@pytest.mark.parametrize("beta", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_target(reward, beta):
    g = torch.Generator().manual_seed(1)
    p = torch.randn(3, VOCAB, generator=g, dtype=torch.float64).softmax(-1)
    y = torch.tensor([0, 5, 2])
    target = p + target_gap(p, y, reward=reward, beta=beta)
    tilted = p.clone()
    tilted[range(3), y] *= math.exp(reward / beta)
    assert_close(target, tilted / tilted.sum(-1, keepdim=True), rtol=1e-13, atol=0.0)
    own, before = target.gather(1, y[:, None]), p.gather(1, y[:, None])
    z = 1 + before * math.expm1(reward / beta)
    assert_close(own / before, math.exp(reward / beta) / z)
    assert ((own > before) == (reward > 0)).all()


@pytest.mark.checks(
    "rosa", "r = 0, β = ∞ and saturated tokens ask for no change; a small β overflows nothing"
)
def test_edges_of_the_target():
    p = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.5, 0.3]], dtype=torch.float64)
    y = torch.tensor([0, 1])
    assert not target_gap(p, y, reward=0.0, beta=1.0).any()
    assert not target_gap(p, y, reward=-1.0, beta=math.inf).any()
    for reward, last in ((1.0, [0.0, 1.0, 0.0]), (-1.0, [0.4, 0.0, 0.6])):
        target = p + target_gap(p, y, reward=reward, beta=1e-6)
        assert_close(target, torch.tensor([[1.0, 0.0, 0.0], last], dtype=torch.float64))


@pytest.mark.checks("rosa", "conjugate gradients equal a dense damped least-squares solve")
def test_solve_equals_dense(net):
    policy, samples = net
    jacobian, _, gap = system(policy, samples, reward=-1.0, beta=1.0)
    damped = jacobian.T @ jacobian + 1e-3 * torch.eye(jacobian.shape[1], dtype=torch.float64)
    dense = torch.linalg.solve(damped, jacobian.T @ gap)
    options = {"damping": 1e-3, "iterations": 200, "tolerance": 1e-13}
    result = rosa_step(policy, samples, reward=-1.0, **options)
    assert_close(result.step, dense, rtol=1e-7, atol=1e-10)
    assert result.iterations < 200


@pytest.mark.checks("rosa", "undamped, the step has no component in the null space of J")
def test_no_null_space_component(net):
    policy, samples = net
    jacobian, *_ = system(policy, samples, reward=-1.0, beta=1.0)
    result = rosa_step(policy, samples, reward=-1.0, damping=0.0, iterations=12, tolerance=1e-6)
    _, values, rows = torch.linalg.svd(jacobian)
    null = rows[int((values > 1e-10).sum()) :]
    assert len(null) > 5
    assert float((null @ result.step).abs().max()) < 1e-12 * float(result.step.norm())


@pytest.mark.checks("rosa", "one iteration is a steepest-descent step along Jᵀ(p* - p)")
def test_one_iteration_is_steepest_descent(net):
    policy, samples = net
    jacobian, _, gap = system(policy, samples, reward=-1.0, beta=1.0)
    result = rosa_step(policy, samples, reward=-1.0, damping=1e-4, iterations=1)
    b = jacobian.T @ gap
    length = b @ b / ((jacobian @ b).square().sum() + 1e-4 * b @ b)
    assert_close(result.step, length * b, rtol=1e-10, atol=1e-14)


@pytest.mark.checks("rosa", "r = 0 leaves the parameters identical to the bit")
def test_no_reward_no_change(net):
    policy, samples = net
    before = policy.vector()
    result = rosa_step(policy, samples, reward=0.0)
    assert torch.equal(policy.vector(), before)
    assert result.iterations == 0


def test_linearised_products_are_those_of_the_jacobian(net):
    policy, samples = net
    near = linearise(lambda theta: policy.log_probs(theta, samples), policy.vector())
    whole = torch.autograd.functional.jacobian(
        lambda theta: policy.log_probs(theta, samples), policy.vector()
    )
    v = torch.linspace(-1, 1, whole.shape[-1], dtype=torch.float64)
    u = torch.linspace(-1, 2, near.value.numel(), dtype=torch.float64).view_as(near.value)
    assert_close(near.push(v), whole @ v)
    assert_close(near.pull(u), torch.einsum("stv,stvp->p", u, whole))


@pytest.mark.checks(
    "rosa", "an update lowers KL(p*‖π) on the model in the box; a reset undoes it to the bit"
)
@pytest.mark.parametrize("kind", ["lora", "hidden"])
def test_variables_of_a_language_model(kind):
    """The sampler follows them: its log-probabilities are those of the policy at θ."""
    adaptation = load_settings("rosa", [f"parameters={kind}"]).adaptation()
    task = make_task("arithmetic")
    policy = load_policy("tiny", dtype="float64", lora=adaptation.lora)
    if adaptation.prepare:
        adaptation.prepare(policy.bare)
    sampler = LocalSampler(policy)
    with RewardPool(task.reward) as pool:
        responder = Responder(policy, sampler, task, pool, 8, 1.0, 0)
        variables = (LoraVariables if kind == "lora" else OffsetVariables)(responder)
        problem = task.test[0]
        prompt = responder.encode(problem.prompt, problem)
        (first,) = responder.draw(problem, prompt, [3])

        def greedy() -> torch.Tensor:
            return sampler.sample([prompt], seeds=[0], max_tokens=5, temperature=0.0).logp

        start = greedy()
        observed = variables.observe(prompt, first.ids)
        assert_close(
            observed.policy.logp(observed.policy.vector(), observed.samples).sum(),
            sampler.sample(
                [prompt], seeds=[derive(0, "attempt", 0, 3)], max_tokens=8, temperature=1.0
            )
            .logp.double()
            .sum(),
            rtol=1e-5,
            atol=1e-5,
        )
        result = rosa_step(observed.policy, observed.samples, reward=-1.0)
        assert result.kl_after < 0.6 * result.kl_before
        variables.commit()
        moved = greedy()
        assert (moved - start).abs().max() > 1e-3
        with torch.no_grad():
            ids = sampler.sample([prompt], seeds=[0], max_tokens=5, temperature=0.0).tokens
            whole = policy.model(input_ids=responder.sequence(prompt, ids[0].tolist())).logits
        direct = whole[:, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, ids[..., None])
        assert_close(moved.double(), direct[..., 0], rtol=1e-4, atol=1e-5)
        variables.reset()
        assert torch.equal(greedy(), start)


def test_a_head_with_a_bias_keeps_it():
    model = load_policy("tiny").model
    add_bias(model)
    head = model.get_output_embeddings()
    head.bias.data.fill_(0.5)
    add_bias(model)
    assert float(head.bias.detach().sum()) == 0.5 * len(head.bias)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"beta": 0.0}, "beta > 0"),
        ({"turns": 0}, "at least 1"),
        ({"parameters": "hidden", "rank": 4}, "no effect"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ProxpoError, match=word):
        load_settings("rosa", options.items())
