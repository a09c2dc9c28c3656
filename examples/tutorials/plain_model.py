# %% [markdown]
# # A Hugging Face model and our loss
#
# Forty lines: `generate`, a forward pass, the loss of any method, an optimizer. Nothing of
# `proxpo.train` is used. Needs `pip install 'proxpo[train]'`; takes seconds on a CPU.
#
# The model is the included one, which answers a good half of three-digit additions. Put any
# causal language model in its place.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import proxpo
from proxpo.models import TINY  # a folder; or "Qwen/Qwen3-0.6B"

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(TINY)
tokenizer = AutoTokenizer.from_pretrained(TINY)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
loss_of = proxpo.loss_fn("p3o")  # or grpo, kpo, dapo, ...

# %% [markdown]
# Eight responses to each of sixteen prompts. All prompts here have the same number of tokens;
# prompts of several lengths are padded on the left, and `attention_mask` then goes into every
# pass.

# %%
pairs = [(100 + 37 * n, 899 - 41 * n) for n in range(16)]
prompts = [f"{a}+{b}=" for a, b in pairs for _ in range(8)]
answers = [str(a + b) for a, b in pairs for _ in range(8)]
group = torch.arange(16).repeat_interleave(8)  # the prompt that each response answers
prompt_ids = tokenizer(prompts, return_tensors="pt", add_special_tokens=False).input_ids
length = prompt_ids.shape[1]


def log_probabilities(ids: torch.Tensor) -> torch.Tensor:
    """log π of each response token given what stands before it, [responses, tokens]."""
    logits = model(ids).logits[:, length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, length:, None]).squeeze(-1)


# %% [markdown]
# A step: sample, score, two updates on the same responses. `mask` is True up to and including the
# end-of-sequence token. The second update is off-policy, and the ratio π/π_old corrects for it.

# %%
for step in range(6):
    ids = model.generate(prompt_ids, do_sample=True, top_k=0, max_new_tokens=6)
    response, end = ids[:, length:], tokenizer.eos_token_id
    mask = ((response == end).cumsum(1) - (response == end).int()) == 0
    texts = tokenizer.batch_decode(response, skip_special_tokens=True)
    rewards = torch.tensor([float(text == right) for text, right in zip(texts, answers)])
    with torch.no_grad():
        old_logp = log_probabilities(ids)
    for _ in range(2):
        logp = log_probabilities(ids)
        batch = proxpo.Batch(logp=logp, old_logp=old_logp, mask=mask, rewards=rewards, group=group)
        value, metrics = loss_of(batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print(f"step {step + 1}: reward {rewards.mean():.3f}, ESS {metrics['ratio/ess']:.3f}")

# %% [markdown]
# The reward rises; the effective sample size says how far the second update has moved from the
# policy that sampled. `loss_fn("grpo")` in place of `loss_fn("p3o")` is another method, and
# nothing else changes. Methods that act on the gradient need one thing more: [ISOPO in your own
# loop](../../docs/tutorials/isopo.md).
