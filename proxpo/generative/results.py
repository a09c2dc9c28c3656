"""Results of generative models: spread of samples, the lines and the figure of a report."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from proxpo.ops.shapes import Float, Tensor

SHOWN = 32  # images before, and as many after


def diversity(x: Float[Tensor, "row size"]) -> float:
    """The mean distance of two samples, over √size; 0 for a single one."""
    if len(x) < 2:
        return 0.0
    return float(torch.pdist(x.double()).mean()) / math.sqrt(x.shape[1])


def answers(rewards: Float[Tensor, " row"]) -> list[dict[str, Any]]:
    """A few samples of an evaluation, for the table before and after."""
    return [
        {"prompt": f"sample {i}", "completion": f"reward {float(r):.3f}", "answer": ""}
        for i, r in enumerate(rewards[:8])
    ]


def result(
    before: dict[str, float],
    after: dict[str, float],
    *,
    score: str,
    unit: str,
    count: int,
    seconds: float,
) -> dict[str, Any]:
    """The results of a run, for its summary."""
    return {
        "score": score,
        "unit": unit,
        "accuracy_before": None,
        "accuracy_after": None,
        "reward_before": before.get("eval/reward"),
        "reward_after": after["eval/reward"],
        **{
            f"diversity_{when}": metrics["eval/diversity"]
            for when, metrics in (("before", before), ("after", after))
            if "eval/diversity" in metrics
        },
        "kl": after.get("eval/kl"),
        "tokens": count,
        "tokens_per_second": round(count / max(seconds, 1e-9), 1),
    }


def samples_figure(pairs: Sequence[tuple[str, Float[Tensor, "row size"]]]) -> Any:
    """Samples side by side under their titles: images of 8 x 8, points, or a histogram."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(pairs), 2.6 if pairs[0][1].shape[1] == 64 else 3.6))
    figure.set_layout_engine("constrained")
    low, high = (float(f(torch.stack([f(x) for _, x in pairs]))) for f in (torch.min, torch.max))
    for number, (title, x) in enumerate(pairs):
        axis = figure.add_subplot(1, len(pairs), number + 1)
        axis.set_title(title, fontsize=10.5, loc="left")
        if x.shape[1] == 64:
            axis.imshow(_tiled(x[:SHOWN]).numpy(), cmap="gray", vmin=-1, vmax=1)
            axis.set_axis_off()
        elif x.shape[1] == 1:
            axis.hist(x[:, 0].numpy(), bins=60, range=(low, high), density=True, color="#2f6fed")
        else:
            axis.scatter(x[:, 0].numpy(), x[:, 1].numpy(), s=4, color="#2f6fed")
            axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    return figure


def _tiled(x: Float[Tensor, "row 64"]) -> Float[Tensor, "y x"]:
    """Images of 8 x 8 in up to four rows."""
    rows = min(4, len(x))
    images = x[: len(x) - len(x) % rows].view(rows, -1, 8, 8)
    framed = torch.nn.functional.pad(images, (0, 1, 0, 1), value=-1.0)
    return framed.permute(0, 2, 1, 3).reshape(rows * 9, -1)


__all__ = ["answers", "diversity", "result", "samples_figure"]
