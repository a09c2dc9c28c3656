"""`--confirm`: a comparison once more, as it was tuned, on seeds that it has not seen."""

import json

import pytest

from proxpo.cli import main
from proxpo.compare.confirmation import confirmation
from proxpo.compare.design import config_of, make_plan, with_choices
from proxpo.compare.plan import Choice, Finding, read_plan, write_plan
from proxpo.compare.request import Request, parse_arm
from proxpo.errors import ProxpoError

SWEEP = {"lr": (1e-4, 1e-3), "clip_low+clip_high": (0.1, 0.3)}


@pytest.fixture
def tuned(tmp_path):
    """A folder whose plan has chosen a setting for two arms of three."""
    arms = [parse_arm(one) for one in ("grpo", "grpo:ratio=sequence", "reinforce")]
    plan = make_plan(Request(arms=arms, config="comparison", seeds=4, sweep=SWEEP))
    chosen = [
        Choice(arm="grpo", settings={"lr": 1e-3, "clip_low+clip_high": 0.3}, scores=()),
        Choice(arm="reinforce", settings={"lr": 1e-4}, scores=()),
    ]
    folder = tmp_path / "tuned"
    folder.mkdir()
    write_plan(with_choices(plan, chosen), folder)
    return folder


def test_each_arm_keeps_its_chosen_setting_and_only_the_seeds_are_new(tuned):
    stored, plan = read_plan(tuned), confirmation(tuned, arms=["grpo", "Reinforce"], seeds=3)
    assert [(run.arm, run.seed) for run in plan.runs] == [
        (arm, seed) for seed in (4, 5, 6) for arm in ("grpo", "reinforce")
    ]
    reported = {run.arm: run for run in stored.runs if run.role == "report"}
    for run in plan.runs:
        config, before = config_of(plan, run), config_of(stored, reported[run.arm])
        assert (config.train, config.recipe) == (before.train, before.recipe)
        assert (config.task, config.rollout) == (before.task, before.rollout)
    grpo = config_of(plan, plan.runs[0])
    assert grpo.train.lr == 1e-3
    assert grpo.recipe == {"clip_low": 0.3, "clip_high": 0.3}
    assert plan.notes[-1].startswith(
        f"settings as chosen in {tuned}, which has not seen seeds 4 to 6; it has no summary.json"
    )
    assert not plan.sweep
    assert plan.title == "grpo · reinforce, on other seeds"
    assert len(confirmation(tuned, arms=["grpo"]).runs) == len(stored.seeds.report)


def test_findings_of_the_arms_that_are_run_go_into_the_plan(tuned):
    numbers = {"student": {"mean": -0.02, "low": -0.03, "high": -0.01}, "p_holm": 0.2}
    pairs = [
        {"a": "grpo", "b": "reinforce", "measure": "final", "winner": "reinforce", **numbers},
        {"a": "grpo", "b": "reinforce", "measure": "area", "winner": "", **numbers},
        {"a": "grpo ratio=sequence", "b": "grpo", "measure": "final", "winner": "grpo", **numbers},
    ]
    (tuned / "summary.json").write_text(json.dumps({"pairs": pairs}))
    plan = confirmation(tuned, arms=["grpo", "reinforce"])
    found = {"winner": "reinforce", "loser": "grpo", "measure": "final", "p_holm": 0.2}
    assert plan.confirms == (Finding(mean=0.02, low=0.01, high=0.03, **found),)
    write_plan(plan, tuned)
    assert read_plan(tuned) == plan
    (tuned / "summary.json").write_text('{"pairs": [')
    with pytest.raises(ProxpoError, match=r"summary\.json is damaged; `proxpo report"):
        confirmation(tuned, arms=["grpo", "reinforce"])


def test_a_confirmation_of_a_confirmation_spares_the_seeds_of_both(tuned, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    write_plan(confirmation(tuned, arms=["grpo"], seeds=2), again)
    assert confirmation(again).seeds.report == (6, 7)
    for first in (0, 5, 1000):
        with pytest.raises(ProxpoError, match=f"has seen seed {first}"):
            confirmation(again, first_seed=first)


def test_without_a_sweep_all_arms_are_run_again(tmp_path):
    write_plan(make_plan(Request(arms=[parse_arm("grpo"), parse_arm("p3o")], seeds=2)), tmp_path)
    plan = confirmation(tmp_path, first_seed=7)
    assert [(run.arm, run.seed) for run in plan.runs] == [
        (arm, seed) for seed in (7, 8) for arm in ("grpo", "p3o")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "has chosen no setting for grpo ratio=sequence: finish it first"),
        (["grop"], "did you mean 'grpo'?"),
        (["grpo", "--first-seed", "3"], "has seen seed 3: begin after those"),
        (["grpo", "--first-seed", "999"], "has seen seed 1000"),
        (["grpo", "--seeds", "0"], "at least one seed"),
        (["grpo", "--set", "lr=1e-5"], "--set takes no effect: --confirm repeats"),
        (["grpo", "--study", "hot"], "--study takes no effect: --confirm repeats"),
        (["--search", "--budget", "40", "--unseen", "task=gsm8k"], "has no place in a search"),
    ],
)
def test_what_cannot_be_confirmed_is_refused_in_one_line(words, message, tuned, tmp_path, capsys):
    out = tmp_path / "again"
    assert main(["compare", *words, "--confirm", str(tuned), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not out.exists()


def test_a_folder_without_a_comparison_is_refused(tmp_path, capsys):
    assert main(["compare", "--confirm", str(tmp_path)]) == 2
    assert "holds no comparison" in capsys.readouterr().err
