"""With a recipe that TRL has too, the loss of every step is TRL's own: twenty steps, same seeds."""

import math
from typing import Any

import pytest
import torch
from trl_runs import Watched, canned, losses, questions, seen, trainer

from proxpo.adapters.trl._optimizer_step import ROW

pytestmark = pytest.mark.long
# Two updates on each rollout, so that ratios leave 1 and clips act.
OFTEN = {"num_iterations": 2, "learning_rate": 1e-4}
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
PLAIN = {"eps": 1e-4, "aggregate.count_empty": True}
CASES = {
    "grpo": ("grpo", PLAIN, {}),
    "grpo-kl": (
        "grpo",
        {**PLAIN, "kl_coef": 0.3, "kl_ratio_corrected": True},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "grpo-parts": ("grpo", PLAIN, {"loss_type": "grpo"}),
    "bnpo": ("grpo", {"eps": 1e-4, "aggregate": "token_mean"}, {}),
    "dapo": (
        "dapo",
        {"eps": 1e-4, "group_filter": "off", "overlong": "off"},
        {"epsilon_high": 0.28},
    ),
    "dr_grpo": (
        "dr-grpo",
        {"max_tokens": 3, "aggregate.count_empty": True},
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
    "vespo": ("vespo", {"eps": 1e-4}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_that_of_trl(case, tmp_path):
    recipe, options, theirs = CASES[case]
    parts = {"steps_per_generation": 2} if case == "grpo-parts" else {}
    ours = trainer(tmp_path, recipe, options=options, **OFTEN, **parts)
    ours.train()
    host = trainer(tmp_path, **OFTEN, **parts, **{"loss_type": case, **theirs})
    host.train()
    # The weight of a response is an exponential of a sum over its tokens, which amplifies rounding.
    atol = 1e-5 if case == "vespo" else 1e-6
    torch.testing.assert_close(losses(ours), losses(host), rtol=1e-6, atol=atol)
    torch.testing.assert_close(seen(ours, "grad_norm"), seen(host, "grad_norm"), rtol=1e-4, atol=0)
    assert len(losses(ours)) == 20
    assert max(map(abs, losses(ours))) > 1e-3
    logs_agree(ours, host)


def logs_agree(ours: Any, host: Any) -> None:
    """Each number that TRL logs in a step stands under the same name in ours."""
    for mine, theirs in zip(ours.state.log_history, host.state.log_history, strict=True):
        shared = {name: mine[name] for name in theirs if name not in TIMES}  # KeyError: not logged
        wanted = {name: theirs[name] for name in shared}
        torch.testing.assert_close(shared, wanted, rtol=1e-4, atol=1e-5)


BONUS = {"regularisers+": "entropy_bonus", "regularisers.entropy_bonus.coef": 0.3}
KL = {"regularisers+": "kl_to_ref", "regularisers.kl_to_ref.coef": 0.3}
DAPO = {"eps": 1e-4, "group_filter": "off", "overlong": "off"}
STEPS = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
LUSPO = {"variant": "luspo", "clip_low": 0.2, "clip_high": 0.2}
MASKED = {"mask_truncated_completions": True}
# Where both have the argument, or TRL's loss type, the recipe does as TRL, to the last digit.
AS_TRL = {
    "masked-grpo": ("grpo", {"eps": 1e-4}, {"loss_type": "grpo", **MASKED}),
    "masked-dr_grpo": (
        "dr-grpo",
        {},
        {"loss_type": "dr_grpo", "scale_rewards": "none", **MASKED},
    ),
    "luspo-bonus": (
        "gspo",
        {"eps": 1e-4, **LUSPO, **BONUS},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "entropy_coef": 0.3},
    ),
    "grpo-bonus": (
        "grpo",
        {"eps": 1e-4, **BONUS},
        {"loss_type": "grpo", "entropy_coef": 0.3, "gradient_accumulation_steps": 2},
    ),
    "dapo-bonus": ("dapo", {**DAPO, **BONUS}, {"epsilon_high": 0.28, "entropy_coef": 0.3, **STEPS}),
    "dapo-steps": ("dapo", DAPO, {"epsilon_high": 0.28, "steps_per_generation": 3}),
    "cispo-steps": (
        "cispo",
        {"eps": 1e-4, "prompts": None, "absolute": True, "clip_high": 1.2},
        {"loss_type": "cispo", "epsilon_high": 1.2, "steps_per_generation": 3},
    ),
    "vespo-steps": ("vespo", {"eps": 1e-4}, {"loss_type": "vespo", "steps_per_generation": 3}),
    "vespo-kl": (
        "vespo",
        {"eps": 1e-4, **KL, "regularisers.kl_to_ref.ratio_corrected": True},
        {"loss_type": "vespo", "beta": 0.3},
    ),
}


def half_cut(prompts: list[str], run: Any) -> dict[str, Any]:
    """Completions of several lengths, of which each third does not end."""
    made = canned(prompts, run)
    for ids in made["completion_ids"][::3]:
        ids[-1] = 5
    return made


@pytest.mark.parametrize("case", AS_TRL)
@pytest.mark.filterwarnings("ignore:recipe dapo")
def test_an_argument_that_both_have_acts_as_in_trl(case, tmp_path):
    recipe, options, theirs = AS_TRL[case]
    often = {**OFTEN, "max_steps": 4, "rollout_func": half_cut, **theirs}
    ours = trainer(tmp_path, recipe, options=options, **often)
    ours.train()
    host = trainer(tmp_path, **often)
    host.train()
    # A sum over the response magnifies rounding.
    within = {"rtol": 1e-4, "atol": 1e-5} if recipe == "vespo" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(losses(ours), losses(host), **within)
    torch.testing.assert_close(seen(ours, "grad_norm"), seen(host, "grad_norm"), rtol=1e-4, atol=0)
    logs_agree(ours, host)
    assert max(map(abs, losses(ours))) > 1e-3
    assert ("policy_loss" in ours.state.log_history[0]) == ("bonus" in case)


CUT = {"gradient_accumulation_steps": 2, "max_steps": 4}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


@pytest.mark.parametrize("case", ["grpo-kl", "gspo", "cispo"])
def test_micro_batches_are_logged_as_trl_logs_them(case, tmp_path):
    recipe, options, theirs = CASES[case]
    ours = trainer(tmp_path, recipe, options=options, **OFTEN, **CUT)
    ours.train()
    host = trainer(tmp_path, **OFTEN, **CUT, **{"loss_type": case, **theirs})
    host.train()
    logs_agree(ours, host)
    clipped = "cispo_clip_ratio" if case == "cispo" else "clip_ratio/region_mean"
    assert max(seen(ours, clipped)) > 0


def test_a_synced_reference_model_is_that_of_trl(tmp_path):
    recipe, options, theirs = CASES["grpo-kl"]
    ours = trainer(tmp_path, recipe, options=options, **OFTEN, **SYNCED, max_steps=6)
    ours.train()
    host = trainer(tmp_path, **OFTEN, **SYNCED, **theirs, max_steps=6)
    host.train()
    logs_agree(ours, host)
    moved = zip(ours.ref_model.parameters(), host.ref_model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in moved)
    start = trainer(tmp_path, recipe, options=options, max_steps=1).ref_model
    pairs = zip(start.parameters(), ours.ref_model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_isopo_logs_what_every_recipe_logs(tmp_path):
    """Entropy, KL and response lengths under TRL's names, and the lengths of its gradients."""
    options = {"regularisers+": "kl_to_ref"}
    rows = {}
    for slug in ("isopo", "reinforce"):
        run = trainer(tmp_path, slug, options=options, max_steps=2)
        run.train()
        rows[slug] = run.state.log_history[1]
    assert rows["reinforce"].keys() <= rows["isopo"].keys()
    assert {"entropy", "kl", "completions/mean_length"} <= rows["isopo"].keys()
    assert rows["isopo"]["entropy"] > 0
    assert rows["isopo"]["kl"] > 0
    assert rows["isopo"]["proxpo/gradient/fisher"] > 0


@pytest.mark.parametrize("average", ["token", "prompt"])
def test_two_optimizer_steps_share_a_rollout(average, tmp_path):
    """Each divides by its own tokens: on fresh data the loss is the mean of -A over them.

    But for TRL's dapo, which divides by a third of the tokens of the whole rollout.
    """
    options = {"prompts": None, "overlong": "off", "average": average}
    held = {"steps_per_generation": 3, "max_steps": 1, "gradient_accumulation_steps": 1}
    held |= {"rollout_func": canned}
    run = trainer(tmp_path, "dapo", options=options, kind=Watched, num_generations=4, **held)
    run.train()
    first = run._rollouts["train"][0].local.rows(run.parts[0][ROW])
    groups = [first.group == g for g in first.group.unique()]
    means = [-first.advantages[g][first.mask[g]].mean() for g in groups]
    whole = -first.advantages[first.mask].mean()
    share = 3 * first.mask.sum() / run._rollouts["train"][0].whole.mask.sum()
    assert share != 1
    expected = whole * share if average == "token" else torch.stack(means).mean()
    assert losses(run)[0] == pytest.approx(float(expected), rel=1e-5)
    assert len(groups) > 1
    assert abs(float(expected)) > 1e-3


def test_evaluation(tmp_path):
    """The loss of held-out prompts, by the recipe; no update, no change of what it remembers."""
    for recipe in ("rloo", "isopo"):
        run = trainer(
            tmp_path, recipe, eval_dataset=questions().select(range(4)), max_steps=1,
            per_device_eval_batch_size=4, num_generations_eval=2,
        )  # fmt: skip
        before = [p.clone() for p in run.model.parameters()]
        found = run.evaluate()
        assert math.isfinite(found["eval_loss"])
        assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))
        run.train()
        assert len(losses(run)) == 1
