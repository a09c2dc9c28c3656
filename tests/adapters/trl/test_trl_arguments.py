"""Each argument of GRPOConfig counts as in TRL, or is refused with the option that does it."""

import ast
import dataclasses
import inspect
import re
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_batch
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl_runs import SMALL, canned, closeness, config, questions, trainer

import proxpo
from proxpo.adapters.trl._arguments import (
    ARGUMENTS,
    LOSS_TYPES,
    TRAINER_ARGUMENTS,
    check_arguments,
    suggestion,
)
from proxpo.adapters.trl._metrics import LENGTHS
from proxpo.adapters.trl._refusals import PROVIDED, check_updates
from proxpo.batch_file import load_batch
from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.settings import at_length
from proxpo.train._settings import TRL_NAMES
from proxpo.train.config import explain

PLAIN = {"eps": 1e-4, "aggregate.count_empty": True}  # grpo with the constants of TRL
SHORT = {"learning_rate": 1e-3, "max_steps": 2, "loss_type": "grpo"}
TWICE = {"num_iterations": 2}  # so that ratios leave 1
TIMES = ("step_time", "_runtime", "samples_per_second", "steps_per_second")
TRLS = [n for n, a in ARGUMENTS.items() if a.rule == "TRL" and a.example is not None]
RECIPES = [n for n, a in ARGUMENTS.items() if a.rule == "recipe"]
NOWHERE = [n for n, a in ARGUMENTS.items() if a.rule == "none"]
# Arguments whose recipe options are held against TRL's own loss here; other loss types and the
# temperatures of SAPO are in test_trl_curves, the corrections for vLLM need vLLM in TRL.
SAME_LOSS = (
    *("beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "scale_rewards"),
    *("top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef"),
)


def made(**changes: Any) -> GRPOConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return config("unused", **changes)


def options_of(advice: str) -> dict[str, Any]:
    return ast.literal_eval(advice.removeprefix("use ").removesuffix(" in recipe_options"))


def test_every_argument_of_trl_is_in_the_table():
    """Inherited arguments of TrainingArguments are those of the Trainer, which stays as it is."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(GRPOConfig)} - inherited
    assert own <= set(ARGUMENTS)
    assert set(ARGUMENTS) - own == {"learning_rate", "remove_unused_columns"}
    assert set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"} == set(
        TRAINER_ARGUMENTS
    )
    assert set(TRL_NAMES) <= {field.name for field in dataclasses.fields(GRPOConfig)}
    assert set(TRL_NAMES.values()) <= {setting.path for setting in explain(None)}
    text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"].partition(".")[2]
    assert set(re.findall(r"'(\w+)'", text.partition(".")[0])) == {*LOSS_TYPES}


def test_metrics_on_the_page_are_logged():
    """TRL's names are TRL's, and those of recipes are reported by p3o, grpo or a transform."""
    page = (Path(__file__).parents[3] / "docs/from-trl.md").read_text()
    table = page.partition("## Which metric")[2].partition("\n## ")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    assert len(named) > 8
    batch, logged = load_batch("sample"), {"skipped", *LENGTHS.values()}
    for slug in ("grpo", "p3o"):
        logged |= set(proxpo.loss_fn(slug)(batch).metrics)
    known = {f"proxpo/{name}" for name in logged}
    known |= set(re.findall(r'"([a-z_]+(?:/[a-z_]+)*)"', inspect.getsource(GRPOTrainer)))
    for name in (name.strip("`") for name in named):
        assert any(fnmatch(other, name) for other in known), name


def test_what_trl_s_loss_alone_reads_is_not_called_trl_s():
    """The recipe's loss replaces it, so that only these five of its arguments act elsewhere too."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = set(ARGUMENTS) & set(re.findall(r"self\.(?:args\.)?([a-z_]+)", source))
    assert {"beta", "loss_type", "delta", "vespo_k_pos"} <= read
    assert {name for name in read if ARGUMENTS[name].rule == "TRL"} == {
        *("max_completion_length", "router_aux_loss_coef", "steps_per_generation", "use_vllm"),
    }


@pytest.mark.parametrize("name", [*RECIPES, *NOWHERE])
def test_what_a_recipe_decides_is_refused_with_its_option(name):
    """Options that exist and change the recipe; with them set, the same value is accepted."""
    slug = next((slug for slug in ("sapo", "vespo") if name.startswith(slug)), "grpo")
    options = {}
    if name == "use_bias_correction_kl":
        options = {"kl_coef": 0.1, "kl_ratio_corrected": True}
    if name == "vllm_importance_sampling_correction":
        options = {"weights+": "tis"}
    if name == "vllm_importance_sampling_cap":  # TRL writes it to the newer name
        name = "vllm_importance_sampling_clip_max"
    recipe, args = proxpo.make_recipe(slug, options), made(**{name: ARGUMENTS[name].example})
    with pytest.raises(ProxpoError, match=f"^GRPOConfig.{name}=.* has no effect on rec") as caught:
        check_arguments(recipe, args)
    assert "\n" not in str(caught.value)
    advice = suggestion(recipe, name, args)
    assert str(caught.value).endswith(advice)
    if name in NOWHERE:
        assert advice == ARGUMENTS[name].text
    elif name == "vllm_importance_sampling_correction":
        check_arguments(proxpo.make_recipe(slug), args)
    elif name == "loss_type":
        assert advice == "use recipe='dr-grpo'"
        check_arguments(proxpo.make_recipe("dr-grpo"), args)
    else:
        check_arguments(proxpo.make_recipe(slug, {**options, **options_of(advice)}), args)


@pytest.mark.parametrize("loss", LOSS_TYPES)
def test_a_loss_type_names_a_recipe_that_has_it(loss):
    advice = suggestion(proxpo.make_recipe("p3o"), "loss_type", made(loss_type=loss))
    slug, options = re.fullmatch(
        r"use recipe='([a-z-]+)'(?: with (\{.*\}) in recipe_options)?", advice
    ).groups()
    check_arguments(
        proxpo.make_recipe(slug, ast.literal_eval(options or "{}")), made(loss_type=loss)
    )


@pytest.mark.parametrize("slug", ["dpo", "kpo", "lopti", "p3o", "reinforce", "rloo", "tis"])
def test_suggestions_hold_the_number_that_was_asked_for(slug):
    recipe = proxpo.make_recipe(slug)
    for name in ("beta", "delta", "entropy_coef", "epsilon", "epsilon_high"):
        advice = suggestion(recipe, name, made(**{name: 4.5}))
        if "in recipe_options" not in advice:
            assert advice == ARGUMENTS[name].text
            continue
        assert 4.5 in options_of(advice).values()
        other = proxpo.make_recipe(slug, options_of(advice))
        assert other.replace(options={}) != recipe.replace(options={})


def test_a_suggestion_can_be_written_as_it_stands():
    recipe = proxpo.make_recipe("grpo", {"eps": 1e-4})  # which scale=none leaves without effect
    advice = suggestion(recipe, "scale_rewards", made(scale_rewards="none"))
    assert advice == "use {'advantage.scale': 'none'} in recipe_options"
    name = "vllm_importance_sampling_clip_max"
    advice = suggestion(recipe, name, made(**{name: None}))
    assert "'weights.tis.cap': float('inf')" in advice


@pytest.mark.parametrize(
    ("slug", "options", "obstacle"),
    [
        ("grpo", {"weights+": "top_entropy"}, "weights=top_entropy, to whose tokens TRL restricts"),
        ("grpo", {"aggregate": "prompt_mean"}, "aggregate=prompt_mean"),
    ],
)
def test_an_entropy_bonus_that_cannot_be_averaged_as_trl_s_is_refused(slug, options, obstacle):
    bonus = {"regularisers+": "entropy_bonus", "regularisers.entropy_bonus.coef": 0.1}
    recipe = proxpo.make_recipe(slug, {**options, **bonus})
    check_arguments(recipe, made())
    with pytest.raises(ProxpoError, match=rf"entropy_coef=0.1 is in TRL a mean .*{obstacle}"):
        check_arguments(recipe, made(entropy_coef=0.1))
    check_arguments(proxpo.make_recipe(slug, bonus), made(entropy_coef=0.1))


@dataclasses.dataclass
class WithKL(GRPOConfig):
    """A user's own config, whose defaults are not TRL's."""

    beta: float = 0.04


def test_a_default_of_a_derived_config_is_a_written_value():
    with pytest.raises(ProxpoError, match=r"GRPOConfig.beta=0.04 has no effect on recipe grpo"):
        check_arguments(proxpo.make_recipe("grpo"), WithKL("unused", **SMALL))


FIELDS = PROVIDED | {"rollout_logp"}
FED = [slug for slug in methods("language") if not proxpo.make_recipe(slug).needs() - FIELDS]
READS = ("dapo", "entropy-80-20", "opo", "rapid", "reinforce-pp", "reinforce-pp-baseline", "rloo")
TRUNCATED = make_batch(1).mask & (torch.arange(9) != 4)[:, None]  # as TRL masks the fifth


def allowed(recipe: proxpo.Recipe, **changes: Any) -> bool:
    try:
        check_arguments(recipe, made(**changes))
    except ProxpoError:
        return False
    return True


@pytest.mark.parametrize("slug", sorted({*FED} - {"pacs"}))  # which wants labels
def test_masked_completions_change_no_advantage_of_another(slug):
    """Or mask_truncated_completions is refused: TRL hides their tokens, not their rewards."""
    recipe = at_length(proxpo.make_recipe(slug), 6).replace(filter=(), prune=())
    batch = make_batch(1)
    batch = batch.replace(**{name: None for name, _ in batch.items() if name not in FIELDS})
    found = [
        proxpo.prepare(
            recipe,
            batch.replace(mask=mask),
            proxpo.Context(states=recipe.init_state(), generator=torch.Generator().manual_seed(0)),
        ).batch.advantages[TRUNCATED]
        for mask in (batch.mask, TRUNCATED)
    ]
    same = torch.allclose(*found)
    assert same or slug in READS
    assert allowed(recipe, mask_truncated_completions=True) == (slug not in READS)


def test_an_optimizer_may_be_named_in_a_config_that_exists():
    args = made()
    args.optim = "sgd"  # a string, as TRL takes it too
    check_updates(proxpo.make_recipe("grpo"), args)
    args.optim = "galore_adamw_layerwise"
    with pytest.raises(ProxpoError, match="optim=galore_adamw_layerwise moves the weights"):
        check_updates(proxpo.make_recipe("isopo"), args)


# Beside TRL's own trainer


def logged(out: Any, *recipe: Any, changes: dict[str, Any], **given: Any) -> list[dict[str, float]]:
    """What two steps log, times apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(out, *recipe, **given, **{**SHORT, **changes})
        run.train()
        if "eval_dataset" in given:
            run.evaluate()
    return [
        {name: x for name, x in row.items() if not name.endswith(TIMES)}
        for row in run.state.log_history
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[dict[str, float]]:
    return logged(tmp_path_factory.mktemp("plain"), changes={})


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> list[dict[str, float]]:
    return logged(tmp_path_factory.mktemp("twice"), changes=TWICE)


def agree(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for mine, host in zip(ours, theirs, strict=True):
        shared = {name: mine[name] for name in host}  # KeyError: not logged
        torch.testing.assert_close(shared, host, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SAME_LOSS)
def test_recipe_options_that_stand_for_an_argument_give_trl_s_loss(name, tmp_path, twice):
    changes = {**TWICE, name: ARGUMENTS[name].example}
    given = {"rollout_func": canned} if name == "off_policy_mask_threshold" else {}
    recipe = proxpo.make_recipe("grpo", PLAIN)
    options = {**PLAIN, **options_of(suggestion(recipe, name, made(**changes)))}
    theirs = logged(tmp_path, changes=changes, **given)
    agree(logged(tmp_path, "grpo", options=options, changes=changes, **given), theirs)
    assert theirs[1]["loss"] != pytest.approx(twice[1]["loss"], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", TRLS)
def test_what_is_called_trl_s_acts_as_in_trl(name, tmp_path, plain):
    changes: dict[str, Any] = {name: ARGUMENTS[name].example}
    given: dict[str, Any] = {}
    options = PLAIN
    if name == "reward_weights":
        given["reward"] = [closeness, lambda completions, **_: [len(t) for t in completions]]
    if name == "num_generations_eval":
        given["eval_dataset"] = questions().select(range(4))
    if name == "sync_ref_model":
        options = {**PLAIN, "kl_coef": 0.3, "kl_ratio_corrected": True}
        changes |= {"ref_model_sync_steps": 1, "beta": 0.3}
    if name == "mask_truncated_completions":
        changes["temperature"] = 3.0
    theirs = logged(tmp_path, changes=changes, **given)
    agree(logged(tmp_path, "grpo", options=options, changes=changes, **given), theirs)
    before = logged(tmp_path, changes={}, **given) if given else plain
    if name == "pad_to_multiple_of":
        agree(theirs, before)
        return
    with pytest.raises((AssertionError, KeyError)):
        agree(theirs, before)
    if name == "mask_truncated_completions":
        assert 0 < theirs[0]["completions/clipped_ratio"] < 1
