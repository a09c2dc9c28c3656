"""Measures what a gradient transform does to a batch, for logging.

    with transform.applied(model, sequences=seq_index, advantages=A) as session:
        with watch(session) as result:
            nll.backward()
    log(result.metrics())

Lengths F, N, R of every layer whatever the exponents, each layer's share of the update, its angle
to REINFORCE and the KL that the step is predicted to cost. Watching changes no gradient; it costs
about three more weight gradients per layer, so watch every tenth step, not every step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.exact import (
    ActionBatch,
    FlatPolicy,
    fisher_exact,
    natural_gradient,
    policy_gradient,
    scores,
)
from proxpo.gradients._engine.inner_products import inner_with
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import Measurement, measured
from proxpo.gradients._engine.position_gradients import AnyGradients
from proxpo.gradients._engine.session import ParameterHandle, Rule, Session
from proxpo.gradients.isopo import ratio2
from proxpo.ops.shapes import Float, Tensor


@dataclass
class LayerDiagnostics:
    """Lengths of one parameter's sequence gradients, and its update beside REINFORCE's."""

    fisher: Float[Tensor, " row"]
    norm: Float[Tensor, " row"]
    update2: Tensor  # |U|²
    plain2: Tensor  # |Σ A_i V_i|²
    inner: Tensor  # ⟨U, Σ A_i V_i⟩

    @property
    def ratio(self) -> Float[Tensor, " row"]:
        """R_i = F_i / N_i, 0 where both vanish."""
        return ratio2(self.fisher.square(), self.norm.square()).sqrt()

    @property
    def cosine(self) -> float:
        """cos(U, Σ A_i V_i): 1 for REINFORCE."""
        return _cosine(self.inner, self.update2, self.plain2)

    def __add__(self, other: "LayerDiagnostics") -> "LayerDiagnostics":
        return LayerDiagnostics(
            torch.cat([self.fisher, other.fisher]),
            torch.cat([self.norm, other.norm]),
            self.update2 + other.update2,
            self.plain2 + other.plain2,
            self.inner + other.inner,
        )


@dataclass
class Diagnostics:
    """Measurements of one or more watched blocks, pooled, each with its own update.

    `moved` is, for every sequence, ⟨∇ log π(o_i), Δ⟩: the change of its log-probability to first
    order. Δ is a plain step along the update (rate 1), or the step since the parameters given to
    `watch`. The objective is taken to be a negative log-likelihood, as `applied` asks for.
    """

    layers: dict[str, LayerDiagnostics] = field(default_factory=dict)
    blocks: list[Tensor] = field(default_factory=list)
    actual_step: bool = False

    @property
    def moved(self) -> Float[Tensor, " row"]:
        """Change of every sequence's log-probability, see above."""
        if not self.layers:
            raise ProxpoError("watch: nothing was seen; call backward() inside the block")
        return torch.cat(self.blocks)

    def kl(self, lr: float = 1.0) -> float:
        """½ mean_i (lr ⟨∇ log π(o_i), Δ⟩)²: KL per sequence, to second order, of the step lr · Δ.

        For the update itself that is a plain gradient step with rate lr; where the actual step was
        measured, leave lr at 1.
        """
        return float((lr * self.moved).square().mean() / 2)

    def share(self) -> dict[str, float]:
        """|U_l|² / Σ |U|² of every layer."""
        total = sum(float(layer.update2) for layer in self.layers.values())
        return {
            n: float(layer.update2) / total if total else 0.0 for n, layer in self.layers.items()
        }

    @property
    def cosine(self) -> float:
        """cos(U, Σ A_i V_i) over all layers together."""
        parts = [(layer.inner, layer.update2, layer.plain2) for layer in self.layers.values()]
        return _cosine(*(sum(column) for column in zip(*parts)))

    def metrics(self, *, per_layer: bool = False) -> dict[str, float]:
        """Flat numbers for a logger; `per_layer` adds those of every layer."""
        metrics = {"gradient/kl": self.kl(), "gradient/cosine_reinforce": self.cosine}
        if not self.actual_step:
            metrics["gradient/kl_unit_step"] = metrics.pop("gradient/kl")
        for quantity in ("fisher", "norm", "ratio"):
            values = torch.cat([getattr(x, quantity) for x in self.layers.values()])
            metrics |= _spread(f"gradient/{quantity}", values)
        share = self.share()
        metrics["gradient/largest_share"] = max(share.values(), default=0.0)
        if per_layer:
            for name, layer in self.layers.items():
                metrics[f"gradient/share/{name}"] = share[name]
                metrics[f"gradient/cosine_reinforce/{name}"] = layer.cosine
                for quantity in ("fisher", "norm", "ratio"):
                    metrics |= _spread(f"gradient/{quantity}/{name}", getattr(layer, quantity))
        return metrics


