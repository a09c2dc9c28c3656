"""Prompts run once for all their responses: log-probs and gradients of whole sequences."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import rms_norm
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

import proxpo.train.scoring as scoring_module
from proxpo import gradients
from proxpo.models import Policy
from proxpo.recipes.reinforce import reinforce
from proxpo.replay.prefix import shares_prompts, states_before
from proxpo.train.experience import Experience
from proxpo.train.scoring import Learner, LogpOptions, forward

SHAPE = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
}


def make_model(name: str = "qwen3") -> torch.nn.Module:
    """In float64, norms included, which these models would compute in float32."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def make_rows(
    *,
    prompts: list[int],
    samples: list[int],
    lengths: list[int],
    shuffled: bool = False,
    tool: tuple[int, int] = (0, 0),
) -> Experience:
    """Prompts of these lengths with so many samples each; row i has lengths[i % ...] tokens.

    tool: columns of a response that were not sampled: read, and not scored
    """
    draw = torch.Generator().manual_seed(1)
    group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(samples))
    longest, tokens, rows = max(prompts), max(lengths), len(group)
    asked = torch.randint(1, 30, (len(prompts), longest), generator=draw)
    real = torch.arange(longest) >= longest - torch.tensor(prompts)[:, None]
    said = torch.randint(1, 30, (rows, tokens), generator=draw)
    cut = torch.tensor([lengths[i % len(lengths)] for i in range(rows)])
    there = torch.arange(tokens) < cut[:, None]
    mask = there.clone()
    mask[:, slice(*tool)] = False
    order = torch.randperm(rows, generator=draw) if shuffled else torch.arange(rows)
    nothing = torch.zeros(rows)
    return Experience(
        input_ids=torch.cat([(asked * real)[group], said * there], dim=1)[order],
        attention_mask=torch.cat([real[group], there], dim=1)[order],
        mask=mask[order],
        rollout_logp=torch.zeros(rows, tokens),
        rewards=nothing,
        correct=nothing > 0,
        truncated=nothing > 0,
        group=1000 + group[order],
        version=nothing.long(),
    )


ROWS = {
    "equal groups": {"prompts": [5, 5, 5], "samples": [4, 4, 4], "lengths": [3, 6, 5]},
    "left padding": {"prompts": [2, 7, 1], "samples": [3, 3, 3], "lengths": [6, 1, 4]},
    "groups of any size, mixed": {
        "prompts": [4, 2, 6],
        "samples": [1, 5, 2],
        "lengths": [2, 4],
        "shuffled": True,
    },
    "a tool's words": {
        "prompts": [3, 5],
        "samples": [3, 3],
        "lengths": [6, 4, 2],
        "tool": (2, 4),
    },
    "one token": {"prompts": [3, 4], "samples": [2, 2], "lengths": [1]},
    "an empty response": {"prompts": [3, 4], "samples": [2, 2], "lengths": [0, 3]},
}


def outcome(find, model, rows) -> dict[str, torch.Tensor]:
    """Log-probs, entropies, states and all gradients of a sum that uses each differently."""
    draw = torch.Generator().manual_seed(2)
    model.zero_grad()
    options = {"temperature": 0.7, "entropy": True}
    found, states = find(model, rows, options, hidden=True)
    weights = torch.randn(2, *rows.mask.shape, dtype=torch.float64, generator=draw)
    (weights[0] * found.logp + weights[1] * found.entropy).sum().backward()
    parts = {"logp": found.logp, "entropy": found.entropy, "states": states[rows.mask]}
    return parts | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_gradients_are_those_of_whole_sequences(name, rows):
    model, experience = make_model(name), make_rows(**rows)
    assert shares_prompts(model)
    once, whole = (
        outcome(run, model, experience)
        for run in (scoring_module._prompts_once, scoring_module._whole_sequences)
    )
    assert once.keys() == whole.keys()
    for part, expected in whole.items():
        assert_close(once[part], expected, rtol=1e-9, atol=1e-12, msg=lambda m, p=part: f"{p}: {m}")


def test_a_prompt_is_run_once(monkeypatch):
    seen = []
    embedding = torch.nn.functional.embedding
    monkeypatch.setattr(
        "proxpo.sampler._lean.embedding",
        lambda ids, weight: seen.append(len(ids)) or embedding(ids, weight),
    )
    rows = make_rows(prompts=[6, 6], samples=[8, 8], lengths=[3, 5])
    states_before(make_model(), rows)
    assert seen == [2 * 6 + 8 * 2 + 8 * 4]  # prompts, and responses without their last token


def test_what_lives_in_modules_runs_through_them():
    assert shares_prompts(make_model())
    hooked = make_model()
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    watched, released = make_model(), make_model()
    watched.model.norm.weight.register_hook(lambda g: g)
    released.model.norm.weight.register_post_accumulate_grad_hook(lambda p: None)
    half = make_model().bfloat16()
    dropping = make_model("llama").train()
    assert shares_prompts(dropping)
    dropping.config.attention_dropout = 0.1
    checkpointed = make_model()
    checkpointed.gradient_checkpointing_enable()
    other = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=64, n_embd=8, n_head=1))
    adapted = get_peft_model(
        make_model(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    )
    models = [
        hooked,
        watched,
        released,
        half,
        dropping,
        checkpointed,
        other,
        adapted,
        adapted.get_base_model(),
    ]
    assert [shares_prompts(model) for model in models] == [False] * len(models)


@pytest.mark.parametrize("transformed", [False, True])
def test_gradient_transforms_get_whole_sequences(transformed, monkeypatch):
    model, used = make_model(), []
    for name in ("_prompts_once", "_whole_sequences"):
        find = getattr(scoring_module, name)
        monkeypatch.setattr(
            scoring_module,
            name,
            lambda *a, name=name, find=find, **k: used.append(name) or find(*a, **k),
        )
    learner = Learner(
        policy=Policy(model, None, [0], 0, "tiny", 64, torch.float64),
        recipe=reinforce(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        transform=gradients.isopo() if transformed else None,
    )
    rows = make_rows(prompts=[3, 3], samples=[2, 2], lengths=[2, 3])
    forward(learner, rows, LogpOptions(temperature=1.0, micro_batch=4))
    assert used == ["_whole_sequences" if transformed else "_prompts_once"]
