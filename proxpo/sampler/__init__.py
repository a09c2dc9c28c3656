"""Rollouts: responses sampled from the policy, with the log-probabilities they were drawn with.

rollout = make_rollout("local", policy)
samples = rollout.sample(prompts, seeds=seeds, max_tokens=64, temperature=1.0)
...                       # train the policy
rollout.sync()            # and sample from the new one
"""

from typing import Any

from proxpo.errors import resolve
from proxpo.models import Policy
from proxpo.sampler._agreement import Agreement, agreement, inputs
from proxpo.sampler._local import LocalRollout
from proxpo.sampler._types import Rollout, Samples
from proxpo.sampler._vllm import VllmRollout
from proxpo.stages._options import bind

_MAKERS = {"local": LocalRollout, "vllm": VllmRollout}


def make_rollout(name: str, policy: Policy, **options: Any) -> Rollout:
    """The sampler called `name`; `options` are its own (see `LocalRollout`, `VllmRollout`)."""
    name = resolve(name, _MAKERS, what="rollout")
    given = {"policy": policy, **options}
    return _MAKERS[name](**bind(_MAKERS[name], given, what=f"rollout '{name}'"))


__all__ = [
    "Agreement",
    "LocalRollout",
    "Rollout",
    "Samples",
    "VllmRollout",
    "agreement",
    "inputs",
    "make_rollout",
]