@contextmanager
def watch(
    session: Session,
    *,
    into: Diagnostics | None = None,
    since: Mapping[Tensor, Tensor] | None = None,
) -> Iterator[Diagnostics]:
    """Measures what the transform of an open block does; `into` adds to earlier measurements.

    With `since = {p: p.detach().clone() for p in model.parameters()}`, taken before the last
    optimizer step, `Diagnostics.kl` is that of the step actually made, whatever optimizer made it.
    """
    if session.head is not None:
        raise ProxpoError(
            "watch: scope=head scales responses at the head and has no lengths of single layers to "
            "measure; watch a transform with scope=layer"
        )
    result = Diagnostics(actual_step=since is not None) if into is None else into
    inner = session.rule
    session.rule = _Watched(inner, result, since or {})
    result.blocks.append(torch.zeros_like(session.advantages, dtype=torch.float64))
    try:
        yield result
    finally:
        session.rule = inner


class _Watched:
    """A rule with the gradients of another one, which it measures."""

    def __init__(self, inner: Rule, result: Diagnostics, since: Mapping[Tensor, Tensor]) -> None:
        self.inner, self.result, self.since = inner, result, since
        self.wanted = Measurement(overlap=True, norm=True, drawn=inner.overlap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gradient(self, handle: ParameterHandle, rows: AnyGradients, layout: Layout) -> Tensor:
        update = self.inner.gradient(handle, rows, layout)
        assert update is not None
        generator = handle.session.generator
        state = generator.get_state()
        self._measure(handle, rows, layout, update.detach())
        generator.set_state(state)  # the draws of later layers stay what they would have been
        return update

    def _measure(
        self, handle: ParameterHandle, rows: AnyGradients, layout: Layout, update: Tensor
    ) -> None:
        top, bottom, norm2, _ = measured(self.wanted, handle, rows, layout)
        assert top is not None
        assert bottom is not None
        assert norm2 is not None
        plain = layout.total(rows.reduce(layout.spread(handle.session.advantages)).double())
        update = layout.total(update.double())
        layer = LayerDiagnostics(
            ratio2(top, bottom).sqrt().double(),
            norm2.sqrt().double(),
            update.square().sum(),
            plain.square().sum(),
            (update * plain).sum(),
        )
        known = self.result.layers.get(handle.name)
        self.result.layers[handle.name] = layer if known is None else known + layer
        along = -inner_with(rows, self._step(handle, update))
        self.result.blocks[-1] += layout.total(layout.sum_columns(along[None]))[0]

    def _step(self, handle: ParameterHandle, update: Tensor) -> Tensor:
        if not self.result.actual_step:
            return -update
        if handle.parameter not in self.since:
            raise ProxpoError(f"watch: `since` has no entry for the parameter {handle.name}")
        step = handle.parameter.detach() - self.since[handle.parameter]
        if step.dim() > update.dim():  # a bank of experts; the handle is named by its number
            step = step[int(handle.name.split(".")[-2])]
        return step


def cosine_to_npg(
    policy: FlatPolicy,
    samples: ActionBatch,
    advantages: Float[Tensor, " seq"],
    *,
    damping: float = 0.0,
) -> float:
    """cos(-grad, (F + λI)⁻¹ g) with the exact Fisher matrix, for models of a few thousand weights.

    `-grad` is the direction an optimizer would descend along, as a transform left it in `.grad`.
    """
    missing = [name for name, p in policy.parameters.items() if p.grad is None]
    if missing:
        raise ProxpoError(f"cosine_to_npg: parameter '{missing[0]}' has no gradient yet")
    grads = [p.grad for p in policy.parameters.values() if p.grad is not None]
    ascent = -torch.cat([grad.flatten() for grad in grads])
    gradient = policy_gradient(scores(policy, samples), advantages)
    exact = natural_gradient(fisher_exact(policy, samples), gradient, damping=damping)
    return _cosine(ascent @ exact, ascent @ ascent, exact @ exact)


def _cosine(inner: Any, first2: Any, second2: Any) -> float:
    size = (float(first2) * float(second2)) ** 0.5
    return float(inner) / size if size else 0.0


def _spread(name: str, values: Tensor) -> dict[str, float]:
    low, middle, high = values.quantile(values.new_tensor([0.1, 0.5, 0.9])).tolist()
    return {f"{name}_p10": low, f"{name}_median": middle, f"{name}_p90": high}
