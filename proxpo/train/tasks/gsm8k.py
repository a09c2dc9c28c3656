"""GSM8K (arXiv:2110.14168): grade-school word problems with a whole number as the answer."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, imported, resolve
from proxpo.rewards._types import RewardSpec
from proxpo.rewards.answers import VERIFIERS
from proxpo.train.tasks._files import read_jsonl, split_by_hash
from proxpo.train.tasks._types import Problem, Task, with_system

HUB = "openai/gsm8k"
SYSTEM = (
    "Reason step by step. Finish with a last line that holds the final answer alone, as a number "
    "after four hash signs, like this: #### 42"
)
CALCULATION = re.compile(r"<<.*?>>")  # of the calculator, inside the worked solutions


def gsm8k(
    *,
    path: str | None = None,
    chat: bool = True,
    steps: int | None = None,
    system: str = SYSTEM,
    verifier: str | None = None,
    strict: bool = True,
    template: dict | None = None,
) -> Task:
    """Word problems, reward 1 for the right number after `####` or in `\\boxed{}`.

    path: a folder with train.jsonl and test.jsonl, or one file (a tenth is then held out by hash);
    without it the copy on the hub. chat=False writes plain text for base models. steps: problems
    whose worked solution has at most so many lines before its answer. verifier: "numeric", or
    "math-verify", the default where that package is installed.
    """
    train, test = _hub() if path is None else _local(Path(path))
    if steps is not None:
        train, test = (_short(rows, steps) for rows in (train, test))
    verifier = _verifier(verifier)
    return Task(
        name="gsm8k",
        train=[_problem(row, i, chat, system) for i, row in enumerate(train)],
        test=[_problem(row, i, chat, system) for i, row in enumerate(test)],
        reward=RewardSpec(
            where="proxpo.rewards.answers:final_answer",
            kwargs={"verifier": verifier, "strict": strict},
            source=HUB,
            trusted=verifier == "numeric",  # symbolic mathematics can take for ever
        ),
        template=template or {},
    )


def _problem(row: dict[str, Any], index: int, chat: bool, system: str) -> Problem:
    question, solution = row["question"].strip(), row["answer"]
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    worked = CALCULATION.sub("", solution).strip()
    if not chat:
        text = f"{system}\n\nQuestion: {question}\nAnswer:"
        return Problem(text, answer, index, solution=f" {worked}")
    prompt = with_system([{"role": "user", "content": question}], system)
    return Problem(prompt, answer, index, solution=worked)


def _short(rows: list[dict], steps: int) -> list[dict]:
    """The problems with at most so many lines of working."""
    short = [row for row in rows if row["answer"].strip().count("\n") <= steps]
    if not short:
        raise ProxpoError(f"task gsm8k: no worked solution has {steps} steps or fewer")
    return short


def _local(path: Path) -> tuple[list[dict], list[dict]]:
    needed = {"question": str, "answer": str}
    if path.is_dir():
        files = (path / "train.jsonl", path / "test.jsonl")
        return read_jsonl(files[0], needed=needed), read_jsonl(files[1], needed=needed)
    return split_by_hash(read_jsonl(path, needed=needed), share=0.1, key="question")


def _hub() -> tuple[list[dict], list[dict]]:
    local = "for a local copy write gsm8k:FOLDER with train.jsonl and test.jsonl in it"
    needs = "task gsm8k reads the hub with the package 'datasets' (pip install datasets)"
    datasets = imported("datasets", f"{needs}; {local}")
    try:
        splits = datasets.load_dataset(HUB, "main")
    except Exception as error:
        raise ProxpoError(
            f"task gsm8k: {HUB} could not be fetched ({type(error).__name__}); {local}"
        ) from error
    return list(splits["train"]), list(splits["test"])


def _verifier(name: str | None) -> str:
    installed = importlib.util.find_spec("math_verify") is not None
    if name is None:
        return "math-verify" if installed else "numeric"
    chosen = resolve(name, VERIFIERS, what="verifier of gsm8k")
    if chosen == "math-verify" and not installed:
        raise ProxpoError("verifier math-verify needs its package: pip install math-verify")
    return chosen


__all__ = ["gsm8k"]
