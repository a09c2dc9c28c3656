"""Micro-batches by tokens: the cut, the sums over it, and a lack of memory in the middle."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train.train_runs import config_of, curve, job_of, options_of, sample, weights_of

from proxpo.gradients import isopo, isopo_ntk, proma
from proxpo.models import Policy
from proxpo.replay.passes import token_bytes
from proxpo.runs.jsonlines import CUT_TOKENS
from proxpo.settings import at_length
from proxpo.train import cuts, evaluate, minibatch, scoring
from proxpo.train.batch import TrainingBatch
from proxpo.train.config import load_config
from proxpo.train.cuts import Rows, TokenBudget, _parts, fitted_budget
from proxpo.train.episodes import play
from proxpo.train.evaluate import distance
from proxpo.train.experience import used_columns
from proxpo.train.loop import train
from proxpo.train.minibatch import gradients
from proxpo.train.observer import Observer
from proxpo.train.refusals import remarks
from proxpo.train.scoring import reference_kl, score
from proxpo.train.update import RolloutUpdates

PROMPT, RESPONSE = 6, 9


def made(lengths: list[tuple[int, int, int]]) -> Rows:
    """Sequences with these lengths of prompt and response, and these groups."""
    prompt, response, group = torch.tensor(lengths).unbind(dim=1)
    real = torch.arange(PROMPT).flip(0) < prompt[:, None]
    mask = torch.arange(RESPONSE) < response[:, None]
    return Rows(mask, torch.cat([real, mask], dim=1), group)


def area(rows: Rows, part: torch.Tensor) -> int:
    """Positions of a micro-batch that is cut to the columns it uses."""
    columns, _ = used_columns(rows.mask[part], rows.attention_mask[part])
    return len(part) * (columns.stop - columns.start)


lengths = st.tuples(st.integers(1, PROMPT), st.integers(1, RESPONSE), st.integers(0, 4))


@given(st.lists(lengths, min_size=1, max_size=20), st.integers(1, 200), st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, tokens, grouped):
    rows = made(lengths)
    rows = rows._replace(compared=True) if grouped else rows._replace(group=None)
    cut = TokenBudget(tokens).cut(rows)
    assert sorted(torch.cat(cut).tolist()) == list(range(len(lengths)))
    for part in cut:
        whole = rows.group is not None and len(rows.group[part].unique()) == 1
        assert area(rows, part) <= tokens or len(part) == 1 or whole
        assert part.tolist() == sorted(part.tolist())
        if rows.group is not None:
            assert (torch.isin(rows.group, rows.group[part]).sum()) == len(part)
    if area(rows, torch.arange(len(lengths))) <= tokens:
        assert len(cut) == 1
    again = TokenBudget(tokens).cut(rows)
    assert [part.tolist() for part in again] == [part.tolist() for part in cut]


def test_groups_that_only_share_their_prompt_are_cut_where_they_exceed_the_budget():
    rows = made([(2, 3, 0), (2, 3, 1), (2, 3, 0), (2, 3, 1), (6, 9, 2), (6, 9, 2)])
    assert _parts(rows, 30) == [[4, 5], [0, 1, 2, 3]]
    assert _parts(rows, 15) == [[4], [5], [0, 2], [1, 3]]
    assert _parts(rows, 5) == [[4], [5], [0], [2], [1], [3]]
    assert _parts(rows._replace(compared=True), 5) == [[4, 5], [0, 2], [1, 3]]
    once = rows._replace(shared=True)  # 6 + 2 * 9 positions, then 2 * (2 + 2 * 3)
    assert _parts(once, 24) == [[4, 5], [0, 1, 2, 3]]
    assert _parts(once, 15) == [[4], [5], [0, 2], [1, 3]]


def test_rows_of_like_length_lie_together_the_longest_first():
    rows = made([(6, 1, 0), (1, 9, 0), (6, 9, 0), (1, 1, 0), (2, 1, 0), (6, 8, 0)])
    cut = _parts(rows._replace(group=None), 30)
    assert cut == [[2, 5], [0, 1], [3, 4]]


# Gradients -----------------------------------------------------------------------------------


def trained(job):
    """A rollout with unlike rewards, away from the policy that has sampled it."""
    learner, rows = job.learner, sample(job).experience
    rows.rewards.copy_(torch.arange(len(rows.rewards)) % 4)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in learner.trainable():
            p.add_(0.02 * torch.randn(p.shape, generator=draw))
    short = torch.arange(len(rows.mask)) % 3 == 0  # rows of different lengths
    rows.mask[short, 2:] = False
    rows.attention_mask[short, rows.input_ids.shape[1] - rows.mask.shape[1] + 2 :] = False
    return TrainingBatch(rows, RolloutUpdates(job, rows, path=("test",)).batch())


def gradient_of(job, data, *, micro_batch):
    job.learner.optimizer.zero_grad()
    options = options_of(job, micro_batch=micro_batch)
    metrics, batch = gradients(job.learner, job.learner.recipe, data, options, seed=0)
    grads = [p.grad.flatten() for p in job.learner.trainable() if p.grad is not None]
    if job.learner.transform is not None:
        job.learner.transform.step(skipped=True)
    return metrics, torch.cat(grads).clone(), batch


def out_of_memory(monkeypatch, module, fails):
    """Makes `forward` of a module raise where `fails(call number, rows)` says so."""
    real, calls = module.forward, []

    def forward(learner, rows, options, **named):
        calls.append(rows.input_ids.shape)
        if fails(len(calls), rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return real(learner, rows, options, **named)

    monkeypatch.setattr(module, "forward", forward)
    return calls


@pytest.mark.parametrize(
    ("slug", "sets"),
    [
        ("grpo", ()),
        pytest.param("p3o", (), marks=pytest.mark.long),
        pytest.param("dpo", (), marks=pytest.mark.long),
        pytest.param("capo", (), marks=pytest.mark.long),
        ("isopo", ("p=0",)),
        ("entropy-80-20", ("prompts=none", "recipe.reward=none")),
        ("kl-cov", ("prompts=none", "share=0.2")),
        ("clip-cov", ("prompts=none", "share=0.2", "cov_low=0.01")),
        ("grpo", ("select=probability_split", "select.rule=quantile")),
    ],
)
def test_a_cut_by_tokens_gives_the_metrics_and_the_gradient_of_the_whole(tmp_path, slug, sets):
    job = job_of(tmp_path, *sets, method=slug)
    data = trained(job)
    metrics, gradient, batch = gradient_of(job, data, micro_batch=99)
    job.learner.budget.tokens = 50
    cut_metrics, cut_gradient, cut_batch = gradient_of(job, data, micro_batch=None)
    job.close()
    assert cut_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        # All ratios are 1 but for rounding, which decides which of them lie above P3O's cap of 1.
        atol = 0.1 if (slug, name) == ("p3o", "trust/clipped") else 1e-5
        assert float(cut_metrics[name]) == pytest.approx(float(value), rel=1e-3, abs=atol), name
    atol = 1e-4 * float(gradient.abs().max())
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-3, atol=atol)
    for name, value in batch.items():  # what stages read after the step is in the rows' order
        torch.testing.assert_close(getattr(cut_batch, name), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("slug", ["grpo", "isopo", "proma", "isopo-ntk"])
def test_a_lack_of_memory_leaves_nothing_of_the_attempt(tmp_path, slug, monkeypatch):
    """In the second micro-batch: the gradient is that of the finer cut from the start."""
    job = job_of(tmp_path, method=slug)
    data, budget, notices = trained(job), job.learner.budget, []
    budget.tokens, budget.on_notice = 100, notices.append
    before = [p.detach().clone() for p in job.learner.trainable()]
    calls = out_of_memory(monkeypatch, minibatch, lambda number, rows: number == 2)
    found = gradient_of(job, data, micro_batch=None)
    assert len(calls) > 3
    assert [len(notices), budget.tokens] == [1, 50]
    assert "at most 50 tokens from now on, not 100" in notices[0]
    expected = gradient_of(job, data, micro_batch=None)
    assert torch.equal(found[1], expected[1])
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(before, job.learner.trainable()))
    assert len(notices) == 1
    job.close()


@pytest.mark.parametrize("slug", ["p3o", "grpo"])
def test_a_mini_batch_stays_whole_where_a_cut_would_run_it_twice(slug, tmp_path, monkeypatch):
    """P3O sums over the mini-batch before the first backward pass; GRPO does not."""
    job = job_of(tmp_path, method=slug)
    data, budget, notices = trained(job), job.learner.budget, []
    budget.tokens, budget.most, budget.on_notice = 50, 1000, notices.append
    sizes = out_of_memory(monkeypatch, minibatch, lambda number, rows: len(notices) < number == 2)
    found = gradient_of(job, data, micro_batch=None)
    assert (len(sizes) == 1) == (slug == "p3o")
    finer = gradient_of(job, data, micro_batch=None)
    assert [len(notices), budget.most] == [1, 0]
    assert budget.tokens == (50 if slug == "p3o" else 25)
    atol = 1e-4 * float(finer[1].abs().max())
    torch.testing.assert_close(found[1], finer[1], rtol=1e-3, atol=atol)
    job.close()


def test_gradients_of_before_stay(tmp_path, monkeypatch):
    """`gradients` adds to what is there, also after an attempt that failed."""
    job = job_of(tmp_path, method="grpo")
    data = trained(job)
    job.learner.budget.tokens = 100
    _, once, _ = gradient_of(job, data, micro_batch=None)
    out_of_memory(monkeypatch, minibatch, lambda number, rows: number == 2)
    options = options_of(job, micro_batch=None)
    gradients(job.learner, job.learner.recipe, data, options, seed=0)
    twice = torch.cat([p.grad.flatten() for p in job.learner.trainable()])
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-4 * float(once.abs().max()))
    job.close()


def test_one_row_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    job = job_of(tmp_path, method="isopo")
    data = trained(job)
    out_of_memory(monkeypatch, minibatch, lambda number, rows: True)
    with pytest.raises(torch.OutOfMemoryError):
        gradient_of(job, data, micro_batch=None)
    assert job.learner.budget.tokens < 20  # as fine as rows can be cut
    job.close()


def test_passes_without_gradient_repeat_and_keep_the_order_of_rows(tmp_path, monkeypatch):
    job = job_of(tmp_path, "kl_coef=0.1", method="grpo")
    data, learner = trained(job), job.learner
    rows, options = data.experience, options_of(job, micro_batch=99)
    whole, kl = score(learner, rows, options), reference_kl(learner, rows, options)
    small = 4 * rows.input_ids.shape[1]  # a group
    calls = out_of_memory(monkeypatch, scoring, lambda number, part: part.input_ids.numel() > small)
    options = replace(options, micro_batch=None)
    found = score(learner, rows, options)
    assert max(shape.numel() for shape in calls[1:]) <= 4 * small
    assert calls[-1].numel() <= small
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reference_kl(learner, rows, options), kl, rtol=1e-4, atol=1e-5)
    job.close()


def test_responses_to_a_prompt_stay_together_where_a_kernel_compares_them(tmp_path, monkeypatch):
    job = job_of(tmp_path, "group_by=prompt", method="isopo-ntk")
    data = trained(job)
    job.learner.budget.tokens = 50
    calls = out_of_memory(monkeypatch, minibatch, lambda number, rows: False)
    gradient_of(job, data, micro_batch=None)
    assert {shape[0] for shape in calls} == {4}
    job.close()


def test_responses_that_share_the_pass_of_their_prompt_stay_together(tmp_path):
    """On a CPU and in replayed graphs, which run a prompt once; not under a transform."""
    job = job_of(tmp_path, method="isopo")
    learner, rows = job.learner, sample(job).experience
    assert learner.shape(rows).group is None
    learner.graphs = SimpleNamespace()
    assert learner.shape(rows).group is rows.group
    learner.graphs = learner.transform = None
    assert learner.shape(rows).group is rows.group
    assert not learner.shape(rows).compared
    job.close()


# Runs ----------------------------------------------------------------------------------------


def same_weights(a: Path, b: Path, step: int) -> bool:
    one, other = weights_of(a, step), weights_of(b, step)
    return all(torch.equal(other[name], value) for name, value in one.items())


def test_auto_is_one_pass_where_everything_fits(tmp_path):
    for size in ("none", "auto"):
        train(config_of(tmp_path / size, "steps=2", f"micro_batch={size}", method="grpo"))
    assert same_weights(tmp_path / "none", tmp_path / "auto", 2)


def test_a_run_that_is_resumed_is_cut_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "CPU_TOKENS", 60)
    sets = ("micro_batch=auto", "checkpoint.every=1", "evaluate.every=2", "evaluate.k=2")
    sets += ("model.device=cpu",)  # a GPU's budget follows its memory
    train(config_of(tmp_path / "whole", *sets, "steps=4", method="isopo"))
    train(config_of(tmp_path / "again", *sets, "steps=2", method="isopo"))
    train(config_of(tmp_path / "again", *sets, "steps=4", method="isopo"), resume=True)
    assert curve(tmp_path / "whole") == curve(tmp_path / "again")
    assert curve(tmp_path / "again")[-1][CUT_TOKENS] == 60  # ISOPO depends on the cut
    assert same_weights(tmp_path / "whole", tmp_path / "again", 4)


def test_sizes_that_a_lack_of_memory_chose_are_kept_on_resume(tmp_path, monkeypatch):
    """Memory is short in the first two steps alone; ISOPO depends on the cut."""
    sets = ("micro_batch=auto", "checkpoint.every=2", "evaluate.every=2", "model.device=cpu")
    short = [True]
    out_of_memory(monkeypatch, minibatch, lambda _, rows: short[0] and rows.input_ids.numel() > 150)
    observer = Observer(on_step=lambda step, metrics: short.__setitem__(0, step < 2))
    train(config_of(tmp_path / "whole", *sets, "steps=4", method="isopo"), observer=observer)
    short[0] = True
    train(config_of(tmp_path / "again", *sets, "steps=2", method="isopo"), observer=observer)
    train(config_of(tmp_path / "again", *sets, "steps=4", method="isopo"), resume=True)
    assert curve(tmp_path / "whole") == curve(tmp_path / "again")
    assert curve(tmp_path / "again")[-1][CUT_TOKENS] < cuts.CPU_TOKENS
    assert same_weights(tmp_path / "whole", tmp_path / "again", 4)


def test_a_run_goes_on_after_a_lack_of_memory_and_says_so_once(tmp_path, monkeypatch):
    sets = ("steps=2", "micro_batch=auto", "train.lr=1e-3", "evaluate.k=2", "model.device=cpu")
    train(config_of(tmp_path / "plenty", *sets, method="grpo"))
    out_of_memory(monkeypatch, minibatch, lambda number, rows: rows.input_ids.numel() > 150)
    notices: list[str] = []
    observer = Observer(on_notice=notices.append)
    train(config_of(tmp_path / "little", *sets, method="grpo"), observer=observer)
    assert len([line for line in notices if "out of memory" in line]) == 1
    for one, other in zip(curve(tmp_path / "plenty"), curve(tmp_path / "little"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
        assert CUT_TOKENS not in other  # GRPO does not depend on it


def test_evaluation_repeats_a_pass_that_did_not_fit(tmp_path, monkeypatch):
    job = job_of(tmp_path, "micro_batch=auto", "evaluate.k=4", method="grpo")
    assert job.exam.micro_batch is None
    trained(job)
    prompts = [job.task.encode(p, job.policy.tokenizer) for p in job.exam.problems] * 4
    seeds = {"seeds": lambda row, turn: row, "max_tokens": 8, "temperature": 1.0}
    drawn = play(job.policy, job.sampler, job.task, prompts, **seeds)
    whole = distance(job.policy, job.initial, drawn, job.exam)
    real, shapes = evaluate.model_states, []

    def states(model, input_ids, *rest, **named):
        shapes.append(input_ids.shape)
        if len(input_ids) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, input_ids, *rest, **named)

    monkeypatch.setattr(evaluate, "model_states", states)
    found = distance(job.policy, job.initial, drawn, job.exam, budget=job.learner.budget)
    assert found == pytest.approx(whole, rel=1e-5)
    assert shapes[0][0] > 5 >= shapes[-1][0]
    assert job.learner.budget.tokens < cuts.CPU_TOKENS
    job.close()


# The setting ---------------------------------------------------------------------------------


LOCAL = ("scope=microbatch",)


@pytest.mark.parametrize(
    ("method", "sets", "part", "by_number"),
    [
        ("isopo", (), "gradient=isopo", False),
        ("isopo-ntk", (), "gradient=isopo_ntk", False),
        ("proma", (), "gradient=proma", False),
        ("entropy-80-20", LOCAL, "weights=top_entropy", True),
        ("kl-cov", LOCAL, "regularisers=covariance_penalty", True),
        ("clip-cov", LOCAL, "trust=clip_cov", True),
        ("p3o", ("ess_scope=microbatch",), "trust=ess_cap and regularisers=ess_kl_from_old", True),
        ("entropy-80-20", (), None, False),
        ("cppo", ("pool=batch",), None, False),
        ("lopti", ("rule=quantile",), None, False),
        ("grpo", (), None, False),
    ],
)
def test_a_method_that_depends_on_the_cut_says_so(method, sets, part, by_number):
    def said(size):
        config = load_config(None, [f"micro_batch={size}", *sets], overrides={"method": method})
        lines = remarks(config, at_length(config.make_recipe(), 8))
        return [line for line in lines if "micro_batch" in line]

    assert len(said("auto")) == (part is not None)
    assert not part or f"{method}: {part} looks at each micro-batch" in said("auto")[0]
    assert len(said(4)) == by_number
    assert not by_number or "train.micro_batch=4 of 512 responses is part" in said(4)[0]
    assert said(512) == []


def test_the_real_models_preset_is_cut_by_tokens():
    assert load_config("smollm2-arithmetic").train.micro_batch == "auto"


def policy_on_a_gpu(*, trained: int = 0, checkpointing: bool = False):
    """A policy of SmolLM2's shape, as far as the budget looks at it."""
    shape = SimpleNamespace(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    weight = SimpleNamespace(requires_grad=True, numel=lambda: trained)
    weight.device = torch.device("cuda")
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: shape),
        parameters=lambda: iter([weight]),
        modules=lambda: [SimpleNamespace(gradient_checkpointing=checkpointing)],
    )
    named = {"tokenizer": None, "eos_ids": [0], "pad_id": 0, "name": "smollm2", "context": 2048}
    return Policy(model=model, dtype=torch.bfloat16, **named)


