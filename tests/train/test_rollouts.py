"""Sampling: the numbers of a full forward pass, draws that depend on the row's seed alone."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.sampler import LocalSampler, agreement, fastest_backend, inputs, make_sampler
from proxpo.sampler import _draw as drawing
from proxpo.sampler._draw import draw, uniforms
from proxpo.sampler._vllm import Sleep

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    ),
}


def make_policy(name: str = "qwen3", *, ends: int = 4, seed: int = 0) -> Policy:
    """A random model with weights large enough for uneven distributions; ids < `ends` end rows."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Policy(model, None, list(range(ends)), ends, name, 64)


@pytest.mark.parametrize("lean", [True, False])
def test_the_default_dtype_changes_nothing(lean):
    policy = make_policy()
    request = {"seeds": [1, 2], "max_tokens": 5, "temperature": 1.0}

    def sample():
        return make_sampler("local", policy, lean=lean).sample([[5, 6], [7]], **request)

    want = sample()
    torch.set_default_dtype(torch.float64)
    try:
        got = sample()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.tokens, want.tokens)
    assert got.logp.dtype == torch.float32
    assert torch.equal(got.logp, want.logp)


def prompts(rows: int, *, seed: int = 0) -> list[list[int]]:
    """Different lengths, each prompt twice."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (rows,), generator=draws).tolist()
    lists = [torch.randint(5, VOCAB, (n,), generator=draws).tolist() for n in lengths]
    return [lists[row // 2] for row in range(rows)]


def engine_name(policy: Policy) -> str:
    return type(LocalSampler(policy)._engine.engine).__name__


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_logp_is_that_of_a_full_forward_pass(name, temperature):
    policy = make_policy(name)
    rollout = make_sampler("local", policy)
    gap = agreement(policy, rollout, prompts(24), max_tokens=16, temperature=temperature)
    assert gap.tokens > 60
    assert gap.largest < 1e-5
    assert gap.mean <= gap.largest


def test_family_runs_on_the_lean_engine_and_the_rest_does_not():
    engines = {name: engine_name(make_policy(name)) for name in MODELS}
    lean = ["qwen3", "qwen2", "llama"]
    assert engines == {**dict.fromkeys(lean, "LeanEngine"), "gpt2": "ModelEngine"}


def test_sliding_windows_and_changing_rotations_run_on_the_model_itself():
    shape = SHAPE | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    windowed = Qwen3Config(**shape, head_dim=16, use_sliding_window=True)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    models = [
        Qwen3ForCausalLM(windowed),
        LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dynamic)),
    ]
    for model in models:
        policy = Policy(model.eval(), None, [0], 0, "other", 64)
        assert engine_name(policy) == "ModelEngine"
        rollout = LocalSampler(policy)
        assert agreement(policy, rollout, prompts(6), max_tokens=8).largest < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_row_depends_on_its_prompt_and_seed_alone(name):
    policy = make_policy(name)
    rollout = make_sampler("local", policy, max_rows=512)
    given, seeds = prompts(20), list(range(100, 120))
    options = {"max_tokens": 12, "temperature": 1.0}
    together = rollout.sample(given, seeds=seeds, **options)
    assert len(set(together.mask.sum(dim=1).tolist())) > 3  # rows left at different times
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = rollout.sample([given[i] for i in order], seeds=[seeds[i] for i in order], **options)
    assert_close(shuffled.tokens, together.tokens[order])
    for row in (0, 7, 19):
        alone = rollout.sample([given[row]], seeds=[seeds[row]], **options)
        length = alone.tokens.shape[1]
        assert_close(alone.tokens[0], together.tokens[row, :length])
        assert_close(alone.logp[0], together.logp[row, :length], atol=1e-5, rtol=0)
    waves = make_sampler("local", policy, max_rows=3).sample(given, seeds=seeds, **options)
    for field in ("tokens", "mask", "finished"):
        assert_close(getattr(waves, field), getattr(together, field))


def test_lean_engine_draws_what_the_model_itself_draws():
    policy, given = make_policy(), prompts(30)
    options = {"seeds": list(range(30)), "max_tokens": 12, "temperature": 1.3, "top_p": 0.8}
    lean, own = (
        make_sampler("local", policy, lean=x).sample(given, **options) for x in (True, False)
    )
    assert_close(lean.tokens, own.tokens)
    assert_close(lean.logp, own.logp, atol=1e-5, rtol=0)


def test_same_seeds_same_samples_bit_for_bit():
    policy, given = make_policy(), prompts(12)
    options = {"seeds": list(range(12)), "max_tokens": 8, "temperature": 1.0}
    one, two = (make_sampler("local", policy).sample(given, **options) for _ in range(2))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.logp, two.logp)
    other = make_sampler("local", policy).sample(given, **options | {"seeds": list(range(1, 13))})
    assert not torch.equal(one.tokens[:, :1], other.tokens[:, :1])


def test_rows_end_with_their_first_end_token_and_hold_padding_after_it():
    policy, given = make_policy(ends=6), prompts(40)
    samples = make_sampler("local", policy).sample(
        given, seeds=list(range(40)), max_tokens=10, temperature=1.0
    )
    assert samples.prompts == given
    assert 0 < samples.finished.sum() < 40
    for tokens, logp, mask, finished in zip(
        samples.tokens, samples.logp, samples.mask, samples.finished
    ):
        length = int(mask.sum())
        assert mask[:length].all()
        is_end = tokens[:length] < 6
        assert is_end.tolist() == [False] * (length - 1) + [bool(finished)]
        assert finished or length == 10
        assert (tokens[length:] == policy.pad_id).all()
        assert (logp[length:] == 0).all()
        assert (logp[:length] < 0).all()


def test_greedy_takes_the_likeliest_token_whatever_the_seed():
    policy, given = make_policy(), prompts(10)
    options = {"max_tokens": 10, "temperature": 0.0}
    samples = make_sampler("local", policy).sample(given, seeds=[1] * 10, **options)
    again = make_sampler("local", policy).sample(given, seeds=[2] * 10, **options)
    assert_close(samples.tokens, again.tokens)
    ids, seen = inputs(samples, policy.pad_id)
    positions = (seen.long().cumsum(dim=1) - 1).clamp(min=0)
    logits = policy.model(ids, attention_mask=seen.long(), position_ids=positions).logits
    best = logits[:, -samples.tokens.shape[1] - 1 : -1].argmax(dim=-1)
    assert_close(samples.tokens[samples.mask], best[samples.mask])


def test_weights_are_those_of_the_last_sync():
    for name in ("qwen3", "gpt2"):
        policy, given = make_policy(name), prompts(16)
        options = {"seeds": list(range(16)), "max_tokens": 8, "temperature": 1.0}
        rollout = make_sampler("local", policy)
        before = rollout.sample(given, **options)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        assert torch.equal(rollout.sample(given, **options).logp, before.logp)
        assert agreement(policy, rollout, given, max_tokens=8).largest > 1e-2
        rollout.sync()
        assert agreement(policy, rollout, given, max_tokens=8).largest < 1e-5


@pytest.mark.parametrize("lean", [True, False])
def test_lora_is_sampled_with(lean):
    from peft import LoraConfig, get_peft_model

    policy = make_policy("llama")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    wrapped = get_peft_model(policy.model, config)
    policy = replace(policy, model=wrapped.eval())
    rollout = make_sampler("local", policy, lean=lean)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    assert agreement(policy, rollout, prompts(10), max_tokens=8).largest > 1e-2
    rollout.sync()
    assert agreement(policy, rollout, prompts(10), max_tokens=8).largest < 1e-5


def test_samples_can_enter_a_backward_pass():
    samples = make_sampler("local", make_policy()).sample(
        prompts(4), seeds=[0, 1, 2, 3], max_tokens=4, temperature=1.0
    )
    weight = torch.ones((), requires_grad=True)
    (weight * samples.logp).sum().backward()
    assert weight.grad is not None
    assert_close(weight.grad, samples.logp.sum())


def test_progress_counts_finished_rows():
    seen: list[tuple[int, int]] = []
    make_sampler("local", make_policy(), max_rows=8).sample(
        prompts(20),
        seeds=list(range(20)),
        max_tokens=6,
        temperature=1.0,
        progress=lambda done, rows: seen.append((done, rows)),
    )
    assert {rows for _, rows in seen} == {20}
    assert max(done for done, _ in seen) <= 20
    assert seen[-1][0] >= 16  # the third wave begins after two of eight rows


# Draws


def splitmix64(seed: int, position: int) -> float:
    """The generator in Python's integers, as published."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    state = mix(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15
    return (mix(state % 2**64) >> 11) * 2.0**-53


