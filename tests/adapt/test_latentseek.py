"""LatentSeek's loss, its search on the model in the box, and the self-reward."""

import pytest
import torch
from torch.testing import assert_close

from proxpo.adapt.latentseek import LatentSeek, latent_loss
from proxpo.adapt.responder import Responder
from proxpo.adapt.self_reward import CHECKS, SelfReward
from proxpo.adapt.settings import load_settings
from proxpo.adapt.types import Answer
from proxpo.errors import ProxpoError
from proxpo.logp import HeadInput
from proxpo.models import load_policy
from proxpo.rewards import RewardPool
from proxpo.sampler import LocalSampler
from proxpo.train.tasks import Problem, make_task


@pytest.fixture
def block() -> tuple[HeadInput, torch.Tensor]:
    """A head over 7 tokens and three states."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(7, 4, generator=g, dtype=torch.float64)
    z = torch.randn(3, 4, generator=g, dtype=torch.float64)
    return HeadInput(z, w), z.clone().requires_grad_()


@pytest.mark.checks("latentseek", "R = 0 leaves z as it is; R < 0 lowers log π(x̂_t|z_t) at every t")
def test_direction(block):
    head, z = block
    chosen = head.logits(z).argmax(-1)

    def chances() -> torch.Tensor:
        return head.logits(z).log_softmax(-1).gather(-1, chosen[:, None])[:, 0].detach()

    before, start = chances(), z.detach().clone()
    for make in (torch.optim.Adam, torch.optim.SGD):
        optimizer = make([z], lr=0.03)
        (z.grad,) = torch.autograd.grad(latent_loss(head, z, chosen, 0.0), z)
        optimizer.step()
        assert torch.equal(z.detach(), start)
    (gradient,) = torch.autograd.grad(latent_loss(head, z, chosen, -0.5), z)
    with torch.no_grad():
        z -= 1e-3 * gradient
    assert (chances() < before).all()


@pytest.mark.checks("latentseek", "the gradient is -R Wᵀ(e_x̂ - π), up to the 1e-8 inside the log")
def test_gradient(block):
    head, z = block
    probs = head.logits(z).softmax(-1).detach()
    chosen = probs.argmax(-1)
    (gradient,) = torch.autograd.grad(latent_loss(head, z, chosen, -0.7), z)
    onehot = torch.nn.functional.one_hot(chosen, 7).double()
    assert_close(gradient, 0.7 * (onehot - probs) @ head.weight, rtol=1e-7, atol=0.0)


@pytest.mark.checks("latentseek", "over sampled x, R ∇log π averages to ∇E[R] (REINFORCE identity)")
def test_reinforce_identity(block):
    head, z = block
    g = torch.Generator().manual_seed(1)
    reward = torch.randn(7, 7, 7, generator=g, dtype=torch.float64)
    log_probs = head.logits(z).log_softmax(-1)
    a, b, c = log_probs.exp()
    expected = torch.einsum("i,j,k,ijk->", a, b, c, reward)
    (exact,) = torch.autograd.grad(expected, z, retain_graph=True)
    total = torch.zeros_like(exact)
    for x in torch.cartesian_prod(*[torch.arange(7)] * 3):
        logp = log_probs.gather(-1, x[:, None]).sum()
        (score,) = torch.autograd.grad(logp, z, retain_graph=True)
        total += logp.exp().detach() * reward[tuple(x)] * score
    assert_close(total, exact)


@pytest.fixture(scope="module")
def responder():
    task = make_task("arithmetic:hard")
    policy = load_policy("tiny")
    with RewardPool(task.reward) as pool:
        yield Responder(policy, LocalSampler(policy), task, pool, 8, 1.0, 0)


def latentseek(responder: Responder, **options) -> LatentSeek:
    return load_settings("latentseek", options.items()).adaptation().start(responder)


def problem_that(responder: Responder, right: bool) -> tuple[Problem, Answer]:
    """A problem whose greedy answer is right, or wrong."""
    seeker = latentseek(responder)
    answers = ((problem, seeker.first(problem)) for problem in responder.task.test)
    return next(pair for pair in answers if pair[1].right == right)


@pytest.mark.checks("latentseek", "n = 0, or a good reward at the start, returns the greedy answer")
def test_nothing_to_seek(responder):
    wrong, right = problem_that(responder, False), problem_that(responder, True)
    for (problem, first), options, ended in (
        (wrong, {"fraction": 0.0}, "no block"),
        (wrong, {}, "no block"),  # a tenth of a short answer
        (right, {"fraction": 1.0}, "reward"),
    ):
        trial = latentseek(responder, **options).adapt(problem, first)
        assert (trial.answer, trial.attempts, trial.ended) == (first, 1, ended)


@pytest.mark.checks("latentseek", "with lr = 0 every iteration gives the same answer")
def test_frozen_states_repeat_the_answer(responder):
    problem, first = problem_that(responder, False)
    seen: list[list[int]] = []
    seeker = latentseek(responder, fraction=0.6, lr=0.0, iterations=4)
    seeker.judge = lambda problem, answer: seen.append(answer.ids) or -1.0
    trial = seeker.adapt(problem, first)
    assert seen == [first.ids] * 5
    assert (trial.answer, trial.attempts, trial.ended) == (first, 5, "iterations")


def test_the_search_changes_the_block_and_finds_answers(responder):
    """It leaves the model alone, stops at a right answer, and counts its tokens."""
    weights = [p.clone() for p in responder.policy.model.parameters()]
    seeker = latentseek(responder, fraction=1.0, lr=0.3)
    ends = []
    for problem in responder.task.test[:12]:
        responder.tokens = 0.0
        first = seeker.first(problem)
        trial = seeker.adapt(problem, first)
        ends.append(trial.ended)
        assert (trial.ended == "reward") == trial.answer.right
        assert trial.tokens == pytest.approx(responder.tokens)
        if trial.updates:
            assert any(update["changed"] for update in trial.updates)
    assert {"reward", "iterations"} == set(ends)
    assert all(map(torch.equal, weights, responder.policy.model.parameters()))


def test_self_reward_adds_the_weights_of_failed_checks(responder, monkeypatch):
    """An unreadable verdict fails; the format rule adds 2 before dividing."""
    problem = Problem([{"role": "user", "content": "What is 1 + 1?"}], "2", 0)
    questions = [question for _, question in CHECKS.values()]
    judge, strict = SelfReward(responder), SelfReward(responder, format_rule=True)

    def rewards(*verdicts: str) -> tuple[float, float]:
        def encode(prompt, problem):
            return [next(i for i, q in enumerate(questions) if q in prompt[0]["content"])]

        monkeypatch.setattr(responder, "encode", encode)
        monkeypatch.setattr(responder, "generate", lambda prompt, seeds, **options: [prompt])
        monkeypatch.setattr(responder, "text", lambda ids: verdicts[ids[0]])
        answer = Answer([], "2", True)
        return judge(problem, answer), strict(problem, answer)

    assert rewards("Yes.", "yes", "YES", "yes") == (0, -2 / 6)
    assert rewards("no", "Yes, it is", "I cannot tell", "yes") == (-4 / 6, -1)
    assert rewards("", "", "", "") == (-1, -8 / 6)


def test_self_reward_needs_chat(responder):
    seeker = latentseek(responder, judge="self")
    with pytest.raises(ProxpoError, match="judge=task, or a chat task"):
        seeker.adapt(responder.task.test[0], Answer([1], "1", False))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"fraction": 1.5}, "fraction in"),
        ({"threshold": 0.0}, "below 0"),
        ({"format_rule": True}, "belongs to judge=self"),
        ({"lr": -1.0}, "at least 0"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ProxpoError, match=word):
        load_settings("latentseek", options.items())
