"""Recipes from names and settings: from Python, from YAML, from the command line."""

import itertools

import numpy
import pytest
import torch
import yaml
from helpers import close, loss_and_gradients, make_batch

import proxpo
from proxpo import Batch, ProxpoError, Recipe, Stage, make_recipe, make_stage, methods
from proxpo.errors import nearest
from proxpo.recipes._registry import METHODS
from proxpo.settings import make_method, parse_setting
from proxpo.stages.ratio import kalman
from proxpo.stages.weights import tis
from proxpo.types import MANY


def from_strings(*texts: str) -> list:
    return [parse_setting(text) for text in texts]


KALMAN = {
    "python": {"ratio": kalman(q=1e-4)},
    "flat": {"ratio": "kalman", "ratio.q": 1e-4},
    "options first": {"ratio.q": 1e-4, "ratio": "kalman"},
    "yaml": yaml.safe_load("ratio: {name: kalman, q: 1.0e-4}"),
    "strings": from_strings("ratio=kalman", "ratio.q=1e-4"),
    "spelling": {"RATIO".lower(): "Kalman", "ratio.Q": 1e-4},
}


@pytest.mark.parametrize("settings", KALMAN.values(), ids=KALMAN.keys())
def test_a_stage_swapped_in_every_way(settings: object) -> None:
    made = make_recipe("grpo", settings)
    assert made.ratio == kalman(q=1e-4)
    assert made.trust == make_recipe("grpo").trust
    by_hand = make_recipe("grpo").replace(ratio=kalman(q=1e-4))
    batch = make_batch(1)
    close(loss_and_gradients(made, batch)[1], loss_and_gradients(by_hand, batch)[1])


def test_the_example_of_the_readme() -> None:
    made = make_recipe("grpo", from_strings("ratio=kalman", "ratio.q=1e-6", "trust=ess_cap"))
    assert (made.ratio.name, made.ratio.options["q"], made.trust.name) == (
        "kalman",
        1e-6,
        "ess_cap",
    )
    assert proxpo.loss_fn(made)(make_batch(1)).value.isfinite()


ADDED = {
    "python": {"weights+": tis(cap=3.0)},
    "flat": {"weights+": "tis", "weights.tis.cap": 3},
    "yaml": yaml.safe_load("weights+: {name: tis, cap: 3}"),
    "yaml list": yaml.safe_load("weights+: [{name: tis, cap: 3}]"),
    "strings": from_strings("weights+=tis", "weights.tis.cap=3"),
}


@pytest.mark.parametrize("settings", ADDED.values(), ids=ADDED.keys())
def test_adding_keeps_what_is_there(settings: object) -> None:
    made = make_recipe("entropy-80-20", settings)
    assert [one.name for one in made.weights] == ["top_entropy", "tis"]
    assert made.weights[1] == tis(cap=3.0)


def test_replacing_many_and_leaving_out() -> None:
    one = make_recipe("entropy-80-20", {"weights": "tis"})
    assert [stage.name for stage in one.weights] == ["tis"]
    two = make_recipe("grpo", from_strings("weights=tis, top-entropy"))
    assert [stage.name for stage in two.weights] == ["tis", "top_entropy"]
    assert make_recipe("entropy-80-20", from_strings("weights=none")).weights == ()
    assert make_recipe("ppo", from_strings("value=none")).value is None
    assert (
        make_recipe("grpo", from_strings("ratio=none", "trust=score_function")).ratio.name == "none"
    )


def test_option_of_a_stage_named_with_a_hyphen() -> None:
    settings = yaml.safe_load("weights: {name: top-entropy, share: 0.5}")
    assert make_recipe("grpo", settings).weights[0].options["share"] == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregate": "constant_length", "aggregate.max_tokens": 50},
        {"aggregate": {"name": "constant_length", "max_tokens": 50}},
        from_strings("aggregate=constant_length", "aggregate.max_tokens=50"),
    ],
)
def test_stages_with_options_that_have_no_default(settings: object) -> None:
    assert make_recipe("grpo", settings).aggregate.options["max_tokens"] == 50.0


