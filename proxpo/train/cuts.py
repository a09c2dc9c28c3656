"""Cuts of rows into micro-batches: a number of rows each, or a budget of tokens."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from proxpo.gradients import Transform
from proxpo.models import Policy
from proxpo.ops.memory import free_memory, is_out_of_memory
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.replay.passes import token_bytes

CPU_TOKENS = 1 << 13
GPU_TOKENS = 10 << 10  # a pass of this many keeps a large GPU busy
ISOPO_TOKENS = 32 << 10  # of each pass a transform launches many small kernels: fewer passes
LEAST_TOKENS = 1 << 8
Cut = list[Int[Tensor, "_"]]  # row numbers of each micro-batch
Result = TypeVar("Result")


class Unit(NamedTuple):
    """Rows of a micro-batch, their longest prompt and response, and the prompts that are run."""

    rows: list[int]
    prompt: int
    response: int
    prompts: int = 1

    @property
    def area(self) -> int:
        """Positions of a forward pass, padding included."""
        return self.prompts * self.prompt + len(self.rows) * self.response

    def joined(self, other: "Unit") -> "Unit":
        longest = max(self.prompt, other.prompt), max(self.response, other.response)
        return Unit([*self.rows, *other.rows], *longest, self.prompts + other.prompts)


class Rows(NamedTuple):
    """The shape of some sequences: their masks, and the groups that stay together, if any do.

    compared: groups stay together even where they exceed the budget
    shared: a group that stays together runs its prompt once
    """

    mask: Bool[Tensor, "seq tok"]
    attention_mask: Bool[Tensor, "seq pos"]
    group: Int[Tensor, " seq"] | None = None
    compared: bool = False
    shared: bool = False

    def lengths(self) -> tuple[list[int], list[int]]:
        """Columns that the prompt and the response of each row use."""
        prompt = self.attention_mask[:, : self.attention_mask.shape[1] - self.mask.shape[1]]
        before = _columns_before(prompt)
        behind = _columns_before(self.mask.flip(1))
        responses = (self.mask.shape[1] - behind).clamp(min=1)
        return (prompt.shape[1] - before).tolist(), responses.tolist()

    def units(self, tokens: int) -> list[Unit]:
        """Rows that stay together, under a budget of so many tokens."""
        prompts, responses = self.lengths()
        alone = [Unit([row], *shape) for row, shape in enumerate(zip(prompts, responses))]
        if self.group is None:
            return alone
        groups: dict[int, Unit] = {}
        for unit, group in zip(alone, self.group.tolist()):
            groups[group] = groups[group].joined(unit) if group in groups else unit
        if self.shared:
            groups = {group: unit._replace(prompts=1) for group, unit in groups.items()}
        units: list[Unit] = []
        for whole in groups.values():
            together = self.compared or whole.area <= tokens
            units += [whole] if together else [alone[row] for row in whole.rows]
        return units


@dataclass
class TokenBudget:
    """The most tokens of a micro-batch, padding included: prompts that are run, and responses.

    The budget is halved where memory runs out, and stays so for the rest of the run.

    most: tokens of rows that are left whole because a cut would make them run twice
    cut_at: the budget by which the last mini-batch was cut; 0 where it was left whole
    """

    tokens: int = CPU_TOKENS
    most: int = 0
    cut_at: int = 0
    on_notice: Callable[[str], None] = lambda line: None

    def cut(self, rows: Rows, *, runs_twice: Callable[[], bool] = lambda: False) -> Cut:
        """Micro-batches of rows of like length, the longest first; all rows in one where they fit.

        A row longer than the budget is a micro-batch of its own.

        runs_twice: whether rows that are cut take a further pass; asked only where it matters
        """
        parts = _parts(rows, self.tokens)
        whole = _parts(rows, self.most) if len(parts) > 1 and self.most else parts
        if len(whole) == 1 and runs_twice():
            parts = whole
        return [torch.tensor(part, device=rows.mask.device) for part in parts]

    def run(
        self,
        rows: Rows,
        work: Callable[[Cut], Result],
        *,
        undo: Callable[[], None] = lambda: None,
        runs_twice: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Does `work` on the micro-batches; from the start again, on finer ones, without memory.

        undo: removes what an attempt that failed has left.
        """
        while True:
            cut = self.cut(rows, runs_twice=runs_twice)
            try:
                return work(cut)
            except Exception as error:
                if not is_out_of_memory(error) or not self._halve(rows, len(cut)):
                    raise
                traceback.clear_frames(error.__traceback__)  # frees the tensors of the attempt
            undo()
            gc.collect()
            if rows.mask.is_cuda:
                torch.cuda.empty_cache()

    def _halve(self, rows: Rows, now: int) -> bool:
        """Halves the budget until these rows are cut finer than now; False where they cannot be."""
        halved = (self.tokens >> times for times in range(self.tokens.bit_length()))
        finer = next((tokens for tokens in halved if len(_parts(rows, tokens)) > now), None)
        if finer is None:
            return False
        before = self.tokens if finer < self.tokens else self.most
        self.on_notice(
            f"out of memory: micro-batches hold at most {finer:,} tokens from now on, not "
            f"{before:,} (train.micro_batch=auto)"
        )
        self.tokens, self.most = finer, 0
        return True


