"""Options through verl's own config path, the example scripts, the data they read."""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import verl
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    get_policy_loss_fn,
)
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

import proxpo
from proxpo.adapters.verl import LossConfig, _environment
from proxpo.adapters.verl._config_check import check_run, complete_config
from proxpo.adapters.verl._counterparts import ACTOR_SETTINGS, ESTIMATORS, LOSS_MODES
from proxpo.adapters.verl._recipes import PREFIX, VERL_ALONE, loss_refusal, verl_name
from proxpo.adapters.verl._settings import STAGE_OPTIONS
from proxpo.recipes import methods
from proxpo.settings import lengths
from proxpo.stages.aggregate import token_mean

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from engines_verl import ARMS, SETTINGS

EXAMPLES = Path(__file__).parents[4] / "examples" / "verl"
TARGET = "policy_loss._target_=proxpo.adapters.verl.LossConfig"
SCRIPTS = [("several_nodes.sh", ["isopo"]), ("several_nodes.sh", ["p3o"])]
SCRIPTS += [(f"{arm}.sh", settings) for arm in ARMS for settings in ([], SETTINGS)]


def test_every_loss_mode_estimator_and_actor_setting_of_verl_has_a_row():
    own = {name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX)}
    assert own == set(LOSS_MODES)
    assert {str(getattr(name, "value", name)) for name in AdvantageEstimator} == set(ESTIMATORS)
    for table, known in ((LOSS_MODES, POLICY_LOSS_REGISTRY), (ESTIMATORS, ADV_ESTIMATOR_REGISTRY)):
        assert set(re.findall(r"proxpo_\w+", " ".join(table.values()))) <= set(known)
    fields = {entry.name for entry in dataclasses.fields(FSDPActorConfig)}
    assert {name for name in fields if not name.startswith("_")} == {
        *ACTOR_SETTINGS,
        *(name for name in STAGE_OPTIONS if "." not in name),
    }
    loss = {f"policy_loss.{entry.name}" for entry in dataclasses.fields(PolicyLossConfig)}
    rest = {name for name in loss if not name.startswith("policy_loss._")} - set(STAGE_OPTIONS)
    assert rest == {"policy_loss.rollout_correction", "policy_loss.loss_mode"}


def composed(overrides: list[str]):
    """verl's PPO config under these overrides; an unknown key is an error."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides)


def actor(*overrides: str):
    """The actor's config as verl's workers and its driver make it."""
    named = [prefix(one) for one in (TARGET, "ppo_micro_batch_size_per_gpu=1", *overrides)]
    return omega_conf_to_dataclass(composed(named).actor_rollout_ref.actor)


def prefix(override: str) -> str:
    plus = "+" if override.startswith("+") else ""
    return f"{plus}actor_rollout_ref.actor.{override.removeprefix('+')}"


def test_options_reach_the_loss():
    config = actor(
        "policy_loss.loss_mode=proxpo_grpo",
        "+policy_loss.options.clip_high=0.28",
        "+policy_loss.options.ratio={name:kalman,q:0.1}",
    )
    assert isinstance(config.policy_loss, LossConfig)
    assert config.policy_loss.options["ratio"] == {"name": "kalman", "q": 0.1}
    g = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(3, 4, dtype=torch.bool)
    found, _ = get_policy_loss_fn("proxpo_grpo")(old, new, adv, mask, "token-mean", config)
    settings = {"clip_high": 0.28, "ratio": "kalman", "ratio.q": 0.1, "aggregate": "token_mean"}
    recipe = proxpo.make_recipe("grpo", settings)
    batch = proxpo.Batch(logp=new, old_logp=old, mask=mask, advantages=adv)
    torch.testing.assert_close(found, proxpo.loss_fn(recipe)(batch).value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy_loss.loss_mode=proxpo_grop"], "did you mean 'proxpo_grpo'"),
        (["policy_loss.loss_mode=proxpo_dpo"], "needs 'ref_logp'"),
        (["policy_loss.loss_mode=proxpo_isopo"], "set VERL_ENGINE_VENDOR=proxpo"),
        (
            ["policy_loss.loss_mode=proxpo_p3o", "+policy_loss.options.clip_hihg=1"],
            "unknown option 'clip_hihg' of p3o",
        ),
        (
            ["policy_loss.loss_mode=vanilla", "+policy_loss.options.clip=1"],
            "belong to a loss_mode proxpo_",
        ),
    ],
)
def test_mistakes_are_refused_at_construction(overrides, reason):
    with pytest.raises(InstantiationException, match=reason):
        actor(*overrides)


def test_a_gradient_transform_is_accepted_with_our_engine(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "proxpo")
    config = actor("policy_loss.loss_mode=proxpo_isopo", "+policy_loss.options.preset=euclidean")
    assert config.policy_loss.options == {"preset": "euclidean"}


MODE, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
OPTIONS = "+actor_rollout_ref.actor.policy_loss.options"
LONGEST = "+algorithm.options.reward.overlong_penalty.max_tokens=512"
OVERLONG = [
    "reward.reward_manager.name=dapo",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
]
BASE = [prefix(TARGET), prefix("strategy=fsdp2"), prefix("ppo_micro_batch_size_per_gpu=1")]


@cache
def base():
    return composed([*BASE, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"])


def changed(*overrides: str):
    """The config under overrides, as hydra would compose it, in a hundredth of the time."""
    config = copy.deepcopy(base())
    for override in overrides:
        name, value = override.lstrip("+").split("=")
        OmegaConf.update(config, name, yaml.safe_load(value), force_add=True)
    return config


def checked(*overrides: str) -> None:
    """The check of verl's driver, with these overrides written by a user."""
    completed(*overrides)


