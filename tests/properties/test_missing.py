"""A batch that lacks a field: one line says which one, for whom, what it is and who provides it."""

import re

import pytest
from helpers import make_batch
from methods.cases import CASES, recipe
from methods.toy_updates import ToyUpdates, run

import proxpo
from proxpo import Batch
from proxpo.errors import ProxpoError
from proxpo.types import FIELDS

IN_THE_LOSS = {"reward", "filter", "advantage", "prune", "weights", "ratio", "trust"}
IN_THE_LOSS |= {"regularisers", "select", "aggregate"}
GIVEN = {"logp", "mask"}


def asked(case: str, kinds: set[str]) -> set[str]:
    """Fields that the case's stages of these kinds say they read."""
    stages = [stage for _, stage in recipe(case).stages() if stage.kind in kinds]
    return {name for stage in stages for name in stage.needs} - GIVEN


LACKING = {case: asked(case, IN_THE_LOSS) for case in CASES}
for _case in CASES:
    if CASES[_case].slug == "text2grad":
        LACKING[_case] -= {"rewards"}  # a critique's marks replace it: not read, so not missed
READING = [case for case in CASES if "entropy" in asked(case, {"schedule"})]
FRESH = [case for case in READING if recipe(case).schedule.name == "poisson_replay"]
JUDGING = [case for case in READING if case not in FRESH]  # the schedule itself reads it


def assert_told(error: ProxpoError, case: str, name: str) -> None:
    line = str(error)
    assert "\n" not in line
    assert f"'{name}' ({FIELDS[name].doc})" in line
    kind, stage = re.search(r"(\w+)=(\w+)", line).groups()
    assert stage in {one.name for _, one in recipe(case).stages() if one.kind == kind}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_says_what_it_lacks(case: str) -> None:
    loss, batch = proxpo.loss_fn(recipe(case)), make_batch(1)
    for name in sorted(LACKING[case]):
        stand_ins = {stage.instead.get(name, name) for _, stage in recipe(case).stages()}
        with pytest.raises(ProxpoError) as error:
            loss(batch.replace(**dict.fromkeys(stand_ins | {name})))
        assert_told(error.value, case, name)


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_is_read(case: str) -> None:
    """What the stages say they read is enough; a field read in silence would be missed here."""
    batch = make_batch(1)
    batch = batch.replace(rewards=(batch.rewards > 0.5).double())
    said = {name for _, stage in recipe(case).stages() for name in stage.needs} | GIVEN
    bare = Batch(**{name: value for name, value in batch.items() if name in said})
    assert proxpo.loss_fn(recipe(case))(bare).value.isfinite()


@pytest.mark.parametrize("case", [case for case in CASES if recipe(case).budget])
def test_a_budget_says_what_it_lacks(case: str) -> None:
    made, batch = recipe(case), make_batch(1).replace(prompt_id=None)
    with pytest.raises(ProxpoError) as error:
        made.update_state(made.init_state(), batch, {})
    assert_told(error.value, case, "prompt_id")


@pytest.mark.parametrize("case", JUDGING)
def test_a_schedule_says_what_it_lacks(case: str) -> None:
    made, batch = recipe(case), make_batch(1).replace(entropy=None)
    with pytest.raises(ProxpoError) as error:
        run(made, ToyUpdates(recipe=made, batch=batch))
    assert_told(error.value, case, "entropy")


@pytest.mark.parametrize("case", FRESH)
def test_the_loss_of_fresh_data_says_what_it_lacks(case: str) -> None:
    made = recipe(case)
    loss = proxpo.loss_fn(made.schedule.apply.fresh(made).replace(schedule=None))
    with pytest.raises(ProxpoError, match=r"entropy_bonus needs the batch field 'entropy'"):
        loss(make_batch(1).replace(entropy=None))


def test_what_no_recipe_can_do_without_is_asked_for() -> None:
    """The fields of the environments and of the policy's insides are all among those tested."""
    special = {"turn", "void", "duration", "span_rewards", "hidden", "features", "tokens", "mean"}
    special |= {"vocab_logp", "old_vocab_logp", "ref_kl", "prev_logp", "entropy", "greedy_rewards"}
    assert special <= set().union(*LACKING.values())
    assert JUDGING
    assert FRESH


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_names_its_provider(name: str) -> None:
    assert re.search(r"\bfrom |\breported by |\bset by |\bcomputed by ", FIELDS[name].doc)
