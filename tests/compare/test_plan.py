"""Plans from command lines and studies; mistakes are refused in one line and leave no file."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxpo.cli import main
from proxpo.cli.comparing import CompareOptions, request_of
from proxpo.compare.design import (
    command,
    config_of,
    make_plan,
    repeating_command,
    with_choices,
)
from proxpo.compare.naming import run_name
from proxpo.compare.plan import Arm, Choice, plan_differences, read_plan, write_plan
from proxpo.compare.request import Request, parse_arm, with_arms
from proxpo.compare.runner import open_comparison
from proxpo.compare.studies import read_study, studies
from proxpo.errors import ProxpoError
from proxpo.models import TINY
from proxpo.train.config import differences, load_config


def plan_of(*methods: str, **options):
    return make_plan(Request(arms=[parse_arm(one) for one in methods], **options))


def test_every_arm_meets_every_seed_and_all_share_the_rest():
    plan = plan_of("grpo", "p3o", seeds=3, base=[("steps", 7), ("task", "arithmetic:easy")])
    assert [(r.arm, r.seed) for r in plan.runs] == [
        (arm, seed) for seed in (0, 1, 2) for arm in ("grpo", "p3o")
    ]
    configs = [config_of(plan, run) for run in plan.runs]
    assert {(c.train.steps, c.task.name) for c in configs} == {(7, "arithmetic:easy")}
    assert {run.role for run in plan.runs} == {""}
    assert len({run.folder for run in plan.runs}) == 6
    assert all(run.steps == 7 for run in plan.runs)


def test_all_arms_train_on_the_problems_that_one_of_them_needs_to_come_again():
    plan = plan_of("grpo", "palu", "dcpo:history=false", seeds=1, base=[("prompts_per_step", 4)])
    assert [config_of(plan, run).task.problems for run in plan.runs] == [32, 32, 32]
    note = "all arms train on the same 32 problems: palu learns from problems that come again"
    assert plan.notes == (note,)
    own = plan_of("grpo", "palu:task.problems=64", seeds=1)
    assert [config_of(own, run).task.problems for run in own.runs] == [None, 64]
    assert plan_of("grpo", "isopo").base["task"]["problems"] is None


def test_arms_carry_settings_and_a_comma_inside_a_value_stays_there():
    assert parse_arm("grpo:clip_low=0.4,clip_high=0.5")[2] == {"clip_low": 0.4, "clip_high": 0.5}
    assert parse_arm("grpo:weights=tis,off_policy_mask,lr=1e-4")[2] == {
        "weights": "tis,off_policy_mask",
        "lr": 1e-4,
    }
    plan = plan_of("grpo", "grpo:clip_low=0.4,clip_high=0.5")
    assert [arm.name for arm in plan.arms] == ["grpo", "grpo clip_low=0.4 clip_high=0.5"]
    recipes = [config_of(plan, run).recipe for run in plan.runs[:2]]
    assert recipes == [{}, {"clip_low": 0.4, "clip_high": 0.5}]


def test_the_command_of_a_run_gives_its_config(tmp_path):
    plan = plan_of("isopo:overlap=16,ratio=none", vary={"temperature": (0.8, 1.2)}, seeds=2)
    write_plan(plan, tmp_path)
    for run in plan.runs:
        train, base, *words = command(plan, run, tmp_path)
        assert train == "train"
        given = dict(zip(words[::2], words[1::2]))
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        named = {"method": given["--method"], "seed": int(given["--seed"])}
        assert load_config(base, sets, overrides=named) == config_of(plan, run)
        assert given["--out"] == str(tmp_path / run.folder)


def test_the_repeating_command_holds_every_setting_and_whole_paths(tmp_path, monkeypatch):
    """Local files by relative paths, options in blocks, settings that one arm does not read."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "model")
    Path("own.jsonl").write_text(12 * '{"prompt": "1+1=", "answer": "2"}\n')
    base = [
        *(("model", "model"), ("task", "./own.jsonl"), ("task.reward", "exact"), ("steps", 7)),
        *(("task.options.held_out", 0.5), ("model.lora.r", 2), ("lr_schedule", "linear")),
        *(("train.optimizer_options.betas", [0.8, 0.9]), ("prompts_per_step", 4), ("lr", 2e-6)),
    ]
    plan = plan_of("grpo:clip_low=0.1,weights=tis", "isopo:ratio=none", base=base, seeds=2)
    for run in plan.runs:
        train, *words = repeating_command(plan, run)
        given = dict(word.removeprefix("--").split("=", 1) for word in words[:4])
        assert train == "train"
        assert given["model"] == str(tmp_path / "model")
        assert given["task"] == str(tmp_path / "own.jsonl")
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        made = load_config(None, sets, overrides={**given, "seed": int(given["seed"])})
        assert [change.path for change in differences(config_of(plan, run), made)] == [
            "model.name",
            "task.name",
        ]


