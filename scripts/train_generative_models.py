"""Train the generative models in the box: denoisers and flows of digits and of eight Gaussians.

    pip install scikit-learn -c requirements/constraints.txt
    python scripts/train_generative_models.py     # writes proxpo/data/generative.safetensors

Digits are scikit-learn's 8 x 8 images, scaled to [-1, 1]; a classifier of them gives rewards.
Seeded: on the CPU, with one version of torch, the weights come out the same, bit for bit. Denoisers
and flows are kept as float16 numbers.
"""

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from proxpo.generative.diffusion import TRAINED, make_scheduler
from proxpo.generative.networks import HIDDEN, WEIGHTS, Classifier, TimeField
from proxpo.generative.tasks import SPREAD, ring

Loss = Callable[[nn.Module, Tensor, torch.Generator], Tensor]


def points(count: int, draws: torch.Generator) -> Tensor:
    """Draws from the eight Gaussians."""
    mode = torch.randint(8, (count,), generator=draws)
    return ring().float()[mode] + SPREAD * torch.randn(count, 2, generator=draws)


def denoising_loss(alphas: Tensor) -> Loss:
    """mean ‖e(x_t, t) - ε‖², t uniform over the schedule."""

    def loss(network: nn.Module, x: Tensor, draws: torch.Generator) -> Tensor:
        t = torch.randint(TRAINED, (len(x),), generator=draws)
        noise, alpha = torch.randn(x.shape, generator=draws), alphas[t][:, None]
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return (network(noisy, t / TRAINED) - noise).square().mean()

    return loss


def flow_loss(network: nn.Module, x: Tensor, draws: torch.Generator) -> Tensor:
    """mean ‖v(x_t, t) - (x_1 - x_0)‖², x_t = (1-t) x_0 + t x_1."""
    start, t = torch.randn(x.shape, generator=draws), torch.rand(len(x), generator=draws)
    between = torch.lerp(start, x, t[:, None])
    return (network(between, t) - (x - start)).square().mean()


def train(
    network: nn.Module, batches: Callable[[torch.Generator], Tensor], loss: Loss, steps: int
) -> nn.Module:
    """Trains with AdamW at a cosine rate; the network."""
    draws = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        value = loss(network, batches(draws), draws)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % (steps // 4) == 0:
            print(f"  step {step + 1}: {float(value.detach()):.4f}")
    return network


def train_classifier(images: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Cross-entropy on four fifths of the digits, some noise added; prints the accuracy."""
    draws, held = torch.Generator().manual_seed(0), torch.arange(len(images)) % 5 == 0
    x, y = images[~held], labels[~held]
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    for _ in range(steps):
        index = torch.randint(len(x), (256,), generator=draws)
        noisy = x[index] + 0.2 * torch.randn(256, 64, generator=draws)
        loss = nn.functional.nll_loss(network(noisy.clamp(-1, 1)), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = network(images[held]).argmax(1) == labels[held]
    print(f"  held-out accuracy {float(right.float().mean()):.3f}")
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--digits-steps", type=int, default=20_000)
    parser.add_argument("--mixture-steps", type=int, default=8_000)
    parser.add_argument("--classifier-steps", type=int, default=2_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(data.target)
    alphas = make_scheduler().alphas_cumprod

    def some_images(draws: torch.Generator) -> Tensor:
        return images[torch.randint(len(images), (256,), generator=draws)]

    sources = {
        "digits": (64, some_images, args.digits_steps),
        "mixture": (2, lambda draws: points(512, draws), args.mixture_steps),
    }
    weights: dict[str, Tensor] = {}
    for name, (size, batches, steps) in sources.items():
        for kind, loss in (("denoiser", denoising_loss(alphas)), ("flow", flow_loss)):
            print(f"{name}_{kind}")
            network = TimeField(size, size, hidden=HIDDEN[name])
            train(network, batches, loss, steps)
            for key, value in network.state_dict().items():
                weights[f"{name}_{kind}.{key}"] = value.half()
    print("classifier")
    classifier = train_classifier(images, labels, args.classifier_steps)
    weights |= {f"classifier.{key}": value for key, value in classifier.state_dict().items()}
    save_file(weights, args.out)
    written = args.out.read_bytes()
    print(f"{args.out}: {len(written) / 1e3:.0f} kB, sha256 {hashlib.sha256(written).hexdigest()}")


if __name__ == "__main__":
    main()
