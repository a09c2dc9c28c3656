"""Any dataset of the package reasoning-gym, `reasoning-gym:<name>`: generated, verified by rule."""

from itertools import islice

from proxpo.errors import ProxpoError, imported, resolve
from proxpo.ops.streams import derive
from proxpo.rewards._types import Messages, RewardSpec
from proxpo.train.tasks._types import Lazy, Problem, Task, with_system
from proxpo.train.tasks._worked import worked

LISTING = "python -c 'import reasoning_gym as r; print(*r.factory.DATASETS)'"
SYSTEM = (
    "Think about the problem first. Then give your final answer between <answer> and </answer>, "
    "with nothing else between them."
)
# Entry i of a dataset is drawn from seed + i, so the splits' seeds must lie further apart.
APART = 1_000_000_000
TEST_SIZE = 500
FEWEST = 20  # held-out questions below which a score says nothing
SHARE = 0.2  # of the questions, held out where a dataset has so few that they come again
TRIES = 1000


def reasoning_gym(
    *,
    name: str,
    size: int = 100_000,
    test_size: int | None = None,
    seed: int = 0,
    chat: bool = True,
    system: str = SYSTEM,
    config: dict | None = None,
    template: dict | None = None,
) -> Task:
    """Problems of the dataset `name`; `config` goes to it (difficulty and the like).

    A question that is held out is never trained on: in the place of such an entry stands another
    one of the training split. test_size: held-out questions; none: 500, or a fifth of those of a
    smaller dataset, which must be 20 at least.
    """
    gym = imported(
        "reasoning_gym",
        "task reasoning-gym needs the package of that name: pip install 'proxpo[reasoning-gym]'",
    )
    name = resolve(name, gym.factory.DATASETS, what="reasoning-gym dataset", listing=LISTING)
    wanted = TEST_SIZE if test_size is None else test_size
    if not 0 < size < APART or not 0 < wanted < APART // TRIES:
        raise ProxpoError(
            f"task reasoning-gym:{name}: size is in 1..{APART - 1} and test_size in "
            f"1..{APART // TRIES - 1}, got {size} and {wanted}"
        )

    def entries(start: int, count: int) -> Lazy:
        try:
            dataset = gym.create_dataset(name, seed=start, size=count, **(config or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise ProxpoError(f"task reasoning-gym:{name}: {_reason(error)}") from None

        def make(number: int) -> Problem:
            entry = dataset[number]
            where = {"seed": start, "size": len(dataset), "index": number}
            prompt = _prompt(chat, entry["question"], system)
            return Problem(prompt, entry["answer"], number, where, solution=worked(name, entry))

        return Lazy(make, len(dataset))

    test = _held_out(entries(seed + APART, int(2 * wanted / SHARE)), wanted)
    needed = FEWEST if test_size is None else wanted
    if len(test) < needed:
        raise ProxpoError(
            f"task reasoning-gym:{name}: too few different questions: {len(test)} can be held out "
            f"of training, {needed} are needed: lower task.options.test_size, or vary them more "
            "with task.options.config"
        )
    return Task(
        name=f"reasoning-gym:{name}",
        train=_apart(entries(seed, size), {problem.question for problem in test}, name),
        test=test,
        reward=RewardSpec(
            where="proxpo.rewards.gym:score",
            kwargs={"name": name, "config": config or {}},
            source=f"reasoning-gym/{name}",
        ),
        template=template or {},
    )


def _held_out(entries: Lazy, wanted: int) -> list[Problem]:
    """Up to `wanted` different questions.

    They are the first entries if no question comes twice among these: there are many more then.
    Otherwise those whose hash says so, a fixed share of all, so that others are left for training.
    """
    problems = {problem.question: problem for problem in islice(entries, wanted)}
    if len(problems) == wanted:
        return list(problems.values())
    for problem in islice(entries, wanted, None):
        problems.setdefault(problem.question, problem)
    chosen = [
        problem for text, problem in problems.items() if derive(0, "held out", text) < SHARE * 2**63
    ]
    return chosen[:wanted]


def _apart(entries: Lazy, held_out: set[str], name: str) -> Lazy:
    """The entries, those with a held-out question replaced by others drawn by their number."""

    def make(number: int) -> Problem:
        problem = entries[number]
        for i in range(TRIES):
            if problem.question not in held_out:
                return problem
            problem = entries[derive(0, "instead of", number, i) % len(entries)]
        raise ProxpoError(
            f"task reasoning-gym:{name}: every training question is held out: raise "
            "task.options.size, or make them more varied with task.options.config"
        )

    make(0)  # a dataset without any question to train on is refused at once
    return Lazy(make, len(entries))


def _prompt(chat: bool, question: str, system: str) -> str | Messages:
    prompt: str | Messages = [{"role": "user", "content": question}] if chat else f"{question}\n\n"
    return with_system(prompt, system)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


__all__ = ["reasoning_gym"]
