"""Continuous batching: finished rows make room for waiting ones.

A prompt runs once for all its rows and without its last token, which is the first that each row
feeds. Rows share the prompt's full pages; the rest of it is copied to a page of their own. A row
gets all pages it may need when it starts, so that it never stops for want of one.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.memory import free_memory
from proxpo.ops.shapes import Int, Num, Tensor
from proxpo.sampler._decoder import WINDOW, Decoder, pages_of
from proxpo.sampler._step import PAGE
from proxpo.sampler._types import Drawn, Progress
from proxpo.sampler._weights import read, refresh

_ADMIT = 8  # waiting rows start when one row in so many is free: prompts run together


@dataclass
class _Prompt:
    """A distinct prompt; `users` counts its rows that wait or run."""

    ids: list[int]
    users: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are shared."""
        return len(self.ids) - 1

    @property
    def full(self) -> int:
        """Pages that rows share as they are."""
        return self.cached // PAGE

    def own_pages(self, room: int) -> int:
        """Pages of a row's own; the last window may run past its end."""
        return pages_of(self.cached + room + WINDOW) - self.full


@dataclass
class _Row:
    """A response that is being drawn: its place in the request, its pages, its tokens so far."""

    number: int
    prompt: _Prompt
    own: list[int]
    drawn: int = 0

    @property
    def pages(self) -> list[int]:
        return self.prompt.pages[: self.prompt.full] + self.own

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.prompt.cached + self.drawn


class ContinuousEngine:
    """The lean decoder over a paged cache, at most `max_rows` rows at a time."""

    def __init__(
        self,
        bare: nn.Module,
        dtype: torch.dtype,
        context: int,
        ends: Int[Tensor, " eos"],
        *,
        max_rows: int,
    ) -> None:
        self.weights = read(bare, dtype, context)
        self._ends, self._max_rows = ends, max_rows
        self._decoder = Decoder(self.weights, max_rows)
        self._free: list[int] = []

    def sync(self, bare: nn.Module) -> None:
        refresh(self.weights, bare)

    def sample(
        self,
        prompts: list[list[int]],
        u: Num[Tensor, "seq tok"],
        *,
        temperature: float,
        top_p: float,
        progress: Progress | None,
    ) -> Drawn:
        """A response for each prompt."""
        room, device = u.shape[1], u.device
        tokens = torch.zeros(len(u), room + WINDOW, dtype=torch.int64, device=device)
        logp = torch.zeros(len(u), room + WINDOW, dtype=torch.float32, device=device)
        u = nn.functional.pad(u, (0, WINDOW))
        steps = torch.arange(WINDOW, device=device)
        decoder, waiting = self._decoder, self._prepare(prompts, room)
        rows: list[_Row] = []
        most, changed = 0, False
        while rows or waiting:
            if not rows or most - len(rows) >= min(len(waiting), most // _ADMIT + 1) > 0:
                fresh = self._admit(waiting, room, len(rows))
                rows, most = rows + fresh, max(most, len(rows) + len(fresh))
                changed = changed or bool(fresh)
            if changed:
                decoder.load(
                    tokens=[row.prompt.ids[-1] for row in rows if not row.drawn],
                    lengths=[row.length for row in rows],
                    tables=[row.pages for row in rows],
                )
            count = min(WINDOW // 2 if waiting else WINDOW, max(room - row.drawn for row in rows))
            longest = max(row.length for row in rows) + count
            at = torch.tensor([[row.number, row.drawn] for row in rows], device=device)
            place = at[:, :1], at[:, 1:] + steps[:count]
            decoder.advance(u[place], longest, temperature=temperature, top_p=top_p)
            drawn = decoder.tokens[: len(rows), :count]
            tokens[place], logp[place] = drawn, decoder.logp[: len(rows), :count]
            ended = torch.isin(drawn, self._ends).any(dim=1).tolist()
            kept = []
            for i, row in enumerate(rows):
                row.drawn += count
                if ended[i] or row.drawn >= room:
                    self._release(row)
                else:
                    kept.append(i)
            if changed := len(kept) < len(rows):
                decoder.keep(kept)
                rows = [rows[i] for i in kept]
            if progress is not None:
                progress(len(prompts) - len(waiting) - len(rows), len(prompts))
        return Drawn(tokens[:, :room], logp[:, :room])

    def _prepare(self, prompts: list[list[int]], room: int) -> deque[tuple[int, _Prompt]]:
        """Makes room for a request. Returns its rows; those of one prompt stand side by side."""
        distinct: dict[tuple[int, ...], list[int]] = {}
        for number, ids in enumerate(prompts):
            distinct.setdefault(tuple(ids), []).append(number)
        groups = [(_Prompt(list(ids), len(of)), of) for ids, of in distinct.items()]
        rows = min(self._max_rows, len(prompts))
        own = sorted((p.own_pages(room) for p, of in groups for _ in of), reverse=True)
        shared = sorted((pages_of(p.cached) for p, _ in groups), reverse=True)
        least = 1 + own[0] + shared[0]
        self._make_pages(least, 1 + sum(own[:rows]) + sum(shared[: rows + 1]))
        return deque((number, p) for p, of in groups for number in of)

    def _make_pages(self, least: int, wanted: int) -> None:
        """Grows the cache to what is wanted and a little more, or to what fits; all is free then.

        Steps are recorded again then: where memory limits the cache, small gains do not count.
        """
        decoder, have = self._decoder, self._decoder.page_count
        if have < wanted:
            fits = min(wanted * 5 // 4, have + most_pages(decoder))
            if max(have, fits) < least:
                gib = decoder.page_bytes / 2**30
                raise ProxpoError(
                    f"rollout: the cache of one response needs {least * gib:.2f} GiB, and"
                    f" {fits * gib:.2f} GiB are free; ask for fewer tokens"
                )
            if have < least or fits >= min(wanted, have * 5 // 4):
                decoder.allocate(fits)
        self._free = list(range(decoder.page_count - 1, 0, -1))

    def _admit(self, waiting: deque[tuple[int, _Prompt]], room: int, running: int) -> list[_Row]:
        """Starts waiting rows, as many as rows and pages allow."""
        fresh: list[_Row] = []
        started: list[_Prompt] = []
        while waiting and running + len(fresh) < self._max_rows:
            number, prompt = waiting[0]
            shared = 0 if prompt.pages else pages_of(prompt.cached)
            if prompt.own_pages(room) + shared > len(self._free):
                break
            if shared:
                prompt.pages = self._take(shared)
                started.append(prompt)
            fresh.append(_Row(number, prompt, self._take(prompt.own_pages(room))))
            waiting.popleft()
        decoder = self._decoder
        decoder.fill([p.ids[:-1] for p in started], [p.pages for p in started])
        partial = [row for row in fresh if row.prompt.cached % PAGE]
        decoder.copy_pages([row.prompt.pages[-1] for row in partial], [r.own[0] for r in partial])
        return fresh

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _release(self, row: _Row) -> None:
        """Frees the pages of a row that has ended, and of its prompt after the prompt's last."""
        self._free.extend(row.own)
        row.prompt.users -= 1
        if not row.prompt.users:
            self._free.extend(row.prompt.pages)


def most_pages(decoder: Decoder) -> int:
    """Pages that half of the free memory would hold beside those there are."""
    device = decoder.token.device
    if device.type != "cuda":
        return 1 << 40
    return free_memory(device) // 2 // decoder.page_bytes
