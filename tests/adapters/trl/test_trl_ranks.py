"""Two processes over gloo equal one that accumulates: under DDP, FSDP2 and DeepSpeed's ZeRO."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from trl_own_loop import EXACT, FUSED, agree, own_gradients
from trl_ranks import PLANS, RUNS, SETTINGS, WHOLE
from trl_runs import Gradients, Watched, canned, losses, seen, trainer

import proxpo

HERE = Path(__file__).parent
# ZeRO-1 and 2 hand out float32 gradients and round the weights at a step; ZeRO-3 computes so.
ROUNDED = {"zero1": (1e-6, 1e-4), "zero2": (1e-6, 1e-4), "zero3": (1e-5, 1e-4)}
WRAPPERS = {"ddp": "DistributedData", "fsdp2": "FSDP"} | dict.fromkeys(ROUNDED, "DeepSpeed")


@pytest.fixture(scope="module")
def runs_alone(tmp_path_factory) -> dict[str, tuple[Watched, list[dict[str, torch.Tensor]]]]:
    """One process that holds all eight rows, in two micro-batches."""
    return {name: alone(tmp_path_factory.mktemp(name), name) for name in WHOLE}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_ranks.py"), str(folder), str(port)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def alone(out: Path, name: str) -> tuple[Watched, list[dict[str, torch.Tensor]]]:
    slug, options = RUNS[name]
    kept = Gradients()
    given = {"callbacks": [kept], "rollout_func": canned, "gradient_accumulation_steps": 2}
    run = trainer(out, slug, options=options, kind=Watched, **given, **SETTINGS)
    run.train()
    return run, kept.steps


def pairs(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, plan in PLANS.items() for name in plan if name in names]


@pytest.mark.parametrize(("kind", "name"), pairs(WHOLE))
def test_two_processes_equal_one(ranks, runs_alone, kind, name):
    """Gradients of both steps and losses, where no sequence's gradient depends on another's."""
    run, want = runs_alone[name]
    bounds = ROUNDED.get(kind, (EXACT if run._transform is not None else FUSED,) * 2)
    for rank in range(2):
        steps, _, lost, state, wrapper, lengths = torch.load(
            ranks / f"{kind}-{name}-{rank}.pt", weights_only=True
        )
        assert wrapper.startswith(WRAPPERS[kind])
        assert len(steps) == len(want) == 2
        for found, one, bound in zip(steps, want, bounds):
            agree(found, one, to=bound)
        if rank == 0:
            assert_close(lost, losses(run), rtol=max(1e-6, bounds[1] / 10), atol=1e-7)
            assert len(lengths) == (2 if run._transform is not None else 0)
            assert_close(lengths, seen(run, "proxpo/gradient/norm"), rtol=1e-6, atol=0.0)
        if run._transform is not None:
            assert state.keys() == run._transform.state_dict().keys()


@pytest.mark.parametrize(("kind", "name"), pairs(("isopo", "ntk")))
def test_two_processes_equal_the_own_loop(ranks, runs_alone, kind, name):
    """Each process is a micro-batch: sequences meet inside it, and trailing averages over both."""
    slug, options = RUNS[name]
    found = [torch.load(ranks / f"{kind}-{name}-{rank}.pt", weights_only=True) for rank in range(2)]
    parts = [found[rank][1][0] for rank in range(2)]
    wide = max(part["prompt_ids"].shape[1] for part in parts)
    parts = [padded(part, wide, max(p["completion_ids"].shape[1] for p in parts)) for part in parts]
    start = copy.deepcopy(runs_alone["p3o"][0].start)
    want, _ = own_gradients(start, proxpo.make_recipe(slug, options), parts)
    for rank in range(2):
        agree(found[rank][0][0], want, to=ROUNDED[kind][0] if kind in ROUNDED else EXACT)
    assert_close(found[0][3], found[1][3])


@pytest.mark.parametrize("rank", range(2))
def test_weights_in_pieces_are_refused(ranks, rank):
    assert (ranks / f"zero3-{rank}.txt").read_text() == (
        "recipe isopo: gradient=isopo cannot run here: DeepSpeed ZeRO-3 hides the weights of a "
        "layer; use ZeRO-2 or FSDP2"
    )


def padded(part: dict[str, torch.Tensor], prompt: int, tokens: int) -> dict[str, torch.Tensor]:
    """Prompts grown on the left and completions on the right, to a common width."""
    pad = torch.nn.functional.pad
    left, right = prompt - part["prompt_ids"].shape[1], tokens - part["completion_ids"].shape[1]
    grown = {name: pad(part[name], (left, 0)) for name in ("prompt_ids", "prompt_mask")}
    grown |= {name: pad(part[name], (0, right)) for name in ("completion_ids", "completion_mask")}
    kept = ("rewards", "group")
    return grown | {name: part[name] for name in kept}