def test_varied_values_make_arms_of_one_family():
    plan = plan_of("isopo", "grpo", vary={"overlap": (16, 64), "temperature": (0.8, 1.0)})
    isopo = [arm for arm in plan.arms if arm.family == "isopo"]
    assert [dict(arm.varied) for arm in isopo] == [
        {"overlap": o, "temperature": t} for o in (16, 64) for t in (0.8, 1.0)
    ]
    assert [a.name for a in plan.arms if a.family == "grpo"] == [
        "grpo temperature=0.8",
        "grpo temperature=1",
    ]
    assert plan.notes == ("grpo has no setting overlap: it stands once",)


def test_two_settings_can_be_varied_together():
    plan = plan_of("grpo", "p3o", vary={"clip_low+clip_high": (0.2, 0.4)})
    assert [dict(arm.settings) for arm in plan.arms] == [
        {"clip_low": 0.2, "clip_high": 0.2},
        {"clip_low": 0.4, "clip_high": 0.4},
        {},
    ]


def test_a_sweep_is_tuned_and_reported_on_different_seeds():
    plan = plan_of("grpo", "p3o", seeds=2, tune=2, sweep={"lr": (1e-5, 1e-4)})
    assert {run.role for run in plan.runs} == {"tune"}
    assert len(plan.runs) == 2 * 2 * 2
    chosen = [
        Choice(arm="grpo", settings={"lr": 1e-5}, scores=()),
        Choice(arm="p3o", settings={"lr": 1e-4}, scores=()),
    ]
    later = [run for run in with_choices(plan, chosen).runs if run.role == "report"]
    assert [(r.arm, r.seed, config_of(plan, r).train.lr) for r in later] == [
        ("grpo", 0, 1e-5),
        ("p3o", 0, 1e-4),
        ("grpo", 1, 1e-5),
        ("p3o", 1, 1e-4),
    ]
    assert not {r.seed for r in later} & {r.seed for r in plan.runs}


def test_unequal_tuning_effort_is_said():
    plan = plan_of("isopo", "grpo", sweep={"overlap": (16, 64)})
    assert plan.notes == ("unequal tuning effort, settings tried: isopo 2, grpo 1",)


def test_a_setting_of_a_method_goes_to_its_arms():
    pairs = [("isopo:overlap", 16), ("grpo:clip_high", 0.3), ("lr", 1e-3)]
    plan = plan_of("isopo", "grpo", base=pairs)
    assert [dict(arm.settings) for arm in plan.arms] == [{"overlap": 16}, {"clip_high": 0.3}]
    assert {config_of(plan, run).train.lr for run in plan.runs} == {1e-3}


def test_a_joined_setting_sets_each_of_its_parts():
    plan = plan_of(
        "grpo", "p3o", base=[("lr+weight_decay", 1e-4), ("grpo:clip_low+clip_high", 0.3)]
    )
    assert (plan.base["train"]["lr"], plan.base["train"]["weight_decay"]) == (1e-4, 1e-4)
    assert plan.arm("grpo").settings == {"clip_low": 0.3, "clip_high": 0.3}


def test_an_option_of_a_block_stays_in_its_arm():
    plan = plan_of("grpo:task.options.last=2", "p3o", seeds=1)
    assert [config_of(plan, run).task.options for run in plan.runs] == [{"last": 2}, {}]


def test_a_setting_for_all_arms_that_some_arm_lacks_is_refused():
    """It would change grpo alone while the command reads as if it held for both."""
    with pytest.raises(ProxpoError) as refused:
        plan_of("grpo", "p3o", "dapo", base=[("clip_high", 0.28)])
    assert str(refused.value) == (
        "--set clip_high=0.28 does not apply to p3o (p3o: unknown setting 'clip_high'; `proxpo "
        "train --explain` lists them): set it for the others alone, --set grpo:clip_high=0.28 "
        "--set dapo:clip_high=0.28"
    )
    apart = plan_of("grpo", "p3o", base=[("grpo:clip_high", 0.28)])
    assert [dict(arm.settings) for arm in apart.arms] == [{"clip_high": 0.28}, {}]


