"""Logs, run folders and plans from a generator: read, or refused in one line, and never misread."""

import copy
import html
import json
import math
import tempfile
from pathlib import Path

import made
import numpy as np
import pytest
import yaml
from fuzzing import times
from hypothesis import given, settings
from hypothesis import strategies as st

from proxpo.compare.design import make_plan
from proxpo.compare.plan import read_plan, write_plan
from proxpo.compare.request import Request
from proxpo.compare.state import state_of
from proxpo.compare.studies import read_study
from proxpo.errors import ProxpoError
from proxpo.report.analysis import analyse
from proxpo.report.caveats import caveats, setting_warnings
from proxpo.report.comparison_page import comparison_page
from proxpo.report.comparison_report import gather_runs
from proxpo.report.figure_images import draw_figure
from proxpo.report.figure_list import all_figures
from proxpo.report.findings import claims, ranking_heading, ranking_lines
from proxpo.report.html_tables import arm_names
from proxpo.report.summary import summary

ACCURACY, KL, REWARD = "proxpo/eval/accuracy", "proxpo/eval/kl", "reward"
LARGEST = 3.4028234663852886e38
DEEP = json.loads("[" * 200 + "]" * 200)

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=6),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 10**400, -(10**25)]),
    st.sampled_from([[], {}, [1.0], {"a": 1}, DEEP, "0.5", "1e5", "\ud800", "\x1b[2J", "$\\frac$"]),
    st.integers(-(2**70), 2**70),
    st.floats(width=64),
)
fair = st.floats(0, 1).map(lambda x: round(x, 3))
number = st.one_of(fair, fair, fair, fair, odd)
step = st.one_of(*[st.integers(0, 8)] * 8, odd)
METRICS = (KL, REWARD, "step_time", "proxpo/samples", "proxpo/time/rollout", "entropy")
row = st.fixed_dictionaries(
    {"step": step, ACCURACY: number}, optional=dict.fromkeys(METRICS, number)
)
log = st.lists(row, min_size=1, max_size=7)


def fuzz(count):
    return settings(max_examples=times(count))


def rendered(analysis):
    """The page of an analysis; also makes all other texts, as the command does."""
    drawn = all_figures(analysis)
    page = comparison_page(analysis, drawn)
    page.encode(errors="replace")
    json.dumps(summary(analysis), allow_nan=False)
    lines = [
        ranking_heading(analysis),
        *ranking_lines(analysis),
        *setting_warnings(analysis),
        *caveats(analysis),
    ]
    lines += [*claims(analysis), *analysis.notes]
    assert all(line.isprintable() for line in lines), lines
    assert not any("nan" in line.split() or "inf" in line.split() for line in lines), lines
    return page


def valid(value):
    return type(value) in (int, float) and abs(value) <= LARGEST


def values_of(rows, name):
    """A metric by step, read from a log the slow way."""
    kept = {}
    for one in rows:
        at = one.get("step")
        if valid(at) and at >= 0 and at == int(at) and at <= 2**53 and one.get(name) is not None:
            kept[at] = one[name]
    return {at: float(value) for at, value in kept.items() if valid(value)}


def check_numbers(analysis, logs):
    """The numbers of every run against its log, and of every claim against the runs."""
    for one in (each for result in analysis.arms for each in result.runs):
        name = analysis.names[analysis.comparison.runs.index(one.run)]
        score = values_of(logs[one.run.folder], name)
        if analysis.interpolated:
            x = sorted(score)
            assert one.final == pytest.approx(np.interp(analysis.end, x, [score[t] for t in x]))
            continue
        assert set(analysis.steps.tolist()) <= set(score)
        assert one.final == score[analysis.end]
        assert one.start == score[analysis.steps[0]]
        assert one.start <= 0 or one.area != 0 or len(analysis.steps) > 1
    for pair in analysis.pairs:
        if not pair.winner:
            continue
        assert not analysis.interpolated
        both = [
            {one.run.seed: getattr(one, pair.measure) for one in result.runs}
            for name in (pair.a, pair.b)
            for result in analysis.arms
            if result.arm.name == name
        ]
        d = np.array([both[0][seed] - both[1][seed] for seed in both[0].keys() & both[1].keys()])
        assert np.ptp(d) > 0
        assert abs(d.mean()) > 2 * d.std(ddof=1) / math.sqrt(len(d))  # t is above 2 below 60 seeds
        assert (pair.winner == pair.a) == (d.mean() > 0)


