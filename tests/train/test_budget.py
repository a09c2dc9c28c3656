"""Budgets before the rollout, pruning after it, and the fields a run can and cannot bring."""

from dataclasses import replace

import pytest
import torch
from train.train_runs import batch_of, job_of, options_of, sample

import proxpo.train.scoring as module
from proxpo.errors import ProxpoError
from proxpo.stages import STAGES, stage
from proxpo.stages.budget.responses import responses_by_prompt
from proxpo.stages.schedule import Rescale
from proxpo.train.batch import TrainingBatch
from proxpo.train.build import build_job
from proxpo.train.config import load_config
from proxpo.train.language import splits
from proxpo.train.minibatch import gradients
from proxpo.train.update import RolloutUpdates, update
from proxpo.types import Stage


def budget(change, name: str = "test_budget") -> Stage:
    def apply(given, ctx):
        return change(given, ctx), {"budget/seen": torch.tensor(float(ctx.clock.step))}

    return Stage(kind="budget", name=name, apply=apply)


def with_stage(job, **stages):
    job.learner.recipe = job.learner.recipe.replace(**stages)
    return job


def test_samples_and_tokens_of_each_prompt(tmp_path) -> None:
    def change(given, ctx):
        samples = torch.tensor([1, 6, 0, 3])
        return given.replace(samples=samples, max_tokens=torch.tensor([2, 8, 8, 4]))

    job = with_stage(job_of(tmp_path, method="grpo"), budget=(budget(change),))
    drawn = sample(job)
    rows = drawn.experience
    _, counts = rows.group.unique_consecutive(return_counts=True)
    assert counts.tolist() == [1, 6, 3]
    lengths = rows.mask.sum(1)
    assert int(lengths[0]) <= 2
    assert int(lengths[7:].max()) <= 4
    assert bool((rows.truncated | (lengths < 8))[1:7].all())
    drawn_problems = replace(job.source, cursor=0).take(4)
    identities = [drawn_problems[i].id for i in (0, 1, 3)]  # the third got no samples
    assert rows.prompt_id.unique_consecutive().tolist() == identities
    assert drawn.metrics["budget/seen"] == 0.0
    assert torch.isfinite(torch.tensor(update(job, rows)["loss"]))
    job.close()


