"""LatentSeek: policy gradient on the hidden states of an answer's first tokens, model frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.adapt.responder import Responder
from proxpo.adapt.self_reward import SelfReward
from proxpo.adapt.types import UNLIMITED, Adaptation, Answer, Ending, Trial
from proxpo.logp import HeadInput
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.train.tasks import Problem

FLOOR = 1e-8 + 1e-10  # the two constants of the released code, added to a probability in its log
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Reward = Callable[[Problem, Answer], float]


def make_latentseek(
    *,
    fraction: float,
    most: int,
    lr: float,
    iterations: int,
    threshold: float,
    judge: Literal["task", "self"],
    format_rule: bool,
    sgd_lr: float,
) -> Adaptation:
    """LatentSeek with the options of `proxpo.recipes.latentseek`."""

    def start(responder: Responder) -> LatentSeek:
        own: Reward = SelfReward(responder, format_rule=format_rule)
        return LatentSeek(
            responder=responder,
            judge=own if judge == "self" else _sparse,
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


__all__ = ["FLOOR", "LatentSeek", "latent_loss", "make_latentseek"]
