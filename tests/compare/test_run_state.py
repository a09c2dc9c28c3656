"""State of a run and choice of the best setting, from files alone."""

import json
from pathlib import Path

import pytest

from proxpo.compare.design import make_plan
from proxpo.compare.plan import SCORE, Plan, read_plan, write_plan
from proxpo.compare.request import Request, parse_arm
from proxpo.compare.runner import run_plan
from proxpo.compare.state import last_line, state_of
from proxpo.compare.tuning import choose_settings
from proxpo.errors import ProxpoError


def written(folder: Path, *, steps: int, score: float | None, end: str = "done") -> None:
    """Writes the files of a run after so many steps."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "reward": 0.5} for step in range(steps + 1)]
    rows[-1] |= {SCORE: score, "proxpo/eval/kl": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if end == "done":
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    if end == "failed":
        (folder / "failure.json").write_text(json.dumps({"reason": "no memory"}))


def test_a_run_is_done_when_it_says_so_and_has_all_its_steps(tmp_path):
    assert state_of(tmp_path / "none", steps=3, score=SCORE).status == "waiting"
    written(tmp_path / "done", steps=3, score=0.5)
    found = state_of(tmp_path / "done", steps=3, score=SCORE)
    assert (found.status, found.step, found.score, found.kl) == ("done", 3, 0.5, 0.25)
    assert state_of(tmp_path / "done", steps=4, score=SCORE).status == "running"  # stopped early
    written(tmp_path / "failed", steps=2, score=0.5, end="failed")
    found = state_of(tmp_path / "failed", steps=3, score=SCORE)
    assert (found.status, found.step, found.reason) == ("failed", 2, "no memory")


def test_a_line_cut_short_is_left_out(tmp_path):
    written(tmp_path / "cut", steps=3, score=0.5, end="")
    file = tmp_path / "cut/metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 4, "rew')
    found = state_of(tmp_path / "cut", steps=9, score=SCORE)
    assert (found.status, found.step, found.score) == ("running", 3, 0.5)


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    written(tmp_path / "long", steps=20_000, score=0.5, end="")
    found = state_of(tmp_path / "long", steps=9, score=SCORE)
    assert (found.step, found.score) == (20_000, 0.5)


def test_the_last_line_of_a_run_is_its_reason(tmp_path):
    (tmp_path / "log.txt").write_text("loading\nproxpo: model 'x': no such folder\n\n")
    assert last_line(tmp_path / "log.txt") == "model 'x': no such folder"
    assert last_line(tmp_path / "none.txt") == ""


@pytest.fixture
def plan() -> Plan:
    sweep = {"lr": (1e-5, 1e-4, 1e-3)}
    arms = [parse_arm("grpo"), parse_arm("p3o")]
    return make_plan(Request(arms=arms, tune=2, sweep=sweep, base=[("steps", 3)]))


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1e-5: (0.1, 0.3), 1e-4: (0.2, 0.4), 1e-3: (0.9, -0.5)}, 1e-4),  # by the mean
        ({1e-5: (0.1, 0.3), 1e-4: (0.2, 0.2), 1e-3: (0.1, 0.1)}, 1e-5),  # the first of equals
        ({1e-5: (0.1, 0.1), 1e-4: (0.9, None), 1e-3: (0.2, 0.2)}, 1e-3),  # one run has failed
    ],
)
def test_the_best_mean_on_the_tuning_seeds_is_chosen(scores, best, plan, tmp_path):
    for run in plan.runs:
        if run.arm == "grpo":
            score = scores[run.settings["lr"]][run.seed - plan.seeds.tune[0]]
            end = "failed" if score is None else "done"
            written(tmp_path / run.folder, steps=3, score=score, end=end)
    (chosen,) = choose_settings(plan, tmp_path)  # p3o has no finished run and none is chosen
    assert chosen.arm == "grpo"
    assert chosen.settings == {"lr": best}
    means = [None if None in pair else pytest.approx(sum(pair) / 2) for pair in scores.values()]
    assert [value for _, value in chosen.scores] == means


class Pool:
    """`jobs` runs at a time, with the scores it is given; p3o's end when no other is left."""

    threads = 1

    def __init__(self, scores: dict, jobs: int = 4) -> None:
        self.scores, self.jobs, self.running, self.ended = scores, jobs, {}, []

    @property
    def room(self) -> int:
        return self.jobs - len(self.running)

    def start(self, name: str, argv: list[str], folder: Path) -> None:
        arm, rate = argv[argv.index("--method") + 1], float(argv[-6].removeprefix("lr="))
        self.running[name] = folder, arm, rate, int(argv[argv.index("--seed") + 1])

    def finished(self, timeout: float) -> list[tuple[str, str]]:
        name = min(self.running, key=lambda name: self.running[name][1] == "p3o")
        folder, arm, rate, seed = self.running.pop(name)
        written(folder, steps=3, score=self.scores[arm][rate] + 1e-3 * seed)
        self.ended.append((arm, rate, seed))
        return [(name, "")]

    def stop(self, *, grace: float) -> None:
        pass


