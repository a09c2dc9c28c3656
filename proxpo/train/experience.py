"""What a rollout leaves behind for training: token ids, masks, rewards, who sampled it and when."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch.nn.functional import pad

from proxpo.ops.shapes import Bool, Float, Int, Tensor

WHOLE = ("input_ids", "attention_mask")  # fields over the prompt and the response


@dataclass(frozen=True, kw_only=True)
class Experience:
    """B sequences: prompts padded on the left, responses on the right (the last `tok` columns).

    group numbers are unique over the run, so that rows of several rollouts can be mixed.
    `version` is the number of optimizer steps the sampling policy had made. A tool's words are in
    `attention_mask` and not in `mask`.
    """

    input_ids: Int[Tensor, "seq pos"]
    attention_mask: Bool[Tensor, "seq pos"]
    mask: Bool[Tensor, "seq tok"]
    rollout_logp: Float[Tensor, "seq tok"]
    rewards: Float[Tensor, " seq"]
    truncated: Bool[Tensor, " seq"]
    group: Int[Tensor, " seq"]
    version: Int[Tensor, " seq"]
    correct: Bool[Tensor, " seq"] | None = None
    greedy_rewards: Float[Tensor, " seq"] | None = None
    prompt_id: Int[Tensor, " seq"] | None = None
    turn: Int[Tensor, "seq tok"] | None = None
    span_rewards: Float[Tensor, "seq tok"] | None = None
    void: Bool[Tensor, " seq"] | None = None
    duration: Float[Tensor, " seq"] | None = None

    def rows(self, index: Int[Tensor, " row"]) -> "Experience":
        """The sequences `index`, cut to the columns they use."""
        chosen = replace(self, **{name: value[index] for name, value in self.tensors().items()})
        return _trimmed(chosen)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, for a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device | str) -> "Experience":
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})


def join(parts: Sequence[Experience]) -> Experience:
    """Rollouts as one, padded to a common width on both sides."""
    if len(parts) == 1:
        return parts[0]
    tokens = max(part.mask.shape[1] for part in parts)
    prompt = max(part.input_ids.shape[1] - part.mask.shape[1] for part in parts)

    def widened(part: Experience, name: str, value: Tensor) -> Tensor:
        if value.dim() == 1:
            return value
        right = tokens - part.mask.shape[1]
        left = prompt - (part.input_ids.shape[1] - part.mask.shape[1])
        return pad(value, (left if name in WHOLE else 0, right))

    names = parts[0].tensors()
    merged = {
        name: torch.cat([widened(part, name, part.tensors()[name]) for part in parts])
        for name in names
    }
    return Experience(**merged)


def _trimmed(rows: Experience) -> Experience:
    """Without columns in which every sequence has padding."""
    tokens = rows.mask.shape[1]
    used = int(rows.mask.any(dim=0).nonzero().max()) + 1 if rows.mask.any() else 1
    real = rows.attention_mask.any(dim=0).nonzero()
    first = min(int(real.min()) if len(real) else 0, rows.input_ids.shape[1] - tokens)
    last = rows.input_ids.shape[1] - tokens + used
    return replace(
        rows,
        input_ids=rows.input_ids[:, first:last],
        attention_mask=rows.attention_mask[:, first:last],
        **{
            name: value[:, :used]
            for name, value in rows.tensors().items()
            if value.dim() == 2 and name not in WHOLE
        },
    )


__all__ = ["Experience", "join"]
