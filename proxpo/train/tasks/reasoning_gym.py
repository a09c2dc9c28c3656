"""Any dataset of the package reasoning-gym, `reasoning-gym:<name>`: generated, verified by rule."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from proxpo.errors import ProxpoError, resolve
from proxpo.train.tasks._types import Problem, RewardSpec, Task

SYSTEM = (
    "Think about the problem first. Then give your final answer between <answer> and </answer>, "
    "with nothing else between them."
)
# Entry i of a dataset is drawn from seed + i, so the splits' seeds must lie further apart.
APART = 1_000_000_000


@dataclass(frozen=True)
class Entries(Sequence[Problem]):
    """The entries of one reasoning-gym dataset as problems, made when asked for."""

    dataset: Any
    seed: int
    write: Callable[[str], Any]

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = index % len(self)
        entry = self.dataset[number]
        where = {"seed": self.seed, "size": len(self), "index": number}
        return Problem(self.write(entry["question"]), entry["answer"], number, where)


def reasoning_gym(
    *,
    name: str,
    size: int = 100_000,
    test_size: int = 500,
    seed: int = 0,
    chat: bool = True,
    config: dict | None = None,
    template: dict | None = None,
) -> Task:
    """Problems of the dataset `name`; `config` goes to it (difficulty and the like)."""
    gym = _package()
    name = resolve(name, gym.factory.DATASETS, what="reasoning-gym dataset")
    if not 0 < size < APART or not 0 < test_size < APART:
        raise ProxpoError(f"task reasoning-gym:{name}: size and test_size are in 1..{APART - 1}")

    def entries(start: int, count: int) -> Entries:
        try:
            dataset = gym.create_dataset(name, seed=start, size=count, **(config or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise ProxpoError(f"task reasoning-gym:{name}: {_reason(error)}") from None
        return Entries(dataset, start, functools.partial(_prompt, chat))

    return Task(
        name=f"reasoning-gym:{name}",
        train=entries(seed, size),
        test=entries(seed + APART, test_size),
        reward=RewardSpec(
            where="proxpo.train.rewards.gym:score",
            kwargs={"name": name, "config": config or {}},
            source=f"reasoning-gym/{name}",
        ),
        template=template or {},
    )


def _prompt(chat: bool, question: str) -> Any:
    if not chat:
        return f"{SYSTEM}\n\n{question}\n\n"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _package() -> Any:
    try:
        import reasoning_gym as package
    except ImportError:
        raise ProxpoError(
            "task reasoning-gym needs the package of that name: pip install reasoning-gym"
        ) from None
    return package


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


__all__ = ["Entries", "reasoning_gym"]
