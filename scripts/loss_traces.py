"""Seeded traces of every recipe in the trainer, to show that a refactoring changed no number.

    python scripts/loss_traces.py before.json            # at the old commit
    python scripts/loss_traces.py after.json --against before.json

Each recipe trains the model in the box for a few steps, with micro-batches and two updates a
rollout where it allows them. A trace holds every metric but times, and a hash of the weights.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save

from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.runs.checkpoint import load_latest
from proxpo.train.config import load_config
from proxpo.train.loop import train

SETTINGS = [
    "train.steps=4",
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "rollout.max_tokens=5",
    "evaluate.size=8",
    "evaluate.k=2",
    "checkpoint.every=0",
]
CUTS = ["micro_batch=8", "updates_per_rollout=2"]
SPANS = """
def score(solution_str, ground_truth):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "spans": [[0, 99, 1.0 if right else -1.0]]}
"""
# Methods for several turns, for Gaussian policies, or with a solver that takes long.
OF_THEIR_OWN = {
    "simpletir": ["task=calculator", "rollout.max_tokens=8"],
    "st-ppo": ["task=calculator", "rollout.max_tokens=8"],
    "grpo-guard": ["policy=tokens"],
    "lamer": ["task=arms", "rollout.max_tokens=1"],
    "foldact": ["task=dialogue", "rollout.max_tokens=1"],
    "vlpo": ["easiest=none", "thoughts=2", "task.options.last=2"],
    "trpo": ["cg_iterations=3", "delta=0.001"],
    "mdpo": ["updates=2"],
}
MEASURED = ("time", "duration", "per_second")  # differ from run to run


def trace(slug: str, folder: Path) -> dict[str, Any]:
    """Metrics of each step and a hash of the final weights."""
    settings = [*SETTINGS, *OF_THEIR_OWN.get(slug, [])]
    if slug != "trpo":  # it has a radius instead of a rate
        settings.append("train.lr=1e-4")
    if slug == "text2grad":
        (folder / "spans.py").write_text(SPANS)
        settings.append(f"task.reward={folder / 'spans.py'}:score")
    for cuts in (CUTS, CUTS[:1], []):
        out = folder / f"cut-{len(cuts)}"
        try:
            train(
                load_config(None, [*settings, *cuts], overrides={"out": str(out), "method": slug})
            )
        except ProxpoError as refused:
            reason = refused
            continue
        break
    else:
        raise reason
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not any(x in k for x in MEASURED)} for row in rows]
    weights = save(load_latest(out / "checkpoints").parts["weights"])
    return {"steps": kept, "weights": hashlib.sha256(weights).hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--methods", nargs="*", default=sorted(methods("language")))
    asked = parser.parse_args()
    traces = {}
    for slug in asked.methods:
        with tempfile.TemporaryDirectory() as folder:
            traces[slug] = trace(slug, Path(folder))
        print(slug, traces[slug]["weights"][:12], flush=True)
    asked.out.write_text(json.dumps(traces, indent=1))
    if asked.against is None:
        return 0
    before = json.loads(asked.against.read_text())
    moved = [slug for slug in traces if traces[slug] != before.get(slug)]
    print(f"{len(traces) - len(moved)} identical, {len(moved)} differ: {', '.join(moved)}")
    return bool(moved)


if __name__ == "__main__":
    sys.exit(main())
