"""Episodes of several turns: what is sampled stays as it was, what the tool says is not trained."""

from dataclasses import replace

import pytest
import torch
from train.train_runs import batch_of, job_of, options_of, sample

from proxpo.compose import prepare
from proxpo.errors import ProxpoError
from proxpo.models import load_policy
from proxpo.sampler import Samples, make_sampler
from proxpo.train.batch import TrainingBatch
from proxpo.train.episodes import play
from proxpo.train.minibatch import gradients
from proxpo.train.scoring import forward
from proxpo.train.tasks import Reply, make_task
from proxpo.train.update import update

PROMPT = "17+26?"


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


class Scripted:
    """A sampler that says given turns, and remembers what it was shown."""

    def __init__(self, policy, *turns: list[str]) -> None:
        self.policy, self.turns, self.shown, self.seeds = policy, list(turns), [], []
        self.context = policy.context

    def sample(self, prompts, *, seeds, max_tokens, temperature, top_p=1.0, progress=None):
        self.shown.append(prompts)
        self.seeds.append(seeds)
        end = self.policy.eos_ids[0]
        rows = [[*self.policy.tokenizer.encode(text), end] for text in self.turns.pop(0)]
        cut = [row[:max_tokens] for row in rows]
        width = max(map(len, cut))
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in cut])
        tokens = torch.tensor([row + [self.policy.pad_id] * (width - len(row)) for row in cut])
        done = torch.tensor([len(row) <= max_tokens for row in rows])
        logp = torch.where(mask, -torch.rand(mask.shape), 0.0)
        return Samples(prompts, tokens, logp, mask, done)

    def sync(self) -> None: ...
    def close(self) -> None: ...


def played(policy, *turns, level="default", **options):
    sampler, task = Scripted(policy, *turns), make_task(f"calculator:{level}")
    prompts = [policy.tokenizer.encode(PROMPT)] * len(turns[0])
    options = {"max_tokens": 10, "temperature": 1.0} | options
    found = play(
        policy, sampler, task, prompts, seeds=lambda row, turn: 100 * turn + row, **options
    )
    return found, sampler


def test_the_tool_is_read_and_not_trained(policy) -> None:
    found, sampler = played(policy, ["[17+26]", "43", "hm"], ["43"])
    text = policy.tokenizer.decode
    said, told = found.samples.mask, found.real & ~found.samples.mask
    assert [text(row[m]) for row, m in zip(found.samples.tokens, told)] == ["=43\n", "", ""]
    assert found.texts == ["[17+26]=43\n43", "43", "hm"]
    assert found.answers == ["43", "43", "hm"]  # the reward sees the last turn
    assert found.void.tolist() == [False, False, True]
    assert found.samples.finished.all()
    calls, answer = len("[17+26]") + 1, len("43") + 1
    assert found.turn[0].tolist() == [0] * (calls + len("=43\n")) + [1] * answer
    assert bool((found.samples.logp[told] == 0).all())
    assert bool((found.samples.logp[said] != 0).all())
    # The second round goes on from the very tokens of the first.
    assert sampler.shown[1] == [sampler.shown[0][0] + found.samples.tokens[0, : calls + 4].tolist()]
    assert sampler.seeds == [[0, 1, 2], [100]]


def test_an_episode_that_does_not_end_is_truncated(policy) -> None:
    call = ["[17+26]"]
    found, sampler = played(policy, call, call, call)  # three turns are allowed
    assert not found.samples.finished.any()
    assert len(sampler.shown) == 3
    assert bool(found.samples.mask[0, -1])  # the last reply, which nobody reads, is left out
    cut, sampler = played(policy, ["[17+26]"], max_tokens=4)
    assert not cut.samples.finished.any()
    assert cut.texts == ["[17+"]
    assert len(sampler.shown) == 1  # half a call is no call


def test_limits_row_by_row(policy) -> None:
    found, _ = played(policy, ["123456", "123456"], max_tokens=[3, 7])
    assert found.samples.mask.sum(1).tolist() == [3, 7]
    assert found.samples.finished.tolist() == [False, True]


def test_a_long_prompt_is_drawn_with_its_own_limit_near_the_context(policy) -> None:
    """Limits [9, 40]: the larger one, which the first prompt has no room for, is not asked for it.

    Responses are those of the rows drawn alone, in their order.
    """
    task, rollout = make_task("arithmetic"), make_sampler("local", policy)
    short = policy.tokenizer.encode("123+456=")
    full = (short * policy.context)[: policy.context - 9]
    prompts, limits = [full, short, full[1:]], [9, 40, 9]
    options = {"seeds": lambda row, turn: 0, "temperature": 0.0}
    drawn = play(policy, rollout, task, prompts, max_tokens=limits, **options)
    alone = [
        play(policy, rollout, task, [prompt], max_tokens=limit, **options)
        for prompt, limit in zip(prompts, limits)
    ]
    assert drawn.texts == [text for one in alone for text in one.texts]
    assert drawn.samples.prompts == prompts
    assert bool((drawn.samples.mask.sum(1) <= torch.tensor(limits)).all())
    with pytest.raises(ProxpoError, match=r"max_tokens=10 that exceeds the model's context"):
        play(policy, rollout, task, prompts, max_tokens=[10, 40, 9], **options)


