# %% [markdown]
# # Micro-batches that add up
#
# A batch that does not fit into one backward pass is cut. `prepare` computes once what belongs to
# the whole step: mask, advantages, denominators. `policy_loss` is the loss of any cut, and the
# cuts add up to the whole up to rounding. Needs `pip install 'proxpo[train]'`; takes seconds on a
# CPU.

# %%
from dataclasses import replace

import torch

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import inputs, make_sampler

policy = load_policy("tiny")
sampler = make_sampler("local", policy)
pairs = [(100 + 37 * n, 899 - 41 * n) for n in range(8)]
prompts = [policy.tokenizer.encode(f"{a}+{b}=") for a, b in pairs for _ in range(4)]
drawn = sampler.sample(prompts, seeds=list(range(32)), max_tokens=6, temperature=1.2)
ids, attended = inputs(drawn, policy.pad_id)
texts = policy.tokenizer.batch_decode(drawn.tokens, skip_special_tokens=True)
answers = [str(a + b) for a, b in pairs for _ in range(4)]
rollout = proxpo.Batch(
    logp=drawn.logp,
    old_logp=drawn.logp,
    mask=drawn.mask,
    rewards=torch.tensor([float(t == a) for t, a in zip(texts, answers)]),
    group=torch.arange(8).repeat_interleave(4),
)
print(f"{len(texts)} responses of {drawn.mask.sum(1).min()} to {drawn.mask.sum(1).max()} tokens")


# %% [markdown]
# The gradient of the whole batch, in one pass:


# %%
def forward(rows: slice) -> torch.Tensor:
    """Log-probabilities of some responses, with gradient."""
    attention = attended[rows]
    return proxpo.model_logp(policy.model, ids[rows], drawn.mask[rows], attention_mask=attention)


def gradient() -> torch.Tensor:
    """The gradient that the passes since the last call have left, as one vector."""
    parts = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad()
    return torch.cat(parts)


whole = slice(0, 32)
proxpo.loss_fn("grpo")(rollout.replace(logp=forward(whole))).value.backward()
wanted = gradient()
print(f"norm {wanted.norm():.3f}")

# %% [markdown]
# The same in three cuts of unequal size. Groups may be cut as well: advantages are known already.

# %%
recipe = proxpo.make_recipe("grpo")
batch, ctx, _ = proxpo.prepare(recipe, rollout)
cuts = [slice(0, 3), slice(3, 18), slice(18, 32)]
for rows in cuts:
    part = batch.rows(rows).replace(logp=forward(rows))
    proxpo.policy_loss(recipe, part, ctx).value.backward()  # no division by the number of cuts
error = (gradient() - wanted).norm() / wanted.norm()
print(f"relative difference below 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# Many loops average the losses of the cuts. That is another gradient:

# %%
for rows in cuts:
    loss = proxpo.loss_fn(recipe)(rollout.rows(rows).replace(logp=forward(rows)))
    (loss.value / len(cuts)).backward()
error = (gradient() - wanted).norm() / wanted.norm()
print(f"relative difference: {error:.2f}")

# %% [markdown]
# Some methods take a statistic of the whole batch inside the loss, as P3O its effective sample
# size. A cut alone cannot know it, and `policy_loss` says so. `over_microbatches` makes the sums
# first, without gradient.

# %%
recipe = proxpo.make_recipe("p3o")
batch, ctx, _ = proxpo.prepare(recipe, rollout)
try:
    proxpo.policy_loss(recipe, batch.rows(slice(0, 3)), ctx)
except proxpo.ProxpoError as error:
    print(error)


# %%
def loss(part: proxpo.Batch, all_sum) -> proxpo.Loss:
    """The loss of a cut, with sums over the step from `all_sum`."""
    return proxpo.policy_loss(recipe, part, replace(ctx, all_sum=all_sum))


proxpo.loss_fn(recipe)(rollout.replace(logp=forward(whole))).value.backward()
wanted = gradient()
with torch.no_grad():
    parts = [batch.rows(rows).replace(logp=forward(rows)) for rows in cuts]
total = proxpo.over_microbatches(loss, parts)
for rows in cuts:
    loss(batch.rows(rows).replace(logp=forward(rows)), total).value.backward()
error = (gradient() - wanted).norm() / wanted.norm()
print(f"relative difference below 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# Over ranks the same holds with `Context(all_sum=proxpo.over_ranks())`; the gradients of the
# ranks are to be added. More: [denominators](../../docs/concepts/denominators.md).