@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5))
def test_uniforms_are_splitmix64_of_seed_and_position(seeds):
    expected = [[splitmix64(seed, position) for position in range(4)] for seed in seeds]
    assert uniforms(seeds, 4, torch.device("cpu")).tolist() == expected


@pytest.mark.parametrize("block", [512, 4])  # one level, and two
def test_frequencies_are_those_of_the_softmax(block, monkeypatch):
    monkeypatch.setattr(drawing, "_BLOCK", block)
    n, vocab = 200_000, 30
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    u = uniforms(list(range(n)), 1, torch.device("cpu"))[:, 0]
    token, logp = draw(logits.expand(n, -1), u, temperature=0.8, top_p=1.0)
    p = torch.softmax(logits / 0.8, dim=0)
    frequency = torch.bincount(token, minlength=vocab) / n
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-6).all()
    assert_close(logp, p.log()[token], atol=1e-5, rtol=0)


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 50.0]), min_size=1, max_size=14),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([2, 512]),
)
def test_a_token_without_mass_is_never_drawn(masses, u, block):
    before, drawing._BLOCK = drawing._BLOCK, block
    try:
        logits = torch.tensor([[*masses, 1.0, 0.0]]).log()
        for number in (u, 0.0, 1 - 2.0**-53):
            place = torch.tensor([number], dtype=torch.float64)
            token, logp = draw(logits, place, temperature=1.0, top_p=1.0)
            assert logits[0, token] > -torch.inf
            assert torch.isfinite(logp).all()
    finally:
        drawing._BLOCK = before


