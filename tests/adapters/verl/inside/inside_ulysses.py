"""verl's Ulysses on the CPU: ranks that hold slices of the positions against our own loop."""

from types import SimpleNamespace

import pytest
import torch
from engine_ranks import SPREAD
from engine_setup import (
    ALL,
    actor,
    backward,
    close,
    make_data,
    make_engine,
    own_isopo,
    own_isopo_and_kl,
    same_direction,
    step,
)
from torch.distributed.tensor import distribute_tensor

import proxpo
from proxpo.adapters.verl.engine import check_engine_config
from proxpo.gradients import isopo

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("mesh", ["slices", "both"])
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.checks("isopo", "under verl's Ulysses the gradients are those of one rank")
def test_ulysses_equals_one_rank(ranks, mesh, name):
    """Two ranks that share all sequences; four, of which two share a half, with checkpointing."""
    close(ranks[mesh][name], own_isopo(SPREAD[name][2](), 4))


def test_ulysses_pads_the_last_slice(ranks):
    assert ranks["slices"]["sequences"].tolist() == [[0] * 9 + [1] * 5 + [2] * 7 + [-1]]


def test_ulysses_with_terms_outside_the_transform(engine, ranks):
    close(ranks["slices"]["kl"], own_isopo_and_kl())
    wanted, _ = backward(engine, make_data(micro=8), actor("proxpo_p3o", "token-mean"))
    close(ranks["slices"]["p3o"], wanted)


def test_ulysses_with_a_rank_that_holds_padding_alone(ranks):
    close(ranks["slices"]["padding"], own_isopo(isopo(**ALL), 4))


def test_ulysses_in_verl_s_default_precision(ranks):
    same_direction(ranks["slices"]["bfloat16"], own_isopo(isopo(**ALL), 4))


def test_ulysses_with_adapters(ranks):
    engine = make_engine(lora=4)
    state = dict(engine.module.named_parameters())
    with torch.no_grad():
        for name, value in ranks["slices"]["lora weights"].items():
            state[name].copy_(distribute_tensor(value, state[name].device_mesh))
    wanted, _ = backward(engine, make_data(micro=4), actor("proxpo_isopo", options=ALL))
    found = ranks["slices"]["lora"]
    assert found.keys() == wanted.keys()
    close(*({n: g for n, g in x.items() if "lora_B" in n} for x in (found, wanted)))


def test_ulysses_over_two_steps(ranks):
    """The second step reads the averages that the first has left."""
    loss, engine = actor("proxpo_isopo", options={**ALL, "reg": 0.5}), make_engine(lr=0.05)
    assert ranks["slices"]["norms"] == pytest.approx([step(engine, loss) for _ in range(2)], 1e-5)


def test_models_that_verl_cuts_inside_are_refused():
    hf_config = SimpleNamespace(vision_config={}, _attn_implementation="flash_attention_2")
    model = SimpleNamespace(hf_config=hf_config, use_fused_kernels=False)
    config = SimpleNamespace(
        strategy="fsdp2",
        ulysses_sequence_parallel_size=2,
        offload_policy=False,
        mixed_precision=None,
    )
    recipe = proxpo.make_recipe("isopo")
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1 for a model with vis"):
        check_engine_config(recipe, model, config)
    del hf_config.vision_config
    check_engine_config(recipe, model, config)
