"""Small models for the gradient tests."""

import torch
from torch import Tensor, nn

VOCAB = 50


class Tiny(nn.Module):
    """One of each layer, all in float64: embedding, norms, attention, biases, no casts."""

    def __init__(self, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.first = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.second = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def block(self, h: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(h)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~allowed, -1e9)
        h = h + self.out(scores.softmax(-1) @ v)
        return h + self.down(torch.tanh(self.up(self.second(h))))

    def forward(self, ids: Tensor, seq: Tensor) -> Tensor:
        same = seq[:, :, None] == seq[:, None, :]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return self.head(self.block(self.embed(ids), same & causal))


def nll(logits: Tensor, ids: Tensor, seq: Tensor) -> Tensor:
    """Minus the log-probability of every token but the first of its sequence, per position."""
    logp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    inside = (seq[:, 1:] == seq[:, :-1]) & (seq[:, 1:] >= 0)
    return -(logp * inside)


def padded(lengths: list[int], vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Right-padded token ids and sequence numbers."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    seq = torch.full_like(ids, -1)
    for i, length in enumerate(lengths):
        ids[i, :length] = torch.randint(1, vocab, (length,), generator=made)
        seq[i, :length] = i
    return ids, seq


def packed(ids: Tensor, seq: Tensor) -> tuple[Tensor, Tensor]:
    return ids[seq >= 0][None], seq[seq >= 0][None]


def hf(kind: str, **overrides) -> nn.Module:
    """A tiny model of a family, in float64 (its norms still cast to float32)."""
    import transformers  # slow to load, and most tests do without

    torch.manual_seed(1)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    } | overrides
    moe = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**common, head_dim=8)
    elif kind == "llama":
        config = transformers.LlamaConfig(**common)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(**common, head_dim=8)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **{"num_experts": 4} | common, head_dim=8, moe_intermediate_size=16, **moe
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=4, **moe)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for value in model.parameters():
            # Away from ones, zeros and near-zero, where mistakes would hide.
            value.add_(torch.randn_like(value) * (0.2 if value.dim() == 1 else 0.1))
    return model.train()
