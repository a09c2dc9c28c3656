"""Gradient transforms inside TRL: the gradients are those of proxpo's own loop."""

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import TrainerCallback
from trl_own_loop import EXACT, FUSED, agree, own_gradients
from trl_runs import Gradients, Watched, losses, trainer

import proxpo
from proxpo.errors import ProxpoError

ONE: dict[str, Any] = {
    **{"dtype": "float64", "max_grad_norm": 0.0},
    **{"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4},
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
ALL = {"gradient.overlap": "all"}
CUTS = {
    "1x8": {"per_device_train_batch_size": 8},
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}


def first_step(out: Any, slug: str, options: dict[str, Any], **changes: Any) -> tuple[Any, dict]:
    kept = Gradients()
    run = trainer(out, slug, options=options, kind=Watched, callbacks=[kept], **{**ONE, **changes})
    run.train()
    return run, kept.steps[0]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "isopo": ("isopo", ALL, {}),
    "checkpointing": ("isopo", ALL, {"gradient_checkpointing": True}),
    "reentrant": (
        "isopo",
        ALL,
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    "lora": ("isopo", ALL, {"peft_config": LORA}),
    "lora-checkpointing": (
        "isopo",
        ALL,
        {"peft_config": LORA, "gradient_checkpointing": True},
    ),
    "accumulation": ("isopo", ALL, {**CUTS["2x4"], "gradient_checkpointing": True}),
    "ntk": ("isopo-ntk", {}, {}),
    "ntk-by-prompt": ("isopo-ntk", {"gradient.group_by": "prompt"}, {**CUTS["2x4"]}),
    "proma": ("grpo", {"gradient": "proma"}, {**CUTS["2x4"]}),
    "regularised": (
        "grpo",
        {"gradient": "isopo", **ALL, "regularisers": {"name": "entropy_bonus", "coef": 0.3}},
        {**CUTS["2x4"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_own_loop(case, tmp_path):
    slug, options, changes = CASES[case]
    run, found = first_step(tmp_path, slug, options, **changes)
    want, transform = own_gradients(run.start, proxpo.make_recipe(slug, options), run.parts)
    agree(found, want)
    if case == "ntk-by-prompt":
        assert all(len(part["group"].unique()) == 1 for part in run.parts)
    mine, theirs = run._transform.state_dict(), transform.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_close(torch.as_tensor(mine[name]), torch.as_tensor(value), rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_accumulation_changes_nothing(tmp_path):
    """For lengths without an overlap set, where no sequence depends on another."""
    options = {"gradient.preset": "euclidean"}
    found = {name: first_step(tmp_path, "isopo", options, **cut)[1] for name, cut in CUTS.items()}
    agree(found["2x4"], found["1x8"])
    agree(found["8x1"], found["1x8"])


WHOLE = {
    "p3o": ("p3o", {}),
    "dapo": ("dapo", {"prompts": None}),
    "prompt_mean": ("grpo", {"aggregate": "prompt_mean"}),
    "p3o-isopo": ("p3o", {"gradient": "isopo", "gradient.preset": "euclidean"}),
    "pairs": ("dpo", {}),
    "groups": ("grpo", {"advantage": "reweighted_baseline"}),  # which TRL spreads over the cuts
}


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE)
def test_accumulation_changes_no_statistic(case, tmp_path):
    """Token means, prompt means and the ESS are those of the whole optimizer step, and so is
    every metric."""
    slug, options = WHOLE[case]
    twice = {"num_iterations": 2, "max_steps": 2, "learning_rate": 1e-3}
    found = {}
    for cut in ("1x8", "2x4"):
        kept = Gradients()
        given = {**ONE, **twice, **CUTS[cut], "callbacks": [kept]}
        run = trainer(tmp_path, slug, options=options, **given)
        run.train()
        found[cut] = kept.steps, losses(run), metrics_of(run)
    for whole, cut in zip(found["1x8"][0], found["2x4"][0]):  # in the second, ratios have left 1
        agree(cut, whole, to=EXACT if run._transform is not None else FUSED)
    assert_close(found["2x4"][1], found["1x8"][1], rtol=1e-6, atol=1e-7)  # TRL adds in float32
    assert_close(found["2x4"][2], found["1x8"][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_statistics_under_other_dropout_than_the_loss_are_told(rate, tmp_path):
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first_step(tmp_path, "p3o", {}, peft_config=lora, **CUTS["2x4"])
    said = [w for w in caught if "p3o: statistics of an optimizer step" in str(w.message)]
    assert bool(said) == bool(rate)


def metrics_of(run: Any) -> list[dict[str, float]]:
    """The recipe's metrics of each step."""
    return [
        {name: value for name, value in row.items() if name.startswith("proxpo/")}
        for row in run.state.log_history
    ]


class Spoilt(Watched):
    """A trainer whose second update meets infinity in its second micro-batch."""

    def _forward(self, model: Any, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        found = super()._forward(model, inputs, **options)
        if self.state.global_step == 1 and self._step % 2 and torch.is_grad_enabled():
            first = torch.arange(found["logp"].shape[1]) == 0
            found["logp"] = found["logp"] * torch.where(first, torch.inf, 1.0)
        return found


class Everything(TrainerCallback):
    """Weights, optimizer and transform after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.run: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weights = dict(given["model"].named_parameters())
        kept = {"weights": weights, "transform": self.run._transform.state_dict()}
        optimizer = given["optimizer"].state_dict()["state"]
        self.steps.append(copy.deepcopy({**kept, "optimizer": optimizer}))


@pytest.mark.parametrize("slug", ["isopo", "isopo-ntk", "proma"])
def test_an_update_that_is_not_finite_leaves_no_trace(slug, tmp_path):
    kept = Everything()
    options = {"gradient.reg": 1.0} if slug == "isopo" else {}
    changes = {**ONE, **CUTS["2x4"], "max_steps": 3, "max_grad_norm": 1.0}
    run = trainer(tmp_path, slug, options=options, kind=Spoilt, callbacks=[kept], **changes)
    kept.run = run
    with pytest.warns(UserWarning, match="step 1: an update was left out, its gradient was not"):
        run.train()
    first, second, third = kept.steps
    assert_close(second, first, rtol=0, atol=0)
    assert third["transform"]["steps"] == 2
    assert any(not torch.equal(x, first["weights"][n]) for n, x in third["weights"].items())
    assert [entry["proxpo/skipped"] for entry in run.state.log_history if "loss" in entry] == [
        *(0.0, 1.0, 0.0)
    ]


def test_a_loss_scale_is_refused(tmp_path):
    """It would enter the lengths, and with them the trailing averages."""
    with pytest.raises(ProxpoError, match="fp16 scales the loss, which would enter the lengths"):
        trainer(tmp_path, "isopo-ntk", **{**ONE, "fp16": True})
