"""Tasks digits:REWARD and mixture:REWARD: a pretrained model and a reward of its samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from proxpo.errors import ProxpoError, resolve
from proxpo.generative.networks import Classifier, in_the_box
from proxpo.ops.shapes import Float, Tensor

Reward = Callable[[Float[Tensor, "row size"]], Float[Tensor, " row"]]
RADIUS, SPREAD, MODES = 1.5, 0.15, 8  # of the ring of Gaussians


@dataclass(frozen=True, kw_only=True)
class SampleTask:
    """A pretrained model, by its name, and a reward of its samples."""

    name: str
    model: str
    size: int
    reward: Reward


def ring() -> Float[Tensor, "mode 2"]:
    """Centres of the eight Gaussians, counter-clockwise from the right."""
    angle = torch.arange(MODES, dtype=torch.float64) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)


def class_reward(number: int) -> Reward:
    """p(digit = number | image) of the frozen classifier in the box."""
    classifier = in_the_box(Classifier(), "classifier", torch.float32).requires_grad_(False)

    def reward(x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
        return classifier(x.float().clamp(-1, 1))[:, number].exp().to(x.dtype)

    return reward


def ink(x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
    """The mean brightness, from 0 to 1."""
    return (x.clamp(-1, 1) + 1).mean(dim=1) / 2


def symmetry(x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
    """1 less half the mean difference to the mirror image, from 0 to 1."""
    image = x.clamp(-1, 1).view(-1, 8, 8)
    return 1 - (image - image.flip(2)).abs().mean(dim=(1, 2)) / 2


def mode_reward(number: int) -> Reward:
    """exp(-‖x - m‖²/(2·0.5²)), m the centre of the mode."""

    def reward(x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
        return (-2 * (x - ring()[number].to(x.dtype)).square().sum(dim=1)).exp()

    return reward


def right(x: Float[Tensor, "row size"]) -> Float[Tensor, " row"]:
    """The first coordinate over the ring's radius."""
    return x[:, 0] / RADIUS


# name of the reward -> (function of its number, largest number) or a function of samples
REWARDS: dict[str, dict[str, tuple[Callable[[int], Reward], int] | Reward]] = {
    "digits": {"class": (class_reward, 9), "ink": ink, "symmetry": symmetry},
    "mixture": {"mode": (mode_reward, MODES - 1), "right": right},
}
SIZES = {"digits": 64, "mixture": 2}


def make_sample_task(name: str) -> SampleTask:
    """The task of a name such as digits:class=7, digits:ink or mixture:right."""
    head, _, rest = name.partition(":")
    model = resolve(head, REWARDS, what="generative task")
    known = REWARDS[model]
    shown = ", ".join(
        f"{model}:{key}" + (f"=0 to {entry[1]}" if isinstance(entry, tuple) else "")
        for key, entry in known.items()
    )
    word, equals, number = rest.partition("=")
    if not word:
        raise ProxpoError(f"task {model} needs a reward: {shown}")
    entry = known[resolve(word, known, what=f"reward of task {model}")]
    if not isinstance(entry, tuple):
        if equals:
            raise ProxpoError(f"task {model}:{word} takes no number; known: {shown}")
        return SampleTask(name=name, model=model, size=SIZES[model], reward=entry)
    make, most = entry
    if not number.isdecimal() or int(number) > most:
        raise ProxpoError(f"task {name}: expected a number from 0 to {most}; known: {shown}")
    return SampleTask(name=name, model=model, size=SIZES[model], reward=make(int(number)))


__all__ = ["REWARDS", "SampleTask", "make_sample_task", "ring"]
