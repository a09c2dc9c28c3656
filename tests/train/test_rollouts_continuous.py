"""Continuous batching on the CPU: the numbers of rows in step, whatever waits and whatever ends."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.sampler import LocalSampler, agreement
from proxpo.sampler import _continuous as continuous
from proxpo.sampler import _decoder as decoding
from proxpo.sampler import _local as local
from proxpo.sampler._decoder import Decoder, pages_of
from proxpo.sampler._step import PAGE, forward
from proxpo.sampler._weights import read

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
}


def make_policy(*, ends: int = 4, llama: bool = False) -> Policy:
    torch.manual_seed(0)
    if llama:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Policy(model.eval(), None, list(range(ends)), ends, "random", 160)


def prompts(*lengths: int, rows: int = 4) -> list[list[int]]:
    """A prompt of each length, asked for `rows` times, the groups interleaved."""
    draws = torch.Generator().manual_seed(0)
    lists = [torch.randint(5, VOCAB, (n,), generator=draws).tolist() for n in lengths]
    return lists * rows


PROMPTS = prompts(1, 2, PAGE, PAGE + 1, PAGE + 9, 2 * PAGE + 7)


@pytest.fixture
def make_sampler(monkeypatch):
    """Makes samplers with the engine of a GPU, its kernels in plain torch, or rows in step."""

    def make(policy: Policy, *, rows: int = 512, step: bool = False) -> LocalSampler:
        with monkeypatch.context() as patch:
            patch.setattr(local, "paged_kernels", lambda device: not step)
            sampler = LocalSampler(policy, max_rows=rows)
        assert isinstance(sampler._engine, local.Lockstep) == step
        return sampler

    return make


def draw(sampler: LocalSampler, asked=PROMPTS, tokens: int = 24, **options):
    options = {"temperature": 1.0, "seeds": list(range(len(asked)))} | options
    return sampler.sample(asked, max_tokens=tokens, **options)


def assert_same(found, expected) -> None:
    assert found.prompts == expected.prompts
    for name in ("tokens", "mask", "finished"):
        assert_close(getattr(found, name), getattr(expected, name))
    assert_close(found.logp, expected.logp, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rows", [512, 5])
def test_samples_are_those_of_rows_in_step(make_sampler, rows):
    policy = make_policy()
    step, sampler = make_sampler(policy, step=True), make_sampler(policy, rows=rows)
    for options in ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}):
        expected = draw(step, **options)
        lengths = expected.mask.sum(dim=1)
        assert lengths.min() < 15 < lengths.max()  # rows leave at different times
        assert_same(draw(sampler, **options), expected)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("ends", [0, VOCAB - 1])  # no row ends, almost all at once
def test_ends_and_lengths(make_sampler, tokens, ends):
    policy = make_policy()
    policy = replace(policy, eos_ids=list(range(ends)) or [-1])
    expected = draw(make_sampler(policy, step=True), tokens=tokens)
    assert_same(draw(make_sampler(policy, rows=7), tokens=tokens), expected)


def test_one_row_after_another_uses_its_whole_context(make_sampler):
    policy, asked = make_policy(ends=0), prompts(120, 70, rows=1)
    policy = replace(policy, eos_ids=[-1])
    expected = draw(make_sampler(policy, step=True), asked, tokens=40)
    assert_same(draw(make_sampler(policy, rows=1), asked, tokens=40), expected)


@pytest.mark.parametrize("llama", [False, True])
def test_logp_is_that_of_a_full_forward_pass(make_sampler, llama):
    policy = make_policy(llama=llama)
    sampler = make_sampler(policy)
    assert agreement(policy, sampler, PROMPTS[:6], max_tokens=12).largest < 2e-5
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert agreement(policy, sampler, PROMPTS[:6], max_tokens=12).largest > 1e-2
    sampler.sync()
    assert agreement(policy, sampler, PROMPTS[:6], max_tokens=12).largest < 2e-5


def test_a_step_is_the_model_in_double_precision():
    policy = make_policy()
    model, ids = policy.model.double(), torch.tensor(prompts(2 * PAGE + 7, rows=1))
    weights = read(model, torch.float64, 160)
    decoder = Decoder(weights, 1)
    decoder.allocate(8)
    cached, pages = ids[0, :-1].tolist(), [3, 7, 2]
    state = (x[:1] for x in (decoder.table, decoder.length))
    with torch.no_grad():
        decoder.fill([cached], [pages])
        decoder.load(ids[0, -1:].tolist(), [len(cached)], [pages])
        found = forward(weights, decoder.token[:1], decoder.pages, *state)
        assert_close(found, model(ids).logits[:, -1], atol=1e-6, rtol=0)  # float32 rotary tables


def test_a_prompt_runs_once_and_its_full_pages_are_shared(make_sampler, monkeypatch):
    asked, filled, most = prompts(70, 70, rows=8), [], []
    fill, load = Decoder.fill, Decoder.load

    def count_fill(self, ids, pages):
        filled.extend(map(len, ids))
        fill(self, ids, pages)

    def count_load(self, tokens, lengths, tables):
        most.append(len({page for table in tables for page in table}))
        load(self, tokens, lengths, tables)

    monkeypatch.setattr(Decoder, "fill", count_fill)
    monkeypatch.setattr(Decoder, "load", count_load)
    draw(make_sampler(make_policy(), rows=5), asked, tokens=20)
    assert filled == [69, 69]
    alone = pages_of(69 + 20 + 16)
    assert max(most) <= 2 * 2 + 5 * (alone - 2)


def test_few_pages_make_rows_wait_and_too_few_are_reported(make_sampler, monkeypatch):
    policy = make_policy()
    expected = draw(make_sampler(policy, step=True))
    monkeypatch.setattr(continuous, "most_pages", lambda decoder: 13)
    running = []
    load = Decoder.load

    def count_load(self, tokens, lengths, tables):
        running.append(len(lengths))
        load(self, tokens, lengths, tables)

    monkeypatch.setattr(Decoder, "load", count_load)
    sampler = make_sampler(policy)
    assert_same(draw(sampler), expected)
    assert max(running) < 8 < len(PROMPTS)
    monkeypatch.setattr(continuous, "most_pages", lambda decoder: 3)
    with pytest.raises(ProxpoError, match=r"the cache of one response needs .* GiB are free") as e:
        draw(make_sampler(policy))
    assert "\n" not in str(e.value)


def test_progress_counts_finished_rows(make_sampler):
    seen: list[tuple[int, int]] = []
    draw(make_sampler(make_policy(), rows=5), progress=lambda *counts: seen.append(counts))
    done = [count for count, _ in seen]
    assert {rows for _, rows in seen} == {len(PROMPTS)}
    assert done == sorted(done)
    assert done[-1] == len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("long", [1024, 16])  # one part, and rows that are split
def test_samples_on_a_gpu_are_those_of_the_cpu(make_sampler, monkeypatch, long):
    monkeypatch.setattr(decoding, "_LONG", long)
    policy = make_policy()
    cases = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}]
    step = make_sampler(policy, step=True)
    expected = [draw(step, **options) for options in cases]
    policy.model.cuda()
    sampler = LocalSampler(policy, max_rows=7)
    assert isinstance(sampler._engine, continuous.ContinuousEngine)
    for _ in range(2):  # the second time from recorded steps
        for options, known in zip(cases, expected):
            found = draw(sampler, **options)
            width = min(found.tokens.shape[1], known.tokens.shape[1])
            same = (found.tokens[:, :width].cpu() == known.tokens[:, :width]).all(dim=1)
            assert same.float().mean() > 0.9
            gap = (found.logp[:, :width].cpu() - known.logp[:, :width])[same].abs().max()
            assert gap < 1e-4
        assert agreement(policy, sampler, PROMPTS, max_tokens=24).largest < 1e-4
        sampler.sync()


def test_kernels_give_the_plain_numbers():
    """On a GPU, or under Triton's interpreter in vLLM's environment, which has Triton."""
    gpu = torch.cuda.is_available()
    python = sys.executable if gpu else os.environ.get("PROXPO_VLLM_PYTHON")
    if not python or not Path(python).exists():
        pytest.fail(
            "set PROXPO_VLLM_PYTHON to the interpreter of an environment made with"
            " requirements/vllm.txt"
        )
    done = subprocess.run(
        [python, str(Path(__file__).with_name("triton_probe.py"))],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TRITON_INTERPRET": "0" if gpu else "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = json.loads(done.stdout.splitlines()[-1])
    drawn = gaps.pop("draw")
    assert drawn["possible"]
    assert drawn["nan"]
    assert drawn["different"] <= 1  # u a rounding error below 1
    assert drawn["logp"] < 1e-5
    assert gaps.pop("half") < (0.3 if gpu else 0.01)  # bfloat16, float16
    assert gaps.pop("norm_half") < 2.0**-6  # two roundings of bfloat16
    assert gaps.pop("pieces_half") < (2.0**-6 if gpu else 2.0**-10)  # two roundings, and a sum
    assert max(gaps.values()) < (1e-4 if gpu else 1e-5), gaps
