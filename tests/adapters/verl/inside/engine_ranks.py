"""verl's engine on several ranks: halves of a batch, slices of its positions, and both."""

import functools
import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_setup import ALL, KL, PROMA, actor, backward, make_data, make_engine, start, step

from proxpo.gradients import isopo, isopo_ntk

FIRST, SECOND = slice(0, 4), slice(4, 8)
ULYSSES = {"ulysses_sequence_parallel_size": 2, "attention": "varlen"}
MIXED = {"p": -0.5, "q": -1.0, "r": 0.5, "reg": 0.3}  # not free of the scale of the objective
SPREAD = {
    "fisher": ("proxpo_isopo", ALL, lambda: isopo(**ALL)),
    "mixed": ("proxpo_isopo", {**ALL, **MIXED}, lambda: isopo(**ALL, **MIXED)),
    "ntk": ("proxpo_isopo_ntk", {"scale": "paper"}, lambda: isopo_ntk(scale="paper")),
}


def work(rank: int, ranks: int, folder: str) -> None:
    """Runs one rank's half of the batch through verl's engine."""
    start(rank, ranks, f"{folder}/store")
    engine, half = make_engine(), slice(4 * rank, 4 * rank + 4)
    losses = {"isopo": actor("proxpo_isopo", options=ALL), "p3o": actor("proxpo_p3o", "token-mean")}
    data = {name: make_data(half, micro=4) for name in losses}
    finish(folder, {name: backward(engine, data[name], loss)[0] for name, loss in losses.items()})


def slices(rank: int, ranks: int, folder: str) -> None:
    """Ulysses: two ranks hold half of the positions each, of all sequences or of half of them."""
    start(rank, ranks, f"{folder}/store")
    own = make_data if ranks == 2 else functools.partial(make_data, [FIRST, SECOND][rank // 2])
    engine = make_engine(**ULYSSES, checkpointing=ranks == 4)
    found = {}
    for name, (loss, options, _) in SPREAD.items():
        engine.transform = None
        found[name] = backward(engine, own(micro=4), actor(loss, options=options))[0]
    if ranks == 2:
        found |= settings_of_slices(engine)
    finish(folder, found)


def settings_of_slices(engine: Any) -> dict[str, Any]:
    """Settings of verl's that meet Ulysses, where the whole batch is on both ranks."""
    isopo_loss, reg = actor("proxpo_isopo", options=ALL), {**ALL, "reg": 0.5}
    static = make_engine(**ULYSSES, pad_to_length=True, pad_to_length_bucket=128)
    found = {"padding": backward(static, make_data(micro=4), isopo_loss)[0]}
    low = make_engine(**ULYSSES, mixed_precision=None)
    found["bfloat16"] = backward(low, make_data(micro=4), isopo_loss)[0]
    engine.transform = None
    kl = actor("proxpo_isopo", options=ALL, **KL)
    found["kl"] = backward(engine, make_data(micro=4), kl)[0]
    found["p3o"] = backward(engine, make_data(micro=8), actor("proxpo_p3o", "token-mean"))[0]
    torch.manual_seed(3)
    lora = make_engine(**ULYSSES, lora=4)
    found["lora"] = backward(lora, make_data(micro=4), isopo_loss)[0]
    lora_a = {n: p for n, p in lora.module.named_parameters() if "lora_A" in n}
    found["lora weights"] = {n: p.full_tensor().detach() for n, p in lora_a.items()}
    steps = make_engine(**ULYSSES, lr=0.05)
    found["norms"] = [step(steps, actor("proxpo_isopo", options=reg)) for _ in range(2)]
    found["sequences"] = sequences(engine)
    engine.transform = None
    proma = actor("proxpo_isopo", options=PROMA)
    with pytest.raises(ValueError, match="gradient=proma needs ulysses_sequence_parallel_size=1"):
        backward(engine, make_data(micro=4), proma)
    return found


def sequences(engine: Any) -> torch.Tensor:
    """Sequence numbers of 21 positions as the two ranks cut them, one behind the other."""
    with engine.train_mode(zero_grad_on_exit=False):
        own = engine._sequences(make_data(slice(0, 3), micro=3))
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own)
    return torch.cat(parts, dim=1)


def finish(folder: str, found: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def forked(target: Any, ranks: int, folder: str) -> dict[str, Any]:
    """Results of several processes, forked off since verl loads slowly."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target, args=(rank, ranks, folder)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * ranks
    return torch.load(f"{folder}/found.pt", weights_only=True)
