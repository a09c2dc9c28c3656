"""Our PPO and that of stable-baselines3 on CartPole-v1 and Pendulum-v1, with equal settings.

    python benchmarks/control_ppo.py --json docs/speed/control-ppo.json

Both have the same networks, initial weights of the same distribution, rollouts, epochs,
mini-batches, rate, clip and discount; advantages are normalised over the rollout here and over the
mini-batch there. The score is the mean return of 100 episodes of the deterministic policy after
training, with the same starts for all. Ours counts as equal where its mean lies within the range of
the other's seeds. The arms take turns, one thread each; seconds are those of training, without
evaluation and files.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Record

EPISODES = 100
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        **{"envs": 8, "steps": 256, "rollouts": 20, "parts": 4, "epochs": 6},
        **{"lr": 1e-3, "gamma": 0.98, "lam": 0.9},
    },
    "Pendulum-v1": {
        **{"envs": 8, "steps": 256, "rollouts": 40, "parts": 8, "epochs": 8},
        **{"lr": 1e-3, "gamma": 0.9, "lam": 0.95},
    },
}


def ours(task: str, seed: int) -> tuple[float, float]:
    """Mean return and seconds of `proxpo train --method ppo --task gym:TASK`."""
    from proxpo.train.config import load_config
    from proxpo.train.loop import train

    s = TASKS[task]
    sets = [
        *(f"prompts_per_step={s['envs']}", "samples_per_prompt=1", f"max_tokens={s['steps']}"),
        *(f"train.steps={s['rollouts']}", f"mini_batches={s['parts']}", f"train.lr={s['lr']}"),
        *(f"updates_per_rollout={s['parts'] * s['epochs']}", f"gamma={s['gamma']}"),
        *(f"lam={s['lam']}", f"evaluate.size={EPISODES}", "evaluate.every=0"),
        *("checkpoint.every=0", "grad_clip=0.5"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"out": f"{folder}/run", "task": f"gym:{task}", "method": "ppo", "seed": seed}
        summary = train(load_config(None, sets, overrides=overrides))
    return summary["reward_after"], summary["seconds"]


def theirs(task: str, seed: int) -> tuple[float, float]:
    """Mean return and seconds of the same training by stable-baselines3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    s = TASKS[task]
    model = PPO(
        "MlpPolicy",
        make_vec_env(task, n_envs=s["envs"], seed=seed),
        n_steps=s["steps"],
        batch_size=s["envs"] * s["steps"] // s["parts"],
        n_epochs=s["epochs"],
        learning_rate=s["lr"],
        gamma=s["gamma"],
        gae_lambda=s["lam"],
        clip_range=0.2,
        vf_coef=0.5,
        ent_coef=0.0,
        max_grad_norm=0.5,
        seed=seed,
        device="cpu",
    )
    start = time.perf_counter()
    model.learn(s["rollouts"] * s["envs"] * s["steps"])
    seconds = time.perf_counter() - start
    return mean_return(task, lambda seen: model.predict(seen, deterministic=True)[0]), seconds


def mean_return(task: str, act: Callable[[Any], Any]) -> float:
    """Mean return of a deterministic policy on the episodes that `proxpo train` evaluates."""
    import gymnasium as gym

    from proxpo.control.play import exam_seed

    environment, total = gym.make(task), 0.0
    for number in range(EPISODES):
        (seen, _), over = environment.reset(seed=exam_seed(number)), False
        while not over:
            seen, reward, terminated, truncated, _ = environment.step(act(seen))
            total, over = total + float(reward), terminated or truncated
    return total / EPISODES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    record, arms = Record(asked.json), {"proxpo": ours, "stable-baselines3": theirs}
    for task in asked.tasks:
        entry: dict[str, Any] = {"settings": TASKS[task]}
        entry |= {key: {name: [] for name in arms} for key in ("returns", "seconds")}
        for seed in range(asked.seeds):
            for name, run in arms.items():
                score, seconds = run(task, seed)
                entry["returns"][name].append(round(score, 2))
                entry["seconds"][name].append(round(seconds, 2))
                print(task, seed, name, f"{score:.1f}, {seconds:.1f} s", flush=True)
            other = entry["returns"]["stable-baselines3"]
            mean = statistics.mean(entry["returns"]["proxpo"])
            entry["within"] = min(other) <= mean <= max(other)
            record.add(task, entry)
    return 0 if all(entry["within"] for _, entry in record.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