def test_the_recipe_of_a_config_that_holds_for_one_arm_is_said():
    plan = plan_of("isopo", "grpo", config="quickstart")
    assert any("quickstart" in note and "for isopo alone" in note for note in plan.notes)
    assert plan_of("isopo", config="quickstart").notes == ()
    (note,) = plan_of("grpo", "dapo", config="quickstart").notes
    assert note.endswith("for isopo alone, and no arm is that: left out")


TWINS = [
    ("p=-1", "p=1"), ("lr=1e-6", "lr=1e6"), ("a b", "a-b"), ("\u03b1", "\u03b2"), ("A", "a"),
    ("a--b", "a-b"), ("a.", "a"), ("x" * 150 + "1", "x" * 150 + "2"), ("e\u0301", "\u00e9"),
    ("-", "+"),
]  # fmt: skip


@pytest.mark.parametrize("names", TWINS)
def test_arms_whose_names_differ_in_symbols_alone_have_their_own_folders(names):
    """Also arms of equal settings, as in a comparison of a method with itself."""
    arms = [(name, "grpo", {}) for name in names]
    plan = make_plan(Request(arms=arms, seeds=2, tune=1, sweep={"lr": (1e-6, 1e6)}))
    chosen = [Choice(arm=name, settings={"lr": 1e6}, scores=()) for name in names]
    runs = with_choices(plan, chosen).runs
    assert len(runs) == 2 * (2 + 2)
    for values in ([run.folder.lower() for run in runs], [run.id.lower() for run in runs]):
        assert len(set(values)) == len(values)
    assert all(re.fullmatch(r"runs/[a-z0-9.-]+", run.folder) for run in runs)


@given(st.lists(st.text(min_size=1, max_size=30), min_size=2, max_size=6, unique=True))
@settings(max_examples=60, derandomize=True)
def test_no_two_names_give_one_folder(names):
    arms = [Arm(name=name, method="grpo") for name in names]
    folders = [run_name(arm, {}).lower() for arm in arms]
    assert len(set(folders)) == len(folders)
    hashed = [Arm(name=folder, method="grpo") for folder in folders if "--" in folder]
    assert not {run_name(arm, {}) for arm in hashed} & set(folders)


def test_plain_names_are_their_own_folders():
    plan = plan_of("grpo", "dr-grpo", "isopo:p=-1", seeds=1)
    assert [run.folder for run in plan.runs[:2]] == ["runs/grpo-seed0", "runs/dr-grpo-seed0"]
    assert re.fullmatch(r"runs/isopo-p-1--[0-9a-f]{10}-seed0", plan.runs[2].folder)


def test_tuning_seeds_are_never_reported_ones():
    for seeds, first in ((1500, 0), (5, 998)):
        plan = plan_of("grpo", seeds=seeds, first_seed=first, tune=2, sweep={"lr": (1e-5,)})
        assert plan.seeds.report == tuple(range(first, first + seeds))
        assert not set(plan.seeds.tune) & set(plan.seeds.report)


def test_a_plan_with_folders_of_an_earlier_naming_goes_on_in_them(tmp_path):
    plan = plan_of("isopo:p=-1", "grpo", seeds=1, tune=1, sweep={"lr": (1e-5, 1e-4)})
    renamed = [replace(run, id=f"old{i}", folder=f"runs/old{i}") for i, run in enumerate(plan.runs)]
    write_plan(replace(plan, runs=tuple(renamed)), tmp_path)
    chosen = [Choice(arm=arm.name, settings={"lr": 1e-4}, scores=()) for arm in plan.arms]
    later = with_choices(read_plan(tmp_path), chosen)
    assert [run.folder for run in later.runs if run.role == "tune"] == [r.folder for r in renamed]
    moved = [replace(run, folder=f"{run.folder}-x") for run in later.runs]
    again = with_choices(replace(later, runs=tuple(moved)), chosen)
    assert [run.folder for run in again.runs] == [run.folder for run in moved]


