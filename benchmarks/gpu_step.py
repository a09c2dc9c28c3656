"""A whole training step as a user runs it: rollout, update, peak memory; proxpo beside TRL.

    python benchmarks/gpu_step.py --gsm8k FOLDER --json step.json     SmolLM2-135M on a GPU
    python benchmarks/gpu_step.py --cases arithmetic --arms reinforce "reinforce train.graphs=off"
    python benchmarks/gpu_step.py --cases gsm8k --arms "grpo rollout.backend=vllm" grpo
    python benchmarks/gpu_step.py --cases toy --arms grpo isopo trl   the model in the box, CPU

    arithmetic   preset smollm2-arithmetic: 64 x 8 responses of at most 12 tokens, two updates
    gsm8k        GSM8K (a folder with train.jsonl and test.jsonl, or the hub): 16 x 8 responses of
                 at most 256 tokens, one update

An arm is a method with settings of the trainer behind it, or `trl`, or `trl-vllm` (colocated).
`whole` behind a method runs every response with a prompt of its own, as ISOPO's backward pass has
to: the base of its ratio. All draw the same problems in the same order and use the task's reward.

A step lasts from the end of the one before, everything launched having ended. The first
`--warm-up` steps (two of a peer's) do not count: shapes come for the first time there, and graphs
are recorded. The peak is that of torch's allocator from the first step on. The arms take turns in
`--rounds` rounds, the peers in the first. Every run is written to the file when it ends, and not
repeated when the command is given again; after `--seconds` nothing more is begun.
"""

import argparse
import gc
import importlib.util
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Deadline, Record, synchronised

from proxpo.errors import ProxpoError
from proxpo.models import load_policy
from proxpo.replay import inputs, prefix
from proxpo.train.collect import Source
from proxpo.train.config import Config, load_config
from proxpo.train.experience import Experience
from proxpo.train.loop import train
from proxpo.train.observer import Observer
from proxpo.train.tasks import fit_prompts, make_task, take_pool

PEERS = ("trl", "trl-vllm")
ARMS = (
    "reinforce", "reinforce whole", "grpo", "isopo", "isopo-ntk", "isopo-ntk micro_batch=64",
    *PEERS,
)  # fmt: skip


class Case(NamedTuple):
    preset: str
    sets: tuple[str, ...] = ()


CASES = {
    "arithmetic": Case("smollm2-arithmetic"),
    "gsm8k": Case(
        "smollm2-arithmetic",
        (
            "task=gsm8k", "task.options.verifier=numeric", "task.problems=512", "drop_long=true",
            "prompts_per_step=16", "max_prompt=512", "max_tokens=256", "updates_per_rollout=1",
        ),
    ),
    "toy": Case("quickstart", ("prompts_per_step=8", "updates_per_rollout=2", "device=cpu")),
}  # fmt: skip

Row = dict[str, float]


class Enough(BaseException):
    """Ends a run after its last step, before evaluation and report."""


def settings(case: Case, arm: str, args: argparse.Namespace, out: str) -> Config:
    """The config of an arm, with a run in the folder `out`."""
    method, *words = ("grpo" if arm in PEERS else arm).split()
    sets = [*case.sets, *args.sets, *(word for word in words if word != "whole")]
    if args.gsm8k is not None:
        sets = [f"task=gsm8k:{args.gsm8k}" if word == "task=gsm8k" else word for word in sets]
    quiet = ["evaluate.every=0", "evaluate.size=8", "evaluate.k=0", "checkpoint.every=0"]
    common = [*quiet, f"steps={args.steps + 1}", f"out={out}/run"]
    return load_config(case.preset, [f"method={method}", *sets, *common])


def ours(config: Config, on_step: Callable[[Row], bool]) -> list[str]:
    """Trains until `on_step` returns True; notices of the run."""
    notices: list[str] = []
    mark = None

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal mark
        if mark is None and phase == "sampling":  # the first evaluation is over
            mark = synchronised()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()

    def step(_: int, metrics: dict[str, Any]) -> None:
        nonlocal mark
        now = synchronised()
        seconds, mark = now - mark, now
        names = {name: f"proxpo/time/{name}" for name in ("rollout", "update", "sync")}
        names["gap"] = "proxpo/sampler_gap"  # of vLLM alone
        row = {name: float(metrics[key]) for name, key in names.items() if key in metrics}
        if on_step({"step": seconds, **row}):
            raise Enough

    observer = Observer(on_progress=progress, on_step=step, on_notice=notices.append)
    with suppress(Enough):
        train(config, observer=observer)
    return notices


