"""A tiny autoregressive policy in float64, and sequences drawn from it."""

import pytest
import torch
from torch import nn

from proxpo.exact import ActionBatch, FlatPolicy

VOCAB, LENGTH = 4, 3


class TinyLM(nn.Module):
    """Logits from the running mean of the token embeddings: every token sees its whole prefix."""

    def __init__(self, vocab: int = VOCAB, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.hidden(x)))


class Linear(nn.Module):
    """Softmax of features · (B φ) with the last logit fixed at 0: a Fisher matrix of full rank."""

    def __init__(self, phi: torch.Tensor, mix: torch.Tensor) -> None:
        super().__init__()
        self.phi = nn.Parameter(phi)
        self.register_buffer("mix", mix)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        free = features @ (self.mix @ self.phi).view(features.shape[-1], 2)
        return torch.cat([free, torch.zeros_like(free[..., :1])], dim=-1)


def draw(model: nn.Module, sequences: int, generator: torch.Generator) -> ActionBatch:
    ids = torch.randint(VOCAB, (sequences, 1), generator=generator)
    with torch.no_grad():
        for _ in range(LENGTH):
            p = model(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], dim=1)
    lengths = torch.randint(1, LENGTH + 1, (sequences, 1), generator=generator)
    return ActionBatch(ids[:, :-1], ids[:, 1:], torch.arange(LENGTH)[None] < lengths)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def policy() -> FlatPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FlatPolicy(TinyLM().double())


@pytest.fixture
def samples(policy, generator) -> ActionBatch:
    return draw(policy.model, 7, generator)


@pytest.fixture
def advantages(generator) -> torch.Tensor:
    return torch.randn(7, generator=generator, dtype=torch.float64)


@pytest.fixture
def linear(generator) -> tuple[FlatPolicy, ActionBatch, torch.Tensor]:
    """A full-rank problem: a policy, samples and advantages."""
    x = torch.randn(12, 2, 3, generator=generator, dtype=torch.float64)
    actions = torch.randint(3, (12, 2), generator=generator)
    adv, theta = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    policy = FlatPolicy(Linear(theta[:6].clone(), torch.eye(6, dtype=torch.float64)))
    return policy, ActionBatch(x, actions, torch.ones(12, 2).bool()), adv
