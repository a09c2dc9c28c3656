"""One big batch, its micro-batches and its ranks: the same loss and the same gradient."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzzing import times
from helpers import close, f64, gradients, loss_and_gradients, make_batch, method, with_leaves
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.cases import CASES, recipe
from torch import Tensor

import proxpo
from properties.effects import hosts, stage_of, with_stage
from properties.ranks import SEED, run_case
from properties.strategies import Spec, specs
from properties.test_options import other_values
from proxpo import Batch, Context, Recipe, compose
from proxpo.compose import OF_THE_LOSS, local_stages
from proxpo.errors import ProxpoError
from proxpo.ops.metering import combined, share_of_step
from proxpo.stages import STAGES, check_stages, make_stage
from proxpo.stages.schedule import variants
from proxpo.types import Loss, local

pytestmark = pytest.mark.long  # the shapes of every case are checked in tests/methods
WHOLE_BATCH = [case for case in CASES if not local_stages(recipe(case))]
IN_TWO = [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
ACROSS_GROUPS = [[8, 0, 4], [3], [1, 2, 5, 6, 7]]
LOOSE = {"rtol": 1e-9, "atol": 1e-11}  # sums in another order
BY_GROUP = [[3, 4, 5], [0, 1, 2, 6, 7, 8]]


def cut_losses(made: Recipe, batch: Batch, cut: list[list[int]]) -> list[tuple[float, Loss]]:
    """Each micro-batch's share of the tokens and its loss, with the statistics of the whole."""
    ready = proxpo.prepare(made, batch)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in cut]
    counts = ready.ctx.counts

    def loss(part: Batch, all_sum: object) -> Loss:
        return proxpo.policy_loss(made, part, replace(ready.ctx, all_sum=all_sum))

    all_sum = proxpo.over_microbatches(loss, parts)
    return [
        (
            float(share_of_step(part.mask.sum(), counts.tokens, parts=len(parts))),
            loss(part, all_sum=all_sum),
        )
        for part in parts
    ]