def test_required_option_of_one_of_many() -> None:
    made = make_recipe(
        "grpo", {"regularisers+": "entropy_bonus", "regularisers.entropy_bonus.coef": 1}
    )
    assert made.regularisers[0].options == {"coef": 1.0}


TOGETHER = {
    "reject with k2": ("grpo", "filter", "reject", {"estimator": "k2", "threshold": 0.1}),
    "a floor above the default cap": ("grpo", "weights", "tis", {"floor": 3.0, "cap": 5.0}),
    "bounds above the default ones": (
        "bapo",
        "trust",
        "balanced_clip",
        {"low_from": 0.9, "low_to": 0.95, "high_from": 1.0},
    ),
    "covariances above the default range": (
        "clip-cov",
        "trust",
        "clip_cov",
        {"cov_low": 6.0, "cov_high": 9.0},
    ),
}


@pytest.mark.parametrize(
    ("slug", "kind", "name", "options"), TOGETHER.values(), ids=TOGETHER.keys()
)
def test_settings_valid_together_are_accepted_in_any_order(
    slug: str, kind: str, name: str, options: dict
) -> None:
    place, sign = (f"{kind}.{name}", "+") if kind in MANY else (kind, "")
    settings = {f"{kind}{sign}": name} | {f"{place}.{key}": x for key, x in options.items()}
    for pairs in itertools.permutations(settings.items()):
        assert make_stage(kind, name, **options) in dict(make_recipe(slug, pairs).stages()).values()


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        (
            "grpo",
            {"weights+": "tis", "weights.tis.floor": 3.0},
            "floor must be in [0, cap], got 3.0",
        ),
        ("clip-cov", {"trust.cov_low": 6.0}, "cov_low must be below cov_high, got 6.0, 5.0"),
    ],
)
def test_settings_invalid_together_are_refused(name: str, settings: dict, reason: str) -> None:
    with pytest.raises(proxpo.ProxpoError) as caught:
        make_recipe(name, settings)
    assert reason in str(caught.value)


def test_values_from_the_command_line() -> None:
    texts = (
        "a=3",
        "a=0.5",
        "a=1e-6",
        "a=true",
        "a=False",
        "a=none",
        "a=kalman",
        "a=0.5_2.0",
        "a=inf",
    )
    expected = [3, 0.5, 1e-6, True, False, None, "kalman", "0.5_2.0", float("inf")]
    assert [value for _, value in from_strings(*texts)] == expected


