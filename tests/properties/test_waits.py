"""Losses that never make the host wait for a GPU, by the operations they dispatch."""

import pytest
import torch
from helpers import make_batch, method
from torch.utils._python_dispatch import TorchDispatchMode

import proxpo
from proxpo import Context
from proxpo.recipes import methods
from proxpo.types import local

# The host has to know the result of these, or the shape of it.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero")
WAITING = {  # and what for
    "capo": "nothing: Adam's step count lies on the host",
    "clip-cov": "the number of eligible tokens, of which some are drawn",
    "dpo": "the number of groups and the rows of its pairs",
    "duration-aware": "the refusal of negative durations",
    "entropy-80-20": "the number of tokens, a share of which is chosen",
    "fixpo": "nothing: the multiplier lies on the host",
    "gtpo": "the number of groups, as the advantage follows the policy",
    "kl-cov": "the number of tokens, a share of which is chosen",
    "pacs": "the number of groups, whose scores are compared",
    "rapid": "the number of groups, as the advantage follows the policy",
    "st-ppo": "the number of turns",
}


class Waits(TorchDispatchMode):
    """Names of the operations inside the block that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = [x for arg in args if isinstance(arg, (list, tuple)) for x in arg]
        by_mask = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices)
        if name.startswith(WAITS) or (name.startswith("index") and by_mask):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slug", methods("language"))
def test_waits(slug: str) -> None:
    made = method(slug)
    ready = proxpo.prepare(made, make_batch(1))
    ctx = Context(all_sum=local, denominators=ready.ctx.denominators)
    batch = ready.batch.replace(logp=ready.batch.logp.detach().requires_grad_())
    proxpo.policy_loss(made, batch, ctx)  # tables that are kept from one loss to the next
    with Waits() as seen:
        proxpo.policy_loss(made, batch, ctx).value.backward()
    assert bool(seen.names) == (slug in WAITING), seen.names
