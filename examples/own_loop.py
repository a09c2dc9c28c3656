"""Reinforcement learning in plain PyTorch. The loop is yours; the method is the line METHOD."""

from functools import partial

import torch

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import inputs, make_sampler
from proxpo.train.tasks import make_task

METHOD = "isopo"  # or "ema-kpo", or any other of `proxpo methods`
STEPS, UPDATES, LR = 8, 2, 5e-4
TASK = make_task("arithmetic")
PROBLEMS = [problem for problem in TASK.train[:16] for _ in range(8)]  # 8 responses to each


def sample(policy, sampler, problems, seeds):
    """One response to each problem, and what a method reads of it."""
    prompts = [TASK.encode(problem, policy.tokenizer) for problem in problems]
    drawn = sampler.sample(prompts, seeds=seeds, max_tokens=6, temperature=1.0)
    texts = policy.tokenizer.batch_decode(drawn.tokens, skip_special_tokens=True)
    rewards = drawn.logp.new_tensor([text == case.answer for text, case in zip(texts, problems)])
    group = drawn.tokens.new_tensor([problem.index for problem in problems])
    known = {"logp": drawn.logp, "old_logp": drawn.logp, "mask": drawn.mask}
    return inputs(drawn, policy.pad_id), proxpo.Batch(**known, rewards=rewards, group=group)


def backward(model, recipe, transform, ids, attended, batch, ctx, run=torch.Tensor.backward):
    """Gradients of one update: ISOPO acts inside the backward pass, most methods in the loss."""
    rows = torch.arange(len(ids), device=ids.device)[:, None].where(attended, -1)
    forward = partial(proxpo.model_logp, model, ids, batch.mask, attention_mask=attended)
    applied = partial(transform.applied, model, sequences=rows) if transform else None
    with proxpo.backward_pass(recipe, batch, ctx, forward=forward, applied=applied) as opened:
        run(opened.objective)


def main():
    policy, recipe = load_policy("tiny"), proxpo.make_recipe(METHOD)
    transform = recipe.gradient.apply() if recipe.gradient else None
    sampler, weights = make_sampler("local", policy), policy.model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        sampler.sync()  # it has its own copy of the weights
        seeds = [step * len(PROBLEMS) + row for row in range(len(PROBLEMS))]
        (ids, attended), batch = sample(policy, sampler, PROBLEMS, seeds)
        batch, ctx, _ = proxpo.prepare(recipe, batch)
        for _ in range(UPDATES):
            backward(policy.model, recipe, transform, ids, attended, batch, ctx)
            optimizer.step()
            optimizer.zero_grad()
            if transform:
                transform.step()
        print(f"step {step + 1}: reward {batch.rewards.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