def _parts(rows: Rows, tokens: int) -> list[list[int]]:
    """Row numbers of each micro-batch, under a budget of so many tokens."""
    parts: list[Unit] = []
    for unit in sorted(rows.units(tokens), key=lambda x: -(x.prompt + x.response)):
        if parts and (joined := parts[-1].joined(unit)).area <= tokens:
            parts[-1] = joined
        else:
            parts.append(unit)
    return [sorted(part.rows) for part in parts]


def restored(parts: list[Tensor], cut: Cut, *, sorted_rows: bool) -> Tensor:
    """The results of all micro-batches in one tensor, in the order of the rows.

    sorted_rows: the cut itself has them in another order
    """
    joined = torch.cat(parts)
    if not sorted_rows or len(parts) == 1:
        return joined
    return torch.empty_like(joined).index_copy_(0, torch.cat(cut), joined)


def fitted_budget(policy: Policy, transform: Transform | None = None) -> TokenBudget:
    """The budget of a model: fixed on a CPU; on a GPU half of the free memory, up to a limit.

    A token of a forward and backward pass keeps about 32 hidden and 6 inner states a layer, in the
    precision of the arithmetic; as much again under a transform that compares sequences; a tenth
    of it with gradient checkpointing. The gradient, Adam's averages and one more number for each
    trained weight are set apart before.
    """
    if policy.device.type != "cuda":
        return TokenBudget(CPU_TOKENS)
    fitting = fitting_tokens(policy, transform)
    limit = GPU_TOKENS if transform is None or transform.compares else ISOPO_TOKENS
    power = max(1 << max(fitting, 1).bit_length() - 1, LEAST_TOKENS)  # the same from run to run
    return TokenBudget(limit if fitting >= limit else power, most=power)


def fitting_tokens(policy: Policy, transform: Transform | None = None) -> int:
    """Tokens of a pass that take half of a GPU's free memory, see `fitted_budget`."""
    room = free_memory(policy.device) - _step_bytes(policy)
    return room // 2 // _token_bytes(policy, transform)


def update_bytes(policy: Policy, tokens: int, transform: Transform | None = None) -> int:
    """Bytes of a GPU that an update takes with passes of so many tokens.

    They are those that are taken before the first step (weights, also of the start), gradient and
    averages of the trained weights, and one pass.
    """
    taken = torch.cuda.memory_allocated(policy.device)
    return taken + _step_bytes(policy) + tokens * _token_bytes(policy, transform)


def _step_bytes(policy: Policy) -> int:
    """Bytes of the gradient, Adam's averages and one more number for each trained weight."""
    return sum(16 * p.numel() for p in policy.model.parameters() if p.requires_grad)


def _token_bytes(policy: Policy, transform: Transform | None) -> int:
    return token_bytes(policy, compares=transform is not None and transform.compares)


def _columns_before(x: Bool[Tensor, "seq pos"]) -> Int[Tensor, " seq"]:
    """Number of columns before the first True."""
    return (x.int().cumsum(dim=1) == 0).sum(dim=1)


__all__ = [
    "Cut",
    "Result",
    "Rows",
    "TokenBudget",
    "fitted_budget",
    "fitting_tokens",
    "restored",
    "update_bytes",
]
