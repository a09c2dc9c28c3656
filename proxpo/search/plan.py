"""The plan of a search and its state, in one file of the search's folder.

search.yaml              the plan, the choices that made each bracket's candidates, seconds spent
named/rung-0 ...         comparisons: the named methods, halved like the candidates
bracket-01/rung-0 ...    comparisons: one bracket of candidates, rung by rung
confirm-01, unseen-01    comparisons: finalists and best named methods on fresh seeds
search.html              drawn from the files above alone; winner.yaml where there is a winner
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from proxpo.compare.arms import swept_settings
from proxpo.compare.design import TUNING, make_plan
from proxpo.compare.naming import set_text
from proxpo.compare.plan import SEARCH, Arm, Plan, plain
from proxpo.compare.request import Request
from proxpo.compare.runner import locked
from proxpo.errors import ProxpoError
from proxpo.recipes import method
from proxpo.runs.files import write_whole
from proxpo.runs.lock import LOCK
from proxpo.runs.yaml_file import dump_yaml, read_yaml
from proxpo.search.proposals import PROPOSERS
from proxpo.train._settings import place
from proxpo.train.domains import domain_of

VERSION = 1
NAMED = ("reinforce", "grpo", "dr-grpo", "gspo", "cispo", "p3o", "ema-kpo", "isopo")
SHARES = (4, 2, 1)  # of a rung: a quarter of the steps, half of them, all


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit of the search, in runs or in minutes; the confirmation comes on top."""

    runs: int | None = None
    minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search as a command line describes it; `named` brings methods, config, sets and sweep."""

    named: Request
    unseen: Sequence[tuple[str, Any]]
    budget: Budget
    proposer: str = "tpe"
    candidates: int = 16
    finalists: int = 3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Everything that decides the runs of a search.

    base, unseen: config trees of the task that is searched on and of the one that is not
    named: methods of the catalogue, each with every combination of the swept settings
    seeds, tune: numbers of seeds of the confirmation and of the last rung
    """

    base: Mapping[str, Any]
    unseen: Mapping[str, Any]
    named: tuple[Arm, ...]
    sweep: Mapping[str, tuple[Any, ...]]
    proposer: str
    candidates: int
    finalists: int
    seeds: int
    tune: int
    seed: int
    score: str
    budget: Budget
    notes: tuple[str, ...] = ()

    @property
    def rungs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Steps and seeds of each rung."""
        steps = self.base["train"]["steps"]
        first = max(TUNING, self.seeds)
        return tuple(
            (math.ceil(steps / share), tuple(range(first, first + min(rung + 1, self.tune))))
            for rung, share in enumerate(SHARES)
        )

    def cost(self, arms: int) -> int:
        """Runs of a bracket that begins with so many arms."""
        total = 0
        for _, seeds in self.rungs:
            total += arms * len(seeds)
            arms = kept(arms)
        return total

    @property
    def brackets(self) -> int | None:
        """Brackets of candidates that the runs of the budget allow; None: minutes decide."""
        if self.budget.runs is None:
            return None
        return (self.budget.runs - self.cost(len(self.named))) // self.cost(self.candidates)

    @property
    def confirmation(self) -> int:
        """Most runs of the confirmation: finalists and as many named methods, on two tasks."""
        opponents = min(self.finalists, len({arm.family for arm in self.named}))
        return 2 * self.seeds * (self.finalists + opponents)


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """Progress: choices of the candidates by bracket, and seconds spent on each bracket.

    The first of `seconds` are those of the named methods.
    """

    brackets: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    seconds: tuple[float, ...] = (0.0,)


def kept(arms: int) -> int:
    """Arms that go on to the next rung: half of them, rounded up."""
    return math.ceil(arms / 2)


def parse_budget(text: str) -> Budget:
    """`240` runs, or `90min`."""
    number, minutes = (text[:-3], True) if text.endswith("min") else (text, False)
    try:
        value = float(number)
        if not 0 < value < math.inf or (not minutes and not value.is_integer()):
            raise ValueError
    except ValueError:
        raise ProxpoError(
            f"--budget takes runs or minutes, as 240 or 90min, got '{text}'"
        ) from None
    return Budget(minutes=value) if minutes else Budget(runs=int(value))


def make_search(request: SearchRequest) -> SearchPlan:
    """The plan of a search; refuses every mistake and writes nothing."""
    named = request.named
    if named.tune_best is not None:
        raise ProxpoError("--tune-best has no place in a search, which halves its candidates")
    if named.vary:
        raise ProxpoError("--vary has no place in a search: --sweep adds a setting to its space")
    if named.first_seed:
        raise ProxpoError("--first-seed has no place in a search: it confirms on seeds of its own")
    if request.proposer not in PROPOSERS:
        raise ProxpoError(f"unknown proposer '{request.proposer}'")
    for option, value, least in (
        ("--candidates", request.candidates, 2),
        ("--finalists", request.finalists, 1),
        ("--seeds", named.seeds, 2),
        ("--tune-seeds", named.tune, 1),
    ):
        if value < least:
            raise ProxpoError(f"a search needs {option} of at least {least}, got {value}")
    plan = make_plan(replace(named, sweep={}))
    unseen = make_plan(replace(named, sweep={}, base=(*named.base, *request.unseen)))
    _check_shared(named, plan)
    for tree in (plan.base, unseen.base):
        if domain_of(tree["task"]["name"]).name != "language":
            raise ProxpoError("--search composes stages for language models; take such a task")
    if unseen.base["task"] == plan.base["task"]:
        raise ProxpoError(
            "a search is confirmed on a task that it has not seen: name one, as in --unseen "
            "task.options.digits=2 or --unseen task=reasoning-gym:chain_sum"
        )
    for key in named.sweep:
        if place(key, ())[0] == "recipe":
            raise ProxpoError(
                f"--sweep {key}: in a search settings of the run are swept, not those of methods"
            )
    make_plan(named)  # checks the swept values
    arms = tuple(
        Arm(
            name=" ".join([arm.name, *(f"{key}={set_text(v)}" for key, v in swept.items())]),
            method=arm.method,
            settings={**arm.settings, **swept},
            family=arm.name,
        )
        for arm in plan.arms
        for swept in swept_settings(arm, named.sweep)
    )
    notes = [] if named.sweep else ["no --sweep: all candidates and methods train at one rate"]
    search = SearchPlan(
        base=plan.base,
        unseen=unseen.base,
        named=arms,
        sweep={key: tuple(values) for key, values in named.sweep.items()},
        proposer=request.proposer,
        candidates=request.candidates,
        finalists=request.finalists,
        seeds=named.seeds,
        tune=named.tune,
        seed=request.seed,
        score=plan.score,
        budget=request.budget,
        notes=(*plan.notes, *notes),
    )
    if search.brackets is not None and search.brackets < 1:
        least = search.cost(len(arms)) + search.cost(search.candidates)
        raise ProxpoError(
            f"--budget {search.budget.runs} is too small: the named methods and one bracket of "
            f"{search.candidates} candidates take {least} runs"
        )
    return search


@contextmanager
def open_search(folder: Path, plan: SearchPlan | None) -> Iterator[tuple[SearchPlan, SearchState]]:
    """Locks the folder and yields plan and state: those stored there, else `plan`, which is stored.

    Another budget than the stored one is taken over; any other difference is refused.
    """
    state = SearchState()
    if plan is None or (folder / SEARCH).exists():
        stored, state = read_search(folder)
        if plan is not None:
            old, new = plain(replace(stored, budget=plan.budget)), plain(plan)
            changed = [key for key in new if key != "notes" and repr(new[key]) != repr(old[key])]
            if changed:
                raise ProxpoError(
                    f"{folder} holds another search ({', '.join(changed)} differ): choose another "
                    "--out"
                )
        plan = plan or stored
    elif folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {LOCK}):
        raise ProxpoError(f"{folder} is there already and holds no search: choose another --out")
    with locked(folder):
        write_search(folder, plan, state)
        yield plan, state


def write_search(folder: Path, plan: SearchPlan, state: SearchState) -> None:
    """Writes search.yaml, whole or not at all."""
    tree = {"version": VERSION, "plan": asdict(plan), "state": asdict(state)}
    write_whole(folder / SEARCH, dump_yaml(plain(tree)).encode())


def read_search(folder: Path) -> tuple[SearchPlan, SearchState]:
    """Plan and state of a search's folder; refused in one line if missing or damaged."""
    path = folder / SEARCH
    if not path.is_file():
        raise ProxpoError(f"{folder} holds no search: {SEARCH} is missing")
    tree = read_yaml(path)
    if tree.get("version") != VERSION:
        raise ProxpoError(f"{path}: version {tree.get('version')} is not {VERSION}, read here")
    try:
        values = {field_.name: tree["plan"][field_.name] for field_ in fields(SearchPlan)}
        values["named"] = tuple(Arm(**arm) for arm in values["named"])
        values["sweep"] = {key: tuple(options) for key, options in values["sweep"].items()}
        values["notes"] = tuple(values["notes"])
        values["budget"] = Budget(**values["budget"])
        state = SearchState(
            brackets=tuple(tuple(dict(one) for one in each) for each in tree["state"]["brackets"]),
            seconds=tuple(map(float, tree["state"]["seconds"])),
        )
        return SearchPlan(**values), state
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ProxpoError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def _check_shared(request: Request, plan: Plan) -> None:
    """Refuses a --set that belongs to the methods: candidates have other stages."""
    for key, _ in request.base:
        if ":" not in key and any(
            place(key, method(arm.method).defaults)[0] == "recipe" for arm in plan.arms
        ):
            raise ProxpoError(
                f"--set {key} is a setting of methods, and candidates have stages of their own: "
                f"write it at a method, as in {plan.arms[0].method}:{key}=VALUE"
            )


__all__ = [
    "NAMED",
    "Budget",
    "SearchPlan",
    "SearchRequest",
    "SearchState",
    "kept",
    "make_search",
    "open_search",
    "parse_budget",
    "read_search",
    "write_search",
]
