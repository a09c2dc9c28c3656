"""Searches on runs that are written, not trained, and one on real short runs."""

import contextlib
import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import gradients, make_batch, with_leaves

from proxpo.cli import main
from proxpo.compare.plan import read_plan
from proxpo.compare.request import Request, parse_arm
from proxpo.compose import policy_loss, prepare
from proxpo.errors import ProxpoError
from proxpo.runs.yaml_file import read_yaml
from proxpo.search.halving import (
    Runner,
    best,
    bracket,
    bracket_results,
    confirmations,
    run_search,
    tried,
)
from proxpo.search.page import WINNER, frontier, read_findings, search_space, write_search_page
from proxpo.search.plan import (
    Budget,
    SearchRequest,
    make_search,
    open_search,
    parse_budget,
    read_search,
)
from proxpo.search.proposals import propose, replay
from proxpo.search.space import LEFT_OUT, RANGES, make_space
from proxpo.settings import make_recipe
from proxpo.stages import STAGES, load_stages
from proxpo.stages._options import parameters
from proxpo.train.config import load_config
from proxpo.types import Context

SMALL = (("steps", 8), ("prompts_per_step", 4), ("samples_per_prompt", 2), ("mini_batches", 2))


class WrittenRuns:
    """A pool whose runs only write their score; stops like Ctrl-C after `most` runs."""

    threads = 1

    def __init__(self, score, *, most: int = 10**6) -> None:
        self.score, self.most, self.done, self.started = score, most, [], 0
        self.base = functools.cache(read_yaml)

    @property
    def room(self) -> int:
        return 3

    def start(self, name: str, argv: list[str], folder: Path) -> None:
        if self.started == self.most:
            raise KeyboardInterrupt
        self.started += 1
        settings = dict(word.split("=", 1) for word in argv if "=" in word)
        settings["method"] = argv[argv.index("--method") + 1]
        seed, base = int(argv[argv.index("--seed") + 1]), self.base(Path(argv[1]))
        steps = base["train"]["steps"]
        score = self.score(settings, base["task"]["options"]) + _noise(settings, seed) * 0.01
        row = {"step": steps, "proxpo/eval/accuracy": score, "proxpo/eval/kl": 1 - score}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
        self.done.append((name, ""))

    def finished(self, timeout: float) -> list[tuple[str, str]]:
        ended, self.done = self.done, []
        return ended

    def stop(self, *, grace: float) -> None:
        self.done = []


class Quiet:
    def changed(self, run, state) -> None: ...
    def tick(self, plan, states) -> None: ...


