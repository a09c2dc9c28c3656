"""Runs in control: recipes and learners on real environments, refusals, kill and resume."""

import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from proxpo.cli import main
from proxpo.compose import prepare
from proxpo.control.checks import by_step
from proxpo.control.recipe_job import build_recipe_job
from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe
from proxpo.train.build import build_job
from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.observer import SILENT, Observer
from proxpo.train.update import update

CARTPOLE, PENDULUM = "gym:CartPole-v1", "gym:Pendulum-v1"
SMALL = [
    *("evaluate.size=1", "evaluate.every=0", "checkpoint.every=1", "train.steps=2"),
    *("log.pictures=false", "rollout.max_tokens=24"),
]
ROLLOUTS = ["train.mini_batches=2", "train.updates_per_rollout=2"]


def config_of(out: Path, task: str, method: str, *sets: str):
    own = [] if method in ("avg", "tabnas") or "variant=sac" in sets else ROLLOUTS
    small = SMALL if task.startswith("gym") else SMALL[1:5]
    overrides = {"out": str(out), "task": task, "method": method}
    return load_config(None, [*small, *own, *sets], overrides=overrides)


RUNS = {
    "ppo": (CARTPOLE, "ppo"),
    "gaussian": (PENDULUM, "ppo", "task.options.normalise=true"),
    "tanh": (PENDULUM, "ppo", "model.options.distribution=tanh"),
    "gru": (CARTPOLE, "stateful-policies"),
    "reinforce": (PENDULUM, "stateful-policies", "variant=reinforce"),
    "sac": (PENDULUM, "stateful-policies", "variant=sac", "sac_start=30", "sac_batch=8"),
    "props": (CARTPOLE, "props"),
    "avg": (PENDULUM, "avg", "hidden=8"),
    "tabnas": ("architecture:toy", "tabnas"),
    "notebook": ("architecture:toy", "tabnas", "correction=pytorch"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config_of(whole, *RUNS[name]))
    train(config_of(cut, *RUNS[name], "train.steps=1"))
    summary = train(config_of(cut, *RUNS[name]), resume=True)
    assert summary["steps"] == 2
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if "time" not in k}
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        for out in (whole, cut)
    ]
    assert rows[0][-1] == rows[1][-1]
    one, two = (load_file(out / "checkpoints/step-2/weights.safetensors") for out in (whole, cut))
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    first = load_file(whole / "checkpoints/step-1/weights.safetensors")
    moved = any(not torch.equal(value, first[key]) for key, value in one.items())
    assert moved or name == "tabnas"


@pytest.mark.parametrize(
    "method", ["grpo", "reinforce", "p3o", "kpo", "gspo", "isopo", "sapo", "rloo"]
)
def test_recipes_of_language_models_train(method: str, tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, CARTPOLE, method))
    before = [p.detach().clone() for p in job.learner.trainable()]
    collected = job.collect(0)
    assert not job.segments
    assert len(collected.experience.group.unique()) == 2
    metrics = update(job, collected.experience)
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert any(not torch.equal(p, q) for p, q in zip(before, job.learner.trainable()))
    job.close()


def test_a_seed_of_the_transform_reaches_it(tmp_path: Path) -> None:
    seeds = []
    for seed in (0, 1, 1):
        job = build_job(config_of(tmp_path, CARTPOLE, "isopo", f"gradient.seed={seed}"))
        seeds.append(job.learner.transform.seed)
        job.close()
    assert seeds[0] != seeds[1] == seeds[2]


def test_losses_by_step_are_found() -> None:
    wanted = {"ppo": True, "grpo": False, "gspo": False, "reinforce": False, "p3o": True}
    assert {name: by_step(make_recipe(name)) for name in wanted} == wanted


def test_a_mini_batch_of_steps_is_one_pass(tmp_path: Path) -> None:
    job, passes = build_job(config_of(tmp_path, CARTPOLE, "ppo")), []
    fields_of = job.learner.fields_of

    def counted(model, critic, rows, wanted):
        passes.append(rows.mask.shape)
        return fields_of(model, critic, rows, wanted)

    job.learner.fields_of = counted
    rows = job.collect(0).experience
    update(job, rows)
    assert passes == [rows.mask.shape, (96, 1), (96, 1)]  # before the updates, and one for each
    job.close()


