"""Reward functions in TRL's batch signature and in verl's per-sample one, made from each other.

    GRPOTrainer(..., reward_funcs=as_trl(compute_score))     # a function made for verl, in TRL
    compute_score = as_verl(accuracy_reward)                 # a function made for TRL, in verl

`proxpo train` takes either as it is. A function that fails stops the run with one line. Where it
gives no reward (None, NaN), TRL gets None, and verl, which must have a number, gets `missing`. A
function made for TRL gets lists of length one in verl, which scores response by response.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.rewards.answers import answer_of
from proxpo.rewards.worker import (
    Unusable,
    batch_outcomes,
    call,
    per_sample,
    takes_batch,
)

Function = Callable[..., Any]


def as_trl(function: Function, *, source: str = "", answer_field: str | None = None) -> Function:
    """Returns `f(prompts, completions, **columns) -> [reward or None, ...]` under the same name.

    source: verl's data_source, for data without such a column; answer_field: the column with the
    right answers, by default the one that `proxpo train` would take. A function that is TRL's
    already gets the whole batch and all that TRL hands over.
    """
    score, name = _per_sample(function), _name(function)
    if takes_batch(function, name):
        return _renamed(_checked_batch(function, name), function)

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        rewards = []
        for number, row in enumerate(_rows(len(completions), columns)):
            item = {
                "prompt": prompts[number],
                "completion": _text(completions[number]),
                "answer": answer_of(row, answer_field),
                "extra": row | dict(row.get("extra_info") or {}),
                "source": row.get("data_source", source),
                "kwargs": {},
            }
            rewards.append(_reward(score, item, f"reward '{name}', completion {number}"))
        return rewards

    return _renamed(reward, function)


def _checked_batch(function: Function, name: str) -> Function:
    """A reward function of TRL's that raises ProxpoError where the original fails."""

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        arguments = {"prompts": prompts, "completions": completions, **columns}
        outcomes = batch_outcomes(function, arguments, len(completions))
        for number, outcome in enumerate(outcomes):
            _refuse_failed(outcome, f"reward '{name}', completion {number}")
        return [outcome["reward"] for outcome in outcomes]

    return reward


def as_verl(function: Function, *, missing: float | None = None) -> Function:
    """Returns `compute_score(data_source, solution_str, ground_truth, extra_info) -> float`.

    missing: the reward where the function gives none; such a response is refused otherwise.
    """
    score, name = _per_sample(function), _name(function)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any
    ) -> float:
        extra = dict(extra_info or {})
        item = {
            "prompt": extra.get("prompt", extra.get("question", "")),
            "completion": solution_str,
            "answer": ground_truth,
            "extra": extra,
            "source": data_source,
            "kwargs": more,
        }
        reward = _reward(score, item, f"reward '{name}'")
        if reward is None and missing is None:
            raise ProxpoError(
                f"reward '{name}' gave none for a response of '{data_source}', and verl needs a "
                "number: say which with as_verl(..., missing=0.0)"
            )
        return missing if reward is None else reward  # type: ignore[return-value]

    return _renamed(compute_score, function)


def _reward(score: Function, item: Mapping[str, Any], place: str) -> float | None:
    outcome = call(score, item)
    _refuse_failed(outcome, place)
    return outcome["reward"]


def _refuse_failed(outcome: Mapping[str, Any], place: str) -> None:
    if outcome["status"] == "error":
        raise ProxpoError(f"{place}: {outcome['detail']}")


def _per_sample(function: Function) -> Function:
    try:
        return per_sample(function, f"reward '{_name(function)}'")
    except Unusable as error:
        raise ProxpoError(str(error)) from None


def _rows(count: int, columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Values of the columns sample by sample; TRL also passes objects that are no columns."""
    lists = {k: v for k, v in columns.items() if isinstance(v, (list, tuple)) and len(v) == count}
    for number in range(count):
        yield {name: values[number] for name, values in lists.items()}


def _text(completion: Any) -> str:
    """Answer of the model: a text, or the last message of a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _renamed(wrapper: Function, function: Function) -> Function:
    """The wrapper under the name of the function, which TRL's logs show."""
    wrapper.__name__ = wrapper.__qualname__ = _name(function)
    return wrapper


__all__ = ["as_trl", "as_verl"]
