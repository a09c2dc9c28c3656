"""Seeded traces of runs of every kind, to show that a refactoring changed no number.

    python scripts/loss_traces.py before.json            # at the old commit
    python scripts/loss_traces.py after.json --against before.json

The cases: every method for language models, control, generative models and energies in the trainer,
ISOPO with LoRA and on a mixture of experts, adaptation at test time, and the recipes inside TRL. A
trace holds every metric but times, and a hash of the trained tensors. Runs start from the command
line, so the script of one commit traces another: `PYTHONPATH=OTHER python scripts/loss_traces.py`.
Metrics that got another name are lines OLD NEW in the file given with --renamed.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from proxpo.cli import main as proxpo
from proxpo.recipes import methods

Trace = dict[str, Any]
Settings = list[str]

SHORT = ["train.steps=4", "checkpoint.every=0"]
LANGUAGE = [
    *SHORT,
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "rollout.max_tokens=5",
    "evaluate.size=8",
    "evaluate.k=2",
]
CUTS = ["micro_batch=8", "updates_per_rollout=2"]
SPANS = """
def score(solution_str, ground_truth):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "spans": [[0, 99, 1.0 if right else -1.0]]}
"""
ANYTHING = """
def score(solution_str, ground_truth):
    return (sum(map(ord, solution_str)) % 3) / 2
"""
# Methods for several turns, for Gaussian policies, with a solver that takes long or a radius.
OF_THEIR_OWN = {
    "simpletir": ["task=calculator", "rollout.max_tokens=8"],
    "st-ppo": ["task=calculator", "rollout.max_tokens=8"],
    "grpo-guard": ["policy=tokens"],
    "lamer": ["task=arms", "rollout.max_tokens=1"],
    "foldact": ["task=dialogue", "rollout.max_tokens=1"],
    "vlpo": ["easiest=none", "thoughts=2", "task.options.last=2"],
    "trpo": ["cg_iterations=3", "delta=0.001"],
    "mdpo": ["updates=2"],
    "text2grad": ["task.reward=spans.py:score"],
}
BY_THE_CLOCK = {"duration-aware"}  # weighs by the seconds that an answer took
ROLLOUT = ["prompts_per_step=1", "samples_per_prompt=4", "rollout.max_tokens=16"]
CONTROL = [*SHORT, *ROLLOUT, "updates_per_rollout=2", "mini_batches=1", "evaluate.size=2"]
DENOISER = [*SHORT, *ROLLOUT, "rollout.max_tokens=6", "evaluate.size=8"]
OTHER_DOMAINS: dict[str, tuple[str, str, Settings]] = {
    "control ppo": ("ppo", "gym:CartPole-v1", CONTROL),
    "control grpo": ("grpo", "gym:CartPole-v1", CONTROL),
    "control avg": ("avg", "gym:Pendulum-v1", [*SHORT, "evaluate.size=2"]),
    "control props": ("props", "gym:CartPole-v1", [*SHORT, "evaluate.size=2"]),
    "control stateful-policies": (
        "stateful-policies",
        "gym:Pendulum-v1",
        [*SHORT, "model.name=gru", "evaluate.size=2"],
    ),
    "architecture tabnas": ("tabnas", "architecture:toy", [*SHORT]),
    "generative dpok": ("dpok", "digits:class=7", DENOISER),
    "generative grpo-guard": ("grpo-guard", "digits:class=7", [*DENOISER, "updates_per_rollout=2"]),
    "generative ac-flow": ("ac-flow", "mixture:mode=0", [*SHORT, "evaluate.size=8"]),
    "energies adjoint-sampling": (
        "adjoint-sampling",
        "energy:two-modes",
        [*SHORT, "evaluate.size=16"],
    ),
}
LORA = ["model.lora.r=4", "model.lora.target_modules=all-linear", "lr=1e-3"]
TRANSFORMS: dict[str, tuple[str, Settings]] = {
    "isopo lora": ("isopo", [*LORA, "overlap=all"]),
    "isopo drawn": ("isopo", ["overlap=8", "lr=1e-4"]),
    "isopo reg=1": ("isopo", ["reg=1.0", "overlap=8", "lr=1e-4"]),
    "isopo q=-1": ("isopo", ["p=0.0", "q=-1.0", "lr=1e-4"]),
    "isopo r=-2": ("isopo", ["p=0.0", "q=-1.0", "r=-2.0", "overlap=8", "lr=1e-4"]),
    "isopo-ntk lora": ("isopo-ntk", LORA),
    "isopo-ntk by prompt": ("isopo-ntk", ["group_by=prompt", "lr=1e-4"]),
    "proma lora": ("proma", LORA),
}
ADAPTATIONS = {
    "rosa": ["parameters=hidden", "turns=3"],
    "latentseek": ["fraction=0.6", "lr=0.3"],
}
IN_TRL = ("grpo", "p3o", "ema-kpo", "isopo", "isopo-ntk", "rloo")
MEASURED = (
    "time",
    "duration",
    "second",
    "memory",
    "throughput",
    "runtime",
)  # differ from run to run


def cases() -> dict[str, Callable[[Path], Trace]]:
    """Every case by name; a case is given an empty folder."""
    made: dict[str, Callable[[Path], Trace]] = {
        f"language {slug}": lambda folder, slug=slug: language(slug, folder)
        for slug in sorted(set(methods("language")) - BY_THE_CLOCK)
    }
    for name, (slug, task, settings) in OTHER_DOMAINS.items():
        made[name] = lambda folder, x=(slug, task, settings): run(folder, x[0], [*x[2]], task=x[1])
    for name, (slug, settings) in TRANSFORMS.items():
        made[name] = lambda folder, x=(slug, settings): run(
            folder, x[0], [*LANGUAGE, "micro_batch=8", *x[1]]
        )
    made["isopo experts"] = lambda folder: on_experts("isopo", ["overlap=all"], folder)
    made["isopo-ntk experts"] = lambda folder: on_experts("isopo-ntk", [], folder)
    for slug, settings in ADAPTATIONS.items():
        made[f"adapt {slug}"] = lambda folder, x=(slug, settings): adapted(folder, *x)
    for slug in IN_TRL:
        made[f"trl {slug}"] = lambda folder, slug=slug: in_trl(slug, folder)
    return made


class Refused(Exception):
    """The command line's refusal of a run."""


