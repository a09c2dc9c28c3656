"""Directions of ISOPO's updates beside REINFORCE's and the natural gradient's, before and after
AdamW and Muon.

    python scripts/isopo_why.py column-sums --model runs/warm-sums --json why.json
    python scripts/isopo_why.py arithmetic:mixed --model tiny --tokens 8 --npg --json why.json

Gradients are those of `--rollouts` rollouts of the policy as it is. For each arm:

    gradient    cosine of its gradient with REINFORCE's, mean over rollouts; SGD steps along it
    isopo       the same with the gradient of isopo p=-1
    OPTIMIZER   cosine of the last step of an optimizer that was fed all gradients with the step
                that REINFORCE's gradients give; clipped: each gradient to norm 1 before
    npg         cosine with the damped natural gradient of a rollout, damping ρ tr(F)/n (--npg)

`head` weighs a response by 1/F of the head alone, in all layers (scope=head); `whole` by one over
the root of the sum over layers of F². `weights` are the layers' spreads and correlations of
task_profile.py.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from task_profile import (
    add_arguments,
    append,
    backward,
    cut_by_tokens,
    lengths,
    make_config,
    relative_rewards,
)
from torch import Tensor, nn

from proxpo import gradients
from proxpo.exact import natural_gradient_batch, scores
from proxpo.exact.minsr import minsr_damping
from proxpo.gradients.diagnostics import Diagnostics
from proxpo.optimizers import make_optimizer
from proxpo.train.experience import Experience
from proxpo.train.language import LanguageJob, build_language_job
from proxpo.train.scoring import exact_policy

ARMS: dict[str, Callable[[], gradients.Transform]] = {
    "isopo p=-1": lambda: gradients.isopo(p=-1.0),
    "isopo q=-1": lambda: gradients.isopo(p=0.0, q=-1.0),
    "isopo figure 4": lambda: gradients.isopo(preset="figure4"),
    "isopo p=-1 reg=1": lambda: gradients.isopo(p=-1.0, reg=1.0),
    "isopo-ntk": lambda: gradients.isopo_ntk(),
    "head": lambda: gradients.isopo(p=-1.0, scope="head"),
}
OPTIMIZERS = ("adamw", "muon")
DAMPINGS = (0.01, 0.1, 1.0)
LR = 1e-3  # of steps whose direction alone counts


def cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """cos(a, b) over all parameters."""
    inner, a2, b2 = (
        sum(float((x.double() * y.double()).sum()) for x, y in zip(left, right))
        for left, right in ((a, b), (a, a), (b, b))
    )
    return inner / (a2 * b2) ** 0.5 if a2 and b2 else 0.0


def mean_cosine(a: list[list[Tensor]], b: list[list[Tensor]]) -> float:
    """Mean over rollouts of the cosines of two arms' gradients."""
    return round(sum(cosine(x, y) for x, y in zip(a, b)) / len(a), 4)


def response_factors(job: LanguageJob, rows: Experience) -> Tensor:
    """1/F of each response, F² summed over all layers."""
    result, transform = Diagnostics(), gradients.isopo(p=-1.0)
    backward(job, transform, rows, relative_rewards(rows), measured=result)
    job.policy.model.zero_grad(set_to_none=True)
    squares = torch.stack([layer.fisher.square() for layer in result.layers.values()]).sum(0)
    length = torch.empty_like(squares)
    length[torch.cat(cut_by_tokens(job, rows))] = squares.sqrt()
    return torch.where(length > 0, 1 / length, 0.0).to(rows.rewards)


def gradient(job: LanguageJob, arm: str, rows: Experience) -> list[Tensor]:
    """The gradient of an arm on a rollout, parameter by parameter."""
    advantages, model = relative_rewards(rows), job.policy.model
    transform = gradients.isopo(preset="reinforce")
    if arm == "whole":
        advantages = advantages * response_factors(job, rows)
    elif arm != "reinforce":
        transform = ARMS[arm]()
    backward(job, transform, rows, advantages)
    taken = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return taken


def last_step(model: nn.Module, name: str, fed: list[list[Tensor]], *, clip: bool) -> list[Tensor]:
    """The step that an optimizer makes for the last of these gradients."""
    own = copy.deepcopy(model)
    parameters = list(own.parameters())
    optimizer = make_optimizer(name, own, LR, weight_decay=0.0)
    before: list[Tensor] = []
    for gradient in fed:
        before = [p.detach().clone() for p in parameters]
        for p, g in zip(parameters, gradient):
            p.grad = g.clone()
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return [p.detach() - b for p, b in zip(parameters, before)]


def npg_cosines(job: LanguageJob, rows: Experience, direction: list[Tensor]) -> dict[str, float]:
    """Cosines of -gradient with the natural gradient at several dampings."""
    policy, samples = exact_policy(job.policy.model, rows, rows.mask, temperature=1.0)
    jacobian, advantages = scores(policy, samples), relative_rewards(rows)
    named = dict(zip((n for n, _ in job.policy.model.named_parameters()), direction))
    ascent = -torch.cat([named[name].flatten() for name in policy.parameters]).to(jacobian)
    kernel = jacobian @ jacobian.T
    cosines = {}
    for rho in DAMPINGS:
        damping = minsr_damping(kernel, rho=rho)
        exact = natural_gradient_batch(jacobian, advantages.to(jacobian), damping=damping)
        cosines[f"{rho:g}"] = round(cosine([ascent], [exact]), 4)
    return cosines


def measure(args: argparse.Namespace) -> dict[str, Any]:
    job = build_language_job(make_config(args))
    try:
        rollouts = [
            job.collect(number).experience.to(job.policy.device) for number in range(args.rollouts)
        ]
        entry: dict[str, Any] = {"task": args.task, "model": args.model, "arms": {}}
        entry["weights"] = lengths(job, rollouts[0])
        base = [gradient(job, "reinforce", rows) for rows in rollouts]
        fisher = [gradient(job, "isopo p=-1", rows) for rows in rollouts]
        kinds = [(name, clip) for name in OPTIMIZERS for clip in (True, False)]
        model = job.policy.model
        steps = {kind: last_step(model, kind[0], base, clip=kind[1]) for kind in kinds}
        for arm in ("reinforce", *ARMS, "whole"):
            known = {"reinforce": base, "isopo p=-1": fisher}.get(arm)
            own = known or [gradient(job, arm, rows) for rows in rollouts]
            result: dict[str, Any] = {
                "gradient": mean_cosine(own, base),
                "isopo": mean_cosine(own, fisher),
            }
            for name, clip in kinds:
                step = last_step(model, name, own, clip=clip)
                word = "clipped" if clip else "unclipped"
                result[f"{name} {word}"] = round(cosine(step, steps[name, clip]), 4)
            if args.npg:
                result["npg"] = npg_cosines(job, rollouts[0], own[0])
            entry["arms"][arm] = result
            print(f"{arm:<18}", result, flush=True)
    finally:
        job.close()
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--npg", action="store_true", help="for models of some 100,000 weights")
    args = parser.parse_args()
    append(args.json, measure(args))


if __name__ == "__main__":
    main()