REFUSED = {
    "unknown method": ("grppo", {}, "unknown method 'grppo'; did you mean 'grpo'?"),
    "unknown option": (
        "grpo",
        {"clip_hgh": 1},
        "unknown option 'clip_hgh' of grpo; did you mean 'clip_high'?",
    ),
    "unknown stage": ("grpo", {"ratio": "kalmann"}, "did you mean 'kalman'?"),
    "unknown option of a stage": (
        "grpo",
        {"ratio": "kalman", "ratio.qq": 1},
        "unknown option of ratio=kalman 'qq'",
    ),
    "unknown kind": (
        "grpo",
        {"ration.q": 1},
        "unknown kind of stage 'ration'; did you mean 'ratio'?",
    ),
    "wrong type": ("grpo", {"clip_low": "wide"}, "grpo: option 'clip_low' takes float, got 'wide'"),
    "a flag for a number": ("grpo", {"clip_low": True}, "takes float, got True"),
    "wrong type in a stage": (
        "grpo",
        {"trust.clip_low": []},
        "trust=ppo_clip: option 'clip_low' takes float",
    ),
    "wrong word": ("grpo", {"scale": "grup"}, "did you mean 'group'?"),
    "not a number": ("grpo", {"eps": float("nan")}, "takes float, got nan"),
    "missing option": ("grpo", {"aggregate": "constant_length"}, "needs the option 'max_tokens'"),
    "a second ratio": ("grpo", {"ratio+": "kalman"}, "there is one ratio stage; write ratio=NAME"),
    "no aggregate": ("grpo", {"aggregate": None}, "the aggregate stage cannot be left out"),
    "stage not there": ("grpo", {"weights.tis.cap": 2}, "weights stages: none"),
    "no such level": (
        "grpo",
        {"ratio.token.limit": 2},
        "'ratio.token.limit' should read ratio.limit",
    ),
    "no gradient stage": ("grpo", {"gradient.p": -1}, "gradient=NAME adds it"),
    "option of a stage": ("grpo", {"unbiased": False}, "did you mean 'advantage.unbiased'?"),
    "a table without a name": ("grpo", {"weights+": [{"cap": 2}]}, "a table with a 'name'"),
    "clip without a ratio": (
        "reinforce",
        {"trust": "ppo_clip"},
        "trust=ppo_clip works on ratio, but ratio=none gives no ratio",
    ),
    "pairs of a clipped loss": (
        "grpo",
        {"aggregate": "pairwise_logistic"},
        "aggregate=pairwise_logistic works on log_ratio",
    ),
    "a mean of log-ratios": (
        "dpo",
        {"aggregate": "token_mean"},
        "aggregate=token_mean works on loss",
    ),
    "token weights on pairs": ("dpo", {"weights+": "tis"}, "compares whole responses"),
    "a stage of another kind": ("grpo", {"ratio": tis()}, "'tis' is a weights stage, not ratio"),
    "a stage twice": ("tis", {"weights+": "tis"}, "weights=tis stands there twice"),
    "a transform before its advantages": (
        "rapid",
        {"gradient": "isopo"},
        "gradient=isopo takes the advantages before the forward pass, but advantage=",
    ),
    "an option of a stage that is swapped": (
        "grpo",
        {"trust": "ess_cap", "clip_high": 0.9},
        "grpo: option 'clip_high'=0.9 has no effect beside trust=ess_cap",
    ),
    "an option given twice": (
        "grpo",
        {"scale": "batch", "advantage.scale": "group"},
        "grpo: option 'scale'=batch has no effect beside advantage.scale=group",
    ),
    "an option beside another that replaces it": (
        "mdpo",
        {"tsallis": 1.5, "kl": "k3"},
        "mdpo: option 'kl'=k3 has no effect with these settings; it has one with tsallis=none",
    ),
    "an option of another form": (
        "remax",
        {"gamma": 0.5},
        "option 'gamma'=0.5 has no effect with these settings; it has one with form=official",
    ),
    "an option that two others leave out": (
        "ppo",
        {"kl_target": 1.0},
        "it has one with kl_coef=1.0 and kl_controller=horizon",
    ),
    "an option of a stage without effect": (
        "grpo",
        {"advantage.eps": 0.1, "advantage.scale": "none"},
        "grpo: advantage.eps=0.1 has no effect beside group_relative(scale=none, ",
    ),
    "an option of one of many stages without effect": (
        "tis",
        {"weights.tis.judge": "geometric"},
        "tis: weights.tis.judge=geometric has no effect beside tis(mode=truncate, ",
    ),
    "ESS of no ratio": ("reinforce", {"regularisers": "ess_kl_from_old"}, "gives no ratio"),
}


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_reason(name: str, settings: dict, reason: str) -> None:
    with pytest.raises(proxpo.ProxpoError) as caught:
        make_recipe(name, settings)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["clip", "=3", ""])
def test_a_setting_reads_option_equals_value(text: str) -> None:
    with pytest.raises(ValueError, match="--set takes option=value"):
        parse_setting(text)


def test_names_ignore_case_and_hyphens() -> None:
    assert make_recipe("Reinforce_PP").name == "reinforce-pp"
    assert make_recipe("grpo", {"Clip-Low": 0.1}).trust.options["clip_low"] == 0.1
    assert make_recipe("grpo", {"scale": "Batch"}).advantage.options["scale"] == "batch"


def test_defaults_of_every_method_are_accepted_back() -> None:
    for slug, entry in proxpo.methods("language").items():
        made = make_recipe(slug, entry.defaults)
        assert made == make_recipe(slug), slug
        for place, stage in made.stages():
            kind, _, _ = place.partition(".")
            again = proxpo.make_stage(kind, stage.name, **stage.options)
            assert again == stage, place


def test_a_ratio_corrected_kl_without_a_ratio_is_refused():
    settings = {"regularisers": "kl_to_ref", "regularisers.ratio_corrected": True}
    with pytest.raises(proxpo.ProxpoError, match="works on ratio, but ratio=none gives no ratio"):
        make_recipe("reinforce", settings)


