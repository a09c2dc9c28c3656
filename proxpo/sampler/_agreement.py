"""The gap between the log-probabilities of sampler and trainer for the same tokens."""

from typing import NamedTuple

import torch

from proxpo.logp import model_logp, thoughts_fed
from proxpo.models import Policy
from proxpo.sampler._types import Sampler, inputs


class Agreement(NamedTuple):
    """|Δ log π| between sampler and trainer over the sampled tokens (train-inference mismatch)."""

    largest: float
    mean: float
    tokens: int


@torch.no_grad()
def agreement(
    policy: Policy,
    sampler: Sampler,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Agreement:
    """Samples a response to each prompt and scores it with the trainer's full forward pass."""
    seeds = list(range(seed, seed + len(prompts)))
    samples = sampler.sample(prompts, seeds=seeds, max_tokens=max_tokens, temperature=temperature)
    sequences = inputs(samples, policy.pad_id)
    thoughts = samples.thoughts and samples.thoughts.value
    tokens = samples.mask.shape[1]
    with policy.autocast(), thoughts_fed(policy.model, thoughts, tokens=tokens):
        logp = model_logp(
            policy.model,
            sequences.input_ids,
            samples.mask,
            attention_mask=sequences.attention_mask,
            temperature=temperature or 1.0,
        )
    gap = (logp - samples.logp).abs()[samples.mask]
    return Agreement(float(gap.max()), float(gap.mean()), len(gap))
