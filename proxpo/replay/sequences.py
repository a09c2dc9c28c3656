"""The sampled sequences that a pass runs on."""

from typing import Protocol, runtime_checkable

from proxpo.ops.shapes import Bool, Int, Tensor


@runtime_checkable
class Sequences(Protocol):
    """Prompts, padded on the left, with their responses, padded on the right.

    mask: the response tokens that are scored
    group: of the responses that a transform compares; shared_prompt: equal for equal prompts
    """

    @property
    def input_ids(self) -> Int[Tensor, "seq pos"]: ...
    @property
    def attention_mask(self) -> Bool[Tensor, "seq pos"]: ...
    @property
    def mask(self) -> Bool[Tensor, "seq tok"]: ...
    @property
    def group(self) -> Int[Tensor, " seq"]: ...
    @property
    def shared_prompt(self) -> Int[Tensor, " seq"]: ...


__all__ = ["Sequences"]