def reported(folder, paths, logs):
    """The analysis of these paths, or None where they are refused in one line."""
    try:
        analysis = analyse(gather_runs([str(path) for path in paths], folder / "out"))
    except ProxpoError:
        return None
    rendered(analysis)
    check_numbers(analysis, logs)
    return analysis


def dumped(rows):
    return "".join(json.dumps(one) + "\n" for one in rows)


@given(st.lists(st.tuples(log, log), min_size=1, max_size=3), st.data())
@fuzz(30)
def test_metrics_of_proxpo(pairs, data):
    with tempfile.TemporaryDirectory() as name:
        folder, logs = Path(name), {}
        for seed, pair in enumerate(pairs):
            for method, rows in zip(("grpo", "p3o"), pair):
                run = folder / f"{method}{seed}"
                made.write_run(run, made.config(method, seed, 4), rows)
                logs[str(run)] = rows
        victim = data.draw(st.sampled_from(list(logs)))
        if data.draw(st.booleans()):  # bytes cut out or put in
            file = Path(victim) / "metrics.jsonl"
            content = file.read_bytes()
            at = data.draw(st.integers(0, len(content)))
            file.write_bytes(content[:at] + data.draw(st.binary(max_size=3)) + content[at + 1 :])
            logs[victim] = [
                one for one in map(parsed, file.read_bytes().splitlines()) if isinstance(one, dict)
            ]
        reported(folder, logs, logs)
        for path in logs:
            state = state_of(Path(path), steps=4, score=ACCURACY)
            assert state.score is None or abs(state.score) <= LARGEST


