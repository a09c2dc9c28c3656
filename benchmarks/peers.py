"""Steps of TRL's GRPOTrainer on the model, problems and reward of a task of proxpo."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import synchronised
from transformers import TrainerCallback
from trl import GRPOTrainer

from proxpo.models import Policy
from proxpo.rewards import RewardPool
from proxpo.train.tasks import Problem, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from trl_vllm import Options, make_trainer


class _Clock(TrainerCallback):
    """Calls `on_step` with the seconds of each rollout and its updates, and of the rollout."""

    def __init__(self, trainer: GRPOTrainer, updates: int, on_step: Callable[..., None]) -> None:
        self.updates, self.on_step, self.rollout = updates, on_step, 0.0
        self.mark = 0.0
        generate = trainer._generate_and_score_completions

        def timed(*args: Any, **options: Any) -> Any:
            start = synchronised()
            result = generate(*args, **options)
            self.rollout = synchronised() - start
            return result

        trainer._generate_and_score_completions = timed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mark = synchronised()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates:
            return
        now = synchronised()
        step, self.mark = now - self.mark, now
        row = {"step": step, "rollout": self.rollout, "update": step - self.rollout}
        control.should_training_stop = bool(self.on_step(row))


def train_trl(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    prompts: int,
    samples: int,
    tokens: int,
    on_step: Callable[[dict[str, float]], Any],
    updates: int = 1,
    lr: float = 1e-6,
    seed: int = 0,
    vllm: bool = False,
) -> None:
    """Trains GRPO on the problems in their order, `prompts` a rollout.

    on_step is called after the last update of each rollout with {"step", "rollout", "update"} in
    seconds, and ends the training by returning something true. vllm: the rollouts are vLLM's, in
    this process. See `make_trainer`.
    """
    if vllm:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    options = Options(
        recipe="trl",
        steps=len(problems) // prompts,
        prompts=prompts,
        samples=samples,
        tokens=tokens,
        updates=updates,
        lr=lr,
        seed=seed,
        vllm=vllm,
    )
    with RewardPool(task.reward) as pool, tempfile.TemporaryDirectory() as out:
        silent = {"output_dir": out, "logging_strategy": "no"}
        trainer = make_trainer(policy, problems, pool, options, **silent)
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.add_callback(_Clock(trainer, updates, on_step))
        trainer.train()


__all__ = ["train_trl"]
