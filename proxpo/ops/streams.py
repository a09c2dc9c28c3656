"""Random streams derived from one seed, a separate stream for every use of chance.

    derive(seed, "sample", step, prompt, sample)

No stream depends on how often another was used, so a resumed run draws what the uninterrupted one
would have drawn.
"""

import hashlib
from operator import index

import torch

from proxpo.ops.shapes import Bool, Float, Tensor


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit number from the seed and the path, the same on every platform and Python."""
    named = (
        f"s{len(part)}:{part}" if isinstance(part, str) else f"i{index(part)}" for part in path
    )
    text = f"i{index(seed)}" + "".join(named)  # lengths keep ("ab", "c") apart from ("a", "bc")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def turn_seed(path: tuple[int | str, ...], turn: int) -> int:
    """The seed of a response's turn; the first has that of the response itself."""
    seed, *rest = path
    return derive(int(seed), *rest, *([turn] if turn else []))


def generator(seed: int, *path: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator seeded with `derive(seed, *path)`."""
    return torch.Generator(device=device).manual_seed(derive(seed, *path))


def drawn_numbers(
    mask: Bool[Tensor, "seq tok"], generator: torch.Generator | None
) -> Float[Tensor, "seq tok"]:
    """A number in [0, 1) for each valid token, in float64; padding changes none of them."""
    device = mask.device if generator is None else generator.device
    numbers = torch.rand(int(mask.sum()), generator=generator, device=device, dtype=torch.float64)
    drawn = torch.zeros(mask.shape, device=mask.device, dtype=torch.float64)
    drawn[mask] = numbers.to(mask.device)
    return drawn


__all__ = ["derive", "drawn_numbers", "generator", "turn_seed"]
