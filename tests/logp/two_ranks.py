"""What each of two processes runs to show that model_logp works inside DDP and FSDP2."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from proxpo.logp import model_logp

VOCAB, DIM, WRAPS = 11, 4, ("ddp", "fsdp2")
IDS = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.8


class Small(nn.Module):
    """Enough of a causal language model, with logits that are scaled after the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        h = torch.tanh(self.body(self.embed(input_ids)))
        return (self.head(h.cumsum(1)) / 3.0,)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


def naive(model: nn.Module) -> Tensor:
    every = model(IDS)[0][:, :-1].log_softmax(-1)
    return every.gather(-1, IDS[:, 1:, None])[..., 0] * MASK


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for part in (model.body, model.head, model):
        fully_shard(part)
    return model


def run(rank: int, folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    part = slice(0, 1) if rank == 0 else slice(1, 4)
    for wrap in WRAPS:
        model = wrapped(build(), wrap)
        for _ in range(2):  # the first call learns the scale, the second uses it
            model.zero_grad()
            logp = model_logp(model, IDS[part], MASK[part])
            (2.0 * logp.sum()).backward()  # the wrapper divides by the number of ranks
        actual = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
        whole = {n: g.full_tensor() if wrap == "fsdp2" else g for n, g in actual.items()}
        if rank == 0:
            torch.save(whole, os.path.join(folder, f"{wrap}.pt"))
    dist.destroy_process_group()
