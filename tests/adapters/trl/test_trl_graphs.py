"""Recorded passes inside TRL: the same run as without, replayed operation by operation."""

import pytest
import torch
from recorder import record
from trl_runs import losses, seen, trainer

from proxpo.adapters.trl._replay import policy_graphs
from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.replay import PolicyGraphs

pytestmark = pytest.mark.long
CUT = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, "num_generations": 4}
ALL = {"overlap": "all"}  # recorded passes draw among padded positions too
CASES = {
    "grpo": ("grpo", {"kl_coef": 0.1}),
    "isopo": ("isopo", {**ALL, "reg": 1.0, "p": -1.0, "q": -1.0, "regularisers+": "kl_to_ref"}),
    "isopo, head": ("isopo", {**ALL, "scope": "head"}),
    "isopo-ntk": ("isopo-ntk", {"group_by": "prompt"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_run_is_the_same(case, tmp_path):
    recipe, options = CASES[case]
    plain = trainer(tmp_path, recipe, options=options, **CUT)
    plain.train()
    ours = trainer(tmp_path, recipe, options=options, **CUT)
    policy = Policy(ours.model, None, [0], 0, "tiny", 64, ours.model.dtype)
    ours._graphs = graphs = PolicyGraphs(policy, transform=ours._transform, record=record)
    ours.train()
    assert any(run.recorded for run in graphs._runs.values())
    assert graphs.passes >= 8
    names = {name for row in plain.state.log_history for name in row if "gradient/" in name}
    assert bool(names) == (recipe == "isopo")
    for name in ("grad_norm", "entropy", *names):
        torch.testing.assert_close(seen(ours, name), seen(plain, name), rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(losses(ours), losses(plain), rtol=1e-4, atol=1e-5)


def test_where_passes_cannot_be_recorded_the_wish_is_refused(tmp_path):
    with pytest.raises(ProxpoError, match=r"graphs=on cannot record .* it needs a CUDA device"):
        trainer(tmp_path, "p3o", graphs="on")
    with pytest.raises(ProxpoError, match="gradient_checkpointing does not"):
        trainer(tmp_path, "p3o", graphs="on", gradient_checkpointing=True)
    with pytest.raises(ProxpoError, match="did you mean"):
        trainer(tmp_path, "p3o", graphs="of")
    ours = trainer(tmp_path, "p3o")
    assert ours._graphs is None
    ours.args.use_vllm = ours.args.vllm_enable_sleep_mode = True
    with pytest.raises(ProxpoError, match="keeps its memory"):
        policy_graphs(ours, None, wanted="on")