def test_a_plan_whose_runs_share_a_folder_is_refused(tmp_path, capsys):
    plan = plan_of("isopo:p=-1", "isopo:p=1", seeds=1)
    runs = [replace(run, folder="runs/isopo-p-1-seed0") for run in plan.runs]
    write_plan(replace(plan, runs=tuple(runs)), tmp_path)
    for words in (["compare"], ["report", str(tmp_path)]):
        assert main([*words, "--out", str(tmp_path)]) == 2
        said = capsys.readouterr()
        assert "'isopo p=-1' and 'isopo p=1', seed 0, share the folder" in said.err
        assert said.err.count("\n") == 1


def test_equal_swept_values_are_one_and_true_is_not_1():
    with pytest.raises(ProxpoError, match="a value is given twice"):
        plan_of("grpo", sweep={"lr": (1, 1.0)})
    before = plan_of("grpo:clip_high=1")
    arms = (replace(before.arms[0], settings={"clip_high": True}),)
    assert plan_differences(before, replace(before, arms=arms))


def test_a_later_setting_replaces_an_earlier_one_and_an_arm_keeps_its_own():
    base = [("overlap", 16), ("lr", 1e-3), ("overlap", 8), ("isopo:p", -0.5), ("lr", 1e-5)]
    plan = plan_of("isopo", "isopo:overlap=4", base=base)
    assert [arm.settings["overlap"] for arm in plan.arms] == [8, 4]
    assert [arm.settings["p"] for arm in plan.arms] == [-0.5, -0.5]
    assert plan.base["train"]["lr"] == 1e-5


def test_the_recipe_of_a_config_file_is_for_its_own_method():
    plan = plan_of("isopo", "grpo", config="quickstart")
    assert plan.arms[0].settings["overlap"] == 16
    assert plan.arms[1].settings == {}


def test_a_plan_survives_its_file(tmp_path):
    plan = plan_of("isopo:p=-1", "grpo", sweep={"lr": (1e-5, 3e-5)}, vary={"temperature": (1.2,)})
    chosen = [
        Choice(arm=arm.name, settings={"lr": 3e-5}, scores=(({"lr": 1e-5}, None),))
        for arm in plan.arms
    ]
    plan = with_choices(plan, chosen)
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path) == plan
    assert load_config(tmp_path / "base.yaml").evaluate == config_of(plan, plan.runs[0]).evaluate


def test_what_differs_between_plans_is_named():
    before = plan_of("grpo", "p3o", seeds=2)
    after = plan_of("grpo", "dapo", seeds=3, base=[("lr", 1e-3)])
    assert plan_differences(before, before) == []
    lines = plan_differences(before, after)
    assert "base.train.lr: 0.0005 -> 0.001" in lines
    assert "arms: grpo, p3o -> grpo, dapo" in lines
    assert "seeds.report: 0, 1 -> 0, 1, 2" in lines


def test_an_arm_under_a_second_name_is_said():
    (line,) = plan_of("grpo:clip_low=0.2", "grpo", "grpo:clip_low=0.3").notes
    assert line == "grpo and grpo clip_low=0.2 are one method: every setting is equal"
    assert plan_of("grpo:lr=1e-4", "grpo", "dapo").notes == ()


