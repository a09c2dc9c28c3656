"""The gap between the log-probabilities of sampler and trainer for the same tokens."""

from typing import NamedTuple

import torch

from proxpo.logp import model_logp, thoughts_fed
from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.sampler._types import Sampler, inputs


class Agreement(NamedTuple):
    """|Δ log π| between sampler and trainer over the sampled tokens (train-inference mismatch)."""

    largest: float
    mean: float
    tokens: int


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
    with thoughts_fed(policy.model, thoughts, tokens=samples.mask.shape[1]):
        return logp_gap(
            policy, *sequences, mask=samples.mask, logp=samples.logp, temperature=temperature
        )


@torch.no_grad()
def logp_gap(
    policy: Policy,
    input_ids: Int[Tensor, "seq pos"],
    attention_mask: Bool[Tensor, "seq pos"],
    *,
    mask: Bool[Tensor, "seq tok"],
    logp: Float[Tensor, "seq tok"],
    temperature: float = 1.0,
) -> Agreement:
    """Compares a sampler's log-probabilities of tokens with those of the trainer's forward pass."""
    with policy.autocast():
        own = model_logp(
            policy.model,
            input_ids,
            mask,
            attention_mask=attention_mask,
            temperature=temperature or 1.0,
        )
    gap = (own - logp).abs()[mask]
    return Agreement(float(gap.max()), float(gap.mean()), len(gap))
