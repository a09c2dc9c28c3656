"""Metrics under the names of TRL's GRPOTrainer, with its numbers, for any recipe.

TRL averages over the tokens of a micro-batch on all processes, then over the micro-batches of a
log interval. So do these; the `proxpo/...` metrics are those of a whole optimizer step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from proxpo.gradients import Transform
from proxpo.ops.kl import kl_estimate
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages.trust.score import gamma
from proxpo.types import Batch, Metrics, Recipe

LENGTHS = {"F": "gradient/fisher", "N": "gradient/norm", "R": "gradient/ratio"}
Exchange = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class ClipRecorder:
    """A recipe, and the ratio and advantages that its trust stage was given last."""

    recipe: Recipe
    ratio: Float[Tensor, "seq tok"] | None = None
    advantages: Float[Tensor, "seq tok"] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> "ClipRecorder":
        """Wraps the trust stage of the recipe so that its inputs are recorded."""
        recorder, inner = cls(recipe=recipe), recipe.trust.apply

        def apply(ratio: Tensor, batch: Batch, *rest: Any) -> Any:
            recorder.ratio, recorder.advantages = ratio.detach(), batch.advantages
            return inner(ratio, batch, *rest)

        recorder.recipe = recipe.replace(trust=replace(recipe.trust, apply=apply))
        return recorder

    def clipped(self) -> dict[str, Bool[Tensor, "seq tok"]]:
        """Tokens on which the clip acts, by the name of TRL's metric; none without such a clip.

        low: r < 1-clip_low and A < 0; high: r > 1+clip_high and A > 0; CISPO: r above its bound
        and A > 0
        """
        if self.ratio is None or self.advantages is None:
            return {}
        trust, r, adv = self.recipe.trust, self.ratio, self.advantages
        if trust.name == "ppo_clip":
            cap = trust.options["cap"]
            r = r if cap is None else r.clamp(max=cap)
            low = (r < 1 - trust.options["clip_low"]) & (adv < 0)
            high = (r > 1 + trust.options["clip_high"]) & (adv > 0)
            return {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}
        if trust.name == "clipped_weight":
            bound = trust.options["clip_high"] + (0.0 if trust.options["absolute"] else 1.0)
            return {"cispo_clip_ratio": (r > bound) & (adv > 0)}
        return {}

    def kernel(self) -> Float[Tensor, " seq"] | None:
        """VESPO's weight of each response; None for other recipes."""
        trust, r, adv = self.recipe.trust, self.ratio, self.advantages
        if trust.name != "gamma_weight" or r is None or adv is None:
            return None
        return gamma(r, adv, **trust.options)[:, 0]

    @property
    def by_sequence(self) -> bool:
        """True if a response has one ratio, which TRL counts once."""
        return self.recipe.ratio.name == "sequence"


def trl_metrics(
    recorder: ClipRecorder, batch: Batch, metrics: Metrics, *, total: Exchange, gather: Exchange
) -> dict[str, float]:
    """Metrics of a micro-batch over all processes.

    batch: with the numbers of the forward pass; metrics: of the recipe's loss
    total: the sum over processes; gather: their rows, one after another
    """
    mask = batch.mask
    means: dict[str, Tensor] = {}
    if batch.ref_logp is not None:
        k3 = kl_estimate(batch.logp.detach(), batch.ref_logp.detach(), estimator="k3")
        means["kl"] = metrics.get("kl/ref", masked_mean(k3, mask))
    if batch.entropy is not None:
        means["entropy"] = masked_mean(batch.entropy.detach(), mask)
    clipped = recorder.clipped()
    if not clipped and "trust/clipped" in metrics:
        means["clip_ratio/region_mean"] = metrics["trust/clipped"]
    shares = {
        name: _clipped_share(where, mask, rows=recorder.by_sequence)
        for name, where in clipped.items()
    }
    tokens = mask.sum().float()
    sums = {name: torch.stack([mean.float() * tokens, tokens]) for name, mean in means.items()}
    sums |= {_mean_name(name): share.sums for name, share in shares.items()}
    kernel = recorder.kernel()
    if kernel is not None:
        sums["vespo/phi_seq_mean"] = torch.stack(
            [kernel.sum().float(), tokens.new_tensor(len(kernel))]
        )
    if not sums:
        return {}
    reduced = total(torch.stack(list(sums.values())))
    named = dict(zip(sums, (reduced[:, 0] / reduced[:, 1].clamp(min=1)).tolist()))
    if "clip_ratio/low" in shares:
        rows = gather(
            torch.stack([shares[f"clip_ratio/{side}"].rows for side in ("low", "high")], 1)
        )
        low, high = rows[~rows.isnan().any(dim=1)].unbind(1)
        named["clip_ratio/low_min"] = float(low.min()) if len(low) else torch.nan
        named["clip_ratio/high_max"] = float(high.max()) if len(high) else torch.nan
    return named


@dataclass(frozen=True)
class Share:
    """Clipped tokens: their sum and count, and the share of each response (NaN without tokens)."""

    sums: Float[Tensor, " two"]
    rows: Float[Tensor, " seq"]


def _clipped_share(
    where: Bool[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], *, rows: bool
) -> Share:
    if rows:
        each = (where & mask).any(dim=1).float()
        return Share(torch.stack([each.sum(), each.new_tensor(len(each))]), each)
    count, all_tokens = (where & mask).sum(dim=1).float(), mask.sum(dim=1)
    return Share(torch.stack([count.sum(), all_tokens.sum().float()]), count / all_tokens)


def _mean_name(name: str) -> str:
    return f"{name}_mean" if name.startswith("clip_ratio/") else name


def gradient_lengths(transform: Transform, *, total: Exchange) -> Metrics:
    """Lengths of the sequences' gradients in an update that a transform has not yet ended.

    Each is the root of the mean square over layers and the sequences of all processes.

    total: the sum over processes
    """
    measured = [x for x in LENGTHS if x in transform.rule.quantities]
    if not measured:
        return {}
    sums = total(transform.averages.waiting(measured))
    means = dict(zip(measured, sums.unbind()))
    return {LENGTHS[x]: (s / n).sqrt() for x, (s, n) in means.items() if n > 0}


__all__ = ["ClipRecorder", "gradient_lengths", "trl_metrics"]