def completed(*overrides: str):
    """The config that verl's driver hands on after its check."""
    config, written = changed(*overrides), {o.split("=")[0].lstrip("+") for o in overrides}
    complete_config(config, written)
    check_run(config, written)
    return config


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{MODE}=proxpo_p3o"], "p3o: algorithm.adv_estimator=gae lacks group_relative.*_p3o"),
        (
            [f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=grpo"],
            rf"=grpo lacks overlong_penalty.*adv_estimator=proxpo_dapo {re.escape(LONGEST)},",
        ),
        (
            [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=proxpo_opo"],
            "lacks group_relative.*policy_loss.options.advantage=null",
        ),
        (
            [f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=proxpo_dapo"],
            "adv_estimator=proxpo_dapo adds overlong_penalty",
        ),
        (
            [f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=proxpo_grpo", f"{OPTIONS}.scale=none"],
            r"lacks group_relative\(scale=none.*\+algorithm.options.scale=none",
        ),
        (
            [f"{MODE}=proxpo_ppo", f"{OPTIONS}.lam=0.9"],
            "ppo: .*=gae lacks gae.*lam=0.9.*set algorithm.adv_estimator=gae.* algorithm.lam=0.9,",
        ),
        ([f"{MODE}=proxpo_ppo", f"{OPTIONS}.value_clip=0.3"], "value_clip.*critic.cliprange_value"),
        (
            [
                f"{MODE}=proxpo_dr_grpo",
                f"{ESTIMATOR}=proxpo_dr_grpo",
                f"{OPTIONS}.max_tokens=512",
                prefix("loss_agg_mode=token-sum"),
            ],
            "max_tokens of dr-grpo changes the average, which is verl's: set actor.loss_agg_mode",
        ),
        (
            [
                f"{MODE}=proxpo_grpo",
                f"{ESTIMATOR}=proxpo_grpo",
                f"{OPTIONS}.aggregate=token_sum",
                prefix("loss_agg_mode=token-mean"),
            ],
            "loss_agg_mode=token-mean contradicts policy_loss.options.aggregate=token_sum: set one",
        ),
        (
            [f"{MODE}=proxpo_opo", f"{ESTIMATOR}=proxpo_opo", prefix("ppo_epochs=2")],
            "opo makes one update per rollout, but actor.ppo_epochs=2 .*options.schedule=null",
        ),
        ([f"{ESTIMATOR}=proxpo_grpo", "algorithm.gamma=0.9"], "gamma=0.9 has no effect on"),
        (
            [f"{ESTIMATOR}=proxpo_dr_grpo", "algorithm.norm_adv_by_std_in_grpo=True"],
            "norm_adv_by_std_in_grpo=True has no effect on adv_estimator=proxpo_dr_grpo",
        ),
        ([f"{ESTIMATOR}=grpo", "+algorithm.options.eps=1"], "belong to an adv_estimator proxpo_"),
        (
            [f"{ESTIMATOR}=proxpo_grpo", "+algorithm.options.clip_high=0.3"],
            "options.clip_high has no effect on the advantages of grpo: it belongs to .*loss.opt",
        ),
        ([f"{MODE}=proxpo_grop"], "did you mean 'proxpo_grpo'"),
        ([f"{ESTIMATOR}=proxpo_grop"], "adv_estimator 'proxpo_grop'; did you mean 'proxpo_grpo'"),
        (
            [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=proxpo_gspo", prefix("clip_ratio=0.2")],
            "clip_ratio=0.2 is verl's default and does not reach gspo: its trust.clip_low is 0",
        ),
        (
            [
                f"{MODE}=proxpo_gspo",
                f"{ESTIMATOR}=proxpo_gspo",
                "algorithm.rollout_correction.bypass_mode=true",
                "algorithm.rollout_correction.rollout_is=token",
            ],
            "rollout_is=token has no effect on gspo under bypass_mode=True",
        ),
        (
            [f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=proxpo_dapo", *OVERLONG],
            "would both subtract the penalty for long responses: set .*options.reward=null",
        ),
        (
            [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo", prefix("clip_ratio_low=0.2")],
            r"clip_ratio_low=0.2 is verl's default.*\+.*options.trust.clip_low=0.2 sets it",
        ),
        (
            [f"{MODE}=proxpo_remax", f"{ESTIMATOR}=remax", "data.train_batch_size=256"],
            "remax: .*=remax needs greedy responses, .* does not draw: set trainer.use_v1=False",
        ),
        (
            [f"{MODE}=proxpo_reinforce", f"{ESTIMATOR}=proxpo_reinforce", prefix("clip_ratio_c=3")],
            "clip_ratio_c=3 is verl's default and does not reach reinforce: it has none",
        ),
    ],
)
def test_a_run_with_half_a_method_or_an_idle_setting_is_refused(overrides, reason):
    with pytest.raises(ValueError, match=f"verl: .*{reason}") as caught:
        checked(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slug", "setting", "reason"),
    [
        ("tis", "rollout_is=token", "tis corrects for the sampler itself, .*leave one of them"),
        ("decoupled_ppo", "rollout_is=token", "decoupled-ppo corrects for the sampler itself"),
        ("tis", "bypass_mode=True", "the old policy with the sampler's .weights=tis., which are"),
        ("decoupled_ppo", "bypass_mode=True", "tells the proximal policy from the sampler's"),
    ],
)
def test_a_sampler_is_corrected_for_once(slug, setting, reason, monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "proxpo")
    whole = [f"{MODE}=proxpo_{slug}", f"{ESTIMATOR}=proxpo_{slug}"]
    whole.append("actor_rollout_ref.rollout.calculate_log_probs=True")
    checked(*whole)
    with pytest.raises(ValueError, match=f"verl: .*{reason}"):
        checked(*whole, f"algorithm.rollout_correction.{setting}")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{MODE}=proxpo_ppo"],
        [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo", "actor_rollout_ref.rollout.n=4"],
        [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=proxpo_grpo"],
        [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo", prefix("clip_ratio_low=0.1")],
        [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo", f"{OPTIONS}.trust.clip_low=0.2"],
        [f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=grpo", prefix("clip_ratio_low=0.2")],
        [f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=proxpo_grpo", "+algorithm.options.eps=0.0001"],
        [f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=proxpo_dapo", f"{OPTIONS}.advantage=null", LONGEST],
        [
            f"{MODE}=proxpo_grpo",
            f"{ESTIMATOR}=proxpo_grpo",
            prefix("clip_ratio_low=null"),
            prefix("clip_ratio_high=null"),
            prefix("clip_ratio=0.2"),
        ],
        [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=proxpo_opo", f"{OPTIONS}.advantage=null"],
        [
            f"{MODE}=proxpo_gspo",
            f"{ESTIMATOR}=proxpo_opo",
            f"{OPTIONS}.advantage=length_weighted_baseline",
        ],
        [
            f"{MODE}=proxpo_dr_grpo",
            f"{ESTIMATOR}=grpo",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "actor_rollout_ref.rollout.n=4",
        ],
        [
            f"{MODE}=proxpo_rloo",
            f"{ESTIMATOR}=rloo",
            f"{OPTIONS}.kl_coef=0.0",
            "actor_rollout_ref.rollout.n=4",
        ],
        [
            f"{MODE}=proxpo_dr_grpo",
            f"{ESTIMATOR}=proxpo_dr_grpo",
            f"{OPTIONS}.max_tokens=512",
            prefix("loss_agg_mode=seq-mean-token-sum-norm"),
            prefix("loss_scale_factor=512"),
        ],
        [f"{MODE}=vanilla", f"{ESTIMATOR}=proxpo_opo"],
        [f"{MODE}=proxpo_ppo", "algorithm.lam=0.95"],
        [
            f"{MODE}=proxpo_opo",
            f"{ESTIMATOR}=opo",
            prefix("ppo_epochs=2"),
            f"{OPTIONS}.schedule=null",
        ],
        [f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=grpo", *OVERLONG],
        [f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=grpo_vectorized"],
        [f"{MODE}=proxpo_rloo", f"{ESTIMATOR}=rloo_vectorized", f"{OPTIONS}.kl_coef=0.0"],
        [
            f"{MODE}=proxpo_reinforce_pp",
            f"{ESTIMATOR}=reinforce_plus_plus",
            f"{OPTIONS}.kl_coef=0.0",
            "algorithm.use_kl_in_reward=True",
        ],
        [  # as verl's recipe writes it
            f"{MODE}=proxpo_clip_cov",
            f"{ESTIMATOR}=grpo",
            *(prefix(f"{name}=1") for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
        ],
    ],
)
def test_a_run_with_a_whole_method_is_accepted(overrides):
    checked(*overrides)


def test_the_longest_response_is_the_configured_one(capfd, monkeypatch):
    """verl's V1 trainer pads to the longest response of a batch, and tells losses no other."""
    monkeypatch.setattr(_environment, "_NOTICES", set())
    whole = [f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=proxpo_dapo", "data.max_response_length=300"]
    config = completed(*whole)
    assert config.algorithm.options.reward.overlong_penalty.max_tokens == 300
    assert config.actor_rollout_ref.actor.loss_scale_factor is None
    assert "algorithm.options.reward.overlong_penalty.max_tokens=300" in capfd.readouterr().err
    kept = completed(*whole, LONGEST).algorithm.options.reward.overlong_penalty.max_tokens
    assert kept == 512
    whole = [f"{MODE}=proxpo_dr_grpo", f"{ESTIMATOR}=proxpo_dr_grpo"]
    assert completed(*whole).actor_rollout_ref.actor.loss_scale_factor == 512
    norm = prefix("loss_agg_mode=seq-mean-token-sum-norm")
    assert completed(*whole, norm).actor_rollout_ref.actor.loss_scale_factor == 512
    for written in (f"{OPTIONS}.max_tokens=7", prefix("loss_scale_factor=7")):
        actor = completed(*whole, written).actor_rollout_ref.actor
        assert actor.loss_scale_factor in (None, 7)


def test_a_written_average_is_in_force_where_it_is_verl_s_default():
    """verl's workers cannot tell it from the default, so the driver writes the method's option."""
    whole = [f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo"]
    written = completed(*whole, prefix("loss_agg_mode=token-mean")).actor_rollout_ref.actor
    theirs = completed(
        *whole,
        prefix("loss_agg_mode=token-mean"),
        prefix("policy_loss._target_=verl.workers.config.PolicyLossConfig"),
    ).actor_rollout_ref.actor
    plain = completed(*whole).actor_rollout_ref.actor
    g = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(4) < torch.tensor([[4], [1], [2]])
    found = []
    for config in map(omega_conf_to_dataclass, (written, theirs, plain)):
        loss = get_policy_loss_fn("proxpo_gspo")
        found.append(loss(old, new, adv, mask, config.loss_agg_mode, config)[0])
    recipe = proxpo.make_recipe("gspo")
    batch = proxpo.Batch(logp=new, old_logp=old, mask=mask, advantages=adv)
    own = proxpo.loss_fn(recipe)(batch).value
    tokens = proxpo.loss_fn(recipe.replace(aggregate=token_mean()))(batch).value
    torch.testing.assert_close(found, [tokens, tokens, own])
    assert abs(own - tokens) > 1e-3


@pytest.mark.parametrize("setting", ["options.clip_high=0.3", "batch_every=2"])
def test_settings_of_our_loss_config_ask_for_it(setting):
    own = prefix("policy_loss._target_=verl.workers.config.PolicyLossConfig")
    with pytest.raises(
        ValueError, match=f"policy_loss.{setting.split('=')[0].split('.')[0]} needs"
    ):
        checked(f"{MODE}=proxpo_grpo", f"{ESTIMATOR}=grpo", own, prefix(f"+policy_loss.{setting}"))


ISOPO = [f"{MODE}=proxpo_isopo", f"{ESTIMATOR}=proxpo_isopo"]
SUM = prefix("loss_agg_mode=token-sum")
TIS = [f"{MODE}=proxpo_tis", f"{ESTIMATOR}=grpo", "actor_rollout_ref.rollout.n=4"]
LOGPS = "actor_rollout_ref.rollout.calculate_log_probs"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*ISOPO, SUM], ""),
        (ISOPO, ""),
        (
            [*ISOPO, prefix("loss_agg_mode=token-mean")],
            "isopo with gradient=isopo needs actor.loss_agg_mode=token-sum, got 'token-mean'",
        ),
        ([*ISOPO, SUM, prefix("strategy=fsdp")], "isopo needs actor.strategy=fsdp2, got 'fsdp'"),
        ([*ISOPO, SUM, "actor_rollout_ref.model.use_fused_kernels=True"], "fused_kernels=False"),
        ([*TIS, f"{LOGPS}=True", prefix("strategy=fsdp")], ""),
        ([*TIS, f"{LOGPS}=False"], "tis reads 'rollout_logp': set .*calculate_log_probs=True"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_anything_is_loaded(
    overrides, reason, monkeypatch
):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "proxpo")
    if not reason:
        checked(*overrides)
        return
    with pytest.raises(ValueError, match=f"verl: .*{reason}"):
        checked(*overrides)


def test_every_loss_mode_has_an_estimator():
    """Every loss mode that verl accepts runs whole under the estimator that the error names."""
    for slug in methods("language"):
        recipe = proxpo.make_recipe(slug)
        if loss_refusal(recipe, engine=False) or recipe.advantage is None:
            continue
        name = VERL_ALONE.get(recipe.advantage.name, verl_name(slug))
        chosen = [f"{MODE}={verl_name(slug)}", f"{ESTIMATOR}={name}"]
        if recipe.schedule is not None:
            chosen += ["data.train_batch_size=256"]  # one mini-batch
        if name == "remax":
            chosen += ["trainer.use_v1=False"]
        chosen += [f"+algorithm.options.{key}=512" for key in lengths(recipe) if key in LONGEST]
        checked(*chosen)


def test_verl_s_driver_checks_the_run(capfd, monkeypatch):
    """verl's own validation, as its main script calls it."""
    monkeypatch.setattr(_environment, "_NOTICES", set())
    assert main_ppo.validate_config is validate_config
    whole = changed(f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=proxpo_dapo", LONGEST)
    validate_config(whole, False, False)
    line = "dapo: prompts=informative redraws prompts, which verl's V1 trainer does under algorithm"
    assert line in capfd.readouterr().err
    for first, lines in ((True, 0), (False, 1)):  # the older trainer does not read filter_groups
        monkeypatch.setattr(_environment, "_NOTICES", set())
        groups = ["algorithm.filter_groups.enable=True", f"trainer.use_v1={first}"]
        checked(f"{MODE}=proxpo_dapo", f"{ESTIMATOR}=proxpo_dapo", LONGEST, *groups)
        assert capfd.readouterr().err.count(line) == lines
    with pytest.raises(ValueError, match=r"dapo: algorithm.*=gae lacks overlong_penalty"):
        validate_config(changed(f"{MODE}=proxpo_dapo"), False, True)


def test_settings_written_on_the_command_line_are_seen(monkeypatch):
    """Under hydra, as in verl's entry point, clip_ratio_low=0.2 is not verl's silent default."""
    overrides = [*BASE, f"{MODE}=proxpo_gspo", f"{ESTIMATOR}=grpo", prefix("clip_ratio_low=0.2")]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides, return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(config)
    with pytest.raises(
        ValueError, match=r"clip_ratio_low=0\.2 is verl's default and does not reach gspo"
    ):
        validate_config(config, False, False)


JOBS = ("slurm.sh", "skypilot.yaml")
SCRIPTS += [(script, ["isopo"]) for script in JOBS]
# What a job of Slurm or SkyPilot finds in its environment, on the first of two nodes.
JOB = {
    **{"SLURM_SUBMIT_DIR": str(EXAMPLES.parents[1]), "SLURM_JOB_NUM_NODES": "2"},
    **{"SLURM_NODEID": "0", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"},
    **{"SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
}


def launch(script: str, arguments: list[str], folder: Path, env: dict[str, str]) -> str:
    """Runs a launch script as its scheduler would, without Ray; the calls of `ray`."""
    calls = folder / "calls"
    tools = {
        "ray": f'echo "$@" >> {calls}',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "hostname": "echo 10.0.0.1 fe80::1",
    }
    for name, line in tools.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    command = [str(EXAMPLES / script), *arguments]
    if script.endswith(".yaml"):
        task = yaml.safe_load((EXAMPLES / script).read_text())
        assert task["envs"]["METHOD"] == arguments[0]
        env = env | task["envs"]
        command = ["bash", "-euc", task["run"]]
    env = JOB | env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}
    subprocess.run(command, env=env, cwd=EXAMPLES.parents[1], check=True)
    return calls.read_text() if calls.exists() else ""


@pytest.mark.parametrize("script", JOBS)
def test_nodes_of_a_job_join_the_first(script, tmp_path):
    """The first starts Ray, runs and stops it; the second joins and starts nothing else."""
    env = {**os.environ, "PYTHON": "true"}
    first = launch(script, ["isopo"], tmp_path, env)
    head = "start --head --node-ip-address=10.0.0.1 --port=6379"
    assert first.splitlines() == [head, "stop"]
    (tmp_path / "calls").unlink()
    second = {"SLURM_NODEID": "1", "SKYPILOT_NODE_RANK": "1", "PYTHON": "false"}
    joined = launch(script, ["isopo"], tmp_path, env | second)
    assert joined.splitlines() == [
        "health-check --address 10.0.0.1:6379",
        "start --address=10.0.0.1:6379 --block",
    ]


@pytest.mark.parametrize(("script", "arguments"), SCRIPTS, ids=lambda x: str(x)[:20])
def test_every_setting_of_the_scripts_is_known_to_verl(script, arguments, tmp_path, monkeypatch):
    """The script runs with a stand-in for Python that notes what it is asked to start."""
    note = tmp_path / "python"
    lines = "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['NOTE'], 'w'))"
    note.write_text(f"#!{sys.executable}\nimport json, os, sys\n{lines}\n")
    note.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHON": str(note),
        "NOTE": str(tmp_path / "note.json"),
        "GPUS": "4",
    }
    launch(script, arguments, tmp_path, environment)
    (flag, module, *overrides), env = json.loads((tmp_path / "note.json").read_text())
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    config = composed(overrides)
    isopo = "isopo" in (script.removesuffix(".sh"), *arguments)
    if isopo:
        assert env["VERL_ENGINE_VENDOR"] == "proxpo"
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR == "proxpo"
        monkeypatch.setenv("VERL_ENGINE_VENDOR", "proxpo")
    assert config.trainer.nnodes == (2 if script in ("several_nodes.sh", *JOBS) else 1)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSS_REGISTRY
    assert config.algorithm.adv_estimator in ADV_ESTIMATOR_REGISTRY
    roles = need_reference_policy(config), need_critic(config)
    assert roles == (False, False)
    validate_config(config, *roles)  # makes the actor's config, ours inside it
    find = ADV_ESTIMATOR_REGISTRY[config.algorithm.adv_estimator]
    rewards, mask = torch.eye(4), torch.ones(4, 4)
    found, _ = find(rewards * 2, mask, index=["a", "a", "b", "b"], config=config.algorithm)
    assert found.shape == (4, 4)
    OmegaConf.resolve(config)


def test_the_data_script_writes_what_verl_s_reward_reads():
    sys.path.insert(0, str(EXAMPLES))
    from gsm8k_data import row
    from verl.utils.reward_score import default_compute_score

    made = row({"question": "1000 + 234?", "answer": "Easy.\n#### 1,234"}, 7, "train")
    truth = made["reward_model"]["ground_truth"]
    scores = [default_compute_score(made["data_source"], f"#### {n}", truth) for n in (1234, 5)]
    assert scores == [1.0, 0.0]
    assert "####" in made["prompt"][0]["content"]
