"""Engines of the sampling loop: prompts in, logits out, one token per row at a time.

`LeanEngine` runs the Llama family on the lean decoder, through CUDA graphs on a GPU;
`ModelEngine` runs any other causal language model of Hugging Face through its own forward pass.
"""

import copy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.sampler._lean import Cache, decode, empty_cache, prefill
from proxpo.sampler._weights import read, refresh

_PREFILL_TOKENS = 16_384  # prompts run in chunks of about so many tokens, which bounds memory
_SLOTS = 128  # on a GPU the cache grows in powers of two of this, one captured graph for each
_FEWEST_ROWS = 8


@runtime_checkable
class Engine(Protocol):
    """A copy of the weights, and the cache of the rows that are being sampled."""

    every: int  # steps between two looks at which rows have finished

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        """Logits after the prompt of each row, with room for so many tokens more."""

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        """Logits after one more token in each row."""

    def fit(self, alive: int, rows: int) -> int:
        """Number of rows to go on with when so many are alive."""

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        """Drops all other rows."""

    def sync(self, bare: nn.Module) -> None:
        """Takes over the model's weights."""


class LeanEngine:
    """The lean decoder over one static cache."""

    def __init__(self, bare: nn.Module, dtype: torch.dtype, context: int) -> None:
        self.weights = read(bare, dtype, context)
        self.every = 16 if self.weights.embed.is_cuda else 1
        self._cache: Cache | None = None
        self._rows = self._slot = 0
        self._padded = False
        self._graphs = _Graphs(self.weights) if self.weights.embed.is_cuda else None

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        ids, pad = pad_left(prompts, which.device)
        self._padded = bool(pad.any())
        self._rows, self._slot = len(which), ids.shape[1]
        cache = self._make_room(self._rows, ids.shape[1] + room)
        chunk = max(1, _PREFILL_TOKENS // ids.shape[1])
        parts = []
        for first in range(0, len(prompts), chunk):
            part = slice(first, first + chunk)
            logits, prompt_cache = prefill(self.weights, ids[part], pad[part])
            rows = ((which >= first) & (which < first + chunk)).nonzero()[:, 0]
            _spread(prompt_cache, cache, rows, which[rows] - first)
            parts.append(logits)
        return torch.cat(parts)[which]

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        assert self._cache is not None
        slot, self._slot = self._slot, self._slot + 1
        if self._graphs is not None:
            return self._graphs.decode(self._cache, token, slot)
        return decode(self.weights, token, self._cache, slot, padded=self._padded)

    def fit(self, alive: int, rows: int) -> int:
        """Halves the rows on a GPU, where a new number costs a capture; else drops what pays."""
        if self._graphs is None:
            return alive if alive <= 0.75 * rows else rows
        while rows // 2 >= max(alive, _FEWEST_ROWS):
            rows //= 2
        return rows

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        assert self._cache is not None
        self._cache.keep(index, self._slot)
        self._rows = len(index)

    def sync(self, bare: nn.Module) -> None:
        refresh(self.weights, bare)

    def _make_room(self, rows: int, slots: int) -> Cache:
        """Makes a cache; on a GPU, where graphs hold addresses, only if the last is too small."""
        if self._graphs is None:
            self._cache = empty_cache(self.weights, rows, slots)
            return self._cache
        have = (0, 0) if self._cache is None else (len(self._cache.pad), _slots(self._cache))
        if have[0] < rows or have[1] < slots:
            self._cache = None  # first give back what it held
            self._graphs.clear()
            self._cache = empty_cache(
                self.weights, max(have[0], rows), max(have[1], slots + -slots % _SLOTS)
            )
        assert self._cache is not None
        return self._cache


class _Graphs:
    """One decoding step as a CUDA graph, for each number of rows and each reach of the cache."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self._slot = torch.zeros((), dtype=torch.int64, device=weights.embed.device)
        self.clear()

    def clear(self) -> None:
        """Drops all graphs and their memory pool."""
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._token = self._logits = torch.empty(0, device=self._slot.device)

    def decode(self, cache: Cache, token: Tensor, slot: int) -> Float[Tensor, "row vocab"]:
        if len(self._token) < len(cache.pad):
            rows, vocab = len(cache.pad), len(self._weights.head)
            self._token = torch.zeros(rows, dtype=torch.int64, device=self._slot.device)
            self._logits = torch.zeros(rows, vocab, device=self._slot.device)
        rows, reach = len(token), _SLOTS
        while reach < slot + 1:
            reach *= 2
        key = (rows, min(reach, _slots(cache)))
        self._token[:rows].copy_(token)
        self._slot.fill_(slot)
        if key not in self._graphs:
            self._graphs[key] = self._capture(cache.head(*key))
        self._graphs[key].replay()
        return self._logits[:rows]

    def _capture(self, cache: Cache) -> torch.cuda.CUDAGraph:
        rows = len(cache.pad)

        def run() -> None:
            logits = decode(self._weights, self._token[:rows], cache, self._slot)
            self._logits[:rows].copy_(logits)

        # Once outside the capture, where libraries may still allocate; it writes the same slot.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph


class ModelEngine:
    """The model's own forward pass with its own kind of cache; a copy of the model is kept."""

    def __init__(self, bare: nn.Module, dtype: torch.dtype) -> None:
        self._model: Any = copy.deepcopy(bare).to(dtype).eval().requires_grad_(False)
        self.every = 1
        self._cache: Any = None
        self._visible = torch.empty(0)

    def start(
        self, prompts: list[list[int]], which: Int[Tensor, " row"], room: int
    ) -> Float[Tensor, "row vocab"]:
        ids, pad = pad_left(prompts, which.device)
        self._visible = torch.arange(ids.shape[1], device=ids.device) >= pad[:, None]
        logits = self._forward(ids, None)
        if not hasattr(self._cache, "batch_select_indices"):
            raise ProxpoError(
                f"rollout: {type(self._model).__name__} gives no key-value cache that rows can be"
                f" taken from (got {type(self._cache).__name__}); use rollout=vllm"
            )
        self.keep(which)
        return logits[which]

    def step(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        self._visible = nn.functional.pad(self._visible, (0, 1), value=True)
        return self._forward(token[:, None], self._cache)

    def fit(self, alive: int, rows: int) -> int:
        return alive if alive <= 0.75 * rows else rows

    def keep(self, index: Int[Tensor, " kept"]) -> None:
        self._cache.batch_select_indices(index)
        self._visible = self._visible[index]

    def sync(self, bare: nn.Module) -> None:
        mine = [*self._model.parameters(), *self._model.buffers()]
        theirs: list[Tensor] = [*bare.parameters(), *bare.buffers()]
        for old, new in zip(mine, theirs, strict=True):
            old.copy_(new)

    def _forward(self, ids: Int[Tensor, "row tok"], cache: Any) -> Float[Tensor, "row vocab"]:
        visible: Bool[Tensor, "row pos"] = self._visible
        positions = (visible.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=visible.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
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
    length = _slots(source)
    for kept, part in zip(
        (*target.keys, *target.values), (*source.keys, *source.values), strict=True
    ):
        kept[rows, :, :length] = part[which]
    target.pad[rows] = source.pad[which]


def _slots(cache: Cache) -> int:
    return cache.keys[0].shape[2]