def cut_loss(made: Recipe, batch: Batch, cut: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over micro-batches, with the denominators and statistics of the whole."""
    leaves = with_leaves(batch)
    total = sum(loss.value for _, loss in cut_losses(made, leaves, cut))
    return total.detach(), gradients(total, leaves)


def cut_metrics(made: Recipe, batch: Batch, cut: list[list[int]]) -> dict[str, Tensor]:
    """Metrics of the step, combined from those of its micro-batches."""
    totals: dict[str, Tensor] = {}
    for share, (value, metrics) in cut_losses(made, batch, cut):
        totals = combined(made, totals, {**metrics, "loss": value}, share=share)
    return totals


def test_no_recipe_looks_at_the_microbatch() -> None:
    """Every loss of the catalogue adds up: those below are all."""
    assert list(CASES) == WHOLE_BATCH


OF_A_LOSS = [
    (kind, name)
    for kind in (*OF_THE_LOSS, "schedule")
    for name, factory in STAGES[kind].items()
    if factory.__module__.startswith("proxpo.")
]


@pytest.mark.parametrize(("kind", "name"), OF_A_LOSS)
def test_every_option_adds_up_or_is_declared(kind: str, name: str) -> None:
    """Each loss stage under each value of its options, and the losses of schedules, cut in three.

    Cuts add up under the sums of all cuts, and add up or are refused without; a stage that is
    declared to look at each cut by itself is refused, and warned of under such sums.
    """
    for made in with_each_option(kind, name):
        for loss in variants(made) or (made,):
            check_cuts(loss)


def with_each_option(kind: str, name: str) -> Iterator[Recipe]:
    """The first recipe of the catalogue that has the stage, under each value of its options."""
    for made in hosts(kind, name)[:1]:
        stage = stage_of(made, kind, name)
        changes = [{}] + [
            {option: value}
            for option in stage.options
            for value in other_values(kind, name, option, stage.options[option])
        ]
        for change in changes:
            try:
                changed = make_stage(kind, name, **{**stage.options, **change})
                yield check_stages(with_stage(made, changed))
            except ProxpoError:  # no value of this option, or none beside the others
                continue


def check_cuts(made: Recipe) -> None:
    ready = proxpo.prepare(made.replace(schedule=None, gradient=None), make_batch(1, spread=0.4))
    leaves = with_leaves(ready.batch)
    parts = [leaves.rows(torch.tensor(rows)) for rows in ACROSS_GROUPS]
    if declared := local_stages(made.replace(schedule=None)):
        with pytest.raises(ProxpoError, match="looks at each cut of a batch by itself"):
            proxpo.policy_loss(made, parts[0], ready.ctx)
    whole = proxpo.policy_loss(made, leaves, ready.ctx).value

    def loss(part: Batch, all_sum: object) -> Loss:
        return proxpo.policy_loss(made, part, replace(ready.ctx, all_sum=all_sum))

    compose._WARNED.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        all_sum = proxpo.over_microbatches(loss, parts)
        total = sum(loss(part, all_sum).value for part in parts)
    assert bool(declared) == any("looks at each cut" in str(each.message) for each in seen)
    if not declared:
        close(total, whole, rtol=1e-9)
        close(gradients(total, leaves), gradients(whole, leaves), rtol=1e-9)
        close(sum_or_refusal(made, parts, ready.ctx, expected=whole), whole, rtol=1e-9)


@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_microbatches_add_up(case: str) -> None:
    batch = make_batch(1, spread=0.4)
    value, grads = loss_and_gradients(recipe(case), batch)
    found = cut_loss(recipe(case), batch, ACROSS_GROUPS)
    close(found[0], value, rtol=1e-10)
    close(found[1], grads, rtol=1e-10)


@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_metrics_of_microbatches_are_those_of_the_whole(case: str) -> None:
    made, batch = recipe(case), make_batch(1, spread=0.4)
    ready = proxpo.prepare(made, batch)
    value, metrics = proxpo.policy_loss(made, ready.batch, ready.ctx)
    found = cut_metrics(made, batch, ACROSS_GROUPS)
    close(found, {**metrics, "loss": value}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", WHOLE_BATCH)
def test_metrics_of_a_step_without_a_valid_token(case: str) -> None:
    """Cut or whole: the effective sample size of nothing is 1, a mean over nothing 0."""
    made, batch = recipe(case), make_batch(1, spread=0.4)
    batch = batch.replace(mask=torch.zeros_like(batch.mask))
    ready = proxpo.prepare(made, batch)
    value, metrics = proxpo.policy_loss(made, ready.batch, ready.ctx)
    close(cut_metrics(made, batch, ACROSS_GROUPS), {**metrics, "loss": value}, rtol=1e-6)
    if "ratio/ess" in metrics:
        assert float(metrics["ratio/ess"]) == 1.0


@pytest.mark.parametrize("case", WHOLE_BATCH)
@settings(max_examples=times(3))
@given(specs, st.data())
def test_any_cut_adds_up_or_is_refused(case: str, spec: Spec, data: st.DataObject) -> None:
    """Losses, gradients and metrics over random cuts; without the sums of all cuts as well."""
    made, batch = recipe(case), spec.batch()
    places = data.draw(
        st.lists(st.integers(0, 2), min_size=len(batch.mask), max_size=len(batch.mask))
    )
    cut = [[i for i, at in enumerate(places) if at == part] for part in range(3)]
    cut = [rows for rows in cut if rows]
    value, grads = loss_and_gradients(made, batch)
    found = cut_loss(made, batch, cut)
    close(found[0], value, **LOOSE)
    close(found[1], grads, **LOOSE)
    ready = proxpo.prepare(made, batch)
    _, metrics = proxpo.policy_loss(made, ready.batch, ready.ctx)
    close(cut_metrics(made, batch, cut), {**metrics, "loss": value}, rtol=1e-4, atol=1e-5)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in cut]
    close(sum_or_refusal(made, parts, ready.ctx, expected=value), value, **LOOSE)


def sum_or_refusal(made: Recipe, parts: list[Batch], ctx: Context, *, expected: Tensor) -> Tensor:
    """The sum over cuts without a word of their being cuts; `expected` where that is refused."""
    try:
        return sum(proxpo.policy_loss(made, one, ctx).value for one in parts)
    except ProxpoError as refusal:
        if not re.search(r"sums over .* of the step's \d+ tokens: pass all_sum=", str(refusal)):
            raise
        return expected


def test_pairs_cut_apart_are_refused_without_the_sums_of_all_cuts() -> None:
    """Half of each group here and half there, as micro-batches of 4 cut groups of 8."""
    made, batch = recipe("dpo"), make_batch(1)
    ready = proxpo.prepare(made, batch)
    value = proxpo.loss_fn(made)(batch).value
    half = ready.batch.rows(torch.tensor(IN_TWO[0]))
    with pytest.raises(ProxpoError, match=r"dpo: the loss takes sums over whole groups, and"):
        proxpo.policy_loss(made, half, ready.ctx)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in BY_GROUP]
    close(sum(proxpo.policy_loss(made, one, ready.ctx).value for one in parts), value)


PER_MICROBATCH = {
    "clip-cov": {"trust.scope": "microbatch", "share": 0.2, "cov_low": 0.05},
    "kl-cov": {"regularisers.covariance_penalty.scope": "microbatch", "share": 0.2},
    "entropy-80-20": {"scope": "microbatch"},
    "p3o": {"ess_scope": "microbatch"},
}


@pytest.mark.parametrize("slug", PER_MICROBATCH)
def test_choice_within_a_microbatch(slug: str) -> None:
    """The part is treated as a batch of its own, weighed by its share of the tokens."""
    made, batch = method(slug, **PER_MICROBATCH[slug]), make_batch(1, spread=0.4)
    assert local_stages(made)
    ready = proxpo.prepare(made, batch)
    for cut in IN_TWO:
        part = ready.batch.rows(torch.tensor(cut))
        own = proxpo.compose.count(part)
        share = own.tokens / ready.ctx.counts.tokens
        found = proxpo.policy_loss(made, part, replace(ready.ctx, all_sum=local)).value
        alone = proxpo.policy_loss(made, part, Context(denominators=own)).value
        close(found, share * alone)


def test_averaging_token_means_is_wrong() -> None:
    """The classic mistake: the mean of the micro-batches' own means is another number."""
    batch = make_batch(1)
    made = recipe("dapo")
    ready = proxpo.prepare(made, batch)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in IN_TWO]
    own = [
        proxpo.policy_loss(made, part, Context(denominators=proxpo.compose.count(part))).value
        for part in parts
    ]
    assert abs(sum(own) / 2 - proxpo.loss_fn(made)(batch).value) > 1e-3


def test_local_statistics_are_wrong_for_p3o() -> None:
    batch = make_batch(1, spread=0.6)
    ready = proxpo.prepare(recipe("p3o"), batch)
    parts = [ready.batch.rows(torch.tensor(rows)) for rows in IN_TWO]
    with pytest.raises(ProxpoError, match="p3o: the loss takes sums over the whole step"):
        proxpo.policy_loss(recipe("p3o"), parts[0], ready.ctx)
    naive = sum(
        proxpo.policy_loss(recipe("p3o"), part, replace(ready.ctx, all_sum=local)).value
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
