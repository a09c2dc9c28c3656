"""`Batch` in Python: what has one meaning is taken, the rest is refused as in a batch file."""

import json
import math
import pydoc
from typing import Any

import numpy as np
import pytest
import torch
from helpers import close, f64, make_batch
from torch import Tensor

import proxpo
from proxpo import Batch
from proxpo.batch_file import load_batch
from proxpo.errors import ProxpoError
from proxpo.fields import FIELDS


def given(**changes: Any) -> dict[str, Any]:
    """Two responses of three tokens; None removes a field."""
    fields = {
        "logp": f64([[-0.1, -0.2, -0.3], [-0.4, -0.5, -9.0]]),
        "old_logp": f64([[-0.2, -0.1, -0.4], [-0.4, -0.7, -9.0]]),
        "mask": torch.tensor([[True, True, True], [True, True, False]]),
        "rewards": f64([1.0, 0.0]),
        "group": torch.tensor([3, 3]),
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def loss(method: str = "grpo", **changes: Any) -> Tensor:
    return proxpo.loss_fn(method)(Batch(**given(**changes))).value


FLAGS = [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": torch.tensor(FLAGS)},  # int64, as transformers and TRL hand it out
        {"mask": torch.tensor(FLAGS, dtype=torch.uint8)},
        {"mask": torch.tensor(FLAGS, dtype=torch.float32)},
        {"mask": FLAGS},
        {"mask": np.array(FLAGS, dtype=bool)},
        {"rewards": torch.tensor([1, 0])},
        {"rewards": torch.tensor([True, False])},
        {"rewards": [1, 0]},
        {"rewards": (True, False)},
        {"rewards": np.array([1, 0], dtype=np.int8)},
        {"rewards": [torch.tensor(1), torch.tensor(0)]},
        {"rewards": [np.float32(1), np.float32(0)]},
        {"group": torch.tensor([7.0, 7.0])},
        {"group": torch.tensor([7, 7], dtype=torch.int32)},
        {"group": ["a sum", "a sum"]},
        {"group": np.array(["a sum", "a sum"])},
        {"old_logp": [[-0.2, -0.1, -0.4], [-0.4, -0.7, None]]},
        {"old_logp": np.array([[-0.2, -0.1, -0.4], [-0.4, -0.7, math.nan]])[:, ::-1][:, ::-1]},
        {"logp": list(given()["logp"])},
        {"logp": given()["logp"].numpy(), "mask": FLAGS, "rewards": [1, 0]},
    ],
)
def test_what_has_one_meaning_is_taken(changes: dict[str, Any]) -> None:
    close(loss(**changes), loss())


def test_converted_fields_have_the_dtype_of_the_log_probabilities() -> None:
    narrow = {"logp": torch.zeros(2, 3), "old_logp": None}
    batch = Batch(**given(**narrow, rewards=[1, 0], group=[0, 0], advantages=[1, 2], lag=FLAGS))
    assert batch.rewards.dtype == batch.advantages.dtype == torch.float32
    assert batch.group.dtype == torch.int64
    half = Batch(**given(logp=torch.zeros(2, 3).half(), old_logp=None, rewards=[1, 0]))
    assert half.rewards.dtype == torch.float32  # half of them could not hold a token count


def test_fields_that_fit_are_not_copied_and_rows_of_tensors_keep_their_gradient() -> None:
    fields = given()
    batch = Batch(**fields)
    assert all(getattr(batch, name) is value for name, value in fields.items())
    leaf = given()["logp"].requires_grad_()
    Batch(**given(logp=list(leaf))).logp.sum().backward()
    assert leaf.grad.eq(1).all()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mask": torch.ones(2, 1, dtype=torch.bool)}, "mask is 2 x 1, expected 2 x 3 to go with logp"),
    ({"old_logp": torch.zeros(3)}, "old_logp is a list of 3, expected 2 x 3"),
    ({"old_logp": torch.zeros(1, 3)}, "old_logp is 1 x 3, expected 2 x 3"),
    ({"old_logp": torch.zeros(2, 1)}, "old_logp is 2 x 1, expected 2 x 3"),
    ({"rewards": torch.zeros(2, 1)}, "rewards is 2 x 1, expected a list of 2"),
    ({"rewards": torch.zeros(())}, "rewards is a single number, expected a list of 2"),
    ({"rewards": torch.zeros(2, dtype=torch.complex64)}, "rewards holds complex numbers"),
    ({"old_logp": torch.ones(2, 3, dtype=torch.bool)}, "old_logp holds true and false, expected n"),
    ({"advantages": [True, False]}, "advantages holds true and false, expected numbers"),
    ({"rewards": 1.0}, "rewards is the number 1.0, expected a list"),
    ({"rewards": {"a": 1}}, "rewards is an object, expected a list"),
    ({"rewards": range(2)}, "rewards is a range, expected a list"),
    ({"rewards": ["good", "bad"]}, "rewards[0] is text, expected a number"),
    ({"rewards": [1j, 0]}, "rewards[0] is a complex, expected a number"),
    ({"rewards": [10**400, 0]}, "rewards holds an integer too large for float64"),
    ({"group": [10**30, 0]}, "group holds an integer too large for int64"),
    (
        {"group": torch.tensor([0.0, 0.5])},
        "group at row 1 (counted from 0) is 0.5, expected an int",
    ),
    ({"mask": torch.tensor(FLAGS) * 2}, "mask at row 0, column 0 (counted from 0) is 2"),
    ({"mask": [[1, 1, None], [1, 1, 0]]}, "is null or NaN, expected 0 or 1"),
    ({"truncated": [0, 2]}, "truncated at row 1 (counted from 0) is 2, expected 0 or 1"),
    ({"logp": [[-0.1, -0.2], [-0.3]]}, "logp is ragged: row 1 has 1 value, row 0 has 2 values"),
    ({"logp": [torch.zeros(3), torch.zeros(2)]}, "logp is ragged: row 1 has 2 values, row 0"),
    ({"logp": torch.zeros(6)}, "logp is a list of 6, expected responses x tokens"),
    ({"vocab_logp": torch.zeros(2, 3)}, "vocab_logp is 2 x 3, expected 2 x 3 x vocabulary"),
    ({"features": torch.zeros(3, 4)}, "features is 3 x 4, expected a list of 2 x units"),
    (
        {"mean": torch.zeros(2, 3, 4), "old_mean": torch.zeros(2, 3, 1)},
        "old_mean is 2 x 3 x 1, but the last axis of mean is 4",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_the_rest_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProxpoError) as refusal:
        Batch(**given(**changes))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_give_the_same_refusals(tmp_path) -> None:
    """Every list among them, written as JSON."""
    for changes, message in WRONG:
        if not all(isinstance(value, list) for value in changes.values()):
            continue
        data = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in given(**changes).items()}
        try:
            (tmp_path / "batch.json").write_text(json.dumps(data))
        except TypeError:  # no JSON: complex numbers, tensors
            continue
        with pytest.raises(ProxpoError) as refusal:
            load_batch(tmp_path / "batch.json")
        assert message in str(refusal.value)


