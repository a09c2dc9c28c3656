"""`thoughts_fed`: hidden states as inputs of a language model, in place of some tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from proxpo.ops.shapes import Float, Tensor


@contextmanager
def thoughts_fed(
    model: Any, thoughts: Float[Tensor, "seq thought dim"] | None, *, tokens: int
) -> Iterator[None]:
    """Inside the block the model reads thoughts where its sequences have placeholders.

    They are the first columns of a response, which is the last `tokens` columns of `input_ids`; no
    gradient flows through them. None changes nothing.
    """
    if thoughts is None:
        yield
        return

    def feed(_: Any, __: Any, embeddings: Tensor) -> Tensor:
        first = embeddings.shape[1] - tokens
        parts = embeddings.split([first, thoughts.shape[1], tokens - thoughts.shape[1]], dim=1)
        return torch.cat([parts[0], thoughts.detach().to(embeddings.dtype), parts[2]], dim=1)

    handle = model.get_input_embeddings().register_forward_hook(feed)
    try:
        yield
    finally:
        handle.remove()


__all__ = ["thoughts_fed"]
