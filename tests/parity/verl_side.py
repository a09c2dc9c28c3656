"""Evaluate verl's own functions: python verl_side.py REQUEST.json ANSWER.json

Runs in verl's environment and knows nothing of proxpo. The request holds named batches and a list
of cases; the answer holds, per case, what verl computed. Floats survive JSON exactly.
"""

import json
import sys
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig


def tensors(batch: dict) -> dict[str, torch.Tensor]:
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    found["group"] = np.array(batch["group"])
    return found


def differentiated(value: torch.Tensor, leaf: torch.Tensor) -> dict:
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    return {"value": value.tolist(), "grad": grad.tolist()}


def actor(options: dict) -> ActorConfig:
    options = dict(options)
    policy_loss = PolicyLossConfig(**options.pop("policy_loss", {}))
    batch_info = options.pop("global_batch_info", {})
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy_loss,
        **options,
    )
    config.global_batch_info.update(batch_info)
    return config


def policy_loss(
    b,
    *,
    mode,
    agg="token-mean",
    config=None,
    weights=None,
    rows=False,
    seed=None,
    anchor="old_logp",
):
    leaf = b["logp"].requires_grad_()
    advantages = b["row_advantages"][:, None] * b["mask"] if rows else b["advantages"]
    if seed is not None:
        torch.manual_seed(seed)
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=b[anchor],
        log_prob=leaf,
        advantages=advantages,
        response_mask=b["mask"],
        loss_agg_mode=agg,
        config=actor(config or {}),
        rollout_is_weights=None if weights is None else b[weights].exp(),
    )
    return differentiated(loss, leaf)


def aggregate(b, *, agg, scale=None):
    leaf = b["logp"].requires_grad_()
    return differentiated(core_algos.agg_loss(leaf, b["mask"], agg, loss_scale_factor=scale), leaf)


def advantage(b, *, estimator, kl=None, gamma=1.0, lam=1.0, **options):
    rewards = b["scores"]
    if kl is not None:
        rewards = core_algos.compute_rewards(rewards, b["old_logp"], b["ref_logp"], kl)
    given = {"token_level_rewards": rewards, "response_mask": b["mask"], **options}
    if estimator == "gae":
        given |= {"values": b["old_values"], "gamma": gamma, "lam": lam}
    elif estimator == "reinforce_plus_plus":
        given |= {"config": SimpleNamespace(gamma=gamma)}
    elif estimator == "remax":
        given |= {"reward_baselines": b["greedy_rewards"]}
    else:
        given |= {"index": b["group"]}
    advantages, returns = core_algos.get_adv_estimator_fn(estimator)(**given)
    return {"value": advantages.tolist(), "returns": returns.tolist()}


def kl_penalty(b, *, penalty):
    leaf = b["logp"].requires_grad_()
    return differentiated(core_algos.kl_penalty(leaf, b["ref_logp"], penalty), leaf)


def value_loss(b, *, clip, gamma, lam, agg="token-mean"):
    _, returns = core_algos.compute_gae_advantage_return(
        b["scores"], b["old_values"], b["mask"], gamma, lam
    )
    leaf = b["values"].requires_grad_()
    loss, clipped = core_algos.compute_value_loss(
        leaf, returns, b["old_values"], b["mask"], clip, agg
    )
    return differentiated(loss, leaf) | {"clipped": clipped.item()}


def correction(b, **options):
    weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        b["old_logp"], b["rollout_logp"], b["mask"], **options
    )
    found = {} if weights is None else {"weights": weights.batch["rollout_is_weights"].tolist()}
    return found | {"mask": mask.tolist()}


def controller(b, *, coef, target, horizon, kl, n):
    control = core_algos.AdaptiveKLController(coef, target, horizon)
    control.update(kl, n)
    return {"value": float(control.value)}


CALLS = {
    call.__name__: call
    for call in (policy_loss, aggregate, advantage, kl_penalty, value_loss, correction, controller)
}


def main(request: str, answer: str) -> None:
    with open(request) as file:
        asked = json.load(file)
    results = {
        name: CALLS[case["call"]](tensors(asked["batches"][case["batch"]]), **case["options"])
        for name, case in asked["cases"].items()
    }
    with open(answer, "w") as file:
        json.dump({"version": version("verl"), "results": results}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