def test_segments_bootstrap_and_end(tmp_path: Path) -> None:
    """Returns of a segment are discounted rewards to its end, plus γ^n V where it goes on."""
    config = config_of(tmp_path, CARTPOLE, "ppo", "lam=1.0", "gamma=0.9", "dtype=float64")
    job = build_recipe_job(config, config.make_recipe())
    rows = job.collect(0).experience
    assert rows.mask.sum() == 8 * 24
    with torch.no_grad():
        values = job.learner.critic(rows.observations)[..., 0]
    prepared = update_fields(job, rows, values)
    ended = 0
    for i in range(len(rows.mask)):
        n = int(rows.mask[i].sum())
        extra = float(rows.token_rewards[i, n - 1]) - 1.0  # CartPole gives 1 a step
        ended += extra == 0.0
        total = sum(0.9**t for t in range(n)) + 0.9 ** (n - 1) * extra
        assert float(prepared.returns[i, 0]) == pytest.approx(total, rel=1e-9)
    assert 0 < ended < len(rows.mask)
    job.close()


@pytest.mark.parametrize("task", [CARTPOLE, PENDULUM])
def test_an_update_is_that_of_stable_baselines(task: str, tmp_path: Path, monkeypatch) -> None:
    """Four epochs on a rollout whose episodes end, or are cut, within it: equal weights."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger

    steps = 60 if task == CARTPOLE else 210  # Pendulum is cut at 200
    sets = ("train.mini_batches=1", "train.updates_per_rollout=4", "dtype=float64", "lr=1e-2")
    job = build_job(config_of(tmp_path, task, "ppo", *sets, f"max_tokens={steps}"))
    learner, rollout = job.learner, job._segments(0, SILENT)
    made = make_vec_env(task[4:], n_envs=8)
    theirs = stable_baselines3.PPO(
        *("MlpPolicy", made), n_steps=steps, batch_size=8 * steps, n_epochs=4, learning_rate=1e-2
    )
    theirs.set_logger(Logger(None, []))
    monkeypatch.setattr("stable_baselines3.common.policies.preprocess_obs", lambda x, *_, **__: x)
    policy, hidden = theirs.policy.double(), theirs.policy.mlp_extractor
    pairs = [
        (job.actor.net, torch.nn.Sequential(*hidden.policy_net, policy.action_net)),
        (learner.critic, torch.nn.Sequential(*hidden.value_net, policy.value_net)),
    ]
    for ours, other in pairs:
        other.load_state_dict(ours.state_dict())
    buffer = theirs.rollout_buffer
    with torch.no_grad():
        x, drawn, rewards = (
            torch.stack(values)
            for values in (rollout.steps.x, rollout.steps.drawn, rollout.steps.rewards)
        )
        starts, last = torch.zeros(steps, 8), torch.zeros(8, dtype=torch.float64)
        for piece in rollout.pieces:
            value, end = learner.critic(piece.after)[0], piece.first + piece.length
            starts[piece.first, piece.index] = 1.0
            rewards[end - 1, piece.index] += 0.99 * value * piece.truncated
            last[piece.index] = value
        fields = {
            "observations": x,
            "actions": drawn,
            "rewards": rewards,
            "episode_starts": starts,
            "values": learner.critic(x)[..., 0],
            "log_probs": job.actor.score(x, drawn).logp,
            "advantages": torch.zeros_like(rewards),
        }
        rows, _ = job._experience(rollout, 0)
    vars(buffer).update({name: value.numpy() for name, value in fields.items()}, full=True)
    buffer.compute_returns_and_advantage(last, dones=np.array(job.play.lengths) == 0)
    theirs.train()
    update(job, rows)
    assert len(rows.mask) > 8
    for ours, other in pairs:
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-6, atol=1e-7)
    if task == PENDULUM:
        torch.testing.assert_close(job.actor.log_std, policy.log_std, rtol=1e-6, atol=1e-7)
    job.close()


def update_fields(job, rows, values):
    from proxpo import Batch

    batch = Batch(
        logp=rows.rollout_logp,
        mask=rows.mask,
        old_logp=rows.rollout_logp,
        token_rewards=rows.token_rewards,
        rewards=rows.rewards,
        values=values,
        old_values=values,
    )
    return prepare(job.learner.recipe, batch)[0]


@pytest.mark.checks("props", "the learner sees no importance ratio: old log-probs are π_θ's")
def test_props_learns_as_if_on_policy(tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, CARTPOLE, "props", "behaviour_lr=0.05"))
    for number in range(2):
        rows = job.collect(number).experience
        assert bool((rows.version == job.learner.version).all())
        scored = job.actor.score(rows.observations, rows.actions).logp
        if number:
            assert len(rows.mask) > 8  # two batches
        update(job, rows)
        job.step += 1
    assert scored.shape == rows.mask.shape
    job.close()


@pytest.mark.checks("props", "a rate of 0 for the behaviour: the same rollouts as on-policy")
def test_props_without_a_rate_is_on_policy(tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, CARTPOLE, "props", "behaviour_lr=0", "buffer_batches=1"))
    plain = build_job(config_of(tmp_path, CARTPOLE, "ppo"))
    one, other = job.collect(0).experience, plain.collect(0).experience
    assert torch.equal(one.observations, other.observations)
    assert torch.equal(one.actions, other.actions)
    job.close()
    plain.close()


class Target(gym.Env):
    """Ten steps; the reward is -(a - s)²."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def _seen(self) -> np.ndarray:
        self.target = self.np_random.uniform(-0.8, 0.8)
        return np.array([self.target, 1.0], dtype=np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action):
        reward = -float((action[0] - self.target) ** 2)
        self.steps += 1
        return self._seen(), reward, self.steps >= 10, False, {}