def _noise(settings: dict, seed: int) -> float:
    text = json.dumps([settings, seed], sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def by_ratio(settings: dict, options: dict) -> float:
    """Candidates without a ratio are best."""
    return {"none": 0.9}.get(settings.get("recipe.ratio", "?"), 0.5)


def request(**changes) -> SearchRequest:
    named = Request(
        arms=[parse_arm("grpo"), parse_arm("reinforce")],
        config="comparison",
        base=SMALL,
        sweep={"lr": (1e-4, 3e-4)},
        seeds=4,
    )
    made = SearchRequest(
        named=named,
        unseen=[("task.options.last", 2)],
        budget=Budget(runs=50),
        proposer="random",
        candidates=8,
        finalists=2,
    )
    return replace(made, **changes)


def searched(folder: Path, pool: WrittenRuns, asked: SearchRequest | None) -> None:
    @contextlib.contextmanager
    def show(heading: str):
        yield Quiet()

    with open_search(folder, None if asked is None else make_search(asked)) as (plan, state):
        run_search(plan, state, search_space(plan), folder, Runner(pool=pool, show=show))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Path:
    """A finished search in which candidates without a ratio win."""
    folder = tmp_path_factory.mktemp("search") / "found"
    searched(folder, WrittenRuns(by_ratio), request())
    return folder


@pytest.mark.parametrize(
    ("sets", "count"),
    [([], 40), (["task=calculator"], 10), (["mini_batches=1"], 10), (["off_policy_lag=2"], 20)],
    ids=["stale", "turns", "fresh", "lag"],
)
def test_every_proposal_is_a_recipe_with_a_gradient(sets, count) -> None:
    space = make_space(load_config("comparison", sets), {"lr": (1e-4, 3e-4)})
    batch = make_batch(1, groups=4, size=4)
    for proposal in propose(space, "random", count, seed=3, bracket=1, earlier=[]):
        recipe = space.check(proposal.recipe)
        ready = prepare(recipe, batch, Context(generator=torch.Generator().manual_seed(0)))
        leaves = with_leaves(ready.batch)
        loss = policy_loss(recipe, leaves, ready.ctx).value
        assert torch.isfinite(loss), proposal
        assert sum(g.abs().sum() for g in gradients(loss, leaves).values()) > 0, proposal
        assert proposal.swept["lr"] in (1e-4, 3e-4)
        stages = {f"{stage.kind}.{stage.name}" for _, stage in recipe.stages()}
        assert not stages & LEFT_OUT.keys()
    if sets == ["mini_batches=1"]:  # every ratio is 1: nothing that looks at it is drawn
        assert space.stages["ratio"] == ("none",)


def test_the_tables_name_stages_and_options_that_exist() -> None:
    load_stages()
    for name in (*RANGES, *LEFT_OUT):
        kind, _, stage = name.partition(".")
        assert stage in STAGES[kind], name
        assert RANGES.get(name, {}).keys() <= parameters(STAGES[kind][stage]).keys(), name


def test_halving_keeps_the_best_on_more_steps_and_seeds(found) -> None:
    plan, _ = read_search(found)
    rungs = [read_plan(bracket(found, 1) / f"rung-{i}") for i in range(3)]
    assert [len(rung.arms) for rung in rungs] == [8, 4, 2]
    assert [rung.base["train"]["steps"] for rung in rungs] == [2, 4, 8]
    assert [rung.seeds.report for rung in rungs] == [(1000,), (1000, 1001), (1000, 1001)]
    results = bracket_results(bracket(found, 1))
    assert [result.rung for result in results] == [2, 2, 1, 1, 0, 0, 0, 0]
    whole = {arm.name: by_ratio(dict(arm.settings), {}) for arm in rungs[0].arms}
    kept = {arm.name for arm in rungs[1].arms}
    dropped = whole.keys() - kept
    assert min(whole[name] for name in kept) >= max(whole[name] for name in dropped)
    spent = sum(len(list(found.glob(f"{part}/rung-*/runs/*"))) for part in ("named", "bracket-*"))
    assert spent == plan.cost(4) + plan.brackets * plan.cost(8) <= 50


def test_a_search_that_is_stopped_again_and_again_ends_the_same(found, tmp_path) -> None:
    for most in (3, 17, 0, 26, 10**6):
        with contextlib.suppress(KeyboardInterrupt):
            searched(tmp_path, WrittenRuns(by_ratio, most=most), request())
    (plan, state), (plan2, state2) = map(read_search, (found, tmp_path))
    assert (plan, state.brackets) == (plan2, state2.brackets)
    files = [
        {p.relative_to(f): p.read_text() for p in f.rglob("plan.yaml")} for f in (found, tmp_path)
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 3 * (1 + len(state.brackets)) + 2


def test_tpe_moves_to_what_was_better() -> None:
    space = make_space(load_config("comparison", []), {})
    first = propose(space, "tpe", 30, seed=0, bracket=1, earlier=[])
    liked = sorted(first, key=lambda proposal: proposal.recipe["advantage"] == "leave_one_out")
    later = propose(space, "tpe", 10, seed=0, bracket=2, earlier=liked)
    assert propose(space, "tpe", 10, seed=0, bracket=2, earlier=liked) == later
    share = sum(p.recipe["advantage"] == "leave_one_out" for p in later) / len(later)
    assert share > 2 * sum(p.recipe["advantage"] == "leave_one_out" for p in first) / len(first)
    assert replay(space, later[0].choices) == later[0]


def test_the_winner_is_confirmed_and_its_file_makes_its_recipe(found) -> None:
    page, lines = write_search_page(found)
    findings = read_findings(found)
    assert findings.winner in {arm.name for arm in findings.finalists}
    assert f"{findings.winner} beats the best named methods (grpo" in lines[0]
    assert (found / WINNER).read_text().startswith(f"# {lines[0]}\n")
    config = load_config(found / WINNER)
    arm = next(arm for arm in findings.finalists if arm.name == findings.winner)
    flat = {k.removeprefix("recipe."): v for k, v in arm.settings.items() if k != "lr"}
    assert config.make_recipe().stages() == make_recipe("grpo", flat).stages()
    assert config.train.lr == arm.settings["lr"]
    text = page.read_text()
    assert "<polyline points=" in text
    assert text.count("<circle") == sum(
        r.rung == 2 for r in (*findings.candidates, *findings.named)
    )
    confirmed = read_plan(confirmations(read_search(found)[1], found)["unseen"])
    assert confirmed.seeds.report == (0, 1, 2, 3)  # no seed of a rung
    assert confirmed.base["task"]["options"] == {"last": 2}


def test_a_winner_must_hold_on_the_unseen_task_and_a_failure_says_so(tmp_path) -> None:
    def only_here(settings: dict, options: dict) -> float:
        return by_ratio(settings, options) if not options else 1 - by_ratio(settings, options)

    asked = request(budget=Budget(runs=20), candidates=4)
    for name, score in (("elsewhere", only_here), ("equal", lambda settings, options: 0.5)):
        searched(tmp_path / name, WrittenRuns(score), asked)
        _, lines = write_search_page(tmp_path / name)
        assert lines[0].startswith("Nothing that was found is shown to beat the best named methods")
        assert not (tmp_path / name / WINNER).exists()


def test_a_larger_budget_goes_on_and_minutes_end_a_search(tmp_path) -> None:
    folder = tmp_path / "search"
    searched(folder, WrittenRuns(by_ratio), request(budget=Budget(minutes=1e-6), candidates=4))
    assert len(read_search(folder)[1].brackets) == 1
    before = (bracket(folder, 1) / "rung-0/plan.yaml").read_text()
    searched(folder, WrittenRuns(by_ratio), request(budget=Budget(runs=30), candidates=4))
    plan, state = read_search(folder)
    assert len(state.brackets) == plan.brackets == 2
    assert (bracket(folder, 1) / "rung-0/plan.yaml").read_text() == before
    assert best(tried(state, folder), plan, families=False)
    with pytest.raises(ProxpoError, match="another search"):
        searched(folder, WrittenRuns(by_ratio), request(candidates=6))


def test_the_frontier_has_the_highest_score_at_each_drift(found) -> None:
    results = read_findings(found).candidates
    line = frontier(results)
    for result in results:
        assert any(f.kl <= result.kl and f.score >= result.score for f in line)
    assert [r.kl for r in line] == sorted(r.kl for r in line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"unseen": []}, "a task that it has not seen"),
        ({"budget": Budget(runs=20)}, "too small: .* take 30 runs"),
        ({"candidates": 1}, "--candidates of at least 2"),
        ({"vary": {"clip_high": (0.1, 0.2)}}, "--vary has no place"),
        ({"first_seed": 5}, "--first-seed has no place"),
        ({"sweep": {"clip_high": (0.1, 0.2)}}, "clip_high"),
        ({"base": (("ratio", "kalman"),)}, "setting of methods"),
    ],
)
def test_mistakes_are_refused_before_a_run(changes, line) -> None:
    own = {k: v for k, v in changes.items() if k in ("unseen", "budget", "candidates")}
    rest = {k: v for k, v in changes.items() if k not in own}
    asked = request(**own)
    with pytest.raises(ProxpoError, match=line):
        make_search(replace(asked, named=replace(asked.named, **rest)))


