# %% [markdown]
# # ISOPO in your own loop
#
# ISOPO scales each sequence's gradient, layer by layer, inside the backward pass. So it needs the
# model and the forward pass, not the log-probabilities alone. Needs `pip install
# 'proxpo[train]'`; takes seconds on a CPU.

# %%
import torch

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import inputs, make_sampler

policy = load_policy("tiny")
model, tokenizer = policy.model, policy.tokenizer
sampler = make_sampler("local", policy)  # or `generate`, as in the first tutorial
pairs = [(100 + 37 * n, 899 - 41 * n) for n in range(16)]
prompts = [tokenizer.encode(f"{a}+{b}=") for a, b in pairs for _ in range(8)]
answers = [str(a + b) for a, b in pairs for _ in range(8)]


def rollout(step: int):
    """Token ids, attention mask and a batch of one response to each prompt."""
    seeds = [step * len(prompts) + row for row in range(len(prompts))]
    drawn = sampler.sample(prompts, seeds=seeds, max_tokens=6, temperature=1.0)
    ids, attended = inputs(drawn, policy.pad_id)
    texts = tokenizer.batch_decode(drawn.tokens, skip_special_tokens=True)
    batch = proxpo.Batch(
        logp=drawn.logp,
        old_logp=drawn.logp,
        mask=drawn.mask,
        rewards=torch.tensor([float(t == a) for t, a in zip(texts, answers)]),
        group=torch.arange(16).repeat_interleave(8),
    )
    return ids, attended, batch


# %% [markdown]
# The transform is opened around the forward and the backward pass. It takes the number of the
# sequence that each position belongs to (-1 for padding) and the advantages. The sum of
# log-probabilities must then not contain the advantages.

# %%
transform = proxpo.gradients.isopo(p=-1.0, reg=1.0, overlap=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

ids, attended, batch = rollout(0)
centred = batch.rewards.view(16, 8) - batch.rewards.view(16, 8).mean(1, keepdim=True)
sequences = torch.arange(len(ids))[:, None].where(attended, -1)
with transform.applied(model, sequences=sequences, advantages=centred.flatten()):
    logp = proxpo.model_logp(model, ids, batch.mask, attention_mask=attended)
    (-(logp * batch.mask).sum()).backward()
optimizer.step()
optimizer.zero_grad()
transform.step()  # its trailing averages; step(skipped=True) where the optimizer's step is left out
sampler.sync()  # the sampler takes the new weights
print(f"reward {batch.rewards.mean():.3f}")

# %% [markdown]
# `backward_pass` does the same for any recipe: it takes the advantages apart, gives KL and
# entropy terms a backward pass of their own, and works without a transform too. The loop below
# trains with every method whose fields the batch has and whose stages have no memory (`prepare`
# warns of one).

# %%
recipe = proxpo.make_recipe("isopo", {"reg": 1.0, "overlap": 16})  # or "grpo", "p3o", ...
transform = recipe.gradient.apply() if recipe.gradient else None
for step in range(1, 5):
    ids, attended, batch = rollout(step)
    batch, ctx, _ = proxpo.prepare(recipe, batch)
    sequences = torch.arange(len(ids))[:, None].where(attended, -1)

    def forward(ids=ids, mask=batch.mask, attended=attended):
        return proxpo.model_logp(model, ids, mask, attention_mask=attended)

    def applied(advantages, sequences=sequences):
        return transform.applied(model, sequences=sequences, advantages=advantages)

    for _ in range(2):
        with proxpo.backward_pass(
            recipe, batch, ctx, forward=forward, applied=applied if transform else None
        ) as opened:
            opened.objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        if transform:
            transform.step()
    sampler.sync()
    print(f"step {step}: reward {batch.rewards.mean():.3f}")

# %% [markdown]
# The same under Accelerate, Lightning and `transformers.Trainer`:
# [examples](../../examples/README.md). What the transform costs: [speed](../../docs/speed.md).
# Which options it has: [the method's page](../../docs/methods/isopo.md).
