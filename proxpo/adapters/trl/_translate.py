"""What TRL hands over, under the names of proxpo."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from proxpo.ops.shapes import Bool, Float, Tensor

IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def fields_of(
    output: Mapping[str, Any],
    *,
    old: Float[Tensor, "seq tok"] | None,
    entropy: Float[Tensor, "seq tok"] | None,
    ends: Sequence[int],
    proximal: bool,
) -> dict[str, Tensor]:
    """Completions of this process as Batch fields.

    old, entropy: by the policy that starts the updates, where they are known; ends: tokens a whole
    completion ends with; proximal: `old` is the proximal policy, the sampler's numbers are the old
    """
    mask = mask_of(output)
    rollout: Any = output.get("sampling_per_token_logps")
    fields = {
        "mask": mask,
        "tokens": output["completion_ids"],
        "lag": torch.zeros_like(mask, dtype=torch.long),
        "truncated": cut_off(output, ends),
        "old_logp": old,
        "entropy": entropy,
        "rollout_logp": rollout,
        "ref_logp": output.get("ref_per_token_logps"),
    }
    if unscored(output):  # what vLLM could not score gets the trainer's own number
        fields["rollout_logp"] = rollout.where(~rollout.isnan(), old)
    if proximal:
        fields["prox_logp"] = old
        fields["old_logp"] = old if rollout is None else fields["rollout_logp"]
    return {name: value for name, value in fields.items() if value is not None}


def unscored(output: Mapping[str, Any]) -> bool:
    """Whether the sampler has left tokens without a log-probability."""
    rollout = output.get("sampling_per_token_logps")
    return rollout is not None and bool((rollout.isnan() & mask_of(output)).any())


def mask_of(inputs: Mapping[str, Any]) -> Bool[Tensor, "seq tok"]:
    """Tokens to train on: of the completion, and not written by a tool."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def cut_off(inputs: Mapping[str, Any], ends: Sequence[int]) -> Bool[Tensor, " seq"]:
    """Completions whose last token is none of `ends`."""
    ids, lengths = inputs["completion_ids"], inputs["completion_mask"].sum(dim=1)
    last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    return ~torch.isin(last, torch.tensor(ends, device=ids.device))


def weighted(
    scores: Float[Tensor, "seq function"], weights: Float[Tensor, " function"]
) -> Float[Tensor, " seq"]:
    """One reward per completion: the weighted sum of those given, NaN where none was."""
    unscored = scores.isnan().all(dim=1)
    total = (scores * weights.to(scores)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan)


__all__ = ["IMAGES", "cut_off", "fields_of", "mask_of", "unscored", "weighted"]
