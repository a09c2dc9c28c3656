"""Plain resampling: independent answers to the same prompt until one is good enough."""

from proxpo.adapt.responder import Responder
from proxpo.adapt.types import Adapter, Answer, Trial
from proxpo.train.tasks import Problem


def resample(
    responder: Responder,
    adapter: Adapter,
    problem: Problem,
    first: Answer,
    *,
    limit: float,
    threshold: float,
) -> Trial:
    """The first of answers at the sampling temperature with R > threshold, or the best of them.

    Answers are drawn together, as many as `limit` tokens certainly allow and at least one, and
    again from what is left, so that a prompt is not run anew for each of them; one that takes the
    count beyond `limit` does not count. R is the method's own.
    """
    prompt = responder.encode(problem.prompt, problem)
    start = responder.tokens
    best, best_reward, attempts, spent = first, adapter.reward(problem, first), 1, responder.tokens
    judging = responder.tokens - start
    while best_reward <= threshold:
        room = limit - responder.tokens - len(prompt)
        if room <= 0:
            return Trial(best, attempts, spent, "budget")
        count = max(1, int(room // (responder.max_tokens + judging)))
        for answer in responder.draw(problem, prompt, range(attempts, attempts + count)):
            reward = adapter.reward(problem, answer)
            if responder.tokens > limit:
                return Trial(best, attempts, spent, "budget")
            attempts, spent = attempts + 1, responder.tokens
            if reward > best_reward:
                best, best_reward = answer, reward
            if reward > threshold:
                break
    return Trial(best, attempts, spent, "right" if best.right else "reward")


__all__ = ["resample"]
