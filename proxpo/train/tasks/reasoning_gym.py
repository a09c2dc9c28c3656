"""Any dataset of the package reasoning-gym, `reasoning-gym:<name>`: generated, verified by rule."""

from typing import Any

from proxpo.errors import ProxpoError, resolve
from proxpo.train.tasks._types import Lazy, Problem, RewardSpec, Task

SYSTEM = (
    "Think about the problem first. Then give your final answer between <answer> and </answer>, "
    "with nothing else between them."
)
# Entry i of a dataset is drawn from seed + i, so the splits' seeds must lie further apart.
APART = 1_000_000_000


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

    def entries(start: int, count: int) -> Lazy:
        try:
            dataset = gym.create_dataset(name, seed=start, size=count, **(config or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise ProxpoError(f"task reasoning-gym:{name}: {_reason(error)}") from None

        def make(number: int) -> Problem:
            entry = dataset[number]
            where = {"seed": start, "size": len(dataset), "index": number}
            return Problem(_prompt(chat, entry["question"]), entry["answer"], number, where)

        return Lazy(make, len(dataset))

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


__all__ = ["reasoning_gym"]
