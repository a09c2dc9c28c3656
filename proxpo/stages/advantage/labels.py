"""Right and wrong as signed class weights, for losses that learn them as labels."""

from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.groups import group_sum
from proxpo.ops.masked import spread
from proxpo.ops.outcomes import solved
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, PerToken


@stage("advantage", needs=("rewards", "group"))
def signed_labels(
    *,
    balance: Literal["question", "none", "only_positive", "only_negative"] = "question",
    singleton: Literal["refuse", "drop"] = "refuse",
):
    """A_i = +w_i if the response is right, -w_i if it is wrong. PACS, arXiv:2509.02522.

    balance="question": w_i = n/(2·number of responses in the group with the same label), 1 in a
    group with one label; "none": w = 1; "only_positive", "only_negative": 1 for that label, else 0.
    Right is `correct` where given, else a reward of 1 (not 0 or -1; others are refused). A response
    alone in its group is refused, or gets 0 (singleton="drop"); so does one without a reward.

    balance: class weights: by "question", "none", or one label alone
    singleton: a response alone in its group: "refuse", or "drop" it
    """

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        scored = ~batch.rewards.isnan()
        if singleton == "refuse":
            _refuse_alone(scored, batch.group)
        right = solved(batch, by="advantage=signed_labels")
        w = _weights(right, scored, batch.group, balance).to(batch.logp.dtype)
        return spread(torch.where(right, w, -w), batch.mask), {}

    return advantage


def _weights(
    right: Bool[Tensor, " seq"],
    scored: Bool[Tensor, " seq"],
    group: Int[Tensor, " seq"],
    balance: str,
) -> Float[Tensor, " seq"]:
    n = group_sum(scored.double(), group)
    positive = group_sum((scored & right).double(), group)
    same = torch.where(right, positive, n - positive)
    weight = {
        "question": torch.where((same > 0) & (same < n), n / (2 * same.clamp(min=1)), 1.0),
        "none": torch.ones_like(n),
        "only_positive": right.double(),
        "only_negative": (~right).double(),
    }[balance]
    return torch.where(scored & (n > 1), weight, 0.0)


def _refuse_alone(scored: Bool[Tensor, " seq"], group: Int[Tensor, " seq"]) -> None:
    alone = scored & (group_sum(torch.ones_like(group, dtype=torch.float64), group) == 1)
    if alone.any():
        row = int(alone.nonzero()[0])
        raise ProxpoError(
            f"advantage=signed_labels: response {row} is the only one to its prompt; sample two or "
            "more, or drop such prompts with singleton=drop"
        )
