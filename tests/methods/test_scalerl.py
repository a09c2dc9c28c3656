import math

import torch
from helpers import advantages, close, crafted, f64, make_batch, method, per_row, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    centred,
    everywhere,
    informative,
    kept,
    number,
    prompt_mean,
    ratio,
    std,
    weighted_score,
)
from proxpo import Batch


def scalerl(b: Batch) -> torch.Tensor:
    c = centred(b)
    a = {i: x / (std(list(c.values())) + 1e-6) for i, x in c.items()}
    rows = informative(b)
    b = kept(b, lambda i, t: i in rows)
    w = {k: min(number(v), 1.2) for k, v in ratio(b, b.rollout_logp).items()}
    return prompt_mean(weighted_score(w, everywhere(a, b), b), b)


CASES = {
    "scalerl": Case("scalerl", {"cap": 1.2}, scalerl),
}


def test_it_scales_by_the_std_of_all_centred_rewards() -> None:
    batch = make_batch(1)
    a = per_row(advantages(method("dr-grpo"), batch), batch)
    found = advantages(method("scalerl", **{"filter": None}), batch)
    close(per_row(found, batch), a / (a.std() + 1e-6))
    assert abs(a.std() - batch.rewards.std()) > 1e-3  # TRL's "batch" is another number


def test_it_drops_prompts_with_equal_answers() -> None:
    right = torch.tensor([True, True, True, True, False, True])
    batch = make_batch(1, groups=2).replace(correct=right, rewards=right.double())
    ready = proxpo.prepare(method("scalerl"), batch)
    assert ready.batch.mask.any(1).tolist() == [False] * 3 + [True] * 3
    assert ready.ctx.counts.prompts == 1


def test_it_caps_the_ratio_to_the_sampler() -> None:
    batch = crafted([[0.0, 0.0]], [1.0])
    batch = batch.replace(rollout_logp=batch.logp - f64([[0.5, 3.0]]), group=torch.tensor([0]))
    made = method("scalerl", **{"filter": None})
    close(policy_gradient(made, batch), -f64([[math.exp(0.5), 5.0]]) / 2, rtol=1e-7)