def test_every_change_is_checked() -> None:
    batch = Batch(**given())
    with pytest.raises(ProxpoError, match="mask is 2 x 1"):
        batch.replace(mask=batch.mask[:, :1])
    assert batch.replace(rewards=[0, 1]).rewards.tolist() == [0.0, 1.0]
    with pytest.raises(ProxpoError, match="field 'mask' is missing"):
        batch.replace(mask=None)


def test_construction_looks_at_no_value_that_fits() -> None:
    """On a device without values: a look at them would fail there, and wait for a GPU."""
    fields = {name: value.to("meta") for name, value in make_batch(1).items()}
    assert Batch(**fields).rows(slice(0, 2)).logp.device.type == "meta"


NUMBERS = [
    ("old_logp", [[-0.2, math.inf, -0.4], [-0.4, -0.7, 0]], "old_logp at row 0, column 1 (counted"),
    ("old_logp", [[-0.2, math.nan, -0.4], [-0.4, -0.7, 0]], "is null or NaN, expected a finite"),
    (
        "logp",
        [[-0.2, -math.inf, -0.4], [-0.4, -0.7, 0]],
        "logp at row 0, column 1 (counted from 0)",
    ),
    (
        "rewards",
        [1.0, math.inf],
        "rewards at row 1 (counted from 0) is inf, expected a number whose",
    ),
    ("advantages", [math.nan, 1.0], "advantages at row 0 (counted from 0) is null or NaN"),
    ("token_rewards", [[math.nan, 0, 0], [0, 0, 0]], "token_rewards at row 0, column 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), NUMBERS)
def test_numbers_that_a_clamp_would_hide_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ProxpoError) as refusal:
        loss(**{name: f64(value)})
    assert message in str(refusal.value)


def test_a_reward_whose_square_overflows_is_refused() -> None:
    """In float32 the standard deviation of its group would be infinite and all advantages 0."""
    narrow = {n: v.float() for n, v in given().items() if v.is_floating_point()}
    for reward in (1e39, 1e30, -3e19):
        with pytest.raises(ProxpoError, match=r"rewards at row 0 .* whose square fits float32"):
            loss(**narrow | {"rewards": torch.tensor([reward, 0.0])})
    assert loss(**narrow | {"rewards": torch.tensor([1e15, 0.0])}).isfinite()
    close(loss(rewards=f64([1e39, 0.0])), loss(), rtol=1e-5)


def test_an_infinite_log_probability_of_a_new_pass_is_no_finite_loss() -> None:
    ready = proxpo.prepare("grpo", Batch(**given()))
    spoilt = ready.batch.replace(logp=torch.where(ready.batch.logp == -0.2, -torch.inf, -0.3))
    found = proxpo.policy_loss("grpo", spoilt, ready.ctx)
    assert found.value.isnan()


def test_a_method_may_be_given_by_name() -> None:
    close(loss("GRPO"), proxpo.loss_fn(proxpo.make_recipe("grpo"))(Batch(**given())).value)
    with pytest.raises(ProxpoError, match=r"unknown method 'grop'; did you mean 'grpo'?"):
        proxpo.loss_fn("grop")


@pytest.mark.long  # without the checks of annotations, which would come first
def test_what_is_no_recipe_or_no_batch_is_said() -> None:
    with pytest.raises(ProxpoError, match=r"got <function grpo at .*: call it first"):
        proxpo.loss_fn(proxpo.methods()["grpo"].make)
    with pytest.raises(ProxpoError, match=r"expected a proxpo.Batch, got dict"):
        proxpo.loss_fn("grpo")(given())


def test_help_explains_every_field():
    text = pydoc.render_doc(proxpo.Batch)
    for field in FIELDS.values():
        assert f"{field.name} ({field.axes}" in text
        assert field.doc in text
    assert len(repr(proxpo.make_recipe("text2grad")).splitlines()) > 5