class Silent:
    def changed(self, run, state) -> None: ...
    def tick(self, plan, states) -> None: ...


def test_only_the_best_settings_go_on_and_an_arm_waits_for_no_other(tmp_path):
    sweep = {"lr": (1e-5, 1e-4, 1e-3)}
    arms = [parse_arm("grpo"), parse_arm("p3o")]
    asked = Request(arms=arms, tune=2, tune_best=2, sweep=sweep, base=[("steps", 3)], seeds=1)
    plan = make_plan(asked)
    write_plan(plan, tmp_path)
    scores = {"grpo": {1e-5: 0.1, 1e-4: 0.3, 1e-3: 0.2}, "p3o": {1e-5: 0.3, 1e-4: 0.1, 1e-3: 0.4}}
    pool = Pool(scores)
    assert len(plan.runs) + plan.runs_to_come == 12
    done = run_plan(plan, tmp_path, pool, display=Silent())
    assert pool.ended[:6] == [
        *(("grpo", rate, 1000) for rate in sweep["lr"]),
        *(("grpo", rate, 1001) for rate in (1e-4, 1e-3)),
        ("grpo", 1e-4, 0),
    ]
    assert sorted(pool.ended[6:]) == [
        *[("p3o", 1e-5, 1000), ("p3o", 1e-5, 1001), ("p3o", 1e-4, 1000)],
        *[("p3o", 1e-3, 0), ("p3o", 1e-3, 1000), ("p3o", 1e-3, 1001)],
    ]
    assert [dict(choice.settings) for choice in done.chosen] == [{"lr": 1e-4}, {"lr": 1e-3}]
    assert done == read_plan(tmp_path)
    (tmp_path / "alone").mkdir()
    write_plan(plan, tmp_path / "alone")
    alone = Pool(scores, jobs=1)  # an arm is finished before the next one begins
    run_plan(plan, tmp_path / "alone", alone, display=Silent())
    assert [arm for arm, _, _ in alone.ended] == ["grpo"] * 6 + ["p3o"] * 6
    assert done.runs_to_come == 0
    assert run_plan(plan, tmp_path, Pool({}), display=Silent()) == done  # from the files alone


@pytest.mark.parametrize("wrong", [{"tune_best": 1}, {"tune_best": 3}, {"tune": 1}, {"sweep": {}}])
def test_a_number_of_best_settings_that_decides_nothing_is_refused(wrong):
    asked = {"tune": 2, "tune_best": 2, "sweep": {"lr": (1e-5, 1e-4, 1e-3)}} | wrong
    with pytest.raises(ProxpoError, match=r"--tune-best \d takes no effect"):
        make_plan(Request(arms=[parse_arm("grpo")], **asked))
