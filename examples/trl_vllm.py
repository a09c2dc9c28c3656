"""TRL with vLLM in its own process, on one GPU: any method on SmolLM2-135M, additions or GSM8K.

    python examples/trl_vllm.py                                  ISOPO, twenty steps of additions
    python examples/trl_vllm.py --recipe p3o --lora
    python examples/trl_vllm.py --task gsm8k:FOLDER --prompts 16 --tokens 256
    python examples/trl_vllm.py --recipe trl                     TRL's own GRPO
    python examples/trl_vllm.py --no-vllm --model tiny --task arithmetic      on a CPU

FOLDER holds GSM8K's train.jsonl and test.jsonl. vLLM's log-probabilities differ from the trainer's
by rounding. The gap is logged, and corrected for by truncated importance sampling: in a recipe by
its stage `tis`, in TRL's GRPO by TRL itself.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from proxpo.adapters.trl import ProxpoTrainer
from proxpo.models import Policy, load_policy
from proxpo.rewards import RewardItem, RewardPool
from proxpo.settings import parse_value
from proxpo.train.tasks import Problem, make_task

TRL = "trl"  # in place of a recipe: TRL's own GRPO
GAP = "sampling/sampling_logp_difference"


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run; the rate is that of all weights, LoRA takes ten times as much."""

    model: str = "smollm2"
    task: str = "arithmetic-chat"
    recipe: str = "isopo"  # options behind it: "dapo overlong=off"
    steps: int = 20
    prompts: int = 64
    samples: int = 8
    tokens: int = 12
    lr: float = 5e-6
    lora: bool = False
    gradient_checkpointing: bool = False
    vllm: bool = True
    graphs: str = "auto"  # of ProxpoTrainer
    updates: int = 1
    seed: int = 0


class StepLog(TrainerCallback):
    """Calls `on_row` with what every optimizer step took, its reward and the sampler's gap.

    gib: memory of the step at most, on top of what is held between steps
    """

    def __init__(self, on_row: Callable[[dict[str, float]], None]) -> None:
        self.on_row, self.mark, self.held, self.took = on_row, 0.0, 0, {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.took = {"seconds": _now() - self.mark}
        if torch.cuda.is_available():
            self.took["gib"] = (torch.cuda.max_memory_allocated() - self.held) / 2**30

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict, **_: Any) -> None:
        if "reward" in logs:
            row = {"step": state.global_step, **self.took, "reward": logs["reward"]}
            gaps = {"gap": f"{GAP}/mean", "gap_max": f"{GAP}/max"}
            self.on_row(row | {name: logs[key] for name, key in gaps.items() if key in logs})
        self._start()

    def _start(self) -> None:
        """Begins a step: what `on_row` does is in none of them."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        self.mark = _now()


def make_trainer(
    policy: Policy, problems: Sequence[Problem], pool: RewardPool, options: Options, **args: Any
) -> GRPOTrainer:
    """A trainer that takes the problems in their order, `options.prompts` a rollout.

    args: further arguments of GRPOConfig. One pass over all rows of a rollout is an update; weights
    are float32 and, on a GPU, the arithmetic bfloat16.
    """
    gpu = policy.device.type == "cuda"
    if options.vllm:
        args |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 2048}
    config = GRPOConfig(
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        num_iterations=options.updates,
        steps_per_generation=1,
        max_steps=options.updates * options.steps,
        shuffle_dataset=False,
        learning_rate=options.lr * (10 if options.lora else 1),
        lr_scheduler_type="constant",
        gradient_checkpointing=options.gradient_checkpointing,
        use_cpu=not gpu,
        bf16=gpu,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=options.seed,
        **args,
    )

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        items = [
            RewardItem(prompt=p.prompt, completion=text, answer=p.answer, extra=p.extra)
            for text, p in zip(texts, (problems[i] for i in number))
        ]
        return [outcome.reward for outcome in pool.score(items)]

    rows = [{"prompt": p.prompt, "number": i} for i, p in enumerate(problems)]
    common: dict[str, Any] = {
        "model": policy.model.train(),
        "reward_funcs": reward,
        "args": config,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": policy.tokenizer,
        "peft_config": lora_config() if options.lora else None,
    }
    if options.recipe == TRL:
        if options.graphs == "on":
            raise ValueError("TRL's own GRPO replays no graphs: leave out --graphs")
        return GRPOTrainer(**common)
    recipe, *words = options.recipe.split()
    chosen = {name: parse_value(value) for name, _, value in (w.partition("=") for w in words)}
    if options.vllm:
        chosen["weights+"] = "tis"
    return ProxpoTrainer(
        **common, recipe=recipe, recipe_options=chosen or None, graphs=options.graphs
    )


def lora_config() -> Any:
    """LoRA on every linear layer."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def run(options: Options, on_row: Callable[[dict[str, float]], None]) -> dict[str, Any]:
    """Trains; returns the rows of all steps, and whether the gap is corrected for.

    recorded_gib: memory that recorded passes hold between the steps
    """
    gpu = torch.cuda.is_available()
    policy = load_policy(options.model, device="cuda" if gpu else "cpu")
    task = make_task(options.task)
    count = options.steps * options.prompts
    problems = [task.train[i % len(task.train)] for i in range(count)]
    rows: list[dict[str, float]] = []

    def keep(row: dict[str, float]) -> None:
        rows.append({name: round(value, 6) for name, value in row.items()})
        on_row(row)

    with RewardPool(task.reward) as pool, tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(policy, problems, pool, options, output_dir=out, logging_steps=1)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StepLog(keep))
        trainer.train()
    graphs = getattr(trainer, "_graphs", None)
    recorded = {} if graphs is None else {"recorded_gib": round(graphs.held_bytes / 2**30, 3)}
    return {"steps": rows, "corrected": corrects(trainer), **recorded}


def corrects(trainer: GRPOTrainer) -> bool:
    """True if the loss is corrected for the difference between sampler and trainer."""
    if isinstance(trainer, ProxpoTrainer):
        return "rollout_logp" in trainer.recipe.needs()
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


def line(row: dict[str, float]) -> str:
    """A row as text."""
    gap = f"  gap {row['gap']:.4f}" if "gap" in row else ""
    return f"step {row['step']:3}  reward {row['reward']:.3f}  {row['seconds']:.2f} s{gap}"


def _now() -> float:
    """The time after everything that was launched has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in fields(Options):
        name = f"--{option.name.replace('_', '-')}"
        if isinstance(option.default, bool):
            switch = argparse.BooleanOptionalAction
            parser.add_argument(name, action=switch, default=option.default)
        else:
            parser.add_argument(name, type=type(option.default), default=option.default)
    parser.add_argument("--json", type=Path, help="file for the result")
    given = vars(parser.parse_args(argv))
    path = given.pop("json")
    result = run(Options(**given), lambda row: print(line(row), flush=True))
    if path is not None:
        path.write_text(json.dumps({"options": given, **result}, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
