"""Recorded passes in place of TRL's own forward and backward, for a policy on one GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.shapes import Bool, Int, Tensor
from proxpo.replay import CudaRecorder, PolicyGraphs, unsuited

SETTING = "graphs"


@dataclass(frozen=True)
class Completions:
    """Prompts and completions of a micro-batch as a recorded pass reads them.

    tokens: of the longest completion
    groups: of the completions that a transform compares, if one does
    """

    input_ids: Int[Tensor, "seq pos"]
    attention_mask: Bool[Tensor, "seq pos"]
    tokens: int
    groups: Int[Tensor, " seq"] | None = None

    @property
    def mask(self) -> Bool[Tensor, "seq tok"]:
        """The tokens of the completions, an environment's too."""
        return self.attention_mask[:, -self.tokens :]

    @property
    def group(self) -> Int[Tensor, " seq"]:
        return self.shared_prompt if self.groups is None else self.groups

    @cached_property
    def shared_prompt(self) -> Int[Tensor, " seq"]:
        """A number for each different prompt; TRL has shuffled the rows."""
        known = torch.where(self.attention_mask, self.input_ids, -1)[:, : -self.tokens]
        return known.unique(dim=0, return_inverse=True)[1]

    def split(self, rows: int | None) -> Iterator["Completions"]:
        """Parts of so many rows."""
        if rows is None:
            yield self
            return
        for part in zip(self.input_ids.split(rows), self.attention_mask.split(rows)):
            yield Completions(*part, self.tokens)


def policy_graphs(trainer: Any, transform: Any, *, wanted: str) -> PolicyGraphs | None:
    """The recorded passes of the trainer's model; None where they are not wanted or cannot be.

    wanted: "on" is refused where they cannot be, "auto" is not
    """
    if wanted == "off":
        return None
    dtype = torch.bfloat16 if trainer.args.bf16 else trainer.model.dtype
    tokenizer = trainer._tokenizer
    room = getattr(trainer.model.config, "max_position_embeddings", 0)  # other families: refused
    policy = Policy(
        trainer.model, tokenizer, trainer.eos_token_ids, tokenizer.pad_token_id, "TRL", room, dtype
    )
    reason = _host_reason(trainer) or unsuited(
        policy, trainer.recipe, critic=False, transform=transform
    )
    if reason and wanted == "on":
        raise ProxpoError(f"{SETTING}=on cannot record the policy's passes: {reason}")
    if reason:
        return None
    return PolicyGraphs(policy, transform=transform, record=CudaRecorder(), setting=SETTING)


def _host_reason(trainer: Any) -> str:
    """The reason why passes cannot be recorded under this TRL configuration; empty if they can."""
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled:
        return "it works in one process"
    if trainer.is_fsdp_enabled:
        return "it knows no shards"
    if trainer.args.fp16:
        return "fp16 scales its losses"
    if trainer.args.gradient_checkpointing:
        return "it keeps activations, and gradient_checkpointing does not"
    if trainer.args.use_vllm and trainer.args.vllm_enable_sleep_mode:
        return "it keeps its memory, which vllm_enable_sleep_mode lends to vLLM"
    return ""


__all__ = ["Completions", "policy_graphs"]