def test_mistakes_on_the_command_line(capsys, tmp_path) -> None:
    for argv, line in (
        (["grpo", "--budget", "10"], "--budget is an option of a search: add --search"),
        (["--search"], "a search needs --budget RUNS"),
        (["--search", "--budget", "x", "--unseen", "task=gsm8k"], "runs or minutes"),
    ):
        assert main(["compare", *argv, "--out", str(tmp_path / "none")]) != 0
        assert line in capsys.readouterr().err
    assert parse_budget("90min") == Budget(minutes=90.0)


def test_a_whole_search_on_real_runs(tmp_path, capsys) -> None:
    out = tmp_path / "real"
    sets = ("steps=2", "prompts_per_step=4", "samples_per_prompt=2", "evaluate.every=0")
    sets += (
        "evaluate.size=8",
        "k=2",
        "checkpoint.every=0",
        "reward_workers=1",
        "log.pictures=false",
    )
    argv = ["compare", "grpo", "--search", "--proposals", "random", "--budget", "8", "--jobs", "2"]
    argv += ["--candidates", "2", "--finalists", "1", "--seeds", "2", "--tune-seeds", "1"]
    argv += [word for text in sets for word in ("--set", text)]
    argv += ["--unseen", "task.options.last=2", "--out", str(out)]
    assert main(argv) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "bracket-01, rung 2: 1 arm, 2 steps, 1 seed" in said
    assert f"search: {out / 'search.html'}" in said
    assert (out / "confirm-01/report.html").is_file()
    before = {p: p.stat().st_mtime_ns for p in out.rglob("metrics.jsonl")}
    assert len(before) == 3 + 4 + 8
    assert main(["compare", "--search", "--out", str(out)]) == 0  # finished: nothing is repeated
    assert {p: p.stat().st_mtime_ns for p in out.rglob("metrics.jsonl")} == before
    for words in (["grpo"], ["--seeds", "3"], ["--finalists", "2"]):
        capsys.readouterr()
        assert main(["compare", *words, "--search", "--out", str(out)]) == 2
        assert "takes no effect: without --budget and --unseen" in capsys.readouterr().err
