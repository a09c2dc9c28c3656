"""Decoding on the device: rows at positions of their own over a paged cache, in windows of steps.

The tokens that a step draws stay on the device and feed the next step. On a GPU a step is one CUDA
graph for each number of rows (powers of two) and each kind of draw; it is recorded when it is first
needed. All that a graph reads and writes lies in buffers that are made once, or with the pages.
"""

import importlib.util
import warnings
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from proxpo.ops.shapes import Float, Int, Num, Tensor
from proxpo.sampler._draw import Draw, draw
from proxpo.sampler._lean import run
from proxpo.sampler._step import PAGE, PLAIN, Parts, forward
from proxpo.sampler._weights import Weights

WINDOW = 16  # most steps between two looks at what was drawn
_PREFILL_TOKENS = 16_384  # prompts run in chunks of about so many tokens, which bounds memory
_FEWEST_ROWS = 16
_PROGRAMS = 256  # of the attention kernel: fewer leave a GPU idle, so long rows are split
_LONG = 1024  # tokens from which on a row is split


def paged_kernels(device: torch.device) -> bool:
    """True if the steps of a paged cache have kernels on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def pages_of(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE)


class Decoder:
    """The pages, the state of the rows that run, and the steps that advance them.

    Page 0 belongs to nobody: rows that pad the batch write there.
    """

    def __init__(self, weights: Weights, rows: int) -> None:
        device = weights.embed.device
        most, context = self.batch_rows(rows), len(weights.cos)
        self.weights, self.pages = weights, list[Tensor]()
        self.table = torch.zeros(most, pages_of(context + WINDOW), dtype=torch.int32, device=device)
        self.token = torch.zeros(most, dtype=torch.int64, device=device)
        self.length = torch.zeros_like(self.token)
        self.u = torch.zeros(most, WINDOW, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(most, WINDOW, dtype=torch.int64, device=device)
        self.logp = torch.zeros(most, WINDOW, dtype=torch.float32, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._temperature = torch.ones(1, dtype=torch.float64, device=device)
        self._logits = torch.empty(0, device=device)
        self._parts = _kernels() if paged_kernels(device) else PLAIN
        self._records = device.type == "cuda"
        self._forget()

    @staticmethod
    def batch_rows(rows: int) -> int:
        """Number of rows that are run for so many."""
        return max(_FEWEST_ROWS, 1 << (rows - 1).bit_length())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        w = self.weights
        return 2 * len(w.layers) * w.kv_heads * PAGE * w.width * w.embed.element_size()

    @property
    def page_count(self) -> int:
        return self.pages[0].shape[1] if self.pages else 0

    def allocate(self, pages: int) -> None:
        """Replaces the pages; what they held is lost, and steps are recorded anew."""
        self.pages.clear()
        self._forget()
        w = self.weights
        shape = (2, pages, w.kv_heads, PAGE, w.width)
        self.pages.extend(w.embed.new_zeros(shape) for _ in w.layers)

    def fill(self, prompts: list[list[int]], pages: list[list[int]]) -> None:
        """Runs prompts and writes their keys and values to their pages."""
        work = sorted((p for p in zip(prompts, pages) if p[0]), key=lambda p: len(p[0]))
        while work:
            chunk = work[-max(1, _PREFILL_TOKENS // len(work[-1][0])) :]
            del work[-len(chunk) :]
            self._fill(chunk)

    def _fill(self, chunk: list[tuple[list[int], list[int]]]) -> None:
        """Prompts padded on the right, where causal attention does not look."""
        rows, device = len(chunk), self.weights.embed.device
        lengths = torch.tensor([len(ids) for ids, _ in chunk])
        longest = int(lengths.max())
        ids = _padded([ids for ids, _ in chunk], longest).to(device)
        table = _padded([pages for _, pages in chunk], pages_of(longest))
        row, at = (torch.arange(longest) < lengths[:, None]).nonzero().unbind(1)
        place = torch.stack([row * longest + at, table[row, at // PAGE], at % PAGE])
        flat, page, slot = place.to(device)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for kept, new in zip(self.pages[number], (k, v)):
                kept[page, :, slot] = new[flat]
            groups = q.shape[1] // k.shape[1]
            q, k, v = (
                x.unflatten(0, (rows, longest)).transpose(1, 2)
                for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
            )
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
            return o.transpose(1, 2).flatten(2).flatten(0, 1)

        positions = torch.arange(longest, device=device).repeat(rows)
        run(self.weights, ids.flatten(), positions, attend)

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copies whole pages in every layer."""
        if source:
            device = self.weights.embed.device
            old, new = (torch.tensor(x, device=device) for x in (source, target))
            for pages in self.pages:
                pages[:, new] = pages[:, old]

    def keep(self, rows: list[int]) -> None:
        """Moves the tokens of these rows to the front; `load` is due before the next step."""
        self.token[: len(rows)] = self.token[torch.tensor(rows, dtype=torch.int64)]

    def load(self, tokens: list[int], lengths: list[int], tables: list[list[int]]) -> None:
        """Sets all rows: the tokens in the cache, their pages, and the token that is fed next.

        tokens: of the last rows, which are new
        """
        n, size, width = len(lengths), self.batch_rows(len(lengths)), max(map(len, tables))
        self.table[:n, :width].copy_(_padded(tables, width))
        self.table[n:size].zero_()
        self.token[n - len(tokens) : n].copy_(torch.tensor(tokens, dtype=torch.int64))
        self.length[:n].copy_(torch.tensor(lengths))

    def advance(
        self, u: Num[Tensor, "row step"], longest: int, *, temperature: float, top_p: float
    ) -> None:
        """Draws a token for each u; `tokens` and `logp` hold them until the next call.

        longest: tokens of the longest row
        """
        n, steps = u.shape
        rows, heads = self.batch_rows(n), self.weights.kv_heads
        self.u[:n, :steps] = u
        self.length[n:rows].zero_()
        self.token[n:rows].zero_()
        self._column.zero_()
        splits = 1
        if longest > _LONG and rows * heads < _PROGRAMS:
            splits = min(8, _PROGRAMS // (rows * heads))
        if temperature > 0 and top_p < 1:
            if len(self._logits) < rows:
                self._forget()
                self._logits = self._logits.new_empty(len(self.token), len(self.weights.head))
            for _ in range(steps):
                self._run((rows, splits, "logits"), partial(self._keep_logits, rows, splits))
                choose = partial(draw, temperature=temperature, top_p=top_p)
                self._take(rows, choose(self._logits[:rows], self._uniforms(rows)))
            return
        self._temperature.fill_(temperature or 1.0)
        step = partial(self._step, rows, splits, greedy=temperature == 0)
        for _ in range(steps):
            self._run((rows, splits, temperature == 0), step)

    def _step(self, rows: int, splits: int, *, greedy: bool) -> None:
        logits, u = self._forward(rows, splits), self._uniforms(rows)
        if greedy:
            self._take(rows, draw(logits, u, temperature=0.0, top_p=1.0))
        else:
            self._take(rows, self._parts.draw_token(logits, u, self._temperature))

    def _forward(self, rows: int, splits: int) -> Float[Tensor, "row vocab"]:
        return forward(
            self.weights,
            self.token[:rows],
            self.pages,
            self.table[:rows],
            self.length[:rows],
            splits=splits,
            parts=self._parts,
        )

    def _keep_logits(self, rows: int, splits: int) -> None:
        self._logits[:rows].copy_(self._forward(rows, splits))

    def _uniforms(self, rows: int) -> Num[Tensor, " row"]:
        return self.u[:rows].index_select(1, self._column)[:, 0]

    def _take(self, rows: int, drawn: Draw) -> None:
        """Notes the tokens in the window's next column and makes them the next to feed."""
        self.tokens[:rows].index_copy_(1, self._column, drawn.token[:, None])
        self.logp[:rows].index_copy_(1, self._column, drawn.logp[:, None])
        self.token[:rows].copy_(drawn.token)
        self.length[:rows].add_(1)
        self._column.add_(1)

    def _run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replays `work`; the first time it is run as it is, and then recorded."""
        if key in self._graphs:
            self._graphs[key].replay()
            return
        work()
        if self._records:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    work()
                self._graphs[key] = graph
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                self._records = False
                line = " ".join(str(error).split())[:200]
                warnings.warn(f"rollout: decoding runs unrecorded ({line})", stacklevel=2)

    def _forget(self) -> None:
        """Drops all graphs and their memory."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._records else None


def _padded(lists: list[list[int]], width: int) -> Int[Tensor, "row width"]:
    return torch.tensor([x + [0] * (width - len(x)) for x in lists])


def _kernels() -> Parts:
    parts: Parts = importlib.import_module("proxpo.sampler._triton").PARTS
    return parts
