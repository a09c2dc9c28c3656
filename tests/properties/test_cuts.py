"""One big batch, its micro-batches and its ranks: the same loss and the same gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    CASES,
    close,
    f64,
    gradients,
    loss_and_gradients,
    make_batch,
    recipe,
    with_leaves,
)
from torch import Tensor

import proxpo
from properties.ranks import SEED, run_case
from proxpo import Batch, Recipe

pytestmark = pytest.mark.long  # the shapes of every case are checked in tests/methods
PER_MICROBATCH = [
    case for case in CASES if not all(stage.whole_batch for _, stage in recipe(case).stages())
]
WHOLE_BATCH = [case for case in CASES if case not in PER_MICROBATCH]
PAIRED = [case for case in CASES if CASES[case][0] == "dpo"]  # a pair must not be cut
IN_TWO = [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
ACROSS_GROUPS = [[8, 0, 4], [3], [1, 2, 5, 6, 7]]
BY_GROUP = [[3, 4, 5], [0, 1, 2, 6, 7, 8]]


def cut_loss(made: Recipe, batch: Batch, cut: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over micro-batches, with the denominators and statistics of the whole."""
    leaves = with_leaves(batch)
    ready = proxpo.prepare(made, leaves)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in cut]

    def loss(part: Batch, all_sum: object) -> Tensor:
        counts = ready.denominators
        return proxpo.policy_loss(made, part, denominators=counts, all_sum=all_sum).value

    all_sum = proxpo.over_microbatches(loss, parts)
    total = sum(loss(part, all_sum=all_sum) for part in parts)
    return total.detach(), gradients(total, leaves)


def test_which_recipes_look_at_the_microbatch() -> None:
    slugs = {CASES[case][0] for case in PER_MICROBATCH}
    assert slugs == {"clip-cov", "kl-cov", "entropy-80-20", "earl", "cppo"}


@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_microbatches_add_up(case: str) -> None:
    batch = make_batch(1, spread=0.4)
    value, grads = loss_and_gradients(recipe(case), batch)
    found = cut_loss(recipe(case), batch, BY_GROUP if case in PAIRED else ACROSS_GROUPS)
    close(found[0], value, rtol=1e-10)
    close(found[1], grads, rtol=1e-10)


@pytest.mark.parametrize("case", PER_MICROBATCH)
def test_choice_within_a_microbatch(case: str) -> None:
    """The part is treated as a batch of its own, weighed by its share of the tokens."""
    made, batch = recipe(case), make_batch(1, spread=0.4)
    ready = proxpo.prepare(made, batch)
    for cut in IN_TWO:
        part = ready.batch.rows(torch.tensor(cut))
        own = proxpo.compose.count(part)
        share = own.tokens / ready.denominators.tokens
        found = proxpo.policy_loss(made, part, denominators=ready.denominators).value
        alone = proxpo.policy_loss(made, part, denominators=own).value
        close(found, share * alone)


def test_averaging_token_means_is_wrong() -> None:
    """The classic mistake: the mean of the micro-batches' own means is another number."""
    batch = make_batch(1)
    made = recipe("dapo")
    ready = proxpo.prepare(made, batch)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in IN_TWO]
    own = [
        proxpo.policy_loss(made, part, denominators=proxpo.compose.count(part)).value
        for part in parts
    ]
    assert abs(sum(own) / 2 - proxpo.loss_fn(made)(batch).value) > 1e-3


def test_local_statistics_are_wrong_for_p3o() -> None:
    batch = make_batch(1, spread=0.6)
    ready = proxpo.prepare(recipe("p3o"), batch)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in IN_TWO]
    naive = sum(
        proxpo.policy_loss(recipe("p3o"), part, denominators=ready.denominators).value
        for part in parts
    )
    assert abs(naive - proxpo.loss_fn(recipe("p3o"))(batch).value) > 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two real processes, joined by gloo, each found for every case."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "properties.ranks", str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_two_ranks_are_one(case: str, ranks: list[dict]) -> None:
    whole = run_case(case, make_batch(SEED, groups=4, spread=0.4))
    first, second = (rank[case] for rank in ranks)
    close(f64(first["loss"]) + f64(second["loss"]), whole["loss"], rtol=1e-10)
    for name, grad in whole["gradients"].items():
        both = f64(first["gradients"][name] + second["gradients"][name])
        close(both, f64(grad), rtol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if recipe(case).init_state()])
def test_ranks_agree_on_the_next_state(case: str, ranks: list[dict]) -> None:
    whole = run_case(case, make_batch(SEED, groups=4, spread=0.4))
    first, second = (rank[case]["state"] for rank in ranks)
    for place, state in whole["state"].items():
        if "prompt_id" in state:  # each process remembers the prompts it has seen
            assert by_prompt(first[place]) | by_prompt(second[place]) == by_prompt(state)
            continue
        assert first[place] == second[place]
        for key, value in state.items():
            close(first[place][key], value)


def by_prompt(table: dict[str, list]) -> dict[int, dict[str, float]]:
    """The rows of a table of prompts."""
    columns = sorted(table.keys() - {"prompt_id"})
    return {
        prompt: {name: table[name][at] for name in columns}
        for at, prompt in enumerate(table["prompt_id"])
    }
