"""`proxpo inspect`: the library's numbers, its JSON, and mistakes refused in one line."""

import contextlib
import json

import pytest
import torch

import proxpo as library
from proxpo.batch_file import SAMPLE, load_batch, save_batch
from proxpo.inspection import inspect_batch
from proxpo.settings import make_recipe, parse_setting
from proxpo.types import FIELDS

# What only a model or an environment can give, and no batch of eight answers holds.
NEED_A_MODEL = {
    "capo": "hidden",
    "fixpo": "vocab_logp",
    "foldact": "episode",
    "g2rl": "features",
    "grpo-guard": "noise",
    "lamer": "episode",
    "vlpo": "mean",
}
SHOWN = [slug for slug in library.methods("language") if slug not in NEED_A_MODEL]

# What the loss of a batch leaves out of a method, and lengths that a trainer would set.
INFORMATIVE = "shown without prompts=informative"
NOTED = {
    "cispo": [INFORMATIVE],
    "clip-cov": [INFORMATIVE],
    "dapo": [INFORMATIVE, "shown with reward.overlong_penalty.max_tokens=20480"],
    "dppo": ["shown with aggregate.max_tokens=3000"],
    "dr-grpo": ["shown with aggregate.max_tokens=3000"],
    "entropy-80-20": [INFORMATIVE, "shown with reward.overlong_penalty.max_tokens=20480"],
    "isopo": ["shown before gradient=isopo"],
    "isopo-ntk": ["shown before gradient=isopo_ntk"],
    "kl-cov": [INFORMATIVE],
    "knapsack-rl": ["shown without budget=knapsack"],
    "lopti": ["shown before schedule=split_passes"],
    "mdpo": ["shown before schedule=inner_steps"],
    "opo": ["shown before schedule=single_update"],
    "p3o-2019": ["shown before schedule=poisson_replay"],
    "palu": ["shown without budget=length_budget"],
    "proma": ["shown before gradient=proma"],
    "rapid": ["shown before schedule=inner_steps"],
    "remax": ["shown before schedule=single_update"],
    "remix": ["shown before schedule=reincarnation"],
    "sfpo": ["shown before schedule=fast_slow"],
    "st-ppo": ["shown before schedule=clipping_bias"],
    "trpo": ["shown before schedule=line_search"],
}