def test_top_p_draws_from_the_nucleus_and_reports_the_whole_distribution():
    p = torch.tensor([0.05, 0.5, 0.15, 0.3])
    u = uniforms(list(range(4000)), 1, torch.device("cpu"))[:, 0]
    token, logp = draw(p.log().expand(4000, -1), u, temperature=1.0, top_p=0.75)
    frequency = torch.bincount(token, minlength=4) / 4000
    assert_close(frequency, torch.tensor([0.0, 0.5 / 0.8, 0.0, 0.3 / 0.8]), atol=0.04, rtol=0)
    assert_close(logp, p.log()[token])
    token, _ = draw(p.log().expand(4000, -1), u, temperature=1.0, top_p=1e-6)
    assert set(token.tolist()) == {1}  # at least one token stays


# Errors


def request(**changes):
    options = {"seeds": [0], "max_tokens": 4, "temperature": 1.0} | changes
    given = options.pop("prompts", [[5, 6]])
    return make_sampler("local", make_policy()).sample(given, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 1]}, "2 seeds for 1 prompts"),
        ({"prompts": [], "seeds": []}, "no prompts"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"max_tokens": 63}, "prompt 0 has 2 tokens; with max_tokens=63 that exceeds"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_impossible_requests_get_one_clear_line(changes, message):
    with pytest.raises(ProxpoError, match=message) as caught:
        request(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_options_get_the_nearest():
    with pytest.raises(ProxpoError, match="unknown rollout 'lokal'; did you mean 'local'"):
        make_sampler("lokal", make_policy())
    with pytest.raises(ProxpoError, match="did you mean 'max_rows'"):
        make_sampler("local", make_policy(), maxrows=3)
    with pytest.raises(ProxpoError, match="max_rows is 0"):
        make_sampler("local", make_policy(), max_rows=0)
    with pytest.raises(ProxpoError, match="lean=true does not fit this GPT2LMHeadModel"):
        make_sampler("local", make_policy("gpt2"), lean=True)


def test_a_diverged_policy_is_reported():
    policy = make_policy()
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    with pytest.raises(ProxpoError, match="diverged"):
        make_sampler("local", policy).sample([[5]], seeds=[0], max_tokens=2, temperature=1.0)


# Other engines


def test_vllm_samples_the_policy_and_follows_its_weights(tmp_path):
    """In an environment of its own, as vLLM pins what it needs: requirements/vllm.txt."""
    python = os.environ.get("PROXPO_VLLM_PYTHON")
    if not python or not Path(python).exists():
        pytest.fail(
            "set PROXPO_VLLM_PYTHON to the interpreter of an environment made with"
            " requirements/vllm.txt"
        )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [python, str(Path(__file__).with_name("vllm_probe.py")), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trained"] == len(found["steps"]) == 5
    assert found["start"] < 1e-4
    for step in found["steps"]:
        assert step["before"] < 1e-4  # until the hand-over vLLM holds the weights of before
        assert step["stale"] > 1e-2  # which the step has really changed
        assert step["synced"] < 1e-4
    assert found["cool"] < 1e-4
    assert found["greedy_is_that_of_local"]
    assert found["same_seeds_same_tokens"]
    assert "top_p is 0.9" in found["top_p"]
    assert found["dead"].startswith("rollout 'vllm': vLLM could not sample: RuntimeError: CUDA err")
    assert "\n" not in found["dead"]
    assert len(found["logged"]) == 5
    assert max(found["logged"]) < 1e-4


class Engine:
    """Notes what vLLM would be asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def sleep(self, level: int) -> None:
        self.asked.append(level)

    def wake_up(self, tags: list[str]) -> None:
        self.asked.append(tags)


def test_only_what_sleeps_is_woken():
    engine = Engine()
    memory = Sleep(engine)
    memory.wake("weights", "kv_cache")
    memory.sleep()
    memory.wake("weights")  # to take over the new ones
    memory.wake("weights", "kv_cache")  # to sample
    memory.wake("weights", "kv_cache")
    memory.sleep()
    assert engine.asked == [1, ["weights"], ["kv_cache"], 1]


def test_sleep_needs_a_gpu():
    with pytest.raises(ProxpoError, match="sleep=true frees a GPU's memory"):
        make_sampler("vllm", make_policy(), sleep=True)


def test_auto_takes_the_own_decoder_then_vllm(monkeypatch):
    foreign = make_policy("gpt2")
    assert fastest_backend(make_policy()).name == "local"
    assert fastest_backend(foreign).reason.startswith("vLLM is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert fastest_backend(make_policy()).name == "local"
    assert fastest_backend(foreign).name == "vllm"
    assert fastest_backend(foreign, top_p=0.9).name == "local"
    assert fastest_backend(foreign, thoughts=2).name == "local"
