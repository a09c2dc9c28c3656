"""verl's main_ppo with vLLM: our losses and the ISOPO engine beside verl's own loss.

    python benchmarks/engines_verl.py                                      additions, one GPU
    python benchmarks/engines_verl.py --task gsm8k:FOLDER --arms vanilla p3o
    python benchmarks/engines_verl.py --arms isopo --set trainer.total_training_steps=50

Every arm starts a launch script of examples/verl in a process of its own, with the settings below
(ten steps) and those of `--set`, and is ended after `--limit` seconds. Of each step: mean reward
(examples/verl/last_number.py), seconds of the step and its parts, GiB at most in the actor's
process, and the difference between the probabilities of vLLM and actor. An arm that fails keeps
its last lines. It is written to the file when it ends; the same command again repeats only failed
ones. With `--logs FOLDER` the whole output of each arm is kept there.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Record

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "verl"
ARMS = ("vanilla", "p3o", "kpo", "isopo")
RESULTS = ROOT / "docs" / "results" / "engines" / "verl.json"
STEPS = 10
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
SETTINGS = [
    "data.train_batch_size=16",
    "data.max_response_length=256",
    "data.dataloader_num_workers=1",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
    f"{ACTOR}.ppo_epochs=1",
    f"{MODEL}.enable_gradient_checkpointing=False",
    f"{MODEL}.use_remove_padding=False",  # which needs flash-attn
    f"+{MODEL}.override_config.attn_implementation=sdpa",
    f"{ROLLOUT}.gpu_memory_utilization=0.3",
    f"{ROLLOUT}.enforce_eager=True",  # a run of ten steps does not earn the compilation
    f"{ROLLOUT}.calculate_log_probs=True",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
    f"{ROLLOUT}.agent.num_workers=2",
    "reward.num_workers=2",
    f"reward.custom_reward_function.path={SCRIPTS / 'last_number.py'}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.logger=[console,file]",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "+ray_kwargs.ray_init.include_dashboard=False",
]
METRICS = {
    "reward": "critic/score/mean",
    "seconds": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "old_logp_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "sync_s": "timing_s/update_weights",
    "tokens": "perf/total_num_tokens",
    "allocated_gib": "actor/perf/max_memory_allocated_gb",
    "reserved_gib": "actor/perf/max_memory_reserved_gb",
    "probability_gap": "training/rollout_probs_diff_mean",
    "grad_norm": "actor/grad_norm",
}


def write_data(task: str, folder: Path, count: int) -> None:
    """Parquet files of the first problems of a task: gsm8k:FOLDER, or arithmetic-chat."""
    sys.path.insert(0, str(SCRIPTS))
    from gsm8k_data import problems, row, write

    from proxpo.train.tasks import make_task

    name, _, source = task.partition(":")
    if name == "gsm8k":
        made = [row(p, i, "train") for i, p in enumerate(problems("train", source or None)[:count])]
    else:
        train = make_task(task).train
        chosen = [train[i] for i in range(count)]
        made = [
            {
                "data_source": "proxpo/arithmetic",
                "prompt": list(p.prompt),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(p.answer)},
                "extra_info": {"split": "train", "index": i},
            }
            for i, p in enumerate(chosen)
        ]
    for split in ("train", "test"):  # the runs do not validate, but verl wants a file
        write(made if split == "train" else made[:8], folder / f"{split}.parquet")


def steps_of(path: Path) -> list[dict[str, float]]:
    """The metrics of each step in the file that verl's logger writes."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        named = {name: entry["data"].get(key) for name, key in METRICS.items()}
        kept = {name: round(float(x), 6) for name, x in named.items() if x is not None}
        if kept:
            rows.append({"step": entry["step"], **kept})
    return rows


def tail(text: str, lines: int = 40) -> list[str]:
    """The last lines that name an error, and the last lines of all."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    every = [line.rstrip()[:300] for line in plain.splitlines() if line.strip()]
    errors = [line for line in every if re.search(r"\b\w*(Error|Exception): ", line)][-10:]
    return [*errors, "...", *every[-lines:]] if errors else every[-lines:]


def run_arm(
    command: list[str], env: dict[str, str], *, log: Path, metrics: Path, limit: float
) -> dict[str, Any]:
    """Runs a launch script; its steps, its exit status, and its last lines if it failed."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, "VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=metrics.parent,  # where Hydra writes its folder
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = f"ended after {limit:.0f} s"
            for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
                os.killpg(process.pid, number)
                try:
                    process.wait(timeout=patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
    entry: dict[str, Any] = {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "steps": steps_of(metrics),
    }
    if status != 0:
        entry["error"] = tail(log.read_text(errors="replace"))
    return entry


def table(record: Record) -> str:
    """Medians of the steps after the first two, relative to verl's own loss."""
    lines = []
    for name, entry in record.items():
        rows = entry["steps"][2:]
        if "error" in entry:
            lines.append(f"{name}: status {entry['status']}")
        if not rows:
            continue
        task, arm = name.split("/")

        def median(key: str, rows: list[dict[str, float]] = rows) -> float:
            return statistics.median(row.get(key, float("nan")) for row in rows)

        entry["median_s"] = median("seconds")
        base = f"{task}/vanilla"
        if base in record and "median_s" in record[base]:
            entry["relative"] = round(entry["median_s"] / record[base]["median_s"], 3)
        rewards = [row["reward"] for row in entry["steps"]]
        lines.append(
            f"{task:<16}{arm:<9} step {entry['median_s']:6.2f} s "
            f"({entry.get('relative', float('nan')):.2f}x)  update {median('update_s'):6.2f} s  "
            f"{median('allocated_gib'):5.1f} GiB  reward {rewards[0]:.3f} -> {rewards[-1]:.3f}  "
            f"{len(rewards)} steps"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> Record:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--task", default="arithmetic-chat", help="or gsm8k:FOLDER")
    parser.add_argument("--model", default="smollm2", help="a model of proxpo, or a folder")
    parser.add_argument("--set", nargs="*", default=[], dest="sets", help="settings of verl")
    parser.add_argument("--limit", type=float, default=140.0, help="seconds of an arm")
    parser.add_argument("--scripts", type=Path, default=SCRIPTS, help="folder of launch scripts")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    record = Record(args.json)
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        write_data(args.task, Path(folder), 64 * STEPS)
        task = args.task.partition(":")[0]
        for arm in args.arms:
            name = f"{task}/{arm}"
            if name in record and "error" not in record[name]:
                print(f"{name}: already there", flush=True)
                continue
            print(name, flush=True)
            entry = run_arm(
                [str(args.scripts.resolve() / f"{arm}.sh"), *SETTINGS, *args.sets],
                {
                    "PYTHON": sys.executable,
                    "MODEL": model_folder(args.model),
                    "DATA": folder,
                    "GPUS": "1",
                },
                log=logs / f"{arm}.log",
                metrics=Path(folder) / f"{arm}.jsonl",
                limit=args.limit,
            )
            record.add(name, entry)
            print(*entry.get("error", []), table(record), sep="\n", flush=True)
            record.add(name, entry)  # with the medians
    return record


def model_folder(name: str) -> str:
    """The folder of a model's files."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    from proxpo.models import load_policy

    return load_policy(name).model.name_or_path


if __name__ == "__main__":
    main()
