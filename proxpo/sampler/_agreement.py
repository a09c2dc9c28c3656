"""Do sampler and trainer see the same policy? The gap between their log-probabilities, measured."""

from typing import NamedTuple

import torch

from proxpo.logp import model_logp
from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.sampler._types import Rollout, Samples


class Inputs(NamedTuple):
    """Prompts padded on the left and responses on the right, as `model_logp` takes them."""

    input_ids: Int[Tensor, "seq pos"]
    attention_mask: Bool[Tensor, "seq pos"]


class Agreement(NamedTuple):
    """|Δ log π| between sampler and trainer over the sampled tokens (train-inference mismatch)."""

    largest: float
    mean: float
    tokens: int


def inputs(samples: Samples, pad_id: int) -> Inputs:
    """The sequences of a rollout; the last columns are those of `samples.tokens`."""
    device = samples.tokens.device
    longest = max(map(len, samples.prompts))
    blank = [longest - len(prompt) for prompt in samples.prompts]
    ids = [[pad_id] * n + prompt for n, prompt in zip(blank, samples.prompts)]
    real = torch.arange(longest) >= torch.tensor(blank)[:, None]
    return Inputs(
        torch.cat([torch.tensor(ids, device=device), samples.tokens], dim=1),
        torch.cat([real.to(device), samples.mask], dim=1),
    )


@torch.no_grad()
def agreement(
    policy: Policy,
    rollout: Rollout,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Agreement:
    """Sample a response to each prompt and score it with the trainer's full forward pass."""
    seeds = list(range(seed, seed + len(prompts)))
    samples = rollout.sample(prompts, seeds=seeds, max_tokens=max_tokens, temperature=temperature)
    given = inputs(samples, policy.pad_id)
    with policy.autocast():
        logp = model_logp(
            policy.model,
            given.input_ids,
            samples.mask,
            attention_mask=given.attention_mask,
            temperature=temperature or 1.0,
        )
    gap = (logp - samples.logp).abs()[samples.mask]
    return Agreement(float(gap.max()), float(gap.mean()), len(gap))