def test_turns_go_on_while_each_row_has_room_for_its_own_limit(policy) -> None:
    task = make_task("calculator")
    words = "=" * (policy.context - 40)
    chatty = replace(task, tool=lambda turn: Reply(words if "[" in turn else "", void=False))
    sampler = Scripted(policy, ["[17+26]"] * 2, ["43"])
    prompts = [policy.tokenizer.encode(PROMPT)] * 2
    options = {"seeds": lambda row, turn: row, "temperature": 1.0}
    found = play(policy, sampler, chatty, prompts, max_tokens=[9, 40], **options)
    assert sampler.seeds == [[0, 1], [0]]  # the row of 40 has no room for a second turn
    assert found.answers == ["43", "[17+26]"]


def test_a_turn_cut_without_a_call_or_an_answer_is_void(policy) -> None:
    """A cut call is none, even one whose every letter is there; a number is an answer."""
    found, _ = played(policy, ["[17+26]", "hm, that", "4321567", "43"], max_tokens=7)
    assert found.samples.finished.tolist() == [False, False, False, True]
    assert found.texts[:3] == ["[17+26]", "hm, that"[:7], "4321567"]
    assert found.void.tolist() == [True, True, False, False]


def test_an_episode_stops_before_the_context_is_full(policy) -> None:
    task = make_task("calculator")
    longest = policy.context
    words = "=" * (longest - 20)
    chatty = replace(task, tool=lambda turn: Reply(words, void=False))
    sampler = Scripted(policy, ["[17+26]"])
    found = play(
        policy,
        sampler,
        chatty,
        [policy.tokenizer.encode(PROMPT)],
        seeds=lambda row, turn: 0,
        max_tokens=10,
        temperature=1.0,
    )
    assert found.texts == ["[17+26]"]
    assert not found.samples.finished.any()


def test_log_probs_and_gradients_are_those_of_the_whole_sequence(tmp_path, monkeypatch) -> None:
    """With prompts run once: a tool's words are read in both ways, and neither trains them."""
    job = job_of(tmp_path, method="reinforce", task="calculator")
    rows = sample(job).experience
    assert bool((rows.attention_mask[:, -rows.mask.shape[1] :] & ~rows.mask).any())
    options, learner = options_of(job, micro_batch=64), job.learner
    found = []
    for shares in (True, False):
        monkeypatch.setattr("proxpo.train.scoring.shares_prompts", lambda model, s=shares: s)
        logp = forward(learner, rows, options)["logp"]
        weight = torch.linspace(-1, 1, logp.numel()).view(logp.shape)
        learner.optimizer.zero_grad()
        (weight * logp).sum().backward()
        found.append((logp.detach(), [p.grad.clone() for p in learner.trainable()]))
    (once, grads), (whole, expected) = found
    torch.testing.assert_close(once, whole, rtol=1e-4, atol=1e-5)
    assert bool((once[~rows.mask] == 0).all())
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(once, rows.rollout_logp, rtol=1e-3, atol=1e-3)
    job.close()


def test_what_the_tool_said_does_not_move_the_policy(tmp_path) -> None:
    """Rewriting the advantage of tool positions changes nothing: they are outside the mask."""
    job = job_of(tmp_path, method="grpo", task="calculator")
    rows = sample(job).experience
    ready = prepare(job.learner.recipe, batch_of(job, rows)).batch
    options, norms = options_of(job, micro_batch=64), []
    for spoilt in (0.0, 1e3):
        batch = ready.replace(advantages=ready.advantages.masked_fill(~ready.mask, spoilt))
        job.learner.optimizer.zero_grad()
        gradients(job.learner, job.learner.recipe, TrainingBatch(rows, batch), options, seed=0)
        norms.append([p.grad.clone() for p in job.learner.trainable()])
    assert all(torch.equal(a, b) for a, b in zip(*norms))
    job.close()


def test_turns_and_voids_reach_the_recipe(tmp_path) -> None:
    job = job_of(tmp_path, method="st-ppo", task="calculator")
    rows = sample(job).experience
    assert rows.turn is not None
    assert int(rows.turn.max()) >= 1
    assert bool((rows.turn[:, 1:] >= rows.turn[:, :-1])[rows.mask[:, 1:]].all())
    metrics = update(job, rows)
    assert metrics["loss"] == pytest.approx(metrics["loss"])
    job.close()


def test_a_task_without_a_tool_has_no_voids(tmp_path) -> None:
    with pytest.raises(ProxpoError, match=r"'void' .* task arithmetic has no tool"):
        job_of(tmp_path, method="simpletir")


def test_a_turn_has_its_own_draws(policy) -> None:
    """The same seeds give the same episode, others another."""
    task, prompts = make_task("calculator"), [policy.tokenizer.encode(PROMPT)] * 6
    found = [
        play(
            policy,
            make_sampler("local", policy),
            task,
            prompts,
            seeds=lambda row, turn, shift=shift: 7 * row + 1000 * turn + shift,
            max_tokens=8,
            temperature=1.0,
        ).texts
        for shift in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
