"""Run by test_rollouts.py in vLLM's environment: prints what was found as one line of JSON."""

import json

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from proxpo.errors import ProxpoError
from proxpo.train.models import Policy
from proxpo.train.rollouts import agreement, make_rollout

PROMPTS = [[5 + a % 60, 7 + a % 9, *range(5, 5 + a % 4)] for a in range(1, 99, 7)]


def make_policy() -> Policy:
    """Tied embeddings, and heads of a size that vLLM's CPU kernels know."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Policy(Qwen3ForCausalLM(config).eval(), None, [0, 1, 2], 3, "random", 64)


def main() -> None:
    policy = make_policy()
    rollout = make_rollout("vllm", policy, memory=1, max_rows=16)

    def gap(temperature: float = 1.0) -> float:
        return agreement(policy, rollout, PROMPTS, max_tokens=8, temperature=temperature).largest

    found: dict[str, object] = {"start": gap()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found["stale"] = gap()
    rollout.sync()
    found["synced"], found["cool"] = gap(), gap(0.7)
    options = {"seeds": list(range(len(PROMPTS))), "max_tokens": 8}
    local = make_rollout("local", policy).sample(PROMPTS, temperature=0.0, **options)
    greedy = rollout.sample(PROMPTS, temperature=0.0, **options)
    found["greedy_is_that_of_local"] = torch.equal(greedy.tokens, local.tokens)
    one, two = (rollout.sample(PROMPTS, temperature=1.0, **options).tokens for _ in range(2))
    found["same_seeds_same_tokens"] = torch.equal(one, two)
    try:
        rollout.sample(PROMPTS, temperature=1.0, top_p=0.9, **options)
    except ProxpoError as error:
        found["top_p"] = str(error)
    rollout.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
