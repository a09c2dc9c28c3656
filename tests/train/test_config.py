"""Configs: every way to name a setting, every mistake in one line, YAML there and back."""

import re
import typing
from dataclasses import FrozenInstanceError, replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.runs.yaml_file import read_yaml
from proxpo.train._schema import leaves
from proxpo.train._settings import build_config
from proxpo.train.config import (
    Config,
    as_dict,
    changes,
    explain,
    left_out,
    load_config,
    presets,
    to_yaml,
    write_config,
)
from proxpo.train.refusals import unused


def written(folder, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


# Naming settings


@pytest.mark.parametrize(
    ("setting", "where", "value"),
    [
        ("train.lr=1e-5", "train.lr", 1e-5),
        ("lr=1e-5", "train.lr", 1e-5),
        ("seed=3", "seed", 3),
        ("model=smollm2", "model.name", "smollm2"),
        ("task=gsm8k", "task.name", "gsm8k"),
        ("rollout.temperature=2", "rollout.temperature", 2.0),
        ("optimizer=Muon", "train.optimizer", "muon"),
        ("grad_clip=none", "train.grad_clip", None),
        ("sinks=wandb, tensorboard", "log.sinks", ["wandb", "tensorboard"]),
        ("model.lora.r=8", "model.lora", {"r": 8}),
        ("task.options.digits=2", "task.options", {"digits": 2}),
        ("gradient_checkpointing=true", "model.gradient_checkpointing", True),
        ("p=-0.5", "recipe", {"p": -0.5}),
        ("recipe.p=-0.5", "recipe", {"p": -0.5}),
        ("overlap=32", "recipe", {"overlap": 32}),
        ("gradient.overlap=32", "recipe", {"gradient.overlap": 32}),
        ("recipe.gradient.overlap=32", "recipe", {"gradient.overlap": 32}),
        ("filter+=not_truncated", "recipe", {"filter+": "not_truncated"}),
    ],
)
def test_set(setting, where, value):
    found = load_config(sets=[setting])
    for name in where.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_settings_take_effect_in_order(tmp_path):
    path = written(tmp_path, "train: {lr: 1e-3, steps: 5}\nseed: 1")
    config = load_config(path, ["lr=1e-5", "lr=1e-6"], {"seed": 2, "out": None, "task": "gsm8k"})
    assert (config.train.lr, config.train.steps, config.seed) == (1e-6, 5, 2)
    assert (config.out, config.task.name) == (None, "gsm8k")


@pytest.mark.parametrize(
    ("flag", "setting"), [("seed", "seed=2"), ("method", "method=isopo"), ("model", "model.name=x")]
)
def test_an_option_and_another_setting_contradict_each_other(flag, setting):
    value = {"seed": 1, "method": "grpo", "model": "tiny"}[flag]
    message = f"--{flag} {value} and --set {setting} contradict each other"
    with pytest.raises(ProxpoError, match=message):
        load_config(None, [setting], {flag: value})
    assert load_config(None, [f"{flag}={value}"], {flag: value})
    assert load_config(None, [setting, f"{flag}={value}"], {flag: value}), "the last --set counts"


def test_two_spellings_of_one_value_contradict_nothing(tmp_path):
    assert load_config(None, ["method=GRPO", "seed=1.0"], {"method": "grpo", "seed": 1}).seed == 1
    assert load_config(written(tmp_path, "lr: '1e-5'\ntrain: {lr: 0.00001}")).train.lr == 1e-5
    assert load_config(written(tmp_path, "seed: 1"), ["seed=2"]).seed == 2, "not of one level"
    assert load_config(written(tmp_path, "seed: 1"), (), {"seed": 2}).seed == 2
    assert load_config(None, (), {"out": "nan"}).out == "nan"


def test_pairs_work_as_text_does():
    assert load_config(sets=[("lr", 1e-5)]) == load_config(sets=["lr=1e-5"])


def test_another_method_leaves_the_files_recipe_behind(tmp_path):
    path = written(tmp_path, "method: kpo\nrecipe: {eps: 1e-4, ratio: {name: kalman, q: 1e-5}}")
    assert load_config(path).recipe == {"eps": 1e-4, "ratio": {"name": "kalman", "q": 1e-5}}
    other = load_config(path, overrides={"method": "grpo"})
    assert other.recipe == {}
    said = f"recipe of {path} (eps, ratio) left out: it is for kpo, and this is grpo"
    assert left_out(path, other) == [said]
    assert left_out(path, load_config(path)) == left_out(None, other) == []
    assert load_config(path, ["method=grpo", "clip_high=0.3"]).recipe == {"clip_high": 0.3}
    assert load_config(path, overrides={"method": "KPO"}).recipe["eps"] == 1e-4


def test_the_recipe_is_the_methods_with_its_settings():
    config = load_config(
        None, ["clip_high=0.3", "ratio=kalman", "ratio.q=1e-4"], {"method": "grpo"}
    )
    recipe = config.make_recipe()
    assert recipe.name == "grpo"
    assert (recipe.ratio.name, recipe.ratio.options["q"]) == ("kalman", 1e-4)
    assert recipe.trust.options["clip_high"] == 0.3


MISTAKES = {
    "lrr=1": "unknown setting 'lrr'; did you mean 'lr'?",
    "train.lrr=1": "unknown setting 'train.lrr'; did you mean 'train.lr'?",
    "tasks.name=a": "unknown setting 'tasks.name'; did you mean 'task.name'?",
    "overlapp=3": "unknown setting 'overlapp'; did you mean 'overlap'?",
    "zzzz=1": "unknown setting 'zzzz'; `proxpo train --explain` lists them",
    "learning_rate=1e-4": "unknown setting 'learning_rate'; did you mean 'train.lr'?",
    "epochs=2": "unknown setting 'epochs'; did you mean 'train.updates_per_rollout'?",
    "train.max-steps=9": "unknown setting 'train.max-steps'; did you mean 'train.steps'?",
    "eval_every=3": "unknown setting 'eval_every'; did you mean 'evaluate.every'?",
    "every=3": "'every' could be evaluate.every or checkpoint.every: write one of them in full",
    "reward=a": "'reward' could be task.reward or recipe.reward: write one of them in full",
    "train=3": "'train' is a group of settings: write train.NAME=VALUE",
    "lr=-1": "train.lr is at least 0, got -1.0",
    "top_p=0": "rollout.top_p is above 0, got 0.0",
    "top_p=1.1": "rollout.top_p is at most 1, got 1.1",
    "lr=fast": "train.lr takes float, got 'fast'",
    "lr=nan": "train.lr takes float, got nan",
    "seed=-1": "seed is at least 0, got -1",
    "seed=1.5": "seed takes int, got 1.5",
    "seed=true": "seed takes int, got True",
    "steps=0": "train.steps is at least 1, got 0",
    "optimizer=adam": "train.optimizer: unknown value 'adam'; did you mean 'adamw'?",
    "backend=trl": "rollout.backend: unknown value 'trl'; valid: auto, local, vllm",
    "model.lora=3": "model.lora takes a dict, got 3",
    "sinks=3": "log.sinks takes a list, got 3",
    "seed.x=2": "seed takes int, got {'x': 2}",
    "method=grop": "unknown method 'grop'; did you mean 'grpo'?",
    "mini_batches=3": "rollout.prompts_per_step=64 cannot be cut into train.mini_batches=3",
    "replay_share=1": "train.replay_share=1 leaves no room for new data",
    "updates_per_rollout": "--set takes option=value, got 'updates_per_rollout'",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_mistakes_get_one_clear_line(setting):
    with pytest.raises(ProxpoError) as caught:
        load_config(sets=[setting])
    assert str(caught.value).startswith(MISTAKES[setting])
    assert "\n" not in str(caught.value)


SIZES = {
    "samples_per_prompt=9223372036854775808": "rollout.samples_per_prompt is at most 1,048,576",
    "micro_batch=9223372036854775808": "train.micro_batch is at most 1,048,576, got 9223372036854",
    "evaluate.k=1e30": "evaluate.k is at most 1,048,576, got 1000000000000000019884624838656",
    "samples_per_prompt=1000000": "rollout.prompts_per_step x rollout.samples_per_prompt is",
    "evaluate.k=100000": "evaluate.size x evaluate.k is at most 1,048,576 responses, got 25,",
    "lr=inf": "train.lr is at most 1e+30, got inf",
    "reward_timeout=inf": "task.reward_timeout is at most 86,400, got inf",
    f"seed={'9' * 400}": "seed is at most 9,223,372,036,854,775,807, got 9999",
    f"lr={'9' * 400}": "train.lr takes float, got 999999",
    "model.lora.r=9223372036854775808": "model.lora.r is an integer beyond 64 bits, got 922337203",
    "reward_memory=0": "task.reward_memory is above 0, got 0.0",
}


@pytest.mark.parametrize("setting", SIZES, ids=lambda setting: setting[:40])
def test_absurd_sizes_are_refused_in_one_line(setting):
    with pytest.raises(ProxpoError) as caught:
        load_config(sets=[setting])
    assert str(caught.value).startswith(SIZES[setting])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_every_number_has_bounds():
    for path, kind, leaf in leaves(Config):
        if {int, float} & {kind, *typing.get_args(kind)}:
            info = leaf.metadata
            assert info["high"] is not None, path
            assert (info["low"] is None) != (info["above"] is None), path


def test_updates_must_use_every_part():
    config = load_config(sets=["mini_batches=4"])
    assert config.updates == 4
    assert load_config(sets=["mini_batches=4", "updates_per_rollout=8"]).updates == 8
    with pytest.raises(ProxpoError, match=r"updates_per_rollout=6 must be a multiple of"):
        load_config(sets=["mini_batches=4", "updates_per_rollout=6"])


def test_mistakes_in_the_recipe_are_found_at_once():
    with pytest.raises(ProxpoError, match="unknown option 'clip' of isopo"):
        load_config(sets=["recipe.clip=1"])
    with pytest.raises(ProxpoError, match="unknown ratio stage 'kallman'; did you mean 'kalman'"):
        load_config(sets=["ratio=kallman"])


# Files


BAD_FILES = {
    "unknown key": ("trian: {lr: 1}", "unknown setting 'trian'; did you mean 'train'?"),
    "TRL's key": ("learning_rate: 1", "'learning_rate'; did you mean 'train.lr'?"),
    "unknown inner key": ("train: {lrr: 1}", "unknown setting 'train.lrr'; did you mean"),
    "twice": ("seed: 1\nseed: 2", "run.yaml:2: 'seed' is given twice"),
    "twice inside": ("train:\n  lr: 1\n  lr: 2", "run.yaml:3: 'lr' is given twice"),
    "twice by two names": ("lr: 1e-5\ntrain: {lr: 3e-5}", "'train.lr' is given twice, as 1e-05"),
    "a recipe's twice": (
        "method: grpo\nclip_low: 0.1\nrecipe: {clip_low: 0.2}",
        "'recipe.clip_low' is given twice, as 0.1 and as 0.2",
    ),
    "an option twice": (
        "task.options.held_out: 64\ntask: {options: {held_out: 32}}",
        "'task.options.held_out' is given twice, as 64 and as 32",
    ),
    "not yaml": ("train: [", "run.yaml:"),
    "a list": ("- 1", "expected settings as 'name: value' lines"),
    "odd key": ("1: 2", "expected settings as 'name: value' lines"),
    "not text": ("\x00", "run.yaml"),
    "section as list": ("train: [1]", "'train' is a group of settings"),
    "code": ("seed: !!python/object/apply:os.getcwd []", "run.yaml:1: could not determine"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_get_one_clear_line(tmp_path, case):
    text, message = BAD_FILES[case]
    with pytest.raises(ProxpoError) as caught:
        load_config(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ProxpoError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ProxpoError, match="unknown preset 'quickstrat'; did you mean 'quickstart'"):
        load_config("quickstrat")
    (tmp_path / "big.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ProxpoError, match="larger than 1 MiB"):
        load_config(tmp_path / "big.yaml")
    (tmp_path / "raw.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProxpoError, match="not UTF-8"):
        load_config(tmp_path / "raw.yaml")


def test_numbers_without_a_point_are_numbers(tmp_path):
    path = written(tmp_path, "train: {lr: 1e-5}\nrecipe: {p: -1E0}\nmodel: {lora: {x: 1e}}")
    config = load_config(path)
    assert (config.train.lr, config.recipe, config.model.lora) == (1e-5, {"p": -1.0}, {"x": "1e"})


def test_short_forms(tmp_path):
    path = written(tmp_path, "model: smollm2\ntask: gsm8k\nlr: 1e-5\nsteps: 3\nrecipe:\nlog:\n")
    config = load_config(path)
    assert (config.model.name, config.task.name) == ("smollm2", "gsm8k")
    assert (config.train.lr, config.train.steps, config.recipe) == (1e-5, 3, {})
    assert load_config(written(tmp_path, "")) == load_config()


# There and back


values = {
    "seed": st.integers(0, 2**40),
    "train.lr": st.floats(0, 1),
    "train.grad_clip": st.none() | st.floats(1e-9, 9),
    "out": st.none()
    | st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), max_size=9),
    "model.lora": st.none() | st.dictionaries(st.sampled_from(["r", "alpha"]), st.integers(1, 9)),
    "recipe": st.dictionaries(st.sampled_from(["p", "q", "r"]), st.floats(-3, 3)),
    "log.sinks": st.lists(st.sampled_from(["wandb", "trackio"]), unique=True),
    "task.name": st.sampled_from(["arithmetic:hard", "on", "null", "1e5", "a: b", "données"]),
}


@given(st.fixed_dictionaries({}, optional=values))
@settings(max_examples=25, deadline=None)
def test_yaml_gives_back_the_same_config(tmp_path_factory, chosen):
    config = load_config(sets=list(chosen.items()))
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    write_config(config, path)
    assert load_config(path) == config
    assert build_config(as_dict(config)) == config
    assert build_config(yaml.safe_load(to_yaml(config))) == config


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        load_config().seed = 3


def test_changes_are_listed():
    before = load_config()
    after = load_config(sets=["lr=1e-5", "steps=7", "p=-2"])
    assert changes(before, before) == []
    assert changes(before, after) == [
        "recipe: {} -> {'p': -2}",
        "train.steps: 100 -> 7",
        f"train.lr: {before.train.lr} -> 1e-05",
    ]


@pytest.mark.parametrize("columns", ["80", "160"])
def test_names_of_settings_are_never_broken(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["train", "quickstart", "--explain"]) == 0
    out = capsys.readouterr().out
    assert {setting.path for setting in explain()} <= set(out.split())
    assert "None" not in out  # a file and --set write none


def test_every_setting_is_explained():
    known = explain()
    assert [one.path for one in known if not one.doc] == []
    flat = _flat(as_dict(Config()))
    assert {one.path: one.default for one in known} == flat
    assert all("<" not in one.kind for one in known)


def _flat(tree, prefix=""):
    found = {}
    for key, value in tree.items():
        section = isinstance(value, dict) and not prefix and key != "recipe"
        found |= _flat(value, f"{key}.") if section else {f"{prefix}{key}": value}
    return found


def test_folder_and_temperature():
    config = load_config(sets=["task=reasoning-gym:leg_counting", "seed=4", "temperature=1.5"])
    assert config.folder == "runs/isopo-reasoning-gym-leg_counting-seed4"
    assert re.fullmatch(r"runs/[\w.-]+", load_config(sets=["task=/a/../b.jsonl"]).folder)
    assert replace(config, out="here").folder == "here"
    assert config.train_temperature == 1.5
    assert load_config(sets=["temperature=1.5", "train_temperature=1"]).train_temperature == 1.0


# Presets


EXPECTED = {
    "comparison",
    "quickstart",
    "isopo-gsm8k-qwen3-0.6b",
    "p3o-off-temperature",
    "kpo-long-responses",
    "smollm2-arithmetic",
    "foldact-dialogue",
    "lamer-arms",
    "vlpo-arithmetic",
}


def test_presets_are_all_there():
    assert set(presets()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_presets_load_and_say_how_to_run_them(name):
    config = load_config(name)
    assert config.make_recipe().name == config.method
    assert f"proxpo train {name}\n" in presets()[name].read_text()
    for section, value in read_yaml(presets()[name]).items():
        assert section in as_dict(config), "presets spell settings out in their sections"
        assert value is not None
    shorter = load_config(name, ["steps=2"], {"method": "grpo"})
    assert (shorter.train.steps, shorter.method) == (2, "grpo")


def test_the_papers_run():
    """The run of arXiv:2512.23353, as its code has it."""
    config = load_config("isopo-gsm8k-qwen3-0.6b")
    assert (config.model.name, config.task.name) == ("Qwen/Qwen3-0.6B", "gsm8k")
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_step, rollout.samples_per_prompt) == (128, 8)
    assert (rollout.max_prompt, rollout.max_tokens, rollout.temperature) == (512, 2048, 1.0)
    assert (train.steps, config.updates, train.mini_batches, train.micro_batch) == (102, 2, 2, 8)
    assert (train.optimizer, train.lr, train.weight_decay, train.grad_clip) == (
        "adamw", 2e-6, 0.01, 1.0
    )  # fmt: skip
    assert train.optimizer_options == {"betas": [0.9, 0.999]}
    recipe = config.make_recipe()
    assert (recipe.gradient.options["p"], recipe.gradient.options["overlap"]) == (-1.0, 250)
    assert recipe.regularisers == ()


def test_a_setting_that_the_domain_does_not_read(tmp_path):
    with pytest.raises(ProxpoError, match=r"model.options=.* has no effect: a language model"):
        load_config(None, ["model.options.hidden=8"])
    file = tmp_path / "shared.yaml"
    file.write_text("model: {options: {hidden: 8}}\n")
    config = load_config(file)
    assert [line.split(":")[0] for line in unused(config, config.make_method()).values()] == [
        "isopo"
    ]