BAD = [
    (["grpoo"], "unknown method 'grpoo'; did you mean 'grpo'?"),
    (["grpo:clp_high=0.4"], "unknown setting 'clp_high'; did you mean 'clip_high'?"),
    (["grpo:ratio=kalmann"], "unknown ratio stage 'kalmann'; did you mean 'kalman'?"),
    (["grpo:"], "expected METHOD:KEY=VALUE"),
    (["grpo", "--sweep", "lrr=1,2"], "unknown setting 'lrr'"),
    (["grpo", "--sweep", "lr"], "--sweep takes KEY=VALUE,VALUE..., got 'lr'"),
    (["grpo", "--sweep", "lr=1e-5,1e-5"], "a value is given twice"),
    (["grpo", "--vary", "overlap=16"], "unknown setting 'overlap'"),
    (["grpo", "--vary", "lr=1,2", "--sweep", "lr=3"], "both swept and varied"),
    (["grpo:lr=1e-4", "--sweep", "lr=1e-5"], "sets lr itself, so it cannot be swept"),
    (["grpo", "--vary", "temperature=-1"], "rollout.temperature is above 0"),
    (["grpo", "grpo"], "'grpo' is compared with itself"),
    (["grpo", "--sweep", "lr=1e-5,2e-5", "--sweep", "lr=1e-4"], "--sweep lr is given twice"),
    (["grpo", "--vary", "lr=1e-5", "--vary", "train.lr=1e-4"], "lr and train.lr are one setting"),
    (
        ["grpo", "--sweep", "clip_low+clip_high=0.1,0.2", "--sweep", "clip_low=0.3"],
        "clip_low+clip_high and clip_low are one setting",
    ),
    (["grpo:clip_low=0.1,clip_low=0.3"], "sets clip_low twice"),
    (["grpo", "--model", "tinny"], "unknown model 'tinny'; did you mean 'tiny'?"),
    (["grpo:lr=1e-3,train.lr=1e-4"], "lr and train.lr are one setting"),
    (
        ["grpo", "--task", "arithmetic", "--set", "task=chain"],
        "--task arithmetic and --set task=chain contradict each other",
    ),
    (["grpo", "--seeds", "0"], "at least one seed"),
    (["grpo", "--first-seed", "-1"], "the first seed is 0 or more, got -1"),
    (["grpo", "--set", "stepz=3"], "unknown setting 'stepz'; did you mean 'steps'?"),
    (["grpo", "--set", "isopo:p=1"], "isopo is not compared here"),
    (["grpo", "--task", "arithmetik"], "unknown task 'arithmetik'"),
    (["grpo", "--config", "quickstrat"], "unknown preset 'quickstrat'"),
    (["gprpo", "--study", "worked-stale"], "unknown arm of study worked-stale 'gprpo'; did you"),
    (["--study", "p3o-clp"], "unknown study 'p3o-clp'; did you mean 'p3o-clip'?"),
    (["grpo", "--on", "slurm"], "unknown place 'slurm'"),
    (["grpo", "--set", "seed=5"], "'seed' cannot be set in a comparison: the seeds are those of"),
    (["grpo:out=there"], "'out' cannot be set in a comparison: --out names the folder"),
    (["grpo", "--vary", "method=kpo,p3o"], "'method' cannot be set in a comparison"),
    (["grpo", "--sweep", "seed=1,2"], "'seed' cannot be set in a comparison"),
    (["grpo", "--candidates", "0"], "--candidates is an option of a search"),
    ([], "holds no comparison to go on with"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_costs_one_line_and_writes_nothing(words, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", *words, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert not out.exists()


DAMAGE = [
    (lambda tree: "version: [", "plan.yaml"),
    (lambda tree: yaml.dump({**tree, "version": 9}), "version 9"),
    (lambda tree: yaml.dump({k: v for k, v in tree.items() if k != "arms"}), "'arms'"),
    (lambda tree: yaml.dump({**tree, "arms": [{"nam": 1}]}), "damaged"),
    (lambda tree: yaml.dump({**tree, "runs": [{**tree["runs"][0], "arm": "x"}]}), "no arm"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_plan_is_refused(damage, message, tmp_path, capsys):
    write_plan(plan_of("grpo"), tmp_path)
    file = tmp_path / "plan.yaml"
    broken = damage(yaml.safe_load(file.read_text()))
    file.write_text(broken)
    assert main(["compare", "grpo", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == broken


def test_another_plan_in_the_folder_is_refused(tmp_path, capsys):
    write_plan(plan_of("grpo", config="comparison"), tmp_path)
    assert main(["compare", "p3o", "--out", str(tmp_path)]) == 2
    assert "holds another comparison (arms: grpo -> p3o)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--seeds", "7"], ["--first-seed", "0"], ["--set", "lr=1e-3"]])
def test_what_a_plan_that_goes_on_cannot_honour_is_refused(words, tmp_path, capsys):
    write_plan(plan_of("grpo", config="comparison"), tmp_path)
    assert main(["compare", *words, "--out", str(tmp_path)]) == 2
    assert (
        f"{words[0]} takes no effect: without methods, --study or --confirm"
        in capsys.readouterr().err
    )


def test_arms_are_added_and_none_is_taken_away(tmp_path):
    swept = {"sweep": {"lr": (1e-4, 1e-3)}, "config": "comparison", "seeds": 2}
    short, longer = plan_of("p3o", **swept), plan_of("grpo", "p3o", **swept)
    made = with_choices(short, [Choice(arm="p3o", settings={"lr": 1e-3}, scores=())])
    write_plan(made, tmp_path)
    with open_comparison(tmp_path, longer) as plan:
        assert [arm.name for arm in plan.arms] == ["grpo", "p3o"]
        assert {run.folder for run in made.runs} <= {run.folder for run in plan.runs}
        both = [Choice(arm=name, settings={"lr": 1e-3}, scores=()) for name in ("grpo", "p3o")]
        whole = with_choices(plan, both)
        assert len(whole.runs) == 2 * 4 + 2 * 2 == len(plan.runs) + plan.runs_to_come
        assert {run.folder for run in made.runs} <= {run.folder for run in whole.runs}
    assert len(read_plan(tmp_path).arms) == 2
    changed = plan_of("grpo", "p3o", "gspo", sweep={"lr": (1e-4,)}, config="comparison", seeds=2)
    for other, said in ((short, "arms: grpo, p3o -> p3o"), (changed, "arms: grpo, p3o -> grpo")):
        with pytest.raises(ProxpoError, match=f"holds another comparison .{said}"):
            open_comparison(tmp_path, other).__enter__()


def test_a_part_of_a_study():
    request = with_arms(read_study("worked-stale"), ["ISOPO p=-1", "grpo"], of="study worked-stale")
    assert [arm.name for arm in make_plan(request).arms] == ["grpo", "isopo p=-1"]


def test_a_study_takes_further_methods_at_its_settings():
    names = ["vespo:k_pos=1", "grpo", "Dr-GRPO"]
    plan = make_plan(with_arms(read_study("worked-stale"), names, of="study worked-stale"))
    assert [arm.name for arm in plan.arms] == ["grpo", "vespo k_pos=1", "dr-grpo"]
    alone = make_plan(with_arms(read_study("worked-stale"), ["grpo"], of="study worked-stale"))
    assert (plan.base, plan.sweep, plan.seeds) == (alone.base, alone.sweep, alone.seeds)
    assert "dr-grpo is no arm of study worked-stale and has its settings" in plan.notes
    assert not any("grpo is no arm" in note for note in alone.notes)


def test_a_study_on_another_task_leaves_the_options_of_its_own_out():
    options = CompareOptions(
        study="worked-fresh",
        task="reasoning-gym:chain_sum",
        settings=["task.options.config.min_terms=3"],
    )
    plan = make_plan(request_of(options))
    assert plan.base["task"]["options"] == {"config": {"min_terms": 3}}
    left_out = "options of task column-sums are left out: terms, digits"
    assert left_out in plan.notes
    same = make_plan(request_of(CompareOptions(study="worked-fresh", task="column-sums")))
    assert same.base["task"]["options"] == {"terms": [2, 3], "digits": [2, 4]}
    assert left_out not in same.notes


def test_a_setting_that_is_given_is_not_swept_by_the_study():
    fixed = make_plan(request_of(CompareOptions(study="worked-fresh", settings=["lr=1e-5"])))
    assert (fixed.sweep, fixed.tune_best, len(fixed.runs)) == ({}, None, 5 * len(fixed.arms))
    assert {config_of(fixed, run).train.lr for run in fixed.runs} == {1e-5}
    assert "lr is set, and neither swept nor varied" in fixed.notes
    held = make_plan(
        request_of(CompareOptions(study="p3o-temperature", settings=["temperature=1"]))
    )
    assert not held.vary
    swept = CompareOptions(study="hot", sweep=["temperature=1.1,1.2,1.3"])  # set there, for all
    assert {r.settings["temperature"] for r in make_plan(request_of(swept)).runs} == {1.1, 1.2, 1.3}


@pytest.mark.parametrize("axis", ["sweep", "vary"])
def test_a_setting_that_an_axis_would_replace_is_refused(axis):
    options = CompareOptions(methods=["grpo"], settings=["lr=1e-5"], **{axis: ["lr=1e-4,3e-4"]})
    with pytest.raises(ProxpoError, match=r"--set train.lr=1e-05 takes no effect"):
        make_plan(request_of(options))


def test_tuning_seeds_without_a_sweep_are_refused(tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["compare", "grpo", "--tune-seeds", "3", "--out", str(folder)]) == 2
    assert "--tune-seeds 3 takes no effect: nothing is swept" in capsys.readouterr().err
    assert not folder.exists()


def test_the_best_settings_of_a_study_are_kept_where_they_can_decide():
    def best(**more):
        return make_plan(request_of(CompareOptions(study="hot", **more))).tune_best

    assert (best(), best(sweep=["lr=1e-5,1e-4,1e-3"])) == (2, 2)
    assert best(sweep=["lr=1e-4"]) is None
    assert best(tune_seeds=1) is None
    with pytest.raises(ProxpoError, match="takes no effect"):
        best(tune_seeds=1, tune_best=2)


def test_a_folder_with_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    assert main(["compare", "grpo", "--out", str(tmp_path)]) == 2
    assert "holds no comparison" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", list(studies()))
def test_every_study_makes_a_plan_and_asks_a_question(name):
    plan = make_plan(read_study(name))
    assert plan.question.endswith("?")
    assert len(plan.arms) >= 3
    assert len(plan.seeds.report) >= 5
    start = {"worked": "runs/warm-sums", "chain": "runs/warm-chain"}
    assert plan.base["model"]["name"] == start.get(name.partition("-")[0], "tiny")


STUDIES = {
    "isopo-figure5",
    "isopo-figure7",
    "isopo-regularisation",
    "isopo-correlated",
    "p3o-clip",
    "p3o-temperature",
    "kpo-entropy",
    "optimizers",
}


def test_the_studies_of_the_papers_are_there():
    assert set(studies()) >= STUDIES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: grpo", "'arms' is a list"),
        ("arms: [{metod: grpo}]", "unknown key 'arms.metod'; did you mean 'method'?"),
        ("arms: [{method: grpo}]\nswep: {}", "unknown key 'swep'; did you mean 'sweep'?"),
        ("arms: [{method: grpo}]\nsweep: {lr: 1}", "'sweep.lr' is a list"),
        ("arms: [{method: grpo}]\nseeds: many", "'seeds' is a number"),
        ("arms: [{method: grpo, set: {ratio: {name: kalman}}}]", "'ratio' takes one value"),
    ],
)
def test_a_study_of_ones_own_is_checked(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ProxpoError, match=message.replace("?", r"\?")):
        make_plan(read_study(str(file)))


def test_a_study_like_another_changes_what_it_names(tmp_path):
    (tmp_path / "first.yaml").write_text(
        "title: first\nset: {steps: 5, task: column-sums, task.options.terms: [2, 3]}\n"
        "arms: [{method: grpo}, {method: p3o}]\nsweep: {lr: [1e-5, 3e-5]}\nseeds: 4"
    )
    (tmp_path / "second.yaml").write_text("like: first.yaml\ntitle: second\nset: {steps: 7}")
    (tmp_path / "third.yaml").write_text("like: second.yaml\nset: {task: arithmetic}\nseeds: 2")
    files = (tmp_path / f"{name}.yaml" for name in ("second", "third"))
    second, third = (make_plan(read_study(str(file))) for file in files)
    assert (second.title, len(second.arms), second.sweep) == ("second", 2, {"lr": (1e-5, 3e-5)})
    assert (second.base["train"]["steps"], len(second.seeds.report)) == (7, 4)
    assert second.base["task"]["options"] == {"terms": [2, 3]}
    assert (third.base["train"]["steps"], len(third.seeds.report)) == (7, 2)
    assert (third.base["task"]["name"], third.base["task"]["options"]) == ("arithmetic", {})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ("mine.yaml", "study mine: 'like: mine.yaml' leads back to the study itself"),
        ("../{folder}/mine.yaml", "leads back to the study itself"),
        ("wroked-fresh", "unknown study 'wroked-fresh'; did you mean 'worked-fresh'?"),
        ("gone.yaml", "study gone.yaml: no such file"),
        ("3", "study mine: 'like' is the name of a study, got 3"),
    ],
)
def test_a_study_that_is_like_no_other_is_refused(like, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"like: {like.format(folder=tmp_path.name)}")
    with pytest.raises(ProxpoError, match=re.escape(message)):
        read_study(str(file))


def test_a_study_can_be_changed_from_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "arms: [{method: grpo}, {method: p3o}]\nset: {steps: 5}\nseeds: 4\nfirst_seed: 3"
    )
    assert make_plan(read_study(str(file))).seeds.report == (3, 4, 5, 6)
    changed = CompareOptions(
        study=str(file), seeds=2, first_seed=9, settings=("steps=6",), task="gsm8k"
    )
    plan = make_plan(request_of(changed))
    assert plan.seeds.report == (9, 10)
    assert plan.base["train"]["steps"] == 6
    assert plan.base["task"]["name"] == "gsm8k"
