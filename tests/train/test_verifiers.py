"""Environments of verifiers: its own classes, in modules as its users write them, offline."""

import sys
from pathlib import Path

import pytest
from train.train_runs import job_of, sample

from proxpo.errors import ProxpoError
from proxpo.train.tasks import make_task
from proxpo.train.update import update

GUESS = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Config(vf.TasksetConfig):
    count: int = 30
    opening: str | None = "7?"


class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply == "0"

    @vf.reward(weight=0.25)
    async def polite(self, trace) -> float:
        return float(trace.last_reply == "please")


class Guessing(vf.Taskset[GuessTask, Config]):
    def load(self):
        for i in range(self.config.count):
            data = Data(
                name=str(i), prompt=self.config.opening, system_prompt="1=", number=i % 3 + 1
            )
            yield GuessTask(data, self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn(*([] if task.data.prompt else ["hello"]))
            while not segment.terminated and segment.last_reply != str(task.data.number):
                low = segment.last_reply < str(task.data.number)
                segment = await talk.turn("+" if low else "-")
            if not segment.terminated:
                talk.trace.record_reward("found", 1.0)


__all__ = ["Guessing", "GuessEnv"]
"""
PLAIN = """
import verifiers.v1 as vf


class PlainTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    {hook}

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == "4")


class Plain(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield PlainTask(vf.TaskData(prompt=f"{{i}}+{{4 - i}}="), self.config.task)


__all__ = [{exported}]
"""


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "guessing.py").write_text(GUESS)
    (folder / "plain_sums.py").write_text(PLAIN.format(hook="", exported="'Plain'"))
    (folder / "no_taskset.py").write_text("__all__ = []\n")
    boxed = PLAIN.format(hook="NEEDS_CONTAINER = True", exported="'Plain'")
    (folder / "boxed.py").write_text(boxed)
    broken = "async def setup(self, trace, runtime):\n        raise OSError('no\\n  network')"
    (folder / "broken.py").write_text(PLAIN.format(hook=broken, exported="'Plain'"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def played(task, problem, *responses: str) -> tuple[list, list]:
    session = task.environment(problem)
    met, effects = [], []
    for response in responses:
        met.append(session.look())
        effects.append(session.act(response, cut=False))
    assert session.look() is None
    return met, [(effect.reward, session.success) for effect in effects]


def test_an_episode_of_several_turns() -> None:
    task = make_task("verifiers:guessing", max_turns=3)
    assert len(task.train) + len(task.test) == 30
    assert not task.overlap()
    problem = next(problem for problem in task.train if problem.index % 3 == 1)  # 2 is sought
    assert problem.prompt == [
        {"role": "system", "content": "1="},
        {"role": "user", "content": "7?"},
    ]
    met, effects = played(task, problem, "1", "3", "2")
    assert met[0].prompt == problem.prompt
    assert [message["content"] for message in met[2].prompt] == ["1=", "7?", "1", "+", "3", "-"]
    assert [message["role"] for message in met[2].prompt][2:] == ["assistant", "user"] * 2
    assert effects == [(0.0, True), (0.0, True), (1.0, True)]
    # Ends of the package's own: its limit of turns, after which the episode is scored, and a stop.
    assert played(task, problem, "1", "1", "please")[1][-1] == (0.25, False)
    assert played(task, problem, "0")[1] == [(0.0, False)]


def test_attempts_and_an_opening_by_the_environment() -> None:
    options = {"attempts": 2, "max_turns": 1, "chat": False, "config": {"opening": None}}
    task = make_task("verifiers:guessing", **options)
    problem = next(problem for problem in task.train if problem.index % 3 == 0)
    session = task.environment(problem)
    assert session.look().prompt == problem.prompt == "1=hello"
    session.act("3", cut=False)
    assert session.look().reflect
    session.act("lower", cut=False)
    second = session.look()
    assert (second.attempt, second.prompt.count("lower")) == (1, 1)
    assert session.act("1", cut=False).reward == 1.0
    assert session.success


def test_a_taskset_trains(tmp_path: Path) -> None:
    sets = ["task.options.chat=false", "max_prompt=16", "rollout.max_tokens=1", "micro_batch=null"]
    job = job_of(tmp_path, *sets, method="grpo", task="verifiers:plain-sums")
    rows = sample(job).experience
    assert len(rows.mask) == job.config.rollout.prompts_per_step * 4
    assert update(job, rows)["loss"] == pytest.approx(0.0, abs=1.0)
    job.close()


REFUSED = {
    "verifiers:no_such_thing": r"'no_such_thing' not found .* prime env install OWNER/NAME",
    "verifiers:owner/thing": r"'owner/thing' not found",
    "verifiers:no_taskset": r"exports no Taskset subclass",
    "verifiers:boxed": r"PlainTask needs a container runtime",
    "verifiers:broken": r"no network",
    "verifiers": r"task verifiers needs a name: verifiers:NAME",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str) -> None:
    with pytest.raises(ProxpoError, match=REFUSED[name]) as refusal:
        make_task(name)
    assert "\n" not in str(refusal.value)


def test_unknown_settings_and_a_missing_package(monkeypatch) -> None:
    with pytest.raises(ProxpoError, match=r"verifiers:guessing: .*counts"):
        make_task("verifiers:guessing", config={"counts": 3})
    with pytest.raises(ProxpoError, match=r"it seats assistant, user; one policy plays alone"):
        make_task("verifiers:plain_sums", env="user-sim")
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ProxpoError, match=r"pip install 'proxpo\[verifiers\]'"):
        make_task("verifiers:guessing")