def parsed(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


trees = st.one_of(
    odd, st.dictionaries(st.text(max_size=4), odd, max_size=3), st.lists(odd, max_size=2)
)
parts = st.dictionaries(
    st.sampled_from(["seed", "method", "recipe", "model", "task", "rollout", "train", "evaluate"]),
    trees,
    max_size=3,
)
objects = st.one_of(trees, st.fixed_dictionaries({"steps": odd, "reason": odd, "step": odd}))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    arms = {"grpo": 0.3, "p3o": 0.2}
    return made.comparison(folder, arms=arms, seeds=(1, 2), steps=4, every=2, bare=True)


@given(parts, parts, objects, objects, st.booleans())
@fuzz(50)
def test_run_folders(compared, left, right, ended, failed, planned):
    rows = list(made.rows(0.3, 1, steps=4, every=2, bare=True))
    runs = [compared / "runs/grpo-seed1", compared / "runs/p3o-seed1"]
    for run, part, method in zip(runs, (left, right), ("grpo", "p3o")):
        made.write_run(run, made.config(method, 1, 4) | part, rows, done=False)
    (runs[0] / "summary.json").write_text(json.dumps(ended))
    (runs[1] / "summary.json").write_text('{"steps": 4}')
    (runs[1] / "failure.json").write_text(json.dumps(failed))
    if planned:
        rendered(analyse(gather_runs([str(compared)], compared)))
    else:
        analysis = reported(compared, runs, {str(run): rows for run in runs})
        assert analysis is None or not claims(analysis)  # one seed


@given(st.lists(log, min_size=2, max_size=4), st.sampled_from(["trl", "verl"]), odd, odd)
@fuzz(50)
def test_logs_of_trl_and_verl(histories, source, done, wanted):
    names = {"trl": {ACCURACY: "eval_reward"}, "verl": {ACCURACY: "val-core/x/acc/mean@1"}}[source]
    with tempfile.TemporaryDirectory() as name:
        folder, logs = Path(name), {}
        for number, history in enumerate(histories):
            rows = [{names.get(key, key): one[key] for key in one} for one in history]
            run = folder / f"{'ab'[number % 2]}-seed{number // 2}"
            if source == "trl":
                run.mkdir()
                state = {"log_history": rows, "global_step": done, "max_steps": wanted}
                (run / "trainer_state.json").write_text(json.dumps(state))
            else:
                run = run.with_suffix(".jsonl")
                lines = [{"step": one.get("step"), "data": one} for one in rows]
                run.write_text(dumped(lines))
            logs[str(run)] = rows
        found = reported(folder, logs, logs)
        assert found is None or found.unknown or not any(one.runs for one in found.arms)


def places(tree, at=()):
    """Paths of all values of a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inner:
        yield (*at, key)
        if isinstance(value, (dict, list)) and value:
            yield from places(value, (*at, key))


def with_value(tree, place, value):
    tree = copy.deepcopy(tree)
    inside = tree
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return tree


@pytest.fixture(scope="module")
def plan_tree(tmp_path_factory):
    folder, arms = tmp_path_factory.mktemp("plan"), {"grpo": 0.3, "p3o": 0.2}
    made.comparison(folder, arms=arms, seeds=(1, 2), steps=2, every=1, bare=True)
    tree = yaml.safe_load((folder / "plan.yaml").read_text())
    tree["arms"][0] |= {"settings": {"temperature": 0.8}, "varied": {"temperature": 0.8}}
    tree |= {"vary": {"temperature": [0.8]}, "sweep": {"lr": [1e-5, 1e-4]}, "notes": ["a note"]}
    scores = [[{"lr": 1e-5}, 0.5], [{"lr": 1e-4}, None]]
    tree["chosen"] = [{"arm": "grpo", "settings": {"lr": 1e-5}, "scores": scores}]
    tree["runs"][0]["role"] = "tune"
    return folder, tree


@given(st.data())
@fuzz(50)
def test_plans(plan_tree, data):
    folder, tree = plan_tree
    place = data.draw(st.sampled_from(list(places(tree))))
    broken = with_value(tree, place, data.draw(trees))
    (folder / "plan.yaml").write_text(yaml.safe_dump(broken), errors="surrogatepass")
    try:
        plan = read_plan(folder)
        analysis = analyse(gather_runs([str(folder)], folder))
    except ProxpoError:
        return
    folders = [run.folder for run in plan.runs]
    assert len(set(folders)) == len(folders)
    rendered(analysis)


STUDY = {
    "title": "t", "question": "q", "set": {"steps": 3, "lr": 1e-4}, "seeds": 2, "tune": 1,
    "arms": [{"method": "isopo", "name": "one", "set": {"p": -1.0}}, {"method": "grpo"}],
    "vary": {"temperature": [0.8, 1.2]}, "sweep": {"weight_decay": [0.0, 0.1]}, "score": ACCURACY,
}  # fmt: skip


@given(st.data())
@fuzz(40)
def test_studies(data):
    place = data.draw(st.sampled_from(list(places(STUDY))))
    tree = with_value(STUDY, place, data.draw(trees))
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "mine.yaml"
        file.write_text(yaml.safe_dump(tree), errors="surrogatepass")
        try:
            plan = make_plan(read_study(str(file)))
        except ProxpoError:
            return
        folders = [run.folder for run in plan.runs]
        assert len(set(folders)) == len(folders)
        write_plan(plan, name)
        assert [run.folder for run in read_plan(name).runs] == folders


HOSTILE = ["$\\frac$", "_hidden", "a" * 150, "</script><b>", "%s{}", "α β", "[/bold]"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_mean_something_to_a_drawing_or_a_page(name, tmp_path):
    other = (None, "grpo", {})
    plan = make_plan(
        Request(arms=[(name, "grpo", {"lr": 1e-3}), other], seeds=1, base=[("steps", 2)])
    )
    write_plan(plan, tmp_path)
    for run in plan.runs:
        rows = made.rows(0.3, run.seed, steps=2, every=1, bare=True)
        made.write_run(tmp_path / run.folder, made.config("grpo", run.seed, 2), rows)
    analysis = analyse(gather_runs([str(tmp_path)], tmp_path))
    rendered(analysis)
    score = next(one for one in all_figures(analysis) if one.key == "score")
    image = draw_figure(score, arm_names(analysis))["svg"].decode()
    assert html.escape(name, quote=False) in image