def strict(text):
    """Parses JSON of the standard: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))


@pytest.fixture
def inspect(proxpo):
    def run(*arguments, batch="sample"):
        code, out, err = proxpo("inspect", *arguments, "--batch", batch, "--json")
        assert (code, err) == (0, ""), err
        return strict(out)

    return run


def by_hand(recipe, batch):
    logp = batch.logp.clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    loss = library.loss_fn(recipe)(batch.replace(logp=logp), library.Context(generator=generator))
    loss.value.backward()
    return loss, logp.grad


def test_every_method_in_one_call_equals_the_library(inspect):
    batch = load_batch("sample")
    found = inspect(*SHOWN)
    assert list(found) == SHOWN
    for name in SHOWN:
        entry = found[name]
        noted = ["notes"] if NOTED.get(name) else []
        assert set(entry) == {"loss", "dloss_dlogp", "advantages", "metrics", *noted}
        assert [note.split(",")[0] for note in entry.get("notes", [])] == NOTED.get(name, []), name
        loss, gradient = by_hand(make_recipe(name), batch)
        assert entry["loss"] == float(loss.value.detach()), name
        shown = torch.tensor(entry["dloss_dlogp"], dtype=torch.float64)
        assert torch.equal(shown, gradient), name
        assert (shown[~batch.mask] == 0).all()
        for key, value in loss.metrics.items():
            assert entry["metrics"][key] == float(value), (name, key)
        advantages = torch.tensor(entry["advantages"], dtype=torch.float64)
        assert advantages.shape in ((8,), (8, 24)), name


def test_advantages_are_per_response_unless_tokens_differ(inspect):
    found = inspect("grpo", "ppo")
    expected = [0.8660239, -0.8660239, 0.8660239, -0.8660239, -0.499999, 1.499997]
    assert found["grpo"]["advantages"][:6] == pytest.approx(expected, abs=1e-6)
    assert torch.tensor(found["ppo"]["advantages"]).shape == (8, 24)
    assert found["ppo"]["advantages"][2][6:] == [0.0] * 18  # masked


@pytest.mark.parametrize("per_token", [False, True])
def test_given_advantages_are_used_and_keep_their_shape(inspect, tmp_path, per_token):
    batch = load_batch("sample")
    given = torch.linspace(-1, 1, 8, dtype=torch.float64)
    given = given[:, None].expand(8, 24).contiguous() if per_token else given
    save_batch(batch.replace(advantages=given), tmp_path / "batch.json")
    shown = torch.tensor(
        inspect("grpo", batch=tmp_path / "batch.json")["grpo"]["advantages"], dtype=torch.float64
    )
    assert torch.equal(shown, given.masked_fill(~batch.mask, 0.0) if per_token else given)


@pytest.mark.parametrize(
    ("method", "setting", "said"),
    [
        ("grpo", "scale=none", "grpo: advantage=group_relative(scale=none, "),
        ("grpo", "advantage=leave_one_out", "grpo: advantage=leave_one_out("),
        ("dapo", "reward=none", "dapo: reward=none has no effect: the advantages are the batch"),
        ("grpo", "clip_high=0.3", ""),
        ("ppo", "kl_coef=0.1", ""),  # the critic's targets follow the rewards
    ],
)
def test_settings_that_given_advantages_replace_are_named(proxpo, tmp_path, method, setting, said):
    path = tmp_path / "batch.json"
    for advantages in (torch.linspace(-1, 1, 8), None):
        save_batch(load_batch("sample").replace(advantages=advantages), path)
        code, out, err = proxpo("inspect", method, "--batch", path, "--set", setting, "--json")
        assert (code, list(strict(out))) == (0, [method])
        if advantages is None or not said:
            assert err == ""
        else:
            assert err.startswith(f"proxpo: {said}")
            assert err.count("\n") == 1


def test_ess_and_kl_by_hand(inspect):
    batch = load_batch("sample")
    d = (batch.logp - batch.old_logp)[batch.mask]
    r = d.exp()
    metrics = inspect("grpo", "kpo", "reinforce")["grpo"]["metrics"]
    assert metrics["inspect/ess"] == pytest.approx(float(r.sum() ** 2 / (r**2).sum() / len(r)))
    assert metrics["inspect/kl_old"] == pytest.approx(float((r - 1 - d).mean()))
    assert "inspect/ess" not in inspect("reinforce")["reinforce"]["metrics"]


def test_sample_shows_the_methods_apart(inspect):
    found = inspect("grpo", "p3o", "kpo", "gspo")
    clipped = {name: entry["metrics"]["trust/clipped"] for name, entry in found.items()}
    assert 0 < clipped["grpo"] < clipped["gspo"] < clipped["p3o"] < 1
    assert found["p3o"]["metrics"]["ratio/ess"] < 0.95
    assert (
        found["p3o"]["metrics"]["inspect/silent"] == 0 < found["grpo"]["metrics"]["inspect/silent"]
    )


def test_an_empty_mask_gives_zeros(inspect, tmp_path):
    batch = load_batch("sample")
    save_batch(batch.replace(mask=torch.zeros_like(batch.mask)), tmp_path / "batch.json")
    for name, entry in inspect("grpo", "p3o", "ppo", batch=tmp_path / "batch.json").items():
        assert entry["loss"] == 0, name
        assert not torch.tensor(entry["dloss_dlogp"]).any()


def test_what_is_not_finite_is_null(inspect, proxpo, tmp_path):
    batch = load_batch("sample")
    path, settings = tmp_path / "batch.json", ("--set", "kl_coef=1")
    save_batch(batch.replace(logp=batch.logp - 1e6), path)
    found = inspect("grpo", *settings, batch=path)["grpo"]
    assert found["loss"] is None
    assert found["dloss_dlogp"][0][0] is None
    assert " inf " in proxpo("inspect", "grpo", *settings, "--batch", path).out


def test_settings_and_stage_swaps(inspect):
    swapped = inspect(
        "grpo", "--set", "ratio=kalman", "--set", "ratio.q=1e-6", "--set", "trust=ess_cap"
    )["grpo"]
    recipe = make_recipe("grpo", {"ratio": "kalman", "ratio.q": 1e-6, "trust": "ess_cap"})
    assert swapped["loss"] == inspect_batch(recipe, load_batch("sample")).loss
    assert swapped["loss"] != inspect("grpo")["grpo"]["loss"]
    wide = inspect("grpo", "--set", "clip_high=9", "--set", "clip_low=0.99")["grpo"]
    assert wide["metrics"]["trust/clipped"] == 0


def test_a_prefixed_setting_is_for_one_method(inspect):
    plain = inspect("grpo", "dapo")
    found = inspect("grpo", "dapo", "--set", "GRPO:clip_high=0.01")
    assert found["dapo"] == plain["dapo"]
    assert found["grpo"]["metrics"]["trust/clipped"] > plain["grpo"]["metrics"]["trust/clipped"]
    both = inspect("grpo", "dapo", "--set", "clip_high=0.01")
    assert both["grpo"] == found["grpo"]
    assert both["dapo"] != plain["dapo"]


def test_yaml_files_name_methods(inspect, tmp_path):
    path = tmp_path / "smooth.yaml"
    path.write_text("method: GRPO\nclip_high: 0.28\nratio:\n  name: kalman\n  q: 1e-6\n")
    expected = inspect(
        "grpo", "--set", "clip_high=0.28", "--set", "ratio=kalman", "--set", "ratio.q=1e-6"
    )
    assert inspect(path) == expected
    both = inspect("grpo", path)  # the slug is taken, so the file goes by its own name
    assert list(both) == ["grpo", "smooth"]
    assert both["smooth"] == expected["grpo"]
    assert inspect("grpo", path, "--set", "smooth:clip_high=0.2")["grpo"] == both["grpo"]


def test_random_stages_follow_the_seed(inspect):
    options = ("--set", "cov_low=-9", "--set", "cov_high=9", "--set", "share=0.2")
    one, again = inspect("clip-cov", *options), inspect("clip-cov", *options)
    assert one == again
    assert one != inspect("clip-cov", *options, "--seed", "1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["grpp"], "unknown method 'grpp'; did you mean 'grpo'?"),
        (["grpo", "grpo"], "the method 'grpo' is named 2 times"),
        (["grpo", "--set", "clip_hgih=1"], "did you mean 'clip_high'?"),
        (["grpo", "--set", "clip_high=wide"], "takes float, got 'wide'"),
        (["grpo", "--set", "clip_high"], "--set takes option=value, got 'clip_high'"),
        (["grpo", "--set", "ratio=kalmann"], "did you mean 'kalman'?"),
        (["grpo", "--set", "dapo:clip_high=1"], "unknown method in --set 'dapo'"),
        (["grpo", "--set", "ratio=log_ratio_to_ref"], "ppo_clip works on ratio, but"),
        (["dpo", "--set", "trust=ess_cap"], "dpo: trust=ess_cap works on ratio, but"),
        (["dpo", "--set", "weights=tis"], "compares whole responses"),
        (["kpo", "--set", "q=-1"], "q (process noise) must be finite and >= 0, got -1.0"),
        (["tis", "--set", "reject_threshold=1_2_3"], "a number or lo_hi, got '1_2_3'"),
        (["grpo", "--seed", "x"], "see proxpo inspect --help"),
        (["grpo", "--jsn"], "no such option '--jsn'; did you mean '--json'?"),
    ],
)
def test_wrong_methods_and_settings(refused, arguments, expected):
    assert expected in refused("inspect", *arguments, "--batch", "sample", "--json")


@pytest.mark.parametrize("name", sorted(set(library.methods("language")) - set(SHOWN)))
def test_a_method_says_which_field_it_misses_and_who_gives_it(refused, name):
    field = NEED_A_MODEL[name]
    expected = f"needs the batch field '{field}' ({FIELDS[field].doc}), which is missing"
    assert expected in refused("inspect", name, "--batch", "sample", "--json")


@pytest.mark.parametrize("name", library.methods("language"))
def test_no_setting_of_any_method_ends_in_a_traceback(name):
    batch = load_batch("sample").rows(torch.arange(4, 7))
    for option in library.methods()[name].defaults:
        for value in ("nonsense", "-1", "0", "inf", "a_b"):
            with contextlib.suppress(library.ProxpoError):
                inspect_batch(make_recipe(name, [parse_setting(f"{option}={value}")]), batch)


def test_bounds_are_not_numbers_with_underscores():
    recipe = make_recipe("tis", [parse_setting("reject_threshold=1_2")])
    assert recipe.filter[0].options["threshold"] == "1_2"


def test_wrong_calls(refused):
    assert "did you mean 'inspect'?" in refused("inspct").lower()
    assert "inspect takes --batch FILE" in refused("inspect", "grpo")
    assert "missing argument" in refused("inspect", "--batch", "sample")


def test_wrong_batches(refused, tmp_path):
    assert refused("inspect", "grpo", "--batch", tmp_path / "none.json").endswith(
        "none.json: no such file or directory"
    )
    assert "is a directory" in refused("inspect", "grpo", "--batch", tmp_path)
    batch = load_batch("sample")
    save_batch(batch.replace(old_logp=None), tmp_path / "batch.json")
    assert "grpo: ratio=token needs the batch field 'old_logp'" in refused(
        "inspect", "grpo", "--batch", tmp_path / "batch.json"
    )
    save_batch(batch.replace(values=None, old_values=None), tmp_path / "batch.json")
    assert "ppo: advantage=gae needs the batch field 'values'" in refused(
        "inspect", "grpo", "ppo", "--batch", tmp_path / "batch.json"
    )
    (tmp_path / "batch.json").write_text('{"logp": [[1], [1, 2]], "mask": [[1, 1]]}')
    assert "ragged" in refused("inspect", "grpo", "--batch", tmp_path / "batch.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clip_high: 0.2", "expected 'method: NAME'"),
        ("- grpo", "expected settings as 'name: value' lines"),
        ("method: [", "method.yaml:1: expected the node content"),
        ("method: grpp", "did you mean 'grpo'?"),
        ("method: grpo\n1: 2", "expected settings as 'name: value' lines"),
        ("method: grpo\nmethod: dapo", "method.yaml:2: 'method' is given twice"),
        ("method: grpo\nratio:\n  nmae: kalman", "unknown option of ratio=token 'nmae'"),
        ("method: grpo\nratio: [a, b]", "ratio"),
    ],
)
def test_wrong_yaml(refused, tmp_path, text, expected):
    path = tmp_path / "method.yaml"
    path.write_text(text)
    assert expected in refused("inspect", path, "--batch", "sample")


def test_the_config_of_a_run_names_its_method(inspect, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 3\nmethod: grpo\nrecipe: {clip_high: 0.4}\ntrain: {steps: 5}\n")
    assert inspect(path) == inspect("grpo", "--set", "clip_high=0.4")


def test_nothing_is_written_when_something_is_wrong(refused, tmp_path):
    page = tmp_path / "page.html"
    refused("inspect", "grpo", "grpp", "--batch", "sample", "--html", page)
    assert not list(tmp_path.iterdir())
    assert refused(
        "inspect", "grpo", "--batch", "sample", "--json", "--html", tmp_path / "none" / "page.html"
    ).endswith("/none/page.html: no such file or directory")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refused("inspect", "grpo", "--batch", "sample", "--json", "--html", folder).endswith(
        "/folder: is a directory"
    )
    assert list(tmp_path.iterdir()) == [folder]


def test_the_table_fits_80_columns(proxpo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = proxpo("inspect", "grpo", "p3o", "kpo", "gspo", "--batch", "sample")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    assert lines[0] == "sample: 8 responses to 2 prompts, 120 valid of 192 tokens"
    assert any(line.split()[:5] == ["p3o", "0.049", "87%", "0%", "0.89"] for line in lines)
    assert any(line.split()[:3] == ["38", "+", "46"] and "▼" in line for line in lines)
    assert not any("…" in line for line in lines)


def test_many_methods_and_responses_still_fit(proxpo, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    batch = load_batch("sample").rows(torch.arange(8).repeat(5))
    save_batch(batch, tmp_path / "batch.json")
    out = proxpo("inspect", *SHOWN, "--batch", tmp_path / "batch.json").out
    assert max(map(len, out.splitlines())) <= 80
    assert all(name in out for name in SHOWN)
    assert "Fewer methods or --html" in out
    assert "isopo: shown before gradient=isopo" in out
    one = proxpo("inspect", "grpo", "--batch", tmp_path / "batch.json").out
    assert "… and 24 more responses" in one


def test_text_from_the_batch_is_text(proxpo, tmp_path):
    data = json.loads(SAMPLE.read_text(encoding="utf-8"))
    data["group"] = ["[/b] :smile:\n\x1b[31m"] * 8
    (tmp_path / "batch.json").write_text(json.dumps(data))
    code, out, _ = proxpo("inspect", "grpo", "--batch", tmp_path / "batch.json")
    assert code == 0
    assert "[/b] :smile:" in out
    assert "\x1b" not in out


def test_positive_log_probabilities_are_pointed_out(proxpo, tmp_path):
    batch = load_batch("sample")
    expected = "old_logp: values above 0, which a density may have"
    assert expected not in proxpo("inspect", "grpo", "--batch", "sample").out
    save_batch(batch.replace(old_logp=-batch.old_logp), tmp_path / "batch.json")
    page = tmp_path / "page.html"
    out = proxpo("inspect", "grpo", "--batch", tmp_path / "batch.json", "--html", page).out
    assert expected in out
    assert expected in page.read_text(encoding="utf-8")


def test_a_narrow_terminal_keeps_every_digit(proxpo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    out = proxpo("inspect", "grpo", "kpo", "--batch", "sample").out
    assert "7.2e-07" in out
    assert "…" not in out.split("Fewer")[0]
    assert out.count("method ") == 2  # two tables
