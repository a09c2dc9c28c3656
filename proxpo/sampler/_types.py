"""The protocol of samplers, and the responses that they return."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Int, Tensor

Progress = Callable[[int, int], None]  # rows finished, rows


class Thoughts(NamedTuple):
    """Latent thoughts as they were fed back, and the hidden states they were drawn around."""

    value: Float[Tensor, "seq thought dim"]
    mean: Float[Tensor, "seq thought dim"]


@dataclass(frozen=True)
class Samples:
    """Responses, one row per prompt, in the order of the prompts.

    Thoughts, where there are any, come before the tokens of every response and have placeholders in
    the first columns.

    prompts: token ids of each row's prompt
    tokens: response ids, padded on the right
    logp: log-probability of each token at the sampling temperature (at 1 when greedy), over the
        whole vocabulary even where top-p cut the draw; 0 at padding
    mask: the response's tokens, the one that ended it included
    finished: the row ended by itself; otherwise it was cut at `max_tokens`
    """

    prompts: list[list[int]]
    tokens: Int[Tensor, "seq tok"]
    logp: Float[Tensor, "seq tok"]
    mask: Bool[Tensor, "seq tok"]
    finished: Bool[Tensor, " seq"]
    thoughts: Thoughts | None = None

    @property
    def thought_count(self) -> int:
        """Number of thoughts before each response."""
        return 0 if self.thoughts is None else self.thoughts.value.shape[1]

    @property
    def real(self) -> Bool[Tensor, "seq tok"]:
        """Columns that the model reads: tokens and thoughts."""
        before = torch.arange(self.mask.shape[1], device=self.mask.device) < self.thought_count
        return self.mask | before


class Drawn(NamedTuple):
    """Tokens with their log-probabilities, and the thoughts before them, as an engine draws them.

    What follows a row's end is to be cut.
    """

    tokens: Int[Tensor, "seq tok"]
    logp: Float[Tensor, "seq tok"]
    thoughts: Thoughts | None = None


class Inputs(NamedTuple):
    """Prompts padded on the left and responses on the right, as `model_logp` takes them."""

    input_ids: Int[Tensor, "seq pos"]
    attention_mask: Bool[Tensor, "seq pos"]


@runtime_checkable
class Sampler(Protocol):
    """A sampler with a copy of the policy's weights, which `sync` brings up to date."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its response together."""

    def sample(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int],
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        progress: Progress | None = None,
    ) -> Samples:
        """One response per prompt; temperature 0 takes the likeliest token each time."""

    def sync(self) -> None:
        """Takes over the current weights of the model being trained."""

    def close(self) -> None:
        """Frees memory; the sampler is not used again."""


def inputs(samples: Samples, pad_id: int) -> Inputs:
    """Whole sequences of samples; the last columns are those of `samples.tokens`."""
    device = samples.tokens.device
    longest = max(map(len, samples.prompts))
    blank = [longest - len(prompt) for prompt in samples.prompts]
    ids = [[pad_id] * n + prompt for n, prompt in zip(blank, samples.prompts)]
    real = torch.arange(longest) >= torch.tensor(blank)[:, None]
    return Inputs(
        torch.cat([torch.tensor(ids, device=device), samples.tokens], dim=1),
        torch.cat([real.to(device), samples.real], dim=1),
    )


def check_request(
    prompts: list[list[int]],
    *,
    seeds: list[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    context: int,
    vocabulary: int,
) -> None:
    """Raises one clear line for a request that no sampler can answer."""
    if not prompts:
        raise ProxpoError("rollout: no prompts given, expected at least one")
    if len(seeds) != len(prompts):
        raise ProxpoError(f"rollout: {len(seeds)} seeds for {len(prompts)} prompts, expected equal")
    if max_tokens < 1:
        raise ProxpoError(f"rollout: max_tokens is {max_tokens}, expected at least 1")
    if not temperature >= 0:
        raise ProxpoError(f"rollout: temperature is {temperature}, expected 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ProxpoError(f"rollout: top_p is {top_p}, expected more than 0 and at most 1")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ProxpoError(f"rollout: prompt {number} is empty, expected at least one token")
        if len(prompt) + max_tokens > context:
            raise ProxpoError(
                f"rollout: prompt {number} has {len(prompt)} tokens; with max_tokens={max_tokens}"
                f" that exceeds the model's context of {context}"
            )
        if max(prompt) >= vocabulary:
            raise ProxpoError(
                f"rollout: prompt {number} has token {max(prompt)}, and the model has embeddings "
                f"for {vocabulary} tokens: model and tokenizer do not belong together"
            )


def finish(
    prompts: list[list[int]],
    tokens: Int[Tensor, "seq tok"],
    logp: Float[Tensor, "seq tok"],
    ends: Int[Tensor, " eos"],
    pad_id: int,
) -> Samples:
    """Cuts each row after its first end-of-sequence token and blanks what follows."""
    is_end = torch.isin(tokens, ends)
    mask = is_end.cumsum(dim=1) - is_end.long() == 0
    width = int(mask.sum(dim=1).max())
    mask, tokens, logp = mask[:, :width], tokens[:, :width], logp[:, :width]
    logp = logp.masked_fill(~mask, 0.0)
    if not torch.isfinite(logp).all():
        raise ProxpoError(
            "rollout: the policy's log-probabilities are not finite: it has diverged"
            " (a smaller learning rate or a gradient clip helps)"
        )
    return Samples(
        prompts=prompts,
        tokens=tokens.masked_fill(~mask, pad_id),
        logp=logp,
        mask=mask,
        finished=is_end.any(dim=1),
    )


def with_thoughts(samples: Samples, thoughts: Thoughts, pad_id: int) -> Samples:
    """The samples with columns for the thoughts before their tokens."""
    room = (thoughts.value.shape[1], 0)
    return replace(
        samples,
        tokens=pad(samples.tokens, room, value=pad_id),
        logp=pad(samples.logp, room),
        mask=pad(samples.mask, room),
        thoughts=Thoughts(*(x.clone() for x in thoughts)),  # as ordinary tensors
    )


def join_samples(parts: list[Samples], pad_id: int) -> Samples:
    """Joins waves of rows."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.shape[1] for part in parts)

    def wide(name: str, value: float | int) -> Tensor:
        columns = [getattr(part, name) for part in parts]
        return torch.cat([pad(x, (0, width - x.shape[1]), value=value) for x in columns])

    thoughts = [part.thoughts for part in parts if part.thoughts is not None]
    return Samples(
        prompts=[prompt for part in parts for prompt in part.prompts],
        tokens=wide("tokens", pad_id),
        logp=wide("logp", 0.0),
        mask=wide("mask", False),
        finished=torch.cat([part.finished for part in parts]),
        thoughts=Thoughts(*map(torch.cat, zip(*thoughts))) if thoughts else None,
    )


def reorder(samples: Samples, order: list[int]) -> Samples:
    """Puts rows that were drawn in `order` back in their places."""
    if order == list(range(len(order))):
        return samples
    index = torch.tensor(order).argsort()
    place = index.to(samples.mask.device)
    return Samples(
        prompts=[samples.prompts[i] for i in index.tolist()],
        tokens=samples.tokens[place],
        logp=samples.logp[place],
        mask=samples.mask[place],
        finished=samples.finished[place],
        thoughts=samples.thoughts and Thoughts(*(x[place] for x in samples.thoughts)),
    )
