"""Comparison of recorded gradients with those of the model's own modules, once at the start."""

import math
import warnings
from collections.abc import Callable, Mapping

import torch

from proxpo.ops.shapes import Float, Tensor
from proxpo.replay.graphs import PolicyGraphs
from proxpo.replay.sequences import Sequences

# Largest relative difference of a gradient: of rounding alone, in arithmetic of so many bits.
_TOLERANCE = {64: 1e-6, 32: 1e-2, 16: 0.2}
_SHARE = 0.05  # of the whole gradient's norm: below it a parameter's own is mostly rounding


def difference(
    graphs: PolicyGraphs,
    sampled: Sequences,
    modules: Callable[[], Mapping[str, Tensor]],
    *,
    temperature: float,
    entropy: bool,
) -> str:
    """Reason why the recorded gradients of these rows are not those of the modules, or "".

    Both are gradients of Σ slope · x with the same random slopes, over the log-probabilities and
    the entropies. The recorded pass runs twice, the second time recorded. Gradients that the
    parameters have are kept. No reason is given where the modules' gradient is the only one that is
    not finite; a warning says so.
    """
    named = [(n, p) for n, p in graphs.policy.model.named_parameters() if p.requires_grad]
    before = [None if p.grad is None else p.grad.clone() for _, p in named]

    def gradients(run: Callable[[], Mapping[str, Tensor]]) -> list[Tensor]:
        for _, p in named:
            p.grad = None
        draw = torch.Generator().manual_seed(0)
        fields = run()
        names = ("logp", "entropy") if entropy else ("logp",)
        parts = [(fields[name] * _slope(fields[name], sampled, draw)).sum() for name in names]
        torch.stack(parts).sum().backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for _, p in named]

    def recorded() -> Mapping[str, Tensor]:
        return graphs.untransformed(sampled, temperature=temperature, entropy=entropy)

    try:
        gradients(recorded)
        ours, theirs = gradients(recorded), gradients(modules)
    finally:
        for (_, p), gradient in zip(named, before):
            p.grad = gradient
    return _reason(graphs, [name for name, _ in named], ours, theirs)


def _reason(
    graphs: PolicyGraphs, names: list[str], ours: list[Tensor], theirs: list[Tensor]
) -> str:
    apart = _norms([a - b for a, b in zip(ours, theirs)])
    own, other = _norms(ours), _norms(theirs)
    wrong = last_not_finite(names, own)
    if last := last_not_finite(names, other):
        if not wrong:
            warnings.warn(
                f"{graphs.setting}: the gradient of one micro-batch is not finite from {last} back "
                "in the unrecorded pass alone; passes stay recorded",
                stacklevel=4,
            )
        return ""
    if wrong:
        return f"the gradient of one micro-batch is not finite from {wrong} back if recorded"
    floor = _SHARE * math.hypot(*other)
    shares = [gap / (norm + floor) if gap else 0.0 for gap, norm in zip(apart, other)]
    most = max(range(len(names)), key=shares.__getitem__)
    bits = 8 * min(graphs.policy.dtype.itemsize, theirs[most].dtype.itemsize)
    if shares[most] <= _TOLERANCE[bits]:
        return ""
    return (
        f"recorded gradients of one micro-batch differ from unrecorded ones, by "
        f"{shares[most]:.0%} at {names[most]}"
    )


def last_not_finite(names: list[str], norms: list[float]) -> str:
    """The last parameter whose norm is not finite: the first that a backward pass comes to."""
    wrong = [name for name, norm in zip(names, norms) if not math.isfinite(norm)]
    return wrong[-1] if wrong else ""


def _norms(gradients: list[Tensor]) -> list[float]:
    return torch.stack([x.double().norm() for x in gradients]).tolist()


def _slope(x: Tensor, sampled: Sequences, draw: torch.Generator) -> Float[Tensor, "seq tok"]:
    """Random numbers at the scored tokens, 0 elsewhere."""
    return torch.randn(x.shape, generator=draw).to(x) * sampled.mask


__all__ = ["difference", "last_not_finite"]
