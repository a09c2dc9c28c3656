"""TRL with vLLM in its process: our methods beside TRL's own GRPO, step by step, in one run.

    python benchmarks/engines_trl.py                             additions on a GPU, 20 steps an arm
    python benchmarks/engines_trl.py --variants lora checkpointing --arms trl isopo p3o
    python benchmarks/engines_trl.py --task gsm8k:FOLDER --arms trl isopo p3o
    python benchmarks/engines_trl.py --toy --arms trl isopo      the model in the box, CPU, no vLLM

Every arm is a run of examples/trl_vllm.py: at each step reward, seconds and the gap between the
log-probabilities of vLLM and trainer; memory, and whether the loss corrects for the gap. The median
of the steps after `--warm-up` counts, relative to TRL's GRPO in the same variant: `plain`, `lora`,
`checkpointing` (of gradients) or `graphs` (recorded passes in our arms). The arms of a variant take
turns, a step each, so that a slow minute of the machine is slow for all of them. They share one
vLLM, which gets the weights of an arm before it samples for it. Memory is what a step needs on top
of what stands: weights, states of the optimizers, vLLM and its cache. An arm is written to the file
when it ends, and not repeated when the command is given again; after `--seconds` no variant is
begun.
"""

import argparse
import functools
import gc
import importlib
import os
import statistics
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import Deadline, Record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from trl_vllm import TRL, Options, line, run

from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe

# dapo's penalty would begin at ten tokens, where the right answers end.
METHODS = (TRL, "isopo", "isopo-ntk", "p3o", "kpo", "gspo", "dapo overlong=off")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"graphs": "off"},
    "lora": {"lora": True},
    "checkpointing": {"gradient_checkpointing": True},
    "graphs": {"graphs": "on"},
}
GSM8K = {"prompts": 16, "tokens": 256}
TOY = {
    "model": "tiny",
    "task": "arithmetic",
    "vllm": False,
    "prompts": 2,
    "samples": 4,
    "tokens": 5,
}
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "engines" / "trl-vllm.json"


def share_engine() -> None:
    """Lets TRL build vLLM once for all runs of this process."""
    generation: Any = importlib.import_module("trl.generation.vllm_generation")
    generation.LLM = functools.cache(generation.LLM)


class Turns:
    """Lets one of several threads run at a time, in a round."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))  # the first one has the turn
        self.changed = threading.Condition()

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """From one's first turn until one leaves the round."""
        self._wait(number)
        try:
            yield
        finally:
            with self.changed:
                self.left.remove(number)
                self.changed.notify_all()

    def hand_over(self, number: int) -> None:
        """Ends a turn; returns at the next one."""
        with self.changed:
            self.left.append(self.left.pop(0))
            self.changed.notify_all()
        self._wait(number)

    def _wait(self, number: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.left[0] == number)


def measure(options: Options, turns: Turns, number: int) -> dict[str, Any]:
    """One run of the example, a step a turn; an error in place of what is missing of it."""

    def show(row: dict[str, float]) -> None:
        print(f"    {options.recipe:<10}", line(row), flush=True)
        forget_rank()
        turns.hand_over(number)

    with turns.part(number):
        try:
            return run(options, show)
        except Exception as error:
            traceback.print_exc()
            return {"steps": [], "error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            forget_rank()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def forget_rank() -> None:
    """Unsets what TRL sets for vLLM and the next trainer would take for a launch of several."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def side_by_side(runs: dict[str, Options], record: Record, warm_up: int) -> None:
    """Makes the runs in turns; each is recorded by its name when it ends."""
    turns, lock = Turns(len(runs)), threading.Lock()

    def work(number: int, name: str, options: Options) -> None:
        entry = measure(options, turns, number)
        with lock:
            record.add(name, entry)
            summed_up(record, warm_up)
            record.add(name, entry)  # with the medians

    threads = [
        threading.Thread(target=work, args=(number, *run), daemon=True)
        for number, run in enumerate(runs.items())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summed_up(record: Record, warm_up: int) -> list[str]:
    """Sets median seconds, their ratio to TRL's and GiB in every entry; the table's lines."""
    lines = []
    for name, entry in record.items():
        rows = entry["steps"][warm_up:]
        if not rows:
            continue
        task, arm, variant = name.split("/")
        entry["median_s"] = round(statistics.median(row["seconds"] for row in rows), 4)
        entry["gib"] = max(row.get("gib", 0.0) for row in rows)
        base = f"{task}/{TRL}/{variant}"
        if base in record and "median_s" in record[base]:
            entry["relative"] = round(entry["median_s"] / record[base]["median_s"], 3)
        rewards = [row["reward"] for row in entry["steps"]]
        third = max(1, len(rewards) // 3)
        start, end = statistics.mean(rewards[:third]), statistics.mean(rewards[-third:])
        gaps = [row["gap"] for row in entry["steps"] if "gap" in row]
        gap = f"  gap {max(gaps):.4f}" if gaps else ""
        lines.append(
            f"{task:<16}{arm:<11}{variant:<14}{entry['median_s']:7.3f} s "
            f"({entry.get('relative', float('nan')):.2f}x)  reward {start:.3f} -> {end:.3f}{gap}  "
            f"corrected {entry['corrected']}  {entry['gib']:.1f} GiB"
        )
    return lines


def main(argv: list[str] | None = None) -> Record:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--variants", nargs="+", default=["plain"], choices=VARIANTS)
    parser.add_argument("--task", default=None, help="arithmetic-chat, or gsm8k:FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        for arm in set(args.arms) - {TRL}:
            make_recipe(arm.split()[0], {})
    except ProxpoError as error:
        parser.error(str(error))
    options = Options(steps=args.steps, **(TOY if args.toy else {}))
    if args.task is not None:
        options = replace(options, task=args.task, **(GSM8K if "gsm8k" in args.task else {}))
    record, deadline = Record(args.json or (None if args.toy else RESULTS)), Deadline(args.seconds)
    if options.vllm:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        share_engine()
    task = options.task.partition(":")[0]
    for variant in args.variants:
        runs = {}
        for arm in args.arms:
            name = f"{task}/{arm}/{variant}"
            done = name in record and "error" not in record[name]
            if deadline.over or done:
                print(f"{name}: {'already there' if done else 'no time left'}", flush=True)
            else:
                runs[name] = replace(options, recipe=arm, **VARIANTS[variant])
                if arm == TRL:
                    runs[name] = replace(runs[name], graphs="off")  # it has none
        side_by_side(runs, record, args.warm_up)
    print(*summed_up(record, args.warm_up), sep="\n")
    return record


if __name__ == "__main__":
    main()
