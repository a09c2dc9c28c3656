"""Environments: every turn a row of its own, attempts with reflections, folded histories."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.train_runs import job_of, sample

from proxpo.errors import ProxpoError
from proxpo.logp import model_logp
from proxpo.models import TINY
from proxpo.runs.checkpoint import load_latest
from proxpo.train.batch import UpdatePlan, start_fields
from proxpo.train.experience import join
from proxpo.train.job import restore, save
from proxpo.train.tasks import make_task
from proxpo.train.tasks._session import Move, Script, Session
from proxpo.train.tasks.arms import Arms
from proxpo.train.tasks.dialogue import Dialogue
from proxpo.train.update import update

ARMS = ["rollout.max_tokens=1", "max_prompt=8"]
DIALOGUE = [
    "rollout.max_tokens=1",
    "max_prompt=64",
    "task.options.parts=6",
    "task.options.length=50",
]


class Echo:
    """A game that repeats an action until it is `end`."""

    rules, system, won = "Rules. ", "", False

    def start(self) -> str:
        return "Begin. "

    def move(self, action: str) -> Move:
        self.won = action == "win"
        return Move(f"You said {action}. ", reward=1.0, done=action in ("end", "win"))


def said(session: Session, *responses: str) -> list:
    met = []
    for response in responses:
        met.append(session.look())
        session.act(response, cut=False)
    return met


def test_attempts_and_reflections() -> None:
    session = Session(Echo(), Script(attempts=3, max_turns=2, note="<{}>", reflect="Why? "))
    met = said(session, "a", "end", "too slow", "b", "c", "again", "win")
    assert session.look() is None
    assert session.success
    assert [(s.attempt, s.reflect) for s in met] == [
        *[(0, False), (0, False), (0, True), (1, False), (1, False), (1, True), (2, False)]
    ]
    assert met[1].prompt == "Rules. Begin. aYou said a. "
    assert met[2].prompt == "Rules. Begin. aYou said a. endYou said end. Why? "
    assert met[3].prompt == "Rules. <too slow>Begin. "
    assert met[6].prompt == "Rules. <too slow><again>Begin. "
    assert met[0].state == met[3].state == met[6].state != met[1].state
    both = Session(Echo(), Script(attempts=2, memory="both", note="<{}>", show="latest", notes=1))
    assert said(both, "a", "note", "b")[2].prompt == "Rules. Begin. aYou said a. <note>Begin. "


def test_folding_replaces_the_course_by_a_summary() -> None:
    script = Script(max_turns=3, fold=True, summary="<{}>", summarise="Sum. ", chat=True)
    met = said(Session(Echo(), script), "a", "S", "b", "T", "c")
    texts = [" | ".join(m["content"] for m in s.prompt) for s in met]
    assert [s.summary for s in met] == [False, True, False, True, False]
    assert texts[2] == "Rules. \n<S>\nYou said a. "
    assert texts[3] == "Rules. \n<S>\nYou said a.  | b | You said b. \nSum. "
    assert [m["role"] for m in met[3].prompt] == ["user", "assistant", "user"]
    assert " | ".join(m["content"] for m in met[4].history) == (
        "Rules. \nBegin.  | a | You said a.  | b | You said b. "
    )


def test_a_cut_response_is_void() -> None:
    session = Session(Echo(), Script(attempts=1, max_turns=5))
    assert session.act("win", cut=True).void
    assert session.look() is None
    arms = Session(Arms(3, right=2), Script(whole=False))
    assert arms.act("2", cut=True).reward == 1.0
    assert Arms(3, right=2).move("x").void


def test_the_dialogue_pays_for_the_last_digit() -> None:
    search = Dialogue(parts=["a4b", "cde"], needles=["4", "4"])
    earned = []
    for response in ("4", "4", "4"):
        assert search.look() is not None
        earned.append(search.act(response, cut=True).reward)
    assert earned == [1 / 3] * 3
    assert search.success
    assert search.look() is None
    task = make_task("dialogue")
    assert len("".join(task.train[0].extra["parts"])) > 256  # the context of the model in the box


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    job = job_of(tmp_path_factory.mktemp("arms"), *ARMS, method="lamer", task="arms")
    yield job
    job.close()


def test_each_turn_is_a_row(arms) -> None:
    collected = sample(arms)
    rows = collected.experience
    assert len(rows.mask) > 16
    for group in rows.group.unique():
        inside = rows.group == group
        pairs = list(zip(rows.episode[inside].tolist(), rows.step[inside].tolist()))
        assert len(set(pairs)) == len(pairs)
        assert len(set(rows.episode[inside].tolist())) == 4
    reflect = rows.reflect
    assert not rows.step_rewards[reflect].any()
    assert len(rows.state[reflect].unique()) == 1
    assert bool((rows.attempt[rows.step == 0] == 0).all())
    # The reward of every turn is that of its episode; rows of equal prompts share a number.
    total = torch.zeros(int(rows.episode.max()) + 1).index_add(0, rows.episode, rows.step_rewards)
    assert torch.equal(rows.rewards, total[rows.episode])
    width = rows.input_ids.shape[1] - rows.mask.shape[1]
    texts = {}
    for number, ids in zip(rows.prompt.tolist(), rows.input_ids[:, :width].tolist()):
        assert texts.setdefault(number, ids) == ids
    assert len(texts) == len({tuple(ids) for ids in texts.values()})
    metrics = collected.metrics
    assert metrics["reward"] == pytest.approx(metrics["proxpo/success@3"])
    assert metrics["proxpo/samples"] == 16
    assert len(collected.lines) == 16


def test_log_probs_are_those_of_each_prompt(arms) -> None:
    """Groups hold several prompts here; none is scored under another row's."""
    rows = sample(arms).experience
    plan = UpdatePlan.of(arms.learner.recipe, arms.config, rows=len(rows.mask))
    found = start_fields(arms.learner, rows, plan)["logp"]
    with torch.no_grad():
        whole = model_logp(
            arms.policy.model, rows.input_ids, rows.mask, attention_mask=rows.attention_mask
        )
    torch.testing.assert_close(found[rows.mask], whole[rows.mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, rows.rollout_logp, rtol=1e-3, atol=1e-3)


def test_full_histories(tmp_path: Path) -> None:
    job = job_of(tmp_path, *DIALOGUE, "drop=0.5", "dropped=flat", method="foldact", task="dialogue")
    rows = sample(job).experience
    plan = UpdatePlan.of(job.learner.recipe, job.config, rows=len(rows.mask))
    fields = start_fields(job.learner, rows, plan)
    full, fits = fields["full_logp"], rows.history_mask.any(dim=1)
    assert fits.tolist() == (rows.step < 5).tolist()  # 5 parts of 50 letters, a digit and `?`
    assert not full[~fits].any()
    row = int(((rows.step == 3) & fits).nonzero()[0])
    ids = torch.cat([rows.history_ids[row][rows.history_mask[row]], rows.input_ids[row, -1:]])
    assert len(ids) == 4 * 50 + 3
    with torch.no_grad():
        logits = job.policy.model(input_ids=ids[None]).logits[0, -2]
    expected = logits.log_softmax(-1)[ids[-1]]
    torch.testing.assert_close(full[row, 0], expected, rtol=1e-4, atol=1e-4)
    first = rows.step == 0  # nothing is folded yet
    torch.testing.assert_close(full[first], fields["logp"][first], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(full[rows.step == 3], fields["logp"][rows.step == 3], atol=1e-2)
    assert bool((rows.summary[:, 0] == (rows.step < 6)).all())
    twice = join([rows.rows(torch.arange(8)), rows])
    torch.testing.assert_close(twice.unfolded().input_ids[8:], rows.unfolded().input_ids)
    metrics = update(job, rows)
    assert metrics["loss"] == pytest.approx(metrics["loss"])
    assert metrics["prune/kept"] < 1
    job.close()


def test_lamer_learns_to_explore_only_for_later_attempts(tmp_path: Path) -> None:
    """The demonstration of the sheet: arm 0 pays nothing and tells which arm pays."""
    solved, told = [], []
    for gamma in (0.6, 0.0):
        sets = [
            "prompts_per_step=12",
            "samples_per_prompt=8",
            "train.lr=1e-3",
            f"gamma_traj={gamma}",
        ]
        job = job_of(tmp_path / str(gamma), *ARMS, *sets, method="lamer", task="arms")
        for _ in range(14):
            update(job, sample(job).experience)
            job.sampler.sync()
            job.step += 1
        last = sample(job)
        solved.append(last.metrics["proxpo/success@3"])
        zero = job.policy.tokenizer.convert_tokens_to_ids("0")
        rows = last.experience
        pulls = rows.input_ids[:, -1][~rows.reflect]
        told.append(float((pulls == zero).float().mean()))
        job.close()
    assert solved[0] > 0.8 > 0.6 > solved[1]
    assert told[0] > 0.2 > 0.05 > told[1]


@pytest.mark.parametrize(
    ("method", "task", "sets"), [("lamer", "arms", ARMS), ("foldact", "dialogue", DIALOGUE)]
)
def test_a_resumed_job_is_the_one_that_went_on(
    method: str, task: str, sets: list[str], tmp_path: Path
) -> None:
    """A rollout waits for training in the checkpoint, with its attempts or folded contexts."""
    jobs = [job_of(tmp_path, *sets, "prompts_per_step=2", method=method, task=task)]
    update(jobs[0], sample(jobs[0]).experience)
    jobs[0].sampler.sync()
    jobs[0].step += 1
    jobs[0].waiting.append(sample(jobs[0]).experience)
    save(jobs[0], tmp_path / "checkpoints")
    jobs.append(job_of(tmp_path, *sets, "prompts_per_step=2", method=method, task=task))
    restore(jobs[1], load_latest(tmp_path / "checkpoints"))
    ends = []
    for job in jobs:
        metrics = update(job, job.waiting.pop(0))
        job.sampler.sync()
        rows = sample(job).experience
        ends.append(
            [metrics, rows.input_ids.tolist(), rows.segment_draw.tolist(), rows.state.tolist()]
        )
        job.close()
    assert ends[0] == ends[1]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ProxpoError, match=r"'group'|'void' .* task arithmetic has no"):
        job_of(tmp_path, method="lamer")
    with pytest.raises(
        ProxpoError, match=r"'segment_draw' .* task arms folds no history; take one that"
    ):
        job_of(tmp_path, method="foldact", task="arms")
    with pytest.raises(ProxpoError, match=r"count is from 2 to 9, got 12"):
        make_task("arms", count=12)
    sets = ["max_prompt=400", "task.options.length=300", "rollout.max_tokens=1"]
    job = job_of(tmp_path, *sets, method="grpo", task="dialogue")
    with pytest.raises(
        ProxpoError, match=r"first prompt of problem \d+ has 302 tokens, and with a"
    ):
        sample(job)
    job.close()


# Games of textarena


GAMES = {
    "Minesweeper": "[1 1]",
    "Sokoban": "[up]",
    "GuessTheNumber": "[10]",
    "FrozenLake": "[right]",
    "TowerOfHanoi": "[A C]",
}


@pytest.mark.parametrize("game", GAMES)
def test_games_start_and_repeat(game: str) -> None:
    settings = {"chat": False, "test_size": 2, "attempts": 2, "max_turns": 2}
    task, again = (make_task(f"textarena:{game}", **settings) for _ in range(2))
    problem = task.train[5]
    assert problem.prompt == again.train[5].prompt
    assert problem.question != task.train[6].question
    played = []
    for made in (task, again):
        session = made.environment(problem)
        turns = []
        while (situation := session.look()) is not None:
            effect = session.act(GAMES[game], cut=False)
            turns.append((situation.prompt, situation.attempt, situation.reflect, effect))
        played.append(turns)
    assert played[0] == played[1]
    assert played[0][0][0] == problem.prompt
    attempts = {attempt for _, attempt, _, _ in played[0]}
    assert attempts == {0, 1} or session.success


def test_a_game_is_won_and_lost() -> None:
    task = make_task("textarena:TowerOfHanoi", chat=False, test_size=1, max_turns=9)
    moves = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    session = task.environment(task.train[0])
    effects = []
    for move in moves:
        assert session.look() is not None
        effects.append(session.act(move, cut=False))
    assert session.success
    assert effects[-1].reward == 1.0
    assert session.look() is None
    lost = task.environment(task.train[0])
    assert lost.act("hello", cut=False).void
    assert not lost.success


def test_a_game_trains(tmp_path: Path) -> None:
    """With a copy of the model in the box that has room for a game's rules."""
    model = tmp_path / "model"
    model.mkdir()
    for file in TINY.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    options = {"chat": False, "test_size": 2, "attempts": 2, "max_turns": 2, "show": "latest"}
    sets = [f"task.options.{name}={str(value).lower()}" for name, value in options.items()]
    job = job_of(
        tmp_path / "run",
        *sets,
        *("max_prompt=1500", "prompts_per_step=1", "samples_per_prompt=2", "rollout.max_tokens=6"),
        method="lamer",
        model=str(model),
        task="textarena:GuessTheNumber",
    )
    collected = sample(job)
    rows = collected.experience
    assert bool(rows.reflect.any())
    assert update(job, rows)["loss"] == pytest.approx(update(job, rows)["loss"], abs=1.0)
    assert collected.metrics["proxpo/crowded"] == 0.0
    job.close()


def test_unknown_games_and_missing_packages(monkeypatch) -> None:
    with pytest.raises(ProxpoError, match=r"unknown game of textarena 'Sokobann'; did you mean"):
        make_task("textarena:Sokobann")
    with pytest.raises(
        ProxpoError, match=r"unknown game .* among them .*; python -c .* lists them"
    ):
        make_task("textarena:zzz")
    with pytest.raises(ProxpoError, match=r"textarena:TicTacToe-v0 cannot start a game for one"):
        make_task("textarena:TicTacToe-v0")
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(
        ProxpoError, match=r"needs the agents extra: pip install 'proxpo\[agents\]'"
    ):
        make_task("textarena:Sokoban")


def test_environments_need_their_problems(arms) -> None:
    from proxpo.train.episodes import play

    task = replace(arms.task)
    with pytest.raises(ProxpoError, match=r"starts from problems"):
        play(
            arms.policy,
            arms.sampler,
            task,
            [[1]],
            seeds=lambda *_: 0,
            max_tokens=1,
            temperature=1.0,
        )