@pytest.mark.checks("avg", "learns to hit a target that it sees within 500 steps, each used once")
def test_avg_learns(tmp_path: Path) -> None:
    gym.register("Target-v0", Target)
    rates = ("lr_actor=0.003", "lr_critic=0.01", "alpha=0.01", "gamma=0", "hidden=32")
    config = config_of(tmp_path, "gym:Target-v0", "avg", *rates, "train.steps=1", "max_tokens=500")
    summary = train(config)
    assert summary["reward_before"] < -1.5
    assert summary["reward_after"] > -0.9


def test_avg_counts_every_observation_once(tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, PENDULUM, "avg", "hidden=8"))
    job.learn(230, torch.Generator().manual_seed(0))
    assert job.play.begun == [2]
    assert job.normaliser.count == 230 + 2
    assert torch.equal(job.x, job._seen())
    job.close()


REFUSED = {
    "task gym needs an environment": ("gym", "ppo"),
    "unknown task 'gymn'; did you mean 'gym'": ("gymn:CartPole-v1", "ppo"),
    "task gym:LunarLander-v3 needs another package: Box2D": ("gym:LunarLander-v3", "ppo"),
    "stateful-policies needs model.name=gru, got mlp": (
        *(CARTPOLE, "stateful-policies"),
        "model.name=mlp",
    ),
    "unknown environment 'CartPol-v1'.*did you mean 'CartPole-v1'": ("gym:CartPol-v1", "ppo"),
    "avg moves along the gradient .* 2 actions to choose from": (CARTPOLE, "avg"),
    "variant=sac takes actions that are numbers": (
        *(CARTPOLE, "stateful-policies"),
        "variant=sac",
    ),
    "avg is a method for control .*gym:CartPole-v1.* arithmetic is one for language.*isopo": (
        *("arithmetic", "avg"),
    ),
    "grpo is a method for language .* one for architecture, with methods such as tabnas": (
        *("architecture:toy", "grpo"),
    ),
    "needs the batch field 'vocab_logp'.*are numbers, not a list": (
        PENDULUM,
        "grpo",
        "ratio=recentred",
    ),
    "prompts=.* does not act in control": (CARTPOLE, "dapo"),
    "task.reward=x.py:f has no effect: the environment gives the reward": (
        *(CARTPOLE, "ppo"),
        "task.reward=x.py:f",
    ),
    "train.lr=.* has no effect: this method makes updates of its own": (
        *(PENDULUM, "avg"),
        "train.lr=0.1",
    ),
    "grpo: advantage=gae reads the values of a critic, .* value=value_loss adds one": (
        *(CARTPOLE, "grpo"),
        "advantage=gae",
    ),
    "grpo has no advantage stage": (CARTPOLE, "grpo", "advantage=none"),
    "model.name=gru has no effect: this method brings its networks": (
        *(PENDULUM, "avg"),
        "model.name=gru",
    ),
    "avg: task.options.normalise has no effect: its option normalise_observations": (
        *(PENDULUM, "avg"),
        "task.options.normalise=true",
    ),
    "variant=sac does not scale observations": (
        *(PENDULUM, "stateful-policies"),
        *("variant=sac", "task.options.normalise=true"),
    ),
    "'sac_lr'=1.0 has no effect with these settings; it has one with variant=sac": (
        *(CARTPOLE, "stateful-policies"),
        "sac_lr=1",
    ),
    "'clip_low'=1.0 has no effect with these settings; it has one with variant=ppo": (
        *(CARTPOLE, "stateful-policies"),
        *("variant=reinforce", "clip_low=1"),
    ),
    "'kl'=behaviour_target has no effect with these settings; it has one with kl_coef=1": (
        *(CARTPOLE, "props"),
        *("kl_coef=0", "kl=behaviour_target"),
    ),
    r"avg: beta1 must be in \[0, 1\), got 1": (PENDULUM, "avg", "beta1=1"),
    "props: period must be 1 or more, got 0": (CARTPOLE, "props", "period=0"),
    "tabnas: draws must be 1 or more, got 0": ("architecture:toy", "tabnas", "draws=0"),
    "model.options.log_std=1 has no effect: this environment has 2 actions to choose from": (
        *(CARTPOLE, "ppo"),
        "model.options.log_std=1",
    ),
    "model.options.std is above 0, got -1": (
        *(CARTPOLE, "stateful-policies"),
        "model.options.std=-1",
    ),
    "unknown option of model mlp 'hiden'; did you mean 'hidden'": (
        *(CARTPOLE, "ppo"),
        "model.options.hiden=3",
    ),
    "hide=9 is no component of 4": (CARTPOLE, "ppo", "task.options.hide=[1,9]"),
    "hide takes numbers of components, such as .* got 'speed'": (
        *(CARTPOLE, "ppo"),
        "task.options.hide=speed",
    ),
    "unknown model of control 'tiny'": (CARTPOLE, "ppo", "model.name=tiny"),
    "distribution=tanh is for actions that are numbers": (
        *(CARTPOLE, "ppo"),
        "model.options.distribution=tanh",
    ),
    "'ratio' cannot be set": (PENDULUM, "avg", "ratio=token"),
    "mini_batches=8 cuts a rollout into as many parts, and it has 4: ": (
        *(CARTPOLE, "grpo"),
        *("prompts_per_step=2", "samples_per_prompt=2"),
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_one_line(line: str, tmp_path: Path) -> None:
    task, method, *sets = REFUSED[line]
    overrides = {"out": str(tmp_path), "task": task, "method": method}
    with pytest.raises(ProxpoError, match=line) as caught:
        build_job(load_config(None, sets, overrides=overrides))
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ProxpoError, match=r"needs gymnasium: pip install 'proxpo\[control\]'"):
        build_job(config_of(tmp_path, CARTPOLE, "ppo"))


def test_the_command_line(tmp_path: Path, capsys) -> None:
    words = [
        "--task",
        "architecture:toy",
        "--out",
        str(tmp_path / "run"),
        "--set",
        "train.steps=150",
    ]
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    assert "mean quality of feasible architectures 0.230 ->" in told
    assert "curves: " in told
    assert "metrics: " not in told
    bare = str(tmp_path / "bare[/b][x]")  # no markup
    words[3:] = [bare, *("--set", "train.steps=1", "--set", "log.pictures=false")]
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    assert f"1 step -> {bare}\n" in told
    assert f"metrics: {bare}/metrics.jsonl" in told
    assert "curves: " not in told
    assert main(["methods", "avg"]) == 0
    assert "for control" in capsys.readouterr().out
    assert main(["train", "--task", CARTPOLE, "--explain"]) == 0


def test_a_stop_signal_leaves_the_environments_as_they_were(tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, CARTPOLE, "ppo", "rollout.max_tokens=80"))
    job.collect(0)
    before = job.play.state()

    def stop(phase: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.collect(1, Observer(on_progress=stop))
    after = job.play.state()
    assert after["returns"] == before["returns"]
    assert torch.equal(
        torch.cat(after["environments"]["played"]), torch.cat(before["environments"]["played"])
    )
    job.close()
