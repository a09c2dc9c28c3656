"""Engines that advance all rows in step: prompts in, logits out, one token per row at a time.

`LeanEngine` runs the Llama family on the lean decoder; `ModelEngine` runs any other causal language
model of Hugging Face through its own forward pass.
"""

import copy
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.sampler._lean import Cache, decode, empty_cache, prefill
from proxpo.sampler._weights import read, refresh

_PREFILL_TOKENS = 16_384  # prompts run in chunks of about so many tokens, which bounds memory


@runtime_checkable
class Engine(Protocol):
    """A copy of the weights, and the cache of the rows that are being sampled."""

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        """Logits after the prompt of each row, with room for so many tokens more."""

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        """Logits after one more token in each row."""

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        """Drops all other rows."""

    def sync(self, bare: nn.Module) -> None:
        """Takes over the model's weights."""


class LeanEngine:
    """The lean decoder over one cache, in which all rows write the same slot."""

    def __init__(self, bare: nn.Module, dtype: torch.dtype, context: int) -> None:
        self.weights = read(bare, dtype, context)
        self._cache: Cache | None = None
        self._slot = 0
        self._padded = False

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        ids, pad = pad_left(prompts, which.device)
        self._padded = bool(pad.any())
        self._slot = ids.shape[1]
        self._cache = empty_cache(self.weights, len(which), ids.shape[1] + room)
        chunk = max(1, _PREFILL_TOKENS // ids.shape[1])
        parts = []
        for first in range(0, len(prompts), chunk):
            part = slice(first, first + chunk)
            logits, prompt_cache = prefill(self.weights, ids[part], pad[part])
            rows = ((which >= first) & (which < first + chunk)).nonzero()[:, 0]
            _spread(prompt_cache, self._cache, rows, which[rows] - first)
            parts.append(logits)
        return torch.cat(parts)[which]

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        assert self._cache is not None
        slot, self._slot = self._slot, self._slot + 1
        return decode(self.weights, token, self._cache, slot, padded=self._padded)

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        assert self._cache is not None
        self._cache.keep(index, self._slot)

    def sync(self, bare: nn.Module) -> None:
        refresh(self.weights, bare)


class ModelEngine:
    """The model's own forward pass with its own kind of cache; a copy of the model is kept.

    keep_states: `states` are the hidden states, as they enter the head, of the last logits
    """

    def __init__(self, bare: nn.Module, dtype: torch.dtype, *, keep_states: bool = False) -> None:
        self._model: Any = copy.deepcopy(bare).to(dtype).eval().requires_grad_(False)
        self._cache: Any = None
        self._visible = torch.empty(0)
        self._keeps, self.states = keep_states, torch.empty(0)
        if keep_states:
            head: nn.Module = cast(Any, self._model).get_output_embeddings()
            head.register_forward_pre_hook(self._keep_states)

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        ids, pad = pad_left(prompts, which.device)
        self._visible = torch.arange(ids.shape[1], device=ids.device) >= pad[:, None]
        logits = self._forward(None, input_ids=ids)
        if not hasattr(self._cache, "batch_select_indices"):
            raise ProxpoError(
                f"rollout: {type(self._model).__name__} gives no key-value cache that rows can be"
                f" taken from (got {type(self._cache).__name__}); use rollout.backend=vllm"
            )
        self.keep(which)
        self.states = self.states[which] if self._keeps else self.states
        return logits[which]

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        self._visible = nn.functional.pad(self._visible, (0, 1), value=True)
        return self._forward(self._cache, input_ids=token[:, None])

    def feed(self, state: Float[Tensor, "row dim"]) -> Float[Tensor, "row vocab"]:
        """Logits after a hidden state in each row, in place of a token's embedding."""
        self._visible = nn.functional.pad(self._visible, (0, 1), value=True)
        return self._forward(self._cache, inputs_embeds=state[:, None])

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        self._cache.batch_select_indices(index)
        self._visible = self._visible[index]

    def sync(self, bare: nn.Module) -> None:
        mine = [*self._model.parameters(), *self._model.buffers()]
        theirs: list[Tensor] = [*bare.parameters(), *bare.buffers()]
        for old, new in zip(mine, theirs, strict=True):
            old.copy_(new)

    def _keep_states(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.states = inputs[0][:, -1]

    def _forward(self, cache: Any, **fed: Tensor) -> Float[Tensor, "row vocab"]:
        columns = next(iter(fed.values())).shape[1]
        visible: Bool[Tensor, "row pos"] = self._visible
        positions = (visible.long().cumsum(dim=1) - 1).clamp(min=0)[:, -columns:]
        output = self._model(
            **fed,
            attention_mask=visible.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        self._cache = getattr(output, "past_key_values", None)  # a recurrent model has none
        return output.logits[:, -1]


def pad_left(
    prompts: list[list[int]], device: torch.device
) -> tuple[Int[Tensor, "row tok"], Int[Tensor, " row"]]:
    """Prompts that end in the same column, and how much padding each got (id 0, never seen)."""
    longest = max(map(len, prompts))
    pad = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * blank + prompt for blank, prompt in zip(pad, prompts)]
    return torch.tensor(ids, device=device), torch.tensor(pad, device=device)


def _spread(
    source: Cache, target: Cache, rows: Int[Tensor, " row"], which: Int[Tensor, " row"]
) -> None:
    """Copies a prompt's keys and values to every row that samples from it."""
    length = source.keys[0].shape[2]
    for kept, part in zip(
        (*target.keys, *target.values), (*source.keys, *source.values), strict=True
    ):
        kept[rows, :, :length] = part[which]
    target.pad[rows] = source.pad[which]
