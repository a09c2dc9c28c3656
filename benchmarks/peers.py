"""Steps of TRL's GRPOTrainer on the model, problems and reward of a task of proxpo."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from record import synchronised
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from proxpo.models import Policy
from proxpo.rewards import RewardItem, RewardPool
from proxpo.train.tasks import Problem, Task


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
    seconds, and ends the training by returning something true. One pass over all rows of a rollout
    is an update; weights are float32 and, on a GPU, the arithmetic bfloat16, as in proxpo's
    trainer; no reference model. vllm: the rollouts are vLLM's, in this process.
    """
    data = Dataset.from_list([{"prompt": p.prompt, "number": i} for i, p in enumerate(problems)])
    gpu = policy.device.type == "cuda"
    with RewardPool(task.reward) as pool, tempfile.TemporaryDirectory() as out:

        def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
            texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
            items = [
                RewardItem(prompt=p.prompt, completion=text, answer=p.answer, extra=p.extra)
                for text, p in zip(texts, (problems[i] for i in number))
            ]
            return [outcome.reward for outcome in pool.score(items)]

        colocated: dict[str, Any] = {}
        if vllm:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            colocated = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 2048}
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=prompts * samples,
            num_generations=samples,
            max_completion_length=tokens,
            num_iterations=updates,
            steps_per_generation=1,
            max_steps=updates * (len(problems) // prompts),
            shuffle_dataset=False,
            learning_rate=lr,
            beta=0.0,
            gradient_checkpointing=False,
            use_cpu=not gpu,
            bf16=gpu,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            **colocated,
        )
        trainer = GRPOTrainer(
            model=policy.model.train(),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=policy.tokenizer,
        )
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.add_callback(_Clock(trainer, updates, on_step))
        trainer.train()


__all__ = ["train_trl"]
