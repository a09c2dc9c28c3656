import math
from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.recipes._registry import Procedure, register


@register("latentseek", paper="arXiv:2505.13308", domains=("test time",))
def latentseek(
    *,
    fraction: float = 0.1,
    most: int = 300,
    lr: float = 0.03,
    iterations: int = 10,
    threshold: float = -0.2,
    judge: Literal["task", "self"] = "task",
    format_rule: bool = False,
    sgd_lr: float = 1.0,
) -> Procedure:
    """LatentSeek: REINFORCE on the last-layer states of the first part of the model's own answer.

        greedy answer x_1..x_T from states z_t;  block z_1..z_n,  n = min(⌊fraction·T⌋, most)
        π(·|z_t) = softmax(W z_t),  x̂_t = argmax π(·|z_t)
        loss = -R Σ_{t≤n} log(π(x̂_t|z_t) + 1e-8 + 1e-10),   ∂loss/∂z_t ≈ -R Wᵀ(e_x̂ - π_t)

    At most `iterations` times: stop if R > threshold; an Adam step on z; decode the block as
    argmax W z_t, let the frozen model finish greedily; R of the new answer. As R ≤ 0, every step
    pushes the current token down. n = 0 returns the greedy answer.

    R with judge="task": 0 if right, else -1 (the paper's perfect sparse reward, which knows the
    answer). With "self" the model answers four yes/no checks, weights calculation 2, answer 1,
    completeness 2, understanding 1, and R = -(weights of failed checks)/6; an unreadable verdict
    is a failure. format_rule=True adds a weight of 2 that fails where the answer marks no final
    answer. The baseline is the same loop with plain gradient steps, the paper's own update.

    fraction, most: share of the answer's tokens that is optimised, and their largest number
    lr: Adam's learning rate on the states
    iterations: steps at most
    threshold: reward above which the search stops
    judge: reward from the "task", or from the model's own checks ("self")
    format_rule: ask for a marked final answer too, with judge=self
    sgd_lr: learning rate of the baseline with plain gradient steps

    Departures: as released, not as published: one greedy "sample" in place of an expectation over
    x ~ π(x|z), Adam in place of plain ascent. The checks are in our own words. Answers end at any
    end token of the model.

    Reference: arXiv:2505.13308, bigai-nlco/LatentSeek.
    """
    if not 0 <= fraction <= 1 or min(most, iterations) < 1:
        raise ProxpoError(
            f"latentseek: expected fraction in [0, 1], most and iterations of at least 1, got "
            f"{fraction}, {most}, {iterations}"
        )
    if not (0 <= lr < math.inf and 0 <= sgd_lr < math.inf):
        raise ProxpoError(
            f"latentseek: lr and sgd_lr are finite and at least 0, got {lr} and {sgd_lr}"
        )
    if not threshold < 0:
        raise ProxpoError(f"latentseek: threshold is below 0, the best reward, got {threshold}")
    if format_rule and judge == "task":
        raise ProxpoError("latentseek: format_rule belongs to judge=self")
    return Procedure()