@pytest.mark.parametrize(
    ("slug", "option", "value", "acting"),
    [
        ("capo", "max_tokens", 9, "host=dr-grpo"),
        ("reinforce", "cap", 1.5, "form=truncated"),
        ("rloo", "clip_low", 0.5, "form=trl"),
        ("p3o-2019", "kl_direction", "pi_beta", "kl=full"),
        ("grpo", "kl_ratio_corrected", True, "kl_coef="),
    ],
)
def test_an_option_without_effect_is_refused_with_the_setting_that_gives_it_one(
    slug: str, option: str, value: object, acting: str
) -> None:
    with pytest.raises(ProxpoError) as error:
        make_recipe(slug, {option: value})
    assert f"{slug}: option '{option}'=" in str(error.value)
    assert f"it has one with {acting}" in str(error.value)
    default = methods()[slug].defaults[option]
    assert make_recipe(slug, {option: default}).options[option] == default


def test_an_option_of_a_recipe_with_stages_of_its_own_is_not_judged() -> None:
    """A stage that is not registered may hold the option where nobody can see it."""

    @proxpo.register("test-closure", paper="none")
    def closure(*, scale: float = 1.0) -> Recipe:
        """A loss times a number."""

        def apply(batch: Batch, ctx: object) -> tuple:
            return torch.full_like(batch.logp, scale), {}

        return make_recipe("grpo").replace(weights=(Stage(kind="weights", name="x", apply=apply),))

    try:
        assert make_recipe("test-closure", {"scale": 2.0}).options == {"scale": 2.0}
    finally:
        del METHODS["test-closure"]


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("grpo", "clip", "'clip_low' and 'clip_high'"),
        ("grpo", "epsilon", "'clip_low' and 'clip_high'"),
        ("grpo", "trust.low", "'clip_low'"),
        ("cispo", "high", "'clip_high'"),
        ("opo", "clip", "'clip_low' and 'clip_high'"),
        ("dcpo", "agg", "'average'"),
        ("entropy-80-20", "normalize", "'normalise'"),
        ("rapid", "normalize_std", "'normalise_std'"),
        ("adjoint-sampling", "clip", "'max_norm'"),
    ],
)
def test_other_names_of_an_option_are_refused_with_its_own(method, old, new):
    with pytest.raises(ProxpoError, match=f"unknown option .*did you mean {new}"):
        make_method(method, {old: 0.1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[tensorboard]", ["tensorboard"]),
        (
            "{r: 8, target_modules: [q_proj, 'v, w']}",
            {"r": 8, "target_modules": ["q_proj", "v, w"]},
        ),
        ("[1, none, [2.5]]", [1, None, [2.5]]),
        ("{question}", "{question}"),
        ("[a]b]", "[a]b]"),
        ("[]", []),
    ],
)
def test_lists_and_blocks_on_one_line(text, value):
    assert parse_setting(f"key={text}") == ("key", value)


def test_numbers_of_numpy_are_numbers() -> None:
    made = make_recipe("grpo", {"clip_high": numpy.float32(0.5), "clip_low": numpy.int64(1)})
    assert repr(made.trust.options["clip_high"]) == "0.5"
    assert repr(made.trust.options["clip_low"]) == "1.0"
    assert make_stage("schedule", "inner_steps", steps=numpy.int64(3)).options["steps"] == 3


def test_kinds_of_stages_are_spelt_in_any_case() -> None:
    made = make_recipe("grpo", {"RATIO": "kalman", "Ratio.q": 1e-4, "WEIGHTS+": "tis"})
    assert (
        made.stages()
        == make_recipe("grpo", {"ratio": "kalman", "ratio.q": 1e-4, "weights+": "tis"}).stages()
    )


def test_many_valid_names_are_not_all_listed() -> None:
    names = [f"game-{i}-v0" for i in range(300)]
    said = nearest("zz", [*names, *names])
    assert said.startswith("; 300 are valid, among them game-")
    assert said.count("game-") == 8
    assert nearest("zz", names, listing="ls") == f"{said}; ls lists them"
    assert nearest("zz", names[:2]) == "; valid: game-0-v0, game-1-v0"
