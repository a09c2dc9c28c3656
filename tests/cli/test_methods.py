"""`proxpo methods`: the catalogue and its entries agree with the code."""

import json
from pathlib import Path

import proxpo as library
from proxpo.cli.choosing import choice_table, read_advice, short_table
from proxpo.recipes import method
from proxpo.settings import make_method


def test_the_catalogue_lists_every_method(proxpo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = proxpo("methods")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    firsts = [line.split()[0] for line in out.splitlines() if line.strip()]
    for slug, one in library.methods().items():
        assert slug in firsts, slug
        assert one.paper in out
    assert f"{len(library.methods())} methods" in out


def test_the_diagnostic_is_listed_with_its_command(proxpo):
    assert "proxpo sparsity BEFORE AFTER" in proxpo("methods").out
    shown = proxpo("methods", "sparse-updates").out
    assert "arXiv:2505.11711" in shown
    assert "sparsity = 1 - |{j : |d_j| > tol}| / n" in shown


def test_one_method_in_full(proxpo):
    out = proxpo("methods", "P3O").out
    for expected in (
        "sg[min(r, ESS)]",
        "Departures:",
        "ess_scope",
        "ess_cap(scope=batch",
        "p3o.py:",
    ):
        assert expected in out


def test_formulas_in_brackets_survive(proxpo):
    """rich reads [x] as markup unless that is switched off; formulas are full of brackets."""
    for slug, one in library.methods().items():
        shown = "".join(proxpo("methods", slug).out.split())
        assert "".join(one.prose.split()) in shown, slug


def test_json_of_the_catalogue(proxpo):
    found = json.loads(proxpo("methods", "--json").out)
    assert list(found) == list(library.methods())
    assert found["grpo"]["defaults"]["clip_high"] == 0.2
    assert found["grpo"]["stages"]["trust"]["name"] == "ppo_clip"
    assert found["cispo"]["defaults"]["clip_low"] == "inf"


def test_json_of_one_method(proxpo):
    found = json.loads(proxpo("methods", "p3o", "--json").out)
    assert list(found) == ["p3o"]
    assert found["p3o"]["text"] == method("p3o").text


def test_the_nearest_method_is_suggested(refused):
    assert refused("methods", "gpso") == "unknown method 'gpso'; did you mean 'gspo'?"


def test_a_file_of_ones_own_is_no_method_yet(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "signpo.py").touch()
    for name in ("signpo", "signpo.py:signpo"):
        assert "python -c 'import signpo; from proxpo.cli" in refused("methods", name)


def test_for_settings_prints_what_was_measured_and_says_where_nothing_was(proxpo):
    out = " ".join(proxpo("methods", "--for", "stale,agents").out.split())
    assert out.startswith(
        "stale: several updates on each rollout, or rollouts of an older policy GRPO"
    )
    assert "Measured for stale and agents no evidence yet" in out
    assert "grpo clip_low=0.2 clip_high=0.2 also: short of the clip ranges" in out
    assert out.count("grpo also: short ") == 1, "one heading above its facts"
    assert "docs/results/p3o-clip" in out
    long = " ".join(proxpo("methods", "--for", "long,pretrained").out.split())
    assert "Measured for long and pretrained" in long
    assert "Made for long by their papers" in long
    both = json.loads(proxpo("methods", "--for", "hot,stale", "--json").out)
    assert both["take"]["hot"] == read_advice().settings["hot"].take
    found = [fact["take"] for fact in both["together"]]
    assert found == ["grpo", "vespo", "dppo", "cispo", "isopo", "p3o"]
    code, _, errors = proxpo("methods", "--for", "stail")
    assert code != 0
    assert "unknown setting 'stail'; did you mean 'stale'?" in errors


def test_every_fact_names_a_method_its_options_and_a_result_that_exist():
    advice, results = read_advice(), Path(__file__).parents[2] / "docs/results"
    for fact in advice.facts:
        make_method(fact.take, dict(fact.set))
        assert (results / fact.result).exists(), fact
        assert set(fact.settings) <= advice.settings.keys(), fact
        assert len(fact.why.split()) <= 42, f"the page of the result has room for more: {fact.why}"
    for setting in advice.settings.values():
        assert 4 < len(setting.take.split()) <= 60, setting
    for setting, slugs in advice.untried.items():
        assert setting in advice.settings
        assert all(method(slug) for slug in slugs)
        measured = " ".join(f.take + f.why.lower() for f in advice.facts if setting in f.settings)
        assert not [slug for slug in slugs if slug in measured], f"measured under {setting}"
    page = (results.parent / "choose.md").read_text()
    assert choice_table() in page
    assert short_table() in page


def test_filters_by_stage_and_field(proxpo, refused):
    assert set(json.loads(proxpo("methods", "--stage", "gradient", "--json").out)) == {
        "isopo",
        "isopo-ntk",
        "proma",
    }
    chosen = json.loads(
        proxpo("methods", "--stage", "trust=ppo_clip", "--needs", "no-values", "--json").out
    )
    assert "grpo" in chosen
    assert not {"ppo", "isopo"} & set(chosen)
    assert "did you mean 'kalman'" in refused("methods", "--stage", "kalmann")
    assert "did you mean 'ref_logp'" in refused("methods", "--needs", "ref_lgp")
    assert "leave them out" in refused("methods", "grpo", "--stage", "ratio")


def test_bibtex(proxpo):
    out = proxpo("methods", "isopo", "--bibtex").out
    assert out.startswith(
        "@misc{isopo,\n  title = {{ISOPO: Proximal policy gradients without pi-old}}"
    )
    assert "eprint = {2512.23353}" in out
    whole = proxpo("methods", "--bibtex").out
    assert whole.count("@misc{") == len(library.methods())
    assert whole.count("{") == whole.count("}")


def test_prose_is_wrapped_once(proxpo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = proxpo("methods", "gspo").out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Departures:"))
    prose = lines[start : lines.index("", start)]
    assert all(len(line) > 60 for line in prose[:-1])


def test_presets_are_listed(proxpo):
    out = " ".join(proxpo("train", "--presets").out.split())
    assert "quickstart" in out
    assert "The model in the box learns three-digit addition with ISOPO" in out
