"""ROSA: after a wrong answer, one linearised step towards the closed-form optimal policy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.adapt.responder import Responder
from proxpo.adapt.types import UNLIMITED, Adaptation, Answer, Ending, Trial
from proxpo.adapt.variables import LoraVariables, Observed, OffsetVariables, Variables, add_bias
from proxpo.errors import ProxpoError
from proxpo.exact import ActionBatch, FlatPolicy, conjugate_gradient, linearise
from proxpo.exact.policy import pull
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.rewards._types import Messages
from proxpo.train.tasks import Problem

WRONG = "That is wrong. Please try again."
Update = Callable[[Observed], dict[str, int | float]]


def make_rosa(
    *,
    beta: float,
    damping: float,
    cg_iterations: int,
    cg_tolerance: float,
    turns: int,
    parameters: Literal["lora", "hidden"],
    rank: int,
    context: Literal["auto", "dialogue", "prompt"],
    greedy: bool,
    sgd_lr: float,
) -> Adaptation:
    """ROSA with the options of `proxpo.recipes.rosa`."""

    def step(observed: Observed) -> dict[str, int | float]:
        result = rosa_step(
            observed.policy,
            observed.samples,
            reward=-1.0,
            beta=beta,
            damping=damping,
            iterations=cg_iterations,
            tolerance=cg_tolerance,
        )
        # forward, recorded backward, right-hand side; two products an iteration; KL afterwards
        observed.spend(3 + 2 * result.iterations + 1)
        return {
            "iterations": result.iterations,
            "kl_before": result.kl_before,
            "kl_after": result.kl_after,
            "step_norm": float(result.step.norm()),
        }

    def plain(observed: Observed) -> dict[str, int | float]:
        change = sgd_step(observed.policy, observed.samples, reward=-1.0, lr=sgd_lr)
        observed.spend(2)
        return {"step_norm": float(change.norm())}

    def start(responder: Responder) -> Rosa:
        kind = LoraVariables if parameters == "lora" else OffsetVariables
        return Rosa(responder, kind(responder), step, plain, turns, context, greedy)

    return Adaptation(
        start=start,
        lora={"r": rank} if parameters == "lora" else None,
        prepare=add_bias if parameters == "hidden" else None,
    )


@dataclass(frozen=True)
class RosaStep:
    """Result of one step; `iterations` are those of conjugate gradients, the KLs KL(p*‖π)."""

    step: Float[Tensor, " param"]
    iterations: int
    kl_before: float
    kl_after: float


def rosa_step(
    policy: FlatPolicy,
    samples: ActionBatch,
    *,
    reward: float,
    beta: float = 1.0,
    damping: float = 1e-4,
    iterations: int = 10,
    tolerance: float = 1e-4,
) -> RosaStep:
    """θ + Δθ with (JᵀJ + λI) Δθ = Jᵀ(p* - p), written into the model.

    Conjugate gradients start at 0 and stop at |b - M x| ≤ tolerance · |b|, or after `iterations`.
    """
    theta, actions = policy.vector(), samples.actions[samples.mask]

    def log_probs(at: Tensor) -> Tensor:
        return policy.log_probs(at, samples)[samples.mask]

    near = linearise(lambda at: log_probs(at).exp(), theta)
    gap = target_gap(near.value, actions, reward=reward, beta=beta)
    used = 0

    def product(v: Tensor) -> Tensor:
        nonlocal used
        used += 1
        return near.pull(near.push(v)) + damping * v

    step = conjugate_gradient(
        product, near.pull(gap), iterations=iterations, tolerance=tolerance**2
    )
    target = near.value + gap
    policy.load(theta + step)
    with torch.no_grad():
        after = float(_kl(target, log_probs(theta + step)))
    return RosaStep(step, used, float(_kl(target, near.value.log())), after)


def target_gap(
    probs: Float[Tensor, "tok vocab"],
    actions: Int[Tensor, " tok"],
    *,
    reward: float,
    beta: float,
) -> Float[Tensor, "tok vocab"]:
    """p* - p = w_t (e_y - p_t),  w_t = p_t(y_t) (e^{r/β} - 1) / Z_t.

    Exactly 0 where r = 0, β = ∞ or p_t(y_t) = 1. For r > 0 both sides of the fraction are divided
    by e^{r/β}, so that no small β overflows.
    """
    x = reward / beta
    p = probs.gather(-1, actions[:, None])
    change = -math.expm1(-abs(x)) * p  # p (1 - e^{-|x|})
    below = change + math.exp(-x) if x > 0 else 1.0 - change
    weight = math.copysign(1.0, x) * change / below.clamp(min=torch.finfo(p.dtype).tiny)
    return weight * (torch.zeros_like(probs).scatter_(-1, actions[:, None], 1.0) - probs)


def sgd_step(
    policy: FlatPolicy, samples: ActionBatch, *, reward: float, lr: float
) -> Float[Tensor, " param"]:
    """Δθ = lr · r ∇_θ Σ_t log π(y_t), written into the model."""
    theta = policy.vector()
    value, pullback = pull(lambda at: policy.logp(at, samples).sum(), theta)
    step = lr * reward * pullback(torch.ones_like(value))
    policy.load(theta + step)
    return step


def _kl(target: Float[Tensor, "tok vocab"], log_probs: Float[Tensor, "tok vocab"]) -> Tensor:
    """Σ_t KL(p*_t ‖ π_t); entries without mass add nothing."""
    terms = target * (target.log() - log_probs)
    return torch.where(target > 0, terms, 0.0).sum()


@dataclass
class Rosa:
    """Conversations of ROSA, and the same with plain gradient steps."""

    responder: Responder
    variables: Variables
    step: Update
    plain: Update
    turns: int
    context: Literal["auto", "dialogue", "prompt"]
    greedy: bool

    def __post_init__(self) -> None:
        chat = not isinstance(self.responder.task.test[0].prompt, str)
        if self.context == "dialogue" and not chat:
            raise ProxpoError(
                f"rosa: context=dialogue needs chat messages; the prompts of task "
                f"{self.responder.task.name} are plain text"
            )
        self.dialogue = self.context == "dialogue" or (self.context == "auto" and chat)

    def reset(self) -> None:
        self.variables.reset()

    def first(self, problem: Problem) -> Answer:
        prompt = self.responder.encode(problem.prompt, problem)
        return self.responder.draw(problem, prompt, [0], greedy=self.greedy)[0]

    def reward(self, problem: Problem, answer: Answer) -> float:
        return 0.0 if answer.right else -1.0

    def adapt(self, problem: Problem, first: Answer) -> Trial:
        return self._converse(problem, first, self.step, self.turns, UNLIMITED)

    def sgd(self, problem: Problem, first: Answer, limit: float) -> Trial:
        return self._converse(problem, first, self.plain, UNLIMITED, limit)

    def _converse(
        self, problem: Problem, answer: Answer, update: Update, turns: int | float, limit: float
    ) -> Trial:
        """Answers, and updates between them; an answer beyond `limit` tokens does not count."""
        responder, prompt = self.responder, problem.prompt
        ids = responder.encode(prompt, problem)
        updates: list[dict[str, int | float]] = []
        attempts, spent = 1, responder.tokens

        def end(why: Ending) -> Trial:
            return Trial(answer, attempts, spent, why, updates)

        while not answer.right:
            if attempts >= turns:
                return end("turns")
            numbers = update(self.variables.observe(ids, answer.ids))
            if self.dialogue:
                prompt = _continued(prompt, answer)
                ids = responder.encode(prompt, problem)
            if not responder.fits(ids):
                return end("context")
            if responder.tokens + len(ids) >= limit:
                return end("budget")
            self.variables.commit()
            (drawn,) = responder.draw(problem, ids, [attempts], greedy=self.greedy)
            if responder.tokens > limit:
                return end("budget")
            answer, attempts, spent = drawn, attempts + 1, responder.tokens
            updates.append(numbers)
        return end("right")


def _continued(prompt: str | Messages, answer: Answer) -> Messages:
    assert not isinstance(prompt, str)
    return [
        *prompt,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": WRONG},
    ]


__all__ = ["Rosa", "RosaStep", "make_rosa", "rosa_step", "sgd_step", "target_gap"]
