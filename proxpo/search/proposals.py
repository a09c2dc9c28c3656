"""Proposals of candidates: drawn at random, or by Optuna's TPE from the candidates tried so far.

A proposal is a function of the seed, the bracket and the results of earlier brackets alone, so a
search that was stopped goes on as if it had not been.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxpo.compare.naming import setting_key
from proxpo.errors import ProxpoError, imported
from proxpo.ops.streams import derive
from proxpo.search.space import Settings, Space

PROPOSERS = ("tpe", "random")
TRIES = 200  # draws for each proposal that is asked for
Choices = dict[str, Any]  # by the name of the choice


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A candidate: the choices that make it, its recipe's settings and its swept settings."""

    choices: Choices
    recipe: Settings
    swept: Settings


@dataclass(kw_only=True)
class RandomDraw:
    """Uniform choices; `choices` keeps them."""

    source: random.Random
    choices: Choices = field(default_factory=dict)

    def choose(self, name: str, values: Sequence[Any]) -> Any:
        self.choices[name] = self.source.choice(list(values))
        return self.choices[name]

    def number(self, name: str, low: float, high: float, *, log: bool) -> float:
        if log:
            drawn = math.exp(self.source.uniform(math.log(low), math.log(high)))
        else:
            drawn = self.source.uniform(low, high)
        self.choices[name] = min(max(drawn, low), high)  # exp(log(low)) may lie below low
        return self.choices[name]


@dataclass(kw_only=True)
class TrialDraw:
    """Choices of an Optuna trial."""

    trial: Any

    @property
    def choices(self) -> Choices:
        return dict(self.trial.params)

    def choose(self, name: str, values: Sequence[Any]) -> Any:
        return self.trial.suggest_categorical(name, list(values))

    def number(self, name: str, low: float, high: float, *, log: bool) -> float:
        return self.trial.suggest_float(name, low, high, log=log)


@dataclass(kw_only=True)
class Replay:
    """Choices made before; `alternatives` keeps what each was chosen from."""

    choices: Mapping[str, Any]
    alternatives: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def choose(self, name: str, values: Sequence[Any]) -> Any:
        self.alternatives[name] = ("choice", tuple(values))
        return self._made(name, self.choices.get(name) in values)

    def number(self, name: str, low: float, high: float, *, log: bool) -> float:
        self.alternatives[name] = ("number", low, high, log)
        value = self.choices.get(name)
        return self._made(name, isinstance(value, float) and low <= value <= high)

    def _made(self, name: str, fits: bool) -> Any:
        if not fits or name not in self.choices:
            raise ProxpoError(
                f"the search was begun in another space ('{name}' differs): choose another --out"
            )
        return self.choices[name]


def replay(space: Space, choices: Mapping[str, Any]) -> Proposal:
    """The proposal that these choices made."""
    return _proposal(space, Replay(choices=choices))


def propose(
    space: Space,
    proposer: str,
    count: int,
    *,
    seed: int,
    bracket: int,
    earlier: Sequence[Proposal],
) -> list[Proposal]:
    """`count` valid candidates, none of them among `earlier`, which are in order, the worst first.

    TPE is told that order alone; in the first bracket it has none, and draws at random.
    """
    if proposer == "random" or not earlier:
        draws: _RandomDraws | _TreeDraws = _RandomDraws(
            random.Random(derive(seed, "proposals", bracket))
        )
    else:
        draws = _TreeDraws(space, derive(seed, "proposals", bracket) % 2**32, earlier)
    known = {_key(proposal) for proposal in earlier}
    proposals: list[Proposal] = []
    for _ in range(TRIES * count):
        if len(proposals) == count:
            return proposals
        draw = draws.next()
        try:
            proposal = _proposal(space, draw)
            space.check(proposal.recipe)
        except ProxpoError:
            draws.refuse(draw)
            continue
        if _key(proposal) in known:
            draws.refuse(draw)
            continue
        known.add(_key(proposal))
        proposals.append(proposal)
    raise ProxpoError(
        f"only {len(proposals)} of {count} new candidates were drawn in {TRIES * count} tries: the "
        "space of this run is too small, take fewer --candidates"
    )


def _proposal(space: Space, draw: Any) -> Proposal:
    recipe, swept = space.compose(draw)
    return Proposal(choices=dict(draw.choices), recipe=recipe, swept=swept)


def _key(proposal: Proposal) -> str:
    return setting_key({**proposal.recipe, **{f"set {k}": v for k, v in proposal.swept.items()}})


class _RandomDraws:
    """Independent draws from one random source."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def next(self) -> RandomDraw:
        return RandomDraw(source=self._source)

    def refuse(self, draw: Any) -> None:
        """Nothing: the next draw does not depend on this one."""


class _TreeDraws:
    """Draws of a tree-structured Parzen estimator (Bergstra et al. 2011) fitted to an order."""

    def __init__(self, space: Space, seed: int, earlier: Sequence[Proposal]) -> None:
        self._optuna = import_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        for rank, proposal in enumerate(earlier):
            made = Replay(choices=proposal.choices)
            space.compose(made)
            self._study.add_trial(
                self._optuna.trial.create_trial(
                    params=dict(proposal.choices),
                    distributions={k: self._distribution(v) for k, v in made.alternatives.items()},
                    value=float(rank),
                )
            )

    def next(self) -> TrialDraw:
        return TrialDraw(trial=self._study.ask())

    def refuse(self, draw: Any) -> None:
        """Marks the draw as failed: it made no new candidate."""
        self._study.tell(draw.trial, state=self._optuna.trial.TrialState.FAIL)

    def _distribution(self, alternatives: tuple[Any, ...]) -> Any:
        kinds = self._optuna.distributions
        if alternatives[0] == "choice":
            return kinds.CategoricalDistribution(alternatives[1])
        _, low, high, log = alternatives
        return kinds.FloatDistribution(low, high, log=log)


def import_optuna() -> Any:
    """Optuna; where it is missing, one line with the command that installs it."""
    return imported(
        "optuna",
        "--proposals tpe needs Optuna: pip install 'proxpo[search]', or --proposals random",
    )


__all__ = ["PROPOSERS", "Proposal", "RandomDraw", "import_optuna", "propose", "replay"]