def test_the_budget_follows_free_memory(monkeypatch):
    """Half of what is free besides the optimizer, in a power of two, between two limits."""
    policy, free = policy_on_a_gpu(), []
    monkeypatch.setattr(cuts, "free_memory", lambda device: free[-1])
    per_token = token_bytes(policy, compares=False)
    assert per_token == 30 * (32 * 576 + 6 * 1536) * 2
    found = []
    for tokens in (2 * 5000, 2 * 1024, 2 * 1023, 1 << 40, 0):
        free.append(tokens * per_token)
        found.append(fitted_budget(policy).tokens)
    assert found == [4096, 1024, 512, cuts.GPU_TOKENS, cuts.LEAST_TOKENS]
    free.append(2 * 1024 * per_token + 16 * 1000)
    few = policy_on_a_gpu(trained=1000)
    assert fitted_budget(few) == fitted_budget(few, isopo()) == TokenBudget(1024, most=1024)
    assert (
        fitted_budget(few, isopo_ntk()) == fitted_budget(few, proma()) == TokenBudget(512, most=512)
    )
    free.append(1 << 40)
    assert (
        fitted_budget(policy).tokens == fitted_budget(policy, isopo_ntk()).tokens == cuts.GPU_TOKENS
    )
    assert fitted_budget(policy, isopo()).tokens == cuts.ISOPO_TOKENS
    assert fitted_budget(policy).most > cuts.ISOPO_TOKENS
