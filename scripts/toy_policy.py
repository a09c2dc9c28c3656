"""A transformer small enough for exact Fisher norms, shared by the experiments of this folder."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.second = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        split = self.qkv(self.first(h)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        mixed = score.masked_fill(future, float("-inf")).softmax(-1) @ v
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.down(nn.functional.gelu(self.up(self.second(h))))


class ToyPolicy(nn.Module):
    """Token ids (seq, tok) to logits (seq, tok, vocab)."""

    def __init__(
        self, vocab: int, *, width: int, layers: int, longest: int, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place(places))))


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Prompts continued by `tokens` draws from the policy."""
    ids = prompts
    for _ in range(tokens):
        p = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], dim=1)
    return ids


def response_logp(model: Callable[[Tensor], Tensor], ids: Tensor, prompt: int) -> Tensor:
    """log π of the tokens after the prompt, (seq, tok)."""
    logp = model(ids[:, :-1]).log_softmax(-1)[:, prompt - 1 :]
    return logp.gather(-1, ids[:, prompt:, None])[..., 0]
