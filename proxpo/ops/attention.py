"""A fault in cuDNN's attention, and the means that keep passes away from it.

With a mask, in half precision, the backward pass of `scaled_dot_product_attention` gives NaN in the
gradients of all queries where the number of keys is 64 modulo 128 and a row's scores lie below
ln(1 / largest float32) = -88.7: the padded half of the last tile of 128 keys overflows. The first
layers of Qwen2.5 reach such scores. It is in the kernels for Hopper up to cuDNN 9.25 (PyTorch issue
196678); the other backends, other lengths and causal attention without a mask do not have it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda

from proxpo.ops.shapes import Tensor

FIXED = 92600  # cuDNN 9.26.0
TILE = 128
SPARE = 8  # added keys: no copy of a mask for its alignment
Follow = Callable[[Tensor], None]


def is_faulty(capability: tuple[int, int], cudnn: int | None) -> bool:
    """True for GPUs and versions of cuDNN with the fault."""
    return capability[0] == 9 and cudnn is not None and cudnn < FIXED


def faulty_attention(device: torch.device) -> bool:
    """True where attention on this device may run with the fault, as backends are enabled now."""
    if device.type != "cuda" or not cuda.cudnn_sdp_enabled():
        return False
    return is_faulty(torch.cuda.get_device_capability(device), torch.backends.cudnn.version())


def spare_keys(length: int, device: torch.device) -> int:
    """Number of masked keys to add behind so many, so that their number is none with the fault."""
    return SPARE if length % TILE == TILE // 2 and faulty_attention(device) else 0


@contextmanager
def safe_attention(length: int | None, device: torch.device) -> Iterator[Follow]:
    """A block in which attention over rows of this length does not run with the fault.

        with safe_attention(ids.shape[1], ids.device) as follow:
            y = model(ids)
        follow(y)

    Runs another backend where the length is one with the fault; cuDNN is as fast or faster, so that
    it keeps the others. `follow` extends the block to the backward pass from a result, where
    gradient checkpointing runs the forward pass a second time.

    length: of a row; None for a pass that is compiled for all lengths
    """
    wrong = length is None or length % TILE == TILE // 2
    others = cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    if not (wrong and others and faulty_attention(device)):
        yield lambda result: None
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield _follow
    finally:
        cuda.enable_cudnn_sdp(True)


def _follow(result: Tensor) -> None:
    if result.requires_grad:
        result.register_hook(_disable_until_end)


def _disable_until_end(_: Tensor) -> None:
    """Disables cuDNN's attention for the rest of the present backward pass."""
    if cuda.cudnn_sdp_enabled():
        cuda.enable_cudnn_sdp(False)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: cuda.enable_cudnn_sdp(True))


__all__ = ["faulty_attention", "is_faulty", "safe_attention", "spare_keys"]
