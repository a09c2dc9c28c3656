"""Run by test_rollouts.py in vLLM's environment: prints what was found as one line of JSON."""

import json

import torch

from proxpo.errors import ProxpoError
from proxpo.train.models import load_policy
from proxpo.train.rollouts import agreement, make_rollout


def main() -> None:
    policy = load_policy("tiny")
    rollout = make_rollout("vllm", policy, memory=1, max_rows=16)
    prompts = [policy.tokenizer.encode(f"{a}+{7 * a}=") for a in range(1, 99, 7)]

    def gap(temperature: float = 1.0) -> float:
        return agreement(policy, rollout, prompts, max_tokens=8, temperature=temperature).largest

    found: dict[str, object] = {"start": gap()}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found["stale"] = gap()
    rollout.sync()
    found["synced"], found["cool"] = gap(), gap(0.7)
    options = {"seeds": list(range(len(prompts))), "max_tokens": 8}
    local = make_rollout("local", policy).sample(prompts, temperature=0.0, **options)
    greedy = rollout.sample(prompts, temperature=0.0, **options)
    same = (greedy.tokens == local.tokens) if greedy.tokens.shape == local.tokens.shape else None
    found["greedy_matches_local"] = 0.0 if same is None else float(same.float().mean())
    one, two = (rollout.sample(prompts, temperature=1.0, **options).tokens for _ in range(2))
    found["same_seeds_same_tokens"] = torch.equal(one, two)
    try:
        rollout.sample(prompts, temperature=1.0, top_p=0.9, **options)
    except ProxpoError as error:
        found["top_p"] = str(error)
    rollout.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
