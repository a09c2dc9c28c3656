"""Directions of ISOPO's updates beside REINFORCE's and the natural gradient's, before and after
AdamW and Muon.

    python scripts/isopo_why.py column-sums --model runs/warm-sums --json why.json
    python scripts/isopo_why.py arithmetic:mixed --model tiny --tokens 8 --npg --json why.json

Gradients are those of `--rollouts` rollouts of the policy as it is. For each arm:

    gradient    cosine of its gradient with REINFORCE's, mean over rollouts; SGD steps along it
    isopo       the same with the gradient of isopo p=-1
    by layer    the same within a layer, mean over layers: free of the layers' scales
    OPTIMIZER   cosine of the last step of an optimizer that was fed all gradients with the step
                that REINFORCE's gradients give; clipped: each gradient to norm 1 before
    npg         cosine with the damped natural gradient of a rollout, damping ρ tr(F)/n (--npg)

`head` weighs a response by 1/F of the head alone, in all layers (scope=head); `whole` by one over
the root of the sum over layers of F²; `matrices` is p=-1 in linear layers and REINFORCE in norms,
biases and embeddings. `weights` are the layers' spreads and correlations of task_profile.py,
`prompt` the length of the gradient at the prompt's positions over that at the response's, by layer.
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
from proxpo.logp import model_logp
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


def layer_cosine(a: list[list[Tensor]], b: list[list[Tensor]]) -> float:
    """Mean over rollouts and layers of the cosines within a layer: free of the layers' scales."""
    each = [cosine([p], [q]) for x, y in zip(a, b) for p, q in zip(x, y)]
    return round(sum(each) / len(each), 4)


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


def natural_gradients(job: LanguageJob, rows: Experience) -> dict[str, list[Tensor]]:
    """Minus the natural gradient at several dampings, parameter by parameter."""
    model = job.policy.model
    policy, samples = exact_policy(model, rows, rows.mask, temperature=1.0)
    jacobian, advantages = scores(policy, samples), relative_rewards(rows)
    kernel = jacobian @ jacobian.T
    sizes = [value.numel() for value in policy.parameters.values()]
    exact = {}
    for rho in DAMPINGS:
        damping = minsr_damping(kernel, rho=rho)
        ascent = natural_gradient_batch(jacobian, advantages.to(jacobian), damping=damping)
        named = dict(zip(policy.parameters, ascent.split(sizes)))
        exact[f"{rho:g}"] = [-named[name].view_as(p) for name, p in model.named_parameters()]
    return exact


def prompt_lengths(job: LanguageJob, rows: Experience) -> dict[str, float]:
    """Median over responses of |V| of the prompt's positions over that of the rest, by layer.

    The last position of a prompt, which predicts the first token, counts as the response's.
    """
    transform, model = gradients.isopo(p=0.0, q=-1.0), job.policy.model
    ratios: dict[str, list[Tensor]] = {}
    for part in cut_by_tokens(job, rows):
        cut, count = rows.rows(part), len(part)
        squares: dict[str, list[Tensor]] = {}  # of some sequences at a time, in their order

        def observe(layer: str, values: dict[str, Tensor]) -> None:
            squares.setdefault(layer, []).append(values["N2"].double().cpu())  # noqa: B023

        number = torch.arange(count, device=part.device)[:, None]
        place = torch.arange(cut.input_ids.shape[1], device=part.device)
        first = cut.input_ids.shape[1] - cut.mask.shape[1] - 1
        sequences = torch.where(place >= first, number, number + count)
        block = transform.applied(
            model,
            sequences=torch.where(cut.attention_mask, sequences, -1),
            advantages=torch.ones(2 * count, device=part.device),
            observe=observe,
        )
        with block:
            with job.policy.autocast():
                logp = model_logp(model, cut.input_ids, cut.mask, attention_mask=cut.attention_mask)
            (-logp.sum()).backward()
        for layer, parts in squares.items():
            response, prompt = torch.cat(parts).view(2, -1)
            ratios.setdefault(layer, []).append((prompt / response.clamp(min=1e-300)).sqrt())
    model.zero_grad(set_to_none=True)
    return {layer: round(float(torch.cat(x).median()), 4) for layer, x in ratios.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    job = build_language_job(make_config(args))
    try:
        rollouts = [
            job.collect(number).experience.to(job.policy.device) for number in range(args.rollouts)
        ]
        entry: dict[str, Any] = {"task": args.task, "model": args.model, "arms": {}}
        entry["weights"] = lengths(job, rollouts[0])
        entry["prompt"] = prompt_lengths(job, rollouts[0])
        exact = natural_gradients(job, rollouts[0]) if args.npg else {}
        base = [gradient(job, "reinforce", rows) for rows in rollouts]
        fisher = [gradient(job, "isopo p=-1", rows) for rows in rollouts]
        kinds = [(name, clip) for name in OPTIMIZERS for clip in (True, False)]
        model = job.policy.model
        steps = {kind: last_step(model, kind[0], base, clip=kind[1]) for kind in kinds}
        rest = [p.dim() != 2 or "embed" in name for name, p in model.named_parameters()]
        matrices = [[a if r else b for a, b, r in zip(*xs, rest)] for xs in zip(base, fisher)]
        for arm in ("reinforce", *ARMS, "whole", "matrices"):
            known = {"reinforce": base, "isopo p=-1": fisher, "matrices": matrices}.get(arm)
            own = known or [gradient(job, arm, rows) for rows in rollouts]
            result: dict[str, Any] = {
                "gradient": mean_cosine(own, base),
                "isopo": mean_cosine(own, fisher),
                "gradient by layer": layer_cosine(own, base),
                "isopo by layer": layer_cosine(own, fisher),
            }
            for name, clip in kinds:
                step = last_step(model, name, own, clip=clip)
                word = "clipped" if clip else "unclipped"
                result[f"{name} {word}"] = round(cosine(step, steps[name, clip]), 4)
            if exact:
                result["npg"] = {rho: round(cosine(own[0], x), 4) for rho, x in exact.items()}
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