def theirs(config: Config, arm: str, on_step: Callable[[Row], bool]) -> list[str]:
    """Trains TRL on the problems that proxpo would draw."""
    from peers import train_trl

    device = "cuda" if torch.cuda.is_available() and config.model.device != "cpu" else "cpu"
    policy = load_policy(config.model.name, device=device)
    task = make_task(config.task.name, **config.task.options)
    if config.task.problems is not None:
        task = take_pool(task, config.task.problems)
    rollout, drop = config.rollout, config.task.drop_long
    task = fit_prompts(task, policy.tokenizer, limit=rollout.max_prompt, drop=drop)
    source = Source(problems=task.train, seed=config.seed, held_out=task.held_out)
    train_trl(
        policy,
        task,
        source.take(config.train.steps * rollout.prompts_per_step),
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        tokens=rollout.max_tokens,
        updates=config.updates,
        lr=config.train.lr,
        vllm=arm == "trl-vllm",
        on_step=on_step,
    )
    return []


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Gives every response a prompt of its own, where prompts are shared within a group."""

    def own_prompts(rows: Experience) -> prefix.Prompts:
        length = rows.input_ids.shape[1] - rows.mask.shape[1]
        pad = (~rows.attention_mask[:, :length]).sum(dim=1)
        which = torch.arange(len(rows.mask), device=pad.device)
        return prefix.Prompts(rows.input_ids[:, :length], pad, which)

    shared = prefix.prompts_of
    try:
        prefix.prompts_of = inputs.prompts_of = own_prompts
        yield
    finally:
        prefix.prompts_of = inputs.prompts_of = shared


def measure(case: Case, arm: str, args: argparse.Namespace, deadline: Deadline) -> dict[str, Any]:
    """One run: seconds of its counted steps, peaks in GiB, notices; an error in its place."""
    rows: list[Row] = []
    steps, warm_up = (args.peer_steps, 2) if arm in PEERS else (args.steps, args.warm_up)

    def on_step(row: Row) -> bool:
        rows.append({name: round(value, 5) for name, value in row.items()})
        print("   ", " ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
        return len(rows) >= steps or (deadline.over and len(rows) > warm_up)

    entry: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as out:
        warnings.simplefilter("always")
        try:
            config = settings(case, arm, args, out)
            with whole_sequences() if "whole" in arm.split() else nullcontext():
                notices = theirs(config, arm, on_step) if arm in PEERS else ours(config, on_step)
        except Exception as error:
            traceback.print_exc()
            entry["error"] = f"{type(error).__name__}: {error}"[:500]
            notices = []
    lines = {str(w.message) for w in caught if "train." in str(w.message)}
    entry |= {"steps": rows[warm_up:], "warm_up": rows[:warm_up]}
    entry |= {"notices": [*notices, *sorted(lines)]}
    if torch.cuda.is_available():
        entry["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        entry["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return entry


def missing(arm: str) -> str:
    """The package that an arm lacks; empty if there is none."""
    needed = {"trl": ("trl",), "trl-vllm": ("trl", "vllm")}.get(arm, ())
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)


def table(record: Record) -> str:
    """Medians of all counted steps of each arm, with its update relative to the first arm's."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, entry in record.items():
        case, arm, _ = name.split("/")
        if entry["steps"]:
            runs.setdefault((case, arm), []).append(entry)
    lines, base = [], {}
    for (case, arm), entries in runs.items():
        rows = [row for entry in entries for row in entry["steps"]]
        step, rollout, update = (
            statistics.median(row[name] for row in rows) for name in ("step", "rollout", "update")
        )
        peak = max(entry.get("peak_gib", 0.0) for entry in entries)
        ratio = update / base.setdefault(case, update)
        lines.append(
            f"{case:<11}{arm:<28} step {step:7.3f} s  rollout {rollout:7.3f}  update {update:7.3f} "
            f"({ratio:5.2f}x)  peak {peak:5.1f} GiB  {len(rows)} steps"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["arithmetic", "gsm8k"], choices=CASES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--gsm8k", help="folder of train.jsonl and test.jsonl; none: the hub")
    parser.add_argument("--set", nargs="*", default=[], dest="sets", help="settings of all arms")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record, deadline = Record(args.json), Deadline(args.seconds)
    runs = [
        (case, arm, number)
        for number in range(args.rounds)
        for case in args.cases
        for arm in args.arms
        if number == 0 or arm not in PEERS
    ]
    try:
        for case, arm, _ in runs:
            settings(CASES[case], arm, args, "run")
    except ProxpoError as error:
        parser.error(str(error))
    for case, arm, number in sorted(runs, key=lambda run: run[1] == "trl-vllm"):
        name = f"{case}/{arm}/{number}"
        if deadline.over or (name in record and "error" not in record[name]):
            continue
        if lacking := missing(arm):
            print(f"{name}: {lacking} cannot be imported")
            continue
        print(name, flush=True)
        entry = measure(CASES[case], arm, args, deadline)
        print("   ", *entry["notices"], sep="\n    ")
        if entry["steps"] or "error" in entry:
            record.add(name, entry)
    print(table(record))


if __name__ == "__main__":
    main()