def command(*arguments: str) -> None:
    """Runs a command of proxpo; raises its message where it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = proxpo(arguments)
    if code:
        raise Refused(" ".join(said.getvalue().split()[-60:]))


def run(folder: Path, slug: str, settings: Settings, *, task: str = "", model: str = "") -> Trace:
    """A run of the trainer: its metrics and its tensors."""
    out = folder / f"run-{len(list(folder.iterdir()))}"
    named = (*(("--task", task) if task else ()), *(("--model", model) if model else ()))
    sets = [each for setting in settings for each in ("--set", setting)]
    command("train", "--method", slug, *named, *sets, "--out", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (last,) = sorted(out.glob("checkpoints/*"))[-1:]
    return {"steps": [timeless(row) for row in rows], "tensors": stored(last)}


def language(slug: str, folder: Path) -> Trace:
    """A run of a method for language models, cut and with two updates a rollout where it can be."""
    own = [*OF_THEIR_OWN.get(slug, []), *([] if slug == "trpo" else ["train.lr=1e-4"])]
    (folder / "spans.py").write_text(SPANS)
    with contextlib.chdir(folder):
        for cuts in (CUTS, CUTS[:1], []):
            try:
                return run(folder, slug, [*LANGUAGE, *own, *cuts])
            except Refused as refused:
                reason = refused
    raise reason


def on_experts(slug: str, options: Settings, folder: Path) -> Trace:
    """A run on a small mixture of experts with the tokenizer of the model in the box."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from proxpo.models import load_policy

    tokenizer = load_policy("tiny").tokenizer
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    made = folder / "experts"
    Qwen3MoeForCausalLM(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    # An untrained model is never right.
    (folder / "anything.py").write_text(ANYTHING)
    reward = f"task.reward={folder / 'anything.py'}:score"
    settings = [*LANGUAGE, "micro_batch=8", "lr=1e-4", reward, *options]
    return run(folder, slug, settings, model=str(made))


def adapted(folder: Path, slug: str, settings: Settings) -> Trace:
    """A run of `proxpo adapt` without the seconds of its rows."""
    sets = [each for setting in settings for each in ("--set", setting)]
    out = folder / "adapted"
    command("adapt", slug, "--task", "arithmetic:hard", "--problems", "3", *sets, "--out", str(out))
    (rows,) = out.glob("*.jsonl")
    return {"steps": [timeless(json.loads(line)) for line in rows.read_text().splitlines()]}


def in_trl(slug: str, folder: Path) -> Trace:
    """Four steps of ProxpoTrainer on the model in the box."""
    from datasets import Dataset
    from trl import GRPOConfig

    from proxpo.adapters.trl import ProxpoTrainer
    from proxpo.models import load_policy

    policy = load_policy("tiny")
    problems = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(100, 132)]

    def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

    arguments = GRPOConfig(
        str(folder / "trl"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=4,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=3,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = ProxpoTrainer(
            policy.model,
            exact,
            arguments,
            Dataset.from_list(problems),
            recipe=slug,
            processing_class=policy.tokenizer,
        )
        trainer.train()
    rows = [timeless(row) for row in trainer.state.log_history]
    return {"steps": rows, "tensors": hashed(trainer.model.state_dict().items())}


def timeless(row: Mapping[str, Any]) -> Trace:
    """A row without what was measured by a clock; numbers that are not finite as text."""
    kept: Trace = {}
    for name, value in row.items():
        if any(word in name for word in MEASURED):
            continue
        if isinstance(value, Mapping):
            value = timeless(value)
        kept[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return kept


def stored(checkpoint: Path) -> str:
    """A hash of the tensors of a checkpoint: those for transformers, and what these do not hold."""
    files = [*checkpoint.glob("weights*.safetensors"), *checkpoint.glob("model/*.safetensors")]
    assert files, f"no weights in {checkpoint}"
    tensors = []
    for file in files:
        with safe_open(file, "pt") as stream:
            tensors += [(name, stream.get_tensor(name)) for name in stream.keys()]  # noqa: SIM118
    return hashed(tensors)


def hashed(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of the values of tensors, whatever their names, order and copies."""
    each = {
        hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for _, x in tensors
        if x.numel() and x.is_floating_point()
    }
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()


def differences(before: Trace, after: Trace, renamed: Mapping[str, str]) -> list[str]:
    """Names of what differs between two traces of a case."""
    if before == after:
        return []
    found = ["tensors"] if before.get("tensors") != after.get("tensors") else []
    if len(before["steps"]) != len(after["steps"]):
        return [*found, "number of rows"]
    for old, new in zip(before["steps"], after["steps"]):
        old = {renamed.get(name, name): value for name, value in old.items()}
        found += [k for k in {**old, **new} if old.get(k) != new.get(k) or (k in old) != (k in new)]
    return sorted(set(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="a file of traces to compare with")
    parser.add_argument("--renamed", type=Path, help="metrics with another name: lines OLD NEW")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    asked = parser.parse_args()
    renamed = {}
    if asked.renamed is not None:
        renamed = dict(line.split() for line in asked.renamed.read_text().splitlines() if line)
    traces: dict[str, Trace] = {}
    for name, case in cases().items():
        if asked.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            traces[name] = case(Path(folder))
        print(name, traces[name].get("tensors", "")[:12], flush=True)
        asked.out.write_text(json.dumps(traces, indent=1))
    if asked.against is None:
        return 0
    before = json.loads(asked.against.read_text())
    faults = {
        name: differences(before[name], trace, renamed) if name in before else ["new"]
        for name, trace in traces.items()
    }
    moved = {name: fault for name, fault in faults.items() if fault}
    for name, fault in moved.items():
        print(f"{name}: {', '.join(fault)}")
    print(f"{len(traces) - len(moved)} identical, {len(moved)} differ")
    return bool(moved)


if __name__ == "__main__":
    sys.exit(main())
