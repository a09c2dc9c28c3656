"""LatentSeek: policy gradient on the hidden states of an answer's first tokens, model frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.adapt.responder import Responder
from proxpo.adapt.self_reward import SelfReward
from proxpo.adapt.types import UNLIMITED, Adaptation, Answer, Ending, Trial
from proxpo.errors import ProxpoError
from proxpo.logp import HeadInput
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.train.tasks import Problem

FLOOR = 1e-8 + 1e-10  # the two constants of the released code, added to a probability in its log
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Reward = Callable[[Problem, Answer], float]


def latentseek(
    *,
    fraction: float = 0.1,
    most: int = 300,
    lr: float = 0.03,
    iterations: int = 10,
    threshold: float = -0.2,
    reward: Literal["task", "self"] = "task",
    format_rule: bool = False,
    sgd_lr: float = 1.0,
) -> Adaptation:
    """LatentSeek: REINFORCE on the last-layer states of the first part of the model's own answer.

        greedy answer x_1..x_T from states z_t;  block z_1..z_n,  n = min(⌊fraction·T⌋, most)
        π(·|z_t) = softmax(W z_t),  x̂_t = argmax π(·|z_t)
        loss = -R Σ_{t≤n} log(π(x̂_t|z_t) + 1e-8 + 1e-10),   ∂loss/∂z_t ≈ -R Wᵀ(e_x̂ - π_t)

    At most `iterations` times: stop if R > threshold; an Adam step on z; decode the block as
    argmax W z_t, let the frozen model finish greedily; R of the new answer. As R ≤ 0, every step
    pushes the current token down. n = 0 returns the greedy answer.
    reward: task: 0 if right, else -1 (the paper's perfect sparse reward, which knows the answer);
    self: the model answers four yes/no checks, weights calculation 2, answer 1, completeness 2,
    understanding 1, R = -(weights of failed checks)/6, an unreadable verdict failing; format_rule:
    2 more where the answer marks no final answer. sgd_lr: of the baseline, the same loop with
    plain gradient steps, which are the paper's own update.

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
    if lr < 0 or sgd_lr < 0:
        raise ProxpoError(f"latentseek: lr and sgd_lr are at least 0, got {lr} and {sgd_lr}")
    if not threshold < 0:
        raise ProxpoError(f"latentseek: threshold is below 0, the best reward, got {threshold}")
    if format_rule and reward == "task":
        raise ProxpoError("latentseek: format_rule belongs to reward=self")

    def start(responder: Responder) -> LatentSeek:
        judge: Reward = SelfReward(responder, format_rule=format_rule)
        return LatentSeek(
            responder=responder,
            judge=_sparse if reward == "task" else judge,
            adam=lambda z: torch.optim.Adam(z, lr=lr),
            plain=lambda z: torch.optim.SGD(z, lr=sgd_lr),
            fraction=fraction,
            most=most,
            iterations=iterations,
            threshold=threshold,
        )

    return Adaptation(start=start, threshold=threshold)


def latent_loss(
    head: HeadInput, z: Float[Tensor, "tok dim"], chosen: Int[Tensor, " tok"], reward: float
) -> Float[Tensor, ""]:
    """-R Σ_t log(π(x̂_t|z_t) + 1e-8 + 1e-10), π = softmax of the head's logits."""
    probs = head.logits(z).softmax(-1).gather(-1, chosen[:, None])
    return -reward * (probs + FLOOR).log().sum()


def _sparse(problem: Problem, answer: Answer) -> float:
    return 0.0 if answer.right else -1.0


@dataclass
class LatentSeek:
    """Searches of LatentSeek, and the same with plain gradient steps."""

    responder: Responder
    judge: Reward
    adam: Optimizer
    plain: Optimizer
    fraction: float
    most: int
    iterations: int
    threshold: float

    def reset(self) -> None:
        """Does nothing: the model is never changed."""

    def first(self, problem: Problem) -> Answer:
        prompt = self.responder.encode(problem.prompt, problem)
        return self.responder.draw(problem, prompt, [0], greedy=True)[0]

    def reward(self, problem: Problem, answer: Answer) -> float:
        return self.judge(problem, answer)

    def adapt(self, problem: Problem, first: Answer) -> Trial:
        return self._seek(problem, first, self.adam, self.iterations, UNLIMITED)

    def sgd(self, problem: Problem, first: Answer, limit: float) -> Trial:
        return self._seek(problem, first, self.plain, UNLIMITED, limit)

    def _seek(
        self,
        problem: Problem,
        answer: Answer,
        make_optimizer: Optimizer,
        iterations: int | float,
        limit: float,
    ) -> Trial:
        """Steps on z and new answers; an answer beyond `limit` tokens does not count."""
        responder = self.responder
        prompt = responder.encode(problem.prompt, problem)
        attempts, spent = 1, responder.tokens
        updates: list[dict[str, int | float]] = []

        def end(why: Ending) -> Trial:
            return Trial(answer, attempts, spent, why, updates)

        reward = self.judge(problem, answer)
        n = min(int(self.fraction * len(answer.ids)), self.most)
        if reward > self.threshold:
            return end("reward")
        if n == 0:
            return end("no block")
        block = answer.ids[:n]
        head = responder.states(prompt, block)
        z = head.hidden.clone().requires_grad_()
        optimizer = make_optimizer([z])
        spent = responder.tokens
        while attempts <= iterations:
            chosen = head.logits(z).argmax(-1)
            with torch.enable_grad():
                loss = latent_loss(head, z, chosen, reward)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            block = head.logits(z).argmax(-1).tolist()
            responder.count_head(block, 3)  # forward, backward, and the block's tokens
            drawn = responder.complete(problem, prompt, block)
            new = self.judge(problem, drawn)
            if responder.tokens > limit:
                return end("budget")
            updates.append(
                {"reward": reward, "changed": sum(map(int.__ne__, block, chosen.tolist()))}
            )
            answer, reward, attempts, spent = drawn, new, attempts + 1, responder.tokens
            if reward > self.threshold:
                return end("reward")
        return end("iterations")


__all__ = ["FLOOR", "LatentSeek", "latent_loss", "latentseek"]
