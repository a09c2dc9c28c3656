"""One RL step of proxpo against TRL's GRPOTrainer: same model, prompts, group size and length.

    python benchmarks/step_time.py                       the model in the box on the CPU
    python benchmarks/step_time.py --prompts 32 --samples 8 --steps 12

Both train GRPO on the arithmetic task in float32, one update per rollout, no reference model. The
runs take turns, a block of steps each; the median step counts, and ours is split into its phases.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch


def ours(args: argparse.Namespace, round_number: int) -> list[dict[str, float]]:
    """Seconds of each step and of its phases."""
    from proxpo.train.config import load_config
    from proxpo.train.loop import train

    with tempfile.TemporaryDirectory() as out:
        sets = [
            f"prompts_per_step={args.prompts}",
            f"samples_per_prompt={args.samples}",
            f"rollout.max_tokens={args.tokens}",
            f"steps={args.steps}",
            "evaluate.every=0",
            "evaluate.size=8",
            "checkpoint.every=0",
        ]
        train(
            load_config(None, sets, overrides={"method": "grpo", "out": out, "seed": round_number})
        )
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    phases = ("step_time", "proxpo/time/rollout", "proxpo/time/update", "proxpo/time/sync")
    return [{name: row[name] for name in phases} for row in rows[2:]]  # the first one warms up


def theirs(args: argparse.Namespace, round_number: int) -> list[float]:
    """Seconds of each step of GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from proxpo.train.models import load_policy
    from proxpo.train.tasks import make_task

    policy, task = load_policy("tiny"), make_task("arithmetic")
    problems = [task.train[i] for i in range(args.prompts * (args.steps + 2))]
    data = Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems])

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer)]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=args.prompts * args.samples,
            num_generations=args.samples,
            max_completion_length=args.tokens,
            max_steps=args.steps,
            learning_rate=3e-5,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=round_number,
        )
        trainer = GRPOTrainer(
            model=policy.model.train(),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=policy.tokenizer,
        )
        trainer.train()
    times = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    mine: list[dict[str, float]] = []
    other: list[float] = []
    for number in range(args.rounds):
        other += theirs(args, number)
        mine += ours(args, number)
    shape = f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens"
    print(f"{shape}, {torch.get_num_threads()} threads")
    base = statistics.median(other)
    print(f"TRL GRPOTrainer     {1e3 * base:8.1f} ms a step")
    for name in mine[0]:
        value = statistics.median(row[name] for row in mine)
        label = "proxpo" if name == "step_time" else f"  {name.rsplit('/', 1)[1]}"
        ratio = f"{base / value:6.2f}x faster" if name == "step_time" else ""
        print(f"{label:<20}{1e3 * value:8.1f} ms {ratio}")
    if args.json:
        Path(args.json).write_text(json.dumps({"trl": other, "proxpo": mine}, indent=1))


if __name__ == "__main__":
    main()