def test_a_shorter_limit_is_the_beginning_of_the_same_response(tmp_path) -> None:
    long = sample(job_of(tmp_path / "a", method="grpo")).experience
    job = with_stage(
        job_of(tmp_path / "b", method="grpo"),
        budget=(budget(lambda given, ctx: given.replace(max_tokens=given.max_tokens // 4)),),
    )
    short = sample(job).experience
    width = short.mask.shape[1]
    assert width == 2
    tokens = slice(-long.mask.shape[1], -long.mask.shape[1] + width)
    assert torch.equal(short.input_ids[:, -width:], long.input_ids[:, tokens])


def test_a_budget_of_nothing_is_refused(tmp_path) -> None:
    job = with_stage(
        job_of(tmp_path, method="grpo"),
        budget=(budget(lambda given, ctx: given.replace(samples=0 * given.samples)),),
    )
    with pytest.raises(ProxpoError, match="some prompt a sample"):
        sample(job)


def test_knapsack_learns_from_what_it_has_seen(tmp_path) -> None:
    """Its table is filled by training, and moves samples to prompts seen before."""
    job = job_of(tmp_path, "method=knapsack-rl")
    [place] = [place for place, _ in job.learner.recipe.stages() if place.startswith("budget")]
    assert len(job.learner.state[place]["prompt_id"]) == 0
    rows = sample(job).experience
    update(job, rows)
    known = job.learner.state[place]["prompt_id"]
    assert set(known.tolist()) == set(rows.prompt_id.tolist())
    job.close()


PARITY = """
def score(solution_str, ground_truth):
    right = int(solution_str[-1:] or 0) % 2 == int(ground_truth) % 2
    return {"score": float(right), "acc": right}
"""
REVISITS = ["task=calculator", "task.problems=4", "samples_per_prompt=8", "lr=1e-4"]


def visited(tmp_path, visits: int, *sets: str, method: str) -> list[dict]:
    """Rollouts of a pool of four problems, all of which come at every step, and their updates."""
    job = job_of(tmp_path, *REVISITS, *sets, method=method)
    seen = []
    for _ in range(visits):
        drawn = sample(job)
        metrics = drawn.metrics | update(job, drawn.experience)
        weights = torch.cat([p.detach().flatten() for p in job.learner.trainable()])
        seen.append({"rows": drawn.experience, "metrics": metrics, "weights": weights})
        job.step += 1
    job.close()
    return seen


def test_knapsack_differs_from_grpo_once_problems_come_again(tmp_path) -> None:
    """At the first visit all get their share; later the same total is shared out unevenly."""
    base, own = (visited(tmp_path / m, 2, method=m) for m in ("grpo", "knapsack-rl"))
    counts = [
        [one["rows"].group.unique_consecutive(return_counts=True)[1].tolist() for one in seen]
        for seen in (base, own)
    ]
    assert counts[0] == [[8] * 4] * 2
    assert counts[1][0] == [8] * 4
    assert sum(counts[1][1]) == 32
    assert len(set(counts[1][1])) > 1
    assert own[1]["metrics"]["budget/effective"] > 0


def test_palu_differs_from_grpo_once_problems_come_again(tmp_path) -> None:
    """The first visit is GRPO's; then what was solved gets a shorter limit, and the rest is cut.

    Under a reward that right responses of several lengths earn: equal lengths leave nothing to cut.
    """
    file = tmp_path / "parity.py"
    file.write_text(PARITY)
    eight = ["task.problems=8", "prompts_per_step=8", "rollout.max_tokens=6"]
    sets = ["task=arithmetic:expert", f"task.reward={file}:score", *eight]
    base = visited(tmp_path / "grpo", 2, *sets, method="grpo")
    own = visited(tmp_path / "palu", 2, *sets, "target=0.25", method="palu")
    assert torch.equal(base[0]["weights"], own[0]["weights"])
    assert not torch.equal(base[1]["weights"], own[1]["weights"])
    assert own[0]["metrics"]["budget/tokens"] == 6.0
    assert own[1]["metrics"]["budget/tokens"] < 6.0
    cut = [int(one[1]["rows"].truncated.sum()) for one in (base, own)]
    assert cut[1] > cut[0]


def test_dcpo_differs_from_its_single_visit_form_once_problems_come_again(tmp_path) -> None:
    """Against history=False, which is GRPO's advantage: equal at the first visit alone."""
    own, single = (
        visited(tmp_path / str(history), 2, f"history={history}", method="dcpo")
        for history in (True, False)
    )
    assert torch.equal(own[0]["weights"], single[0]["weights"])
    assert not torch.equal(own[1]["weights"], single[1]["weights"])


@pytest.mark.parametrize("method", ["knapsack-rl", "palu", "dcpo"])
def test_a_method_that_learns_from_revisits_gets_a_pool(method, tmp_path) -> None:
    """On a generated task, eight steps' worth; not on a file, and not with a pool of one's own."""
    config = load_config(None, ["prompts_per_step=4"], overrides={"method": method})
    assert config.task.problems == 32
    assert load_config(None, ["task.problems=5"], overrides={"method": method}).task.problems == 5
    assert load_config(None, ["task=a.jsonl"], overrides={"method": method}).task.problems is None
    assert load_config(None, [], overrides={"method": "grpo"}).task.problems is None
    assert load_config(None, ["history=false"], overrides={"method": "dcpo"}).task.problems is None
    job = build_job(config)
    first = {p.id for p in job.source.take(32)}
    assert len(first) == 32
    assert {p.id for p in job.source.take(32)} == first
    assert splits(job)[0] == "training on 32 different problems"
    job.close()


def test_a_pool_larger_than_the_task_is_said(tmp_path) -> None:
    sets = ["task.options.digits=1", "task.problems=500", "evaluate.size=50"]
    job = job_of(tmp_path, *sets, method="grpo")
    assert splits(job) == [
        "training on 88 different problems, all there are (task.problems is 500)",
        "held out: 12 questions, 0 of them also in training",
        "evaluating on 12 problems, all there are (evaluate.size is 50)",
    ]
    job.close()


def test_lengths_of_several_turns_are_those_of_the_longest(tmp_path) -> None:
    """A limit holds for each turn, so what moves it is measured in turns."""
    job = job_of(tmp_path, "task=calculator", method="palu")
    rows = sample(job).experience
    assert int(rows.turn.max()) > 0
    seen = responses_by_prompt(batch_of(job, rows), by="test")
    assert float(seen.length.max()) <= 8
    assert int(rows.mask.sum(1).max()) > 8
    job.close()


def test_pruned_rows_cost_no_pass(tmp_path, monkeypatch) -> None:
    """Neither their old, nor their reference, nor their current log-probabilities are computed."""
    job = job_of(tmp_path, method="cppo")
    rows = sample(job).experience
    assert len(rows.group.unique()) == 8  # half of the responses leave, so twice the prompts come
    seen = []

    def counted(function):
        def call(model, part, *args, **options):
            seen.append(len(part.mask))
            return function(model, part, *args, **options)

        return call

    monkeypatch.setattr(module, "_prompts_once", counted(module._prompts_once))
    update(job, rows)
    kept = len(rows.mask) // 2
    assert seen == [kept, kept]  # reference and current; fresh data need no old pass of their own
    seen.clear()
    job.learner.recipe = job.learner.recipe.replace(
        schedule=STAGES["schedule"]["inner_steps"](steps=2)
    )
    update(job, sample(job).experience)
    assert seen == [kept] * 4  # old, reference, and the two steps
    job.close()


def test_rows_without_tokens_change_nothing_but_the_cost(tmp_path) -> None:
    """Dropped from the pass or run along with a mask of 0: the same gradient, the same counts."""
    job = job_of(tmp_path, "aggregate=token_mean", method="grpo")
    rows = sample(job).experience
    updates = RolloutUpdates(job, rows, path=("test",))
    batch = updates.batch()
    empty = torch.arange(len(batch.mask)) % 3 == 0
    batch = batch.replace(mask=batch.mask & ~empty[:, None])
    options, learner, found = options_of(job, micro_batch=5), job.learner, []
    for compared in (False, True):
        recipe = learner.recipe
        if compared:  # rows of recipes that compare responses all stay
            live = Stage(kind="advantage", name="x", apply=lambda *_: None, live=True)
            recipe = recipe.replace(advantage=live)
        learner.optimizer.zero_grad()
        batch = batch.replace(refresh=None)
        data = TrainingBatch(rows, batch)
        metrics, _ = gradients(learner, recipe, data, options, seed=0)
        found.append((float(metrics["loss"]), [p.grad.clone() for p in learner.trainable()]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for a, b in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    job.close()


def test_rescaling_divides_by_what_was_clipped(tmp_path) -> None:
    """All gradients are multiplied by the factor of the measured norm, and no other way."""

    def thrice(ratio, batch, ctx):
        return 3.0 * ratio * batch.advantages, {}

    job = job_of(tmp_path, method="reinforce")
    job.learner.recipe = job.learner.recipe.replace(
        ratio=STAGES["ratio"]["token"](), trust=STAGES["trust"]["unclipped"]()
    )
    rows = sample(job).experience
    updates = RolloutUpdates(job, rows, path=("test",))
    options, learner = options_of(job, micro_batch=5), job.learner

    def grads(rescale=None):
        learner.optimizer.zero_grad()
        data = TrainingBatch(rows, updates.batch())
        metrics, _ = gradients(learner, learner.recipe, data, options, seed=0, rescale=rescale)
        return metrics, torch.cat([p.grad.flatten() for p in learner.trainable()])

    _, plain = grads()
    trust = Stage(kind="trust", name="thrice", apply=thrice, takes=("ratio",), gives="loss")
    rescale = Rescale(learner.recipe.replace(trust=trust), lambda norm: 1 / norm)
    metrics, scaled = grads(rescale)
    norm = float(metrics["rescale/norm"])
    assert norm == pytest.approx(3 * float(plain.norm()), rel=1e-4)
    torch.testing.assert_close(scaled, plain / norm, rtol=1e-3, atol=1e-6)
    job.close()


REWARDS = """
import time
def slow(solution_str, ground_truth):
    time.sleep(0.02)
    return {"score": float(solution_str == ground_truth), "spans": [[0, 1, -1.0], [1, 99, 1.0]]}
"""


def test_durations_and_spans_from_the_reward_function(tmp_path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    job = job_of(tmp_path / "run", f"task.reward={file}:slow", method="grpo")
    asks = Stage(
        kind="weights",
        name="asks",
        apply=lambda batch, ctx: (batch.mask.double(), {}),
        needs=("duration", "span_rewards"),
    )
    rows = sample(with_stage(job, weights=(asks,))).experience
    assert float(rows.duration.min()) >= 0.02
    text = job.policy.tokenizer.decode
    for row in range(3):
        ids = rows.input_ids[row, -rows.mask.shape[1] :][rows.mask[row]]
        marks = rows.span_rewards[row][rows.mask[row]].tolist()
        said = text(ids, skip_special_tokens=True)
        word = -1.0 if len(said) == 1 else 1.0  # the span over the middle of the word
        assert marks[: len(said)] == [word] * len(said)
        assert set(marks[len(said) :]) <= {0.0}  # the end token is no text
    job.close()


RANKS = """
def score(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["answer"])
    log_metric("rows", len(prompts))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_extra("ids", [str(ids) for ids in completion_ids])
    order = sorted(range(len(prompts)), key=lambda i: completions[i])
    return [order.index(i) / len(order) for i in range(len(order))]
"""


def test_a_trl_reward_ranks_the_rollout_and_knows_how_far_training_is(tmp_path) -> None:
    """It sees every response of the rollout, its token ids and the step; what it logs is kept."""
    file = tmp_path / "ranks.py"
    file.write_text(RANKS)
    job = job_of(tmp_path / "run", f"task.reward={file}:score", "task=calculator", method="grpo")
    job.step = 2
    drawn = sample(job)
    rows = drawn.experience
    assert sorted(rows.rewards.tolist()) == pytest.approx([i / 16 for i in range(16)])
    assert rows.correct is None
    assert "proxpo/train_accuracy" not in drawn.metrics
    assert drawn.metrics["reward_log/rows"] == 16
    assert drawn.metrics["reward_log/progress"] == 0.5
    said = drawn.lines[0]["extra"]["ids"]
    last = rows.input_ids[0, -rows.mask.shape[1] :][rows.mask[0]].tolist()
    assert last[-len(eval(said)) :] == eval(said)  # the tokens of the last turn, which is scored
    assert torch.isfinite(torch.tensor(update(job, rows)["loss"]))
    job.close()


def test_a_method_that_asks_what_is_right_refuses_rewards_that_do_not_say(tmp_path) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(RANKS)
    job = job_of(tmp_path / "run", f"task.reward={file}:score", method="knapsack-rl")
    with pytest.raises(ProxpoError, match=r"task\.correct_above") as caught:
        update(job, sample(job).experience)
    assert "\n" not in str(caught.value)
    job.close()


def test_spans_that_nobody_marks(tmp_path) -> None:
    job = job_of(tmp_path, method="grpo")
    asks = Stage(kind="weights", name="asks", apply=lambda *_: None, needs=("span_rewards",))
    with pytest.raises(ProxpoError, match=r"'span_rewards', and the reward .* marks no spans"):
        sample(with_stage(job, weights=(asks,)))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("method=grpo-guard",), "noise.* no Gaussian policy"),
        (("method=grpo", "process=true"), "token_rewards.* no process reward model"),
        (("method=grpo", "regularisers=kl_convex"), "prev_logp.* schedule=reincarnation"),
        (("method=simpletir",), "void.* has no tool"),
    ],
)
def test_fields_that_nobody_brings_are_refused_at_once(sets, message, tmp_path) -> None:
    with pytest.raises(ProxpoError, match=message) as caught:
        build_job(load_config(None, sets, overrides={"out": str(tmp_path)}))
    assert "\n" not in str(caught.value)


def test_whole_distributions_of_stale_data_are_refused(tmp_path) -> None:
    job = job_of(tmp_path, "kl=exact", method="fixpo")
    rows = sample(job).experience
    job.learner.version += 1
    with pytest.raises(ProxpoError, match=r"'old_vocab_logp' .* fresh data only"):
        update(job, rows)


@pytest.mark.parametrize("transform", [False, True])
def test_hidden_states_and_distributions_belong_to_their_tokens(transform, tmp_path) -> None:
    """In both passes: log π of the drawn token is in the distribution, which is head(hidden)."""
    job = job_of(tmp_path, method="isopo" if transform else "grpo")
    asks = Stage(
        kind="weights",
        name="asks",
        apply=lambda *_: None,
        needs=("hidden", "vocab_logp", "features", "tokens"),
    )
    with_stage(job, weights=(asks,))
    rows = sample(job).experience
    batch = batch_of(job, rows)
    drawn = batch.vocab_logp.gather(-1, batch.tokens[..., None])[..., 0]
    torch.testing.assert_close(drawn[batch.mask], batch.logp[batch.mask], rtol=1e-4, atol=1e-5)
    logits = job.policy.model.get_output_embeddings()(batch.hidden)
    torch.testing.assert_close(
        logits.log_softmax(-1)[batch.mask], batch.vocab_logp[batch.mask], rtol=1e-4, atol=1e-4
    )
    weight = job.policy.model.get_output_embeddings().weight
    pull = weight[batch.tokens] - batch.vocab_logp.exp() @ weight
    expected = (pull * batch.mask[..., None]).sum(1) / batch.mask.sum(1, keepdim=True)
    torch.testing.assert_close(batch.features, expected, rtol=1e-3, atol=1e-4)
    job.close()


def test_stages_get_the_clock_and_draws_of_their_own(tmp_path) -> None:
    seen = []

    @stage("reward", name="watching")
    def watching():
        def apply(batch, ctx):
            seen.append((ctx.clock.step, ctx.clock.steps, ctx.generator.initial_seed()))
            return batch, {}

        return apply

    try:
        job = job_of(tmp_path, "recipe.reward=watching", method="grpo")
        for _ in range(2):
            update(job, sample(job).experience)
            job.step += 1
        job.close()
    finally:
        del STAGES["reward"]["watching"]
    assert [(step, steps) for step, steps, _ in seen] == [(0, 4), (1, 4)]
    assert seen[0][2] != seen[1][2]
