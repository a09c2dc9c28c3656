"""Models whose positions may be cut over ranks, and what a rank does with its part of them."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from models import VOCAB, Tiny, hf
from torch import Tensor, nn
from torch.nn.functional import pad

from proxpo.gradients import Transform, active_handle, isopo, isopo_ntk, proma
from proxpo.gradients._engine.shard import Shard
from proxpo.gradients.diagnostics import watch

A = torch.tensor([1.0, -0.6, 0.3]).double()
GROUPS = torch.tensor([4, 7, 4])
PLACES, DRAWN = 16, 5
# Lengths of the packed sequences (the rest is padding), and how many positions rank 0 holds.
CUTS = {
    "one sequence on both": ([5, 7, 4], 8),
    "uneven": ([5, 6, 3], 11),
    "padding alone": ([3, 4, 1], 8),
    "every sequence on one": ([5, 3, 8], 8),
}
MIXED = {"p": -1.0, "q": -0.5, "r": 0.5, "reg": 0.3}
METHODS = {
    "fisher": lambda: isopo(overlap="all"),
    "drawn": lambda: isopo(overlap=DRAWN),
    "euclidean": lambda: isopo(preset="euclidean", reg=0.4, scale="mean"),
    "figure4": lambda: isopo(preset="figure4", overlap=6),
    "reinforce": lambda: isopo(preset="reinforce"),
    "gram": lambda: isopo(overlap=6, path="gram", **MIXED),
    "materialise": lambda: isopo(overlap=6, path="materialise", **MIXED),
    "stream": lambda: isopo(overlap=6, path="stream", history="own", **MIXED),
    "sketch": lambda: isopo(p=0.0, q=-1.0, norm="sketch", sketch=3, path="gram"),
    "ntk": isopo_ntk,
    "ntk, gram": lambda: isopo_ntk(rho=0.3, path="gram"),
    "ntk, materialise": lambda: isopo_ntk(rho=0.3, scale="paper", path="materialise"),
    "ntk, by prompt": lambda: isopo_ntk(group_by="prompt"),
}
FORMS = ("drawn", "gram", "materialise", "stream", "ntk, gram", "ntk, materialise")
FAMILIES = {
    "qwen3": ("gram", "ntk"),
    "gpt2": ("materialise", "ntk, gram"),
    "qwen3_moe": ("drawn", "gram", "ntk, gram"),
    "lora": ("drawn", "ntk"),
}


@dataclass(frozen=True)
class Part:
    """The positions [start, stop) of a packed row; `group` holds the others."""

    ids: Tensor
    seq: Tensor
    target: Tensor  # the next token, -1 where there is none
    place: Tensor  # within the sequence
    start: int = 0
    group: Any = None

    def cut(self, start: int, stop: int, group: Any) -> "Part":
        kept = {
            name: getattr(self, name)[:, start:stop] for name in ("ids", "seq", "target", "place")
        }
        return replace(self, start=start, group=group, **kept)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return x if self.group is None else _Gather.apply(x, dim, self)

    def allowed(self) -> Tensor:
        """Which positions of the whole row each of these may look at."""
        everyone = self.gather(self.seq, 1)
        own = torch.arange(self.start, self.start + self.seq.shape[1])
        causal = own[:, None] >= torch.arange(everyone.shape[1])
        return (self.seq[:, :, None] == everyone[:, None, :]) & causal

    def objective(self, logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1).gather(-1, self.target.clamp(min=0)[..., None])[..., 0]
        return -(logp * (self.target >= 0)).sum()


class _Gather(torch.autograd.Function):
    """All ranks' positions; on the way back, what all ranks make of those of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, part: Part) -> Tensor:
        ctx.dim, ctx.start, ctx.size, ctx.group = dim, part.start, x.shape[dim], part.group
        whole = x.new_zeros(*x.shape[:dim], PLACES, *x.shape[dim + 1 :])
        whole.narrow(dim, part.start, x.shape[dim]).copy_(x)
        dist.all_reduce(whole, group=part.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.narrow(ctx.dim, ctx.start, ctx.size), None, None


def row(lengths: list[int], vocab: int) -> Part:
    """Packed sequences in one row of PLACES positions, padding behind."""
    rest = PLACES - sum(lengths)
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seq = pad(seq, (0, rest), value=-1)[None]
    ids = torch.randint(1, vocab, seq.shape, generator=torch.Generator().manual_seed(3))
    ids = torch.where(seq >= 0, ids, 0)
    inside = (seq[:, 1:] == seq[:, :-1]) & (seq[:, 1:] >= 0)
    target = pad(torch.where(inside, ids[:, 1:], -1), (0, 1), value=-1)
    place = torch.cat([torch.arange(n) for n in (*lengths, rest)])[None]
    return Part(ids, seq, target, place)


class Split(Tiny):
    """Tiny with attention over ranks, a tied head, a layer per head and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.per_head = nn.Linear(4, 4)
        self.twice = nn.Linear(8, 8)

    def forward(self, part: Part) -> Tensor:
        h = self.embed(part.ids)
        q, k, v = self.qkv(self.first(h)).chunk(3, -1)
        scores = (q @ part.gather(k, 1).transpose(-1, -2)).masked_fill(~part.allowed(), -1e9)
        h = h + self.out(scores.softmax(-1) @ part.gather(v, 1))
        h = h + self.down(torch.tanh(self.up(self.second(h))))
        h = h + torch.tanh(self.per_head(h.unflatten(-1, (2, 4)))).flatten(-2)
        return self.head(self.twice(torch.tanh(self.twice(h))))


_PART: list[Part] = []  # the part that the attention of a family looks at


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one rank's queries to all ranks' keys."""
    times = query.shape[1] // key.shape[1]
    key, value = (_PART[0].gather(x, 2).repeat_interleave(times, 1) for x in (key, value))
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~_PART[0].allowed()[:, None], -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


class Family(nn.Module):
    def __init__(self, kind: str) -> None:
        from transformers import AttentionInterface

        super().__init__()
        AttentionInterface.register("split", attention)
        self.model = hf("qwen3" if kind == "lora" else kind)
        self.model.set_attn_implementation("split")
        if kind == "lora":
            import peft

            targets = ["q_proj", "down_proj"]
            config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
            self.model = peft.get_peft_model(self.model, config).double()

    def forward(self, part: Part) -> Tensor:
        _PART[:] = [part]
        return self.model(input_ids=part.ids, position_ids=part.place, use_cache=False).logits


@functools.cache
def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = (Split() if kind == "split" else Family(kind)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return model


def block(model: nn.Module, transform: Transform, part: Part, watched: bool) -> dict[str, Any]:
    """One micro-batch and a step: gradients, the weights of the sequences, what a watcher saw."""
    weights: dict[str, list[Tensor]] = {}
    model.zero_grad()
    with transform.applied(
        model,
        sequences=part.seq,
        advantages=A,
        groups=GROUPS,
        token_group=part.group,
        observe=lambda name, values: weights.setdefault(name, []).append(values["weights"]),
    ) as session:
        if watched:
            with watch(session) as observed:
                part.objective(model(part)).backward()
        else:
            part.objective(model(part)).backward()
    transform.step()
    actual = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    metrics = observed.metrics(per_layer=True) if watched else {}
    joined = {name: torch.cat(parts) for name, parts in weights.items()}
    return {"gradients": actual, "weights": joined, "metrics": metrics}


def steps(kind: str, method: str, cut: str, rank: int | None = None) -> list[dict[str, Any]]:
    """Two steps, so that the second uses the averages of the first, and the transform's state."""
    model, transform = model_of(kind), METHODS[method]()
    lengths, first = CUTS[cut]
    part = row(lengths, 13 if kind == "split" else VOCAB)
    if rank is not None:
        part = part.cut(*((0, first), (first, PLACES))[rank], dist.group.WORLD)
    actual = [block(model, transform, part, watched=method == "drawn") for _ in range(2)]
    return [*actual, transform.state_dict()]


def cases() -> list[tuple[str, str, str]]:
    first, *rest = CUTS
    small = [("split", method, first) for method in METHODS]
    small += [("split", method, cut) for cut in rest for method in FORMS]
    return small + [(kind, method, "uneven") for kind, some in FAMILIES.items() for method in some]


def mistakes(rank: int) -> dict[str, str]:
    """Error messages of this rank for mistakes made on it or on the other one."""
    model = model_of("split")
    part = row(*CUTS["uneven"][:1], 13).cut(8 * rank, 8 * rank + 8, dist.group.WORLD)

    def attempt(transform: Transform | None = None, **given: Any) -> None:
        given = {"sequences": part.seq, "advantages": A, "token_group": part.group} | given
        with (transform or isopo()).applied(model, **given):
            active_handle(model.head.weight)

    attempts = {
        "other advantages": lambda: attempt(advantages=A + 0.1 * rank),
        "fewer advantages": lambda: attempt(advantages=A[: 3 - rank]),
        "other groups": lambda: attempt(isopo_ntk(group_by="prompt"), groups=GROUPS + rank),
        "more sequences": lambda: attempt(sequences=part.seq + rank),
        "proma": lambda: attempt(proma()),
        "head outside its module": attempt,
    }
    messages = {}
    for name, wrong in attempts.items():
        try:
            wrong()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def work(rank: int, folder: str) -> None:
    actual: dict[Any, Any] = {case: steps(*case, rank=rank) for case in cases()}
    actual["mistakes"] = mistakes(rank)
    actual["traffic"] = traffic(rank)
    actual["a group of one"] = a_group_of_one(rank)
    torch.save(actual, f"{folder}/{rank}.pt")


def traffic(rank: int) -> int:
    """How many numbers the lengths of one micro-batch send over the group."""
    sent: list[int] = []
    total, fetch = Shard.total, Shard.fetch

    def counted_total(self: Shard, x: Tensor) -> Tensor:
        sent.append(x.numel())
        return total(self, x)

    def counted_fetch(self: Shard, *given: Any) -> list[Tensor]:
        actual = fetch(self, *given)
        sent.extend(x.numel() for x in actual)
        return actual

    Shard.total, Shard.fetch = counted_total, counted_fetch
    part = row(*CUTS["uneven"][:1], 13).cut(8 * rank, 8 * rank + 8, dist.group.WORLD)
    block(model_of("split"), isopo(overlap=DRAWN, path="gram"), part, watched=False)
    Shard.total, Shard.fetch = total, fetch
    return sum(sent)


def a_group_of_one(rank: int) -> dict[str, Any]:
    own = [dist.new_group([number]) for number in range(2)][rank]
    part = replace(row(*CUTS["uneven"][:1], 13), group=own)
    return block(model_of("split"), METHODS["fisher"](), part, watched=False)
