"""ISOPO inside TRL: additions, on a laptop's CPU with the model in the box, or on any model.

    python examples/trl_isopo.py
    python examples/trl_isopo.py --model Qwen/Qwen3-0.6B --recipe p3o --steps 200
    accelerate launch examples/trl_isopo.py --model Qwen/Qwen3-0.6B

Everything but `recipe` is TRL: pass peft_config, use_vllm=True or report_to as ever.
"""

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from proxpo.adapters.trl import ProxpoTrainer
from proxpo.models import load_policy


def additions(count: int, seed: int = 0) -> Dataset:
    """Sums of two numbers of three digits, a good half of which the model in the box answers."""
    drawn = random.Random(seed)
    pairs = [(drawn.randint(100, 999), drawn.randint(100, 999)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 for the right sum, else 0."""
    return [float(text.strip() == target) for text, target in zip(completions, answer)]


def main(argv: list[str] | None = None) -> ProxpoTrainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--recipe", default="isopo")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/trl-isopo")
    options = parser.parse_args(argv)

    policy = load_policy(options.model)
    args = GRPOConfig(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=256 if options.model == "tiny" else 32,
        num_generations=8,
        max_completion_length=6,
        learning_rate=5e-4 if options.model == "tiny" else 1e-6,
        lr_scheduler_type="constant",
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
    )
    trainer = ProxpoTrainer(
        policy.model,
        exact_match,
        args,
        additions(512),
        recipe=options.recipe,
        recipe_options={"gradient.reg": 1.0} if options.recipe == "isopo" else None,
        processing_class=policy.tokenizer,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
