"""The batches both sides of a parity test see, and how ours are evaluated. All in float64."""

import torch

import proxpo
from proxpo.types import Batch

ROWS, TOKENS = 12, 14
FIELDS = ("logp", "old_logp", "ref_logp", "rollout_logp", "entropy", "values", "old_values")
KINDS = ("plain", "holes", "wild")


def make_fields(kind: str = "plain") -> dict[str, torch.Tensor]:
    """Named tensors of one batch; groups of four.

    plain  right padding only, log-ratios of a few tenths
    holes  also masked tokens inside and at the start of responses, one empty response, one
           response without siblings
    wild   as plain, with single log-ratios of ±25 and ±40
    """
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -noise(ROWS, TOKENS).abs() - 0.05
    fields = {
        "logp": old + 0.3 * noise(ROWS, TOKENS),
        "old_logp": old,
        "ref_logp": old + 0.3 * noise(ROWS, TOKENS),
        "rollout_logp": old + 0.2 * noise(ROWS, TOKENS),
        "entropy": noise(ROWS, TOKENS).abs().float().double(),
        "values": noise(ROWS, TOKENS),
        "old_values": noise(ROWS, TOKENS),
        "advantages": noise(ROWS, TOKENS),
        "row_advantages": noise(ROWS),
        "rewards": noise(ROWS).round(decimals=1),
        "greedy_rewards": noise(ROWS),
    }
    lengths = torch.tensor([14, 9, 5, 12, 3, 14, 8, 2, 11, 6, 13, 7])
    mask = torch.arange(TOKENS) < lengths[:, None]
    group = torch.arange(ROWS) // 4
    if kind == "holes":
        mask[0, 4:7] = mask[3, 0] = mask[5, ::3] = False
        mask[6] = False
        group[11] = 3
    if kind == "wild":
        for row, far in ((0, 40.0), (1, -40.0), (2, 25.0), (3, -25.0)):
            fields["logp"][row, 1] += far
            fields["rollout_logp"][row + 4, 1] += far
    # The outcome sits on the last valid token; an empty response keeps it on its first column.
    last = (mask * torch.arange(1, TOKENS + 1)).argmax(1)
    scores = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    fields["scores"] = scores.scatter(1, last[:, None], fields["rewards"][:, None])
    return fields | {"mask": mask, "group": group}


def make_batch(kind: str = "plain", *, advantages: str | None = "tokens", **changes) -> Batch:
    """The same as a proxpo batch: advantages per token, per row ("rows") or to be computed."""
    fields = make_fields(kind)
    given = {"tokens": fields["advantages"], "rows": fields["row_advantages"], None: None}
    names = (*FIELDS, "mask", "group", "rewards", "greedy_rewards")
    batch = Batch(**{name: fields[name].clone() for name in names}, advantages=given[advantages])
    return batch.replace(**changes)


def evaluate(recipe: proxpo.Recipe, batch: Batch, wrt: str = "logp", ctx=proxpo.Context()):
    """Loss, its gradient to one field, and the metrics."""
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in {"logp", wrt}}
    loss = proxpo.loss_fn(recipe)(batch.replace(**leaves), ctx)
    (grad,) = torch.autograd.grad(
        loss.value, leaves[wrt], allow_unused=True, materialize_grads=True
    )
    return loss.value.detach(), grad, loss.metrics


def compose(**stages) -> proxpo.Recipe:
    """A recipe from stages alone; what is not named is PPO's clip at 0.2 under a token mean."""
    from proxpo.stages import aggregate, trust
    from proxpo.stages import ratio as ratios

    usual = {
        "ratio": ratios.token(),
        "trust": trust.ppo_clip(),
        "aggregate": aggregate.token_mean(),
    }
    return proxpo.Recipe(**{"name": "parity", **usual, **stages})


def given_weights(kind: str, field: str) -> proxpo.Stage:
    """Token weights exp(field), fixed beforehand, at the place of a `weights` or `select` stage."""
    return proxpo.Stage(
        kind=kind, name="given", apply=lambda batch, ctx: (getattr(batch, field).exp(), {})
    )


def close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 1e-9) -> None:
    """Equal to `rtol` relative to the largest entry, element by element."""
    scale = max(theirs.abs().max().item(), 1e-300)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=rtol * scale)
