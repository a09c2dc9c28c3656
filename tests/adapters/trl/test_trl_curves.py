"""With a recipe that TRL has too, the loss of every step is TRL's own: twenty steps, same seeds."""

import pytest
import torch
from trl_runs import losses, seen, trainer

# Two updates on each rollout, so that ratios leave 1 and clips act.
TWICE = {"num_iterations": 2, "learning_rate": 3e-4}
PLAIN = {"eps": 1e-4, "aggregate.count_empty": True}
CASES = {
    "grpo": ("grpo", PLAIN, {}),
    "grpo-kl": (
        "grpo",
        {**PLAIN, "kl_coef": 0.3, "kl_ratio_corrected": True},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "bnpo": ("grpo", {"eps": 1e-4, "aggregate": "token_mean"}, {}),
    "dapo": (
        "dapo",
        {"eps": 1e-4, "group_filter": "off", "overlong": "off"},
        {"epsilon_high": 0.28},
    ),
    "dr_grpo": (
        "dr-grpo",
        {"max_tokens": 4, "aggregate.count_empty": True},
        {"scale_rewards": "none"},
    ),
    "cispo": ("cispo", {"eps": 1e-4, "prompts": None}, {"epsilon_high": 1.2}),
    "gspo": (
        "gspo",
        {**PLAIN, "clip_low": 3e-2, "clip_high": 4e-2},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-2,
            "epsilon_high": 4e-2,
        },
    ),
    "sapo": ("sapo", PLAIN, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_that_of_trl(case, tmp_path):
    recipe, options, theirs = CASES[case]
    ours = trainer(tmp_path, recipe, options=options, **TWICE)
    ours.train()
    host = trainer(tmp_path, **TWICE, **{"loss_type": case, **theirs})
    host.train()
    torch.testing.assert_close(losses(ours), losses(host), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen(ours, "grad_norm"), seen(host, "grad_norm"), rtol=1e-4, atol=0)
    assert len(losses(ours)) == 20
    assert max(map(abs, losses(ours))) > 1e-3
