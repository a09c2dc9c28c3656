"""Samplers: responses of the policy, with the log-probabilities they were drawn with.

sampler = make_sampler("local", policy)
samples = sampler.sample(prompts, seeds=seeds, max_tokens=64, temperature=1.0)
...                       # train the policy
sampler.sync()            # and sample from the new one
"""

from typing import Any

from proxpo.errors import resolve
from proxpo.models import Policy
from proxpo.sampler._agreement import Agreement, agreement
from proxpo.sampler._local import LocalSampler
from proxpo.sampler._types import Sampler, Samples, inputs
from proxpo.sampler._vllm import VllmSampler
from proxpo.stages._options import bind

_MAKERS: dict[str, Any] = {"local": LocalSampler, "vllm": VllmSampler}


def make_sampler(name: str, policy: Policy, **options: Any) -> Sampler:
    """The sampler called `name`; `options` are its own (see `LocalSampler`, `VllmSampler`)."""
    name = resolve(name, _MAKERS, what="rollout")
    options = {"policy": policy, **options}
    return _MAKERS[name](**bind(_MAKERS[name], options, what=f"rollout '{name}'"))


__all__ = [
    "Agreement",
    "LocalSampler",
    "Sampler",
    "Samples",
    "VllmSampler",
    "agreement",
    "inputs",
    "make_sampler",
]
