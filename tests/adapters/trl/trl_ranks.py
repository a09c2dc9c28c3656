"""Two processes of a TRL run over gloo: their gradients and micro-batches go to files."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

ZERO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
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
WHOLE = ("euclidean", "p3o", "regularised")  # no sequence's gradient depends on another's
PLANS: dict[str, tuple[str, ...]] = {
    "ddp": tuple(RUNS),
    "fsdp2": tuple(RUNS),
    "zero1": ("isopo", "p3o"),
    "zero2": WHOLE,
    "zero3": ("p3o",),
}
SETTINGS = {"dtype": "float64", "num_generations": 4, "max_steps": 2, "max_grad_norm": 0.0}
# The rows of a process in two micro-batches, on top.
TWICE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


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


def join_on_cpu() -> None:
    """Accelerate knows DeepSpeed on accelerators only, and DeepSpeed would compile a reduction."""
    import deepspeed
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState._prepare_backend = lambda *given: ("gloo", DistributedType.MULTI_CPU)


def keep_gradients(kept: Any) -> None:
    """Under ZeRO the optimizer steps inside the backward, and the gradients are in pieces."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_grad

    step = vars(DeepSpeedEngine).get("_plain_step", DeepSpeedEngine.step)

    def watched(engine: Any, *given: Any, **named: Any) -> Any:
        found = engine.module.named_parameters()
        kept.steps.append({name: safe_get_full_grad(p).double() for name, p in found})
        return step(engine, *given, **named)

    DeepSpeedEngine._plain_step, DeepSpeedEngine.step = step, watched


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
    plain, trl_runs.config = trl_runs.config, shard_on_cpu(trl_runs.config)
    run_all("fsdp2", rank, folder)
    del os.environ["ACCELERATE_USE_FSDP"]
    trl_runs.config = plain
    join_on_cpu()
    for stage in (1, 2, 3):
        run_all(f"zero{stage}", rank, folder)
    with_weights_in_pieces(rank, folder)


def under_zero(stage: int) -> dict[str, Any]:
    return {"deepspeed": ZERO | {"zero_optimization": {"stage": stage}}, "use_cpu": False}


def with_weights_in_pieces(rank: int, folder: Path) -> None:
    """Error of a gradient transform under ZeRO-3."""
    import trl_runs

    from proxpo.errors import ProxpoError

    try:
        trl_runs.trainer(folder / f"zero3-{rank}", "isopo", **under_zero(3))
    except ProxpoError as error:
        (folder / f"zero3-{rank}.txt").write_text(str(error))


def run_all(kind: str, rank: int, folder: Path) -> None:
    import trl_runs

    zero = under_zero(int(kind[-1])) if kind.startswith("zero") else {}
    if kind == "zero2":
        zero |= TWICE
    if kind == "zero3":
        zero["dtype"] = "float32"  # the most it takes
    for name in PLANS[kind]:
        slug, options = RUNS[name]
        kept = trl_runs.Gradients()
        if zero:
            keep_gradients(kept)
        run = trl_runs.trainer(
            folder / f"{name}-{rank}",
            slug,
            options=options,
            kind=trl_runs.Watched,
            callbacks=[] if zero else [kept],
            rollout_func=trl_runs.canned,
            **SETTINGS | zero,
        )
        run.train()
        state = run._transform.state_dict() if run._transform is not None else {}
        wrapper = type(run.model_wrapped).__name__
        lengths = trl_runs.seen(run, "proxpo/gradient/norm")
        found = (kept.steps, run.parts, trl_runs.losses(run), state, wrapper, lengths)
        torch.save(found, folder / f"{kind}-{name}-{rank}.pt")


if __name__ == "__main__":
    import deepspeed  # noqa: F401  with all else, before the processes part ways: imported once
    import trl_runs

    trl_runs.policy(SETTINGS["dtype"])
    other = os.fork()
    main(int(other == 0), Path(sys.argv[1]), sys.argv[2])
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
