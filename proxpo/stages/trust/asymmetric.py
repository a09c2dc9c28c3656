"""Reciprocal ratios for positive advantages, and a soft ceiling on every weight."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean, row_quantile
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, PerToken


@stage("trust", needs=("entropy",), takes=("ratio",), gives="loss")
def asymmetric_clip(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_uncertain: float = 0.4,
    quantile: float = 0.8,
    cap_pos: float = 3.0,
    cap_neg: float = 3.0,
):
    """x = -A·w·(r/sg r), w = 1/min(r, 1+ε) if A ≥ 0 else max(r, 1-ε). ASPO, arXiv:2510.06062.

    Without gradient beyond 1+ε (A ≥ 0) or below 1-ε (A < 0). Where w > cap: x = -A·cap·log π. ε is
    `clip_uncertain` on tokens above the response's entropy quantile, else clip_high or clip_low.

    clip_low, clip_high: ε below (A < 0) and above (A ≥ 0), the clip range
    clip_uncertain: ε on tokens of high entropy
    quantile: quantile of the response's entropies from which on a token is uncertain
    cap_pos, cap_neg: largest weights of tokens with A ≥ 0 and with A < 0
    """
    if not (clip_low >= 0 and clip_high >= 0 and clip_uncertain >= 0):
        raise ProxpoError(
            f"asymmetric_clip: ε must be >= 0, got {clip_low}, {clip_high} and {clip_uncertain}"
        )
    if not 0 <= quantile <= 1:
        raise ProxpoError(f"asymmetric_clip: quantile must be in [0, 1], got {quantile}")
    if not (cap_pos >= 1 and cap_neg >= 1):
        raise ProxpoError(f"asymmetric_clip: caps must be at least 1, got {cap_pos}, {cap_neg}")

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        adv, r, entropy = batch.advantages, ratio.detach(), batch.entropy.detach()
        uncertain = entropy > row_quantile(entropy, batch.mask, quantile)[:, None]
        # Tensors among the choices: two plain numbers would be rounded to float32.
        positive, tiny = adv >= 0, torch.finfo(r.dtype).tiny
        certain = torch.where(positive, r.new_full((), clip_high), clip_low)
        eps = torch.where(uncertain, clip_uncertain, certain)
        bound = 1 + torch.where(positive, eps, -eps)
        held = torch.where(positive, torch.minimum(r, bound), torch.maximum(r, bound))
        silent = held != r
        weight = torch.where(positive, 1 / held.clamp(min=tiny), held)
        cap: Tensor | float = cap_pos
        if cap_pos != cap_neg:
            cap = torch.where(positive, r.new_full((), cap_pos), cap_neg)
        soft, gain = weight > cap, -adv
        scale = gain * weight
        live = scale / r.clamp(min=tiny) * ratio
        capped = gain * weight.clamp(max=cap)  # the cap where `soft`, and finite without one
        x = torch.where(soft, capped * batch.logp, torch.where(silent, scale, live))
        return x, {
            "trust/clipped": masked_mean(silent, batch.mask),
            "trust/soft": masked_mean(soft, batch.mask),
        }

    return surrogate
