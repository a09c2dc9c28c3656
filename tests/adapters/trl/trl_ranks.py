"""One of two processes of a TRL run over gloo: its gradients and micro-batches go to a file."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

KINDS = ("ddp", "fsdp2")
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "isopo": ("isopo", {"gradient.overlap": "all", "gradient.reg": 0.5}),
    "euclidean": ("isopo", {"gradient.preset": "euclidean"}),
    "ntk": ("isopo-ntk", {}),
    "p3o": ("p3o", {}),
    "regularised": (
        "grpo",
        {
            "gradient": "isopo",
            "gradient.preset": "euclidean",
            "regularisers": {"name": "entropy_bonus", "coef": 0.3},
        },
    ),
}
SETTINGS = {"dtype": "float64", "num_generations": 4, "max_steps": 2, "max_grad_norm": 0.0}


def shard_on_cpu(make: Any) -> Any:
    """Accelerate shards on accelerators only; here it is told that the CPU is one."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def config(out: Any, **changes: Any) -> Any:
        args = make(out, **changes)
        assert args.device.type == "cpu"  # reading it sets the processes up
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        return args

    return config


def main(rank: int, folder: Path, port: str) -> None:
    os.environ |= {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
    }
    torch.set_num_threads(1)
    import trl_runs
    from accelerate.state import AcceleratorState

    run_all("ddp", rank, folder)
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    trl_runs.config = shard_on_cpu(trl_runs.config)
    run_all("fsdp2", rank, folder)


def run_all(kind: str, rank: int, folder: Path) -> None:
    import trl_runs

    for name, (slug, options) in RUNS.items():
        kept = trl_runs.Gradients()
        run = trl_runs.trainer(
            folder / f"{name}-{rank}",
            slug,
            options=options,
            kind=trl_runs.Watched,
            callbacks=[kept],
            rollout_func=trl_runs.canned,
            **SETTINGS,
        )
        run.train()
        state = run._transform.state_dict() if run._transform is not None else {}
        wrapper = type(run.model_wrapped).__name__
        found = (kept.steps, run.parts, trl_runs.losses(run), state, wrapper)
        torch.save(found, folder / f"{kind}-{name}-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
