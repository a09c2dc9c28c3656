"""State goes in and comes out explicitly, and survives being written down."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import close, f64, make_batch, method
from methods.cases import CASES, recipe
from safetensors.torch import load_file, save_file

import proxpo
from proxpo import Batch, Recipe, Stage, make_stage
from proxpo.ops.metering import combined
from proxpo.types import Context, PerToken, local

STATEFUL = [case for case in CASES if recipe(case).init_state()]


def flat(state: dict) -> dict[str, torch.Tensor]:
    return {f"{place}/{key}": value for place, kept in state.items() for key, value in kept.items()}


def nested(flat_state: dict, like: dict) -> dict[str, dict[str, torch.Tensor]]:
    out: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in flat_state.items():
        place, key = name.rsplit("/", 1)
        out.setdefault(place, {})[key] = torch.as_tensor(value, dtype=like[name].dtype)
    return out


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def stepped(made: object, state: dict, seed: int) -> tuple[torch.Tensor, dict]:
    """The loss, and the state after an optimizer step and the end of the rollout."""
    batch, ctx, seen = proxpo.prepare(made, make_batch(seed), Context(states=state))
    value, metrics = proxpo.policy_loss(made, batch, ctx)
    state = made.step_state(state, batch, metrics, ctx)
    return value, made.update_state(state, batch, seen | metrics)


def test_some_recipes_have_state() -> None:
    assert "ppo-full" in STATEFUL


@pytest.mark.parametrize("case", STATEFUL)
def test_round_trip(case: str, tmp_path: Path) -> None:
    made = recipe(case)
    _, state = stepped(made, made.init_state(), seed=1)
    save_file(flat(state), tmp_path / "state.safetensors")
    text = json.dumps({name: value.tolist() for name, value in flat(state).items()})
    expected, after = stepped(made, state, seed=2)
    for restored in (load_file(tmp_path / "state.safetensors"), json.loads(text)):
        value, following = stepped(made, nested(restored, flat(state)), seed=2)
        assert value == expected
        assert_same(flat(following), flat(after))


@pytest.mark.parametrize("case", STATEFUL)
def test_memory_moves(case: str) -> None:
    """Every stage that follows the run has another state after a step than before it."""
    made = recipe(case)
    before = made.init_state()
    _, after = stepped(made, before, seed=1)
    for place, stage in made.stages():
        held = stage.options.get("controller") == "fixed" or stage.options.get("coef") == 0
        if before.get(place) and (stage.update or stage.step) and not held:
            same = [torch.equal(after[place][name], value) for name, value in before[place].items()]
            assert not all(same), place


def test_a_step_neither_changes_its_state_nor_its_batch() -> None:
    made = method("ppo", kl_coef=0.1, kl_controller="doubling", kl_target=1e-6)
    state, batch = made.init_state(), make_batch(1)
    before = {name: value.clone() for name, value in batch.items()}
    _, metrics = proxpo.loss_fn(made)(batch, Context(states=state))
    following = made.update_state(state, batch, metrics)
    assert following != state
    close(state["reward.kl_in_reward"]["coef"], 0.1)
    assert all(torch.equal(value, before[name]) for name, value in batch.items())


def with_a_kl(batch: Batch, ctx: Context) -> tuple[Batch, dict[str, torch.Tensor]]:
    """A reward stage of another library, with the metrics that PPO's controller has."""
    return batch, {"reward/kl": torch.tensor(50.0), "reward/responses": f64(9)}


def no_penalty(ratio: torch.Tensor, batch: Batch, ctx: Context) -> PerToken:
    """A penalty of nothing, under the names of the metrics that FixPO's multiplier follows."""
    return 0.0 * ratio, {"kl/old": torch.tensor(9.0), "kl/old_max": torch.tensor(9.0)}


OTHERS = {
    "reward": (
        method("ppo", kl_coef=0.1, kl_controller="horizon", kl_horizon=100.0),
        Stage(kind="reward", name="other", apply=with_a_kl),
    ),
    "penalty": (
        method("fixpo", statistic="mean"),
        Stage(kind="regularisers", name="other", apply=no_penalty),
    ),
    "largest": (
        method("fixpo", statistic="max"),
        Stage(kind="regularisers", name="other", apply=no_penalty),
    ),
    "divergence": (
        method("fixpo", statistic="mean"),
        make_stage("regularisers", "kl_from_old", coef=0.0),
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize(("made", "other"), OTHERS.values(), ids=OTHERS.keys())
def test_a_metric_of_another_stage_is_no_memory(
    made: Recipe, other: Stage, cut: int, first: bool
) -> None:
    """The next state is that without the other stage, wherever it stands, in micro-batches too."""
    members = getattr(made, other.kind)
    joined = (other, *members) if first else (*members, other)
    crowded = made.replace(**{other.kind: joined})
    assert_same(flat(state_after(crowded, cut)), flat(state_after(made, cut)))


def state_after(made: Recipe, cut: int) -> dict:
    """The state after one step on micro-batches of every `cut`-th row, and after the rollout."""
    state = made.init_state()
    batch, ctx, seen = proxpo.prepare(made, make_batch(1, spread=0.4), Context(states=state))
    totals: dict[str, torch.Tensor] = {}
    for start in range(cut):
        part = batch.rows(torch.arange(start, len(batch.mask), cut))
        share = float(part.mask.sum() / batch.mask.sum())
        _, metrics = proxpo.policy_loss(made, part, replace(ctx, all_sum=local))
        totals = combined(made, totals, metrics, share=share)
    state = made.step_state(state, batch, seen | totals, ctx)
    return made.update_state(state, batch, seen | totals)


def test_stateless_recipes_have_none() -> None:
    assert method("grpo").init_state() == {}
