"""Samplers: responses of the policy, with the log-probabilities they were drawn with.

sampler = make_sampler("local", policy)
samples = sampler.sample(prompts, seeds=seeds, max_tokens=64, temperature=1.0)
...                       # train the policy
sampler.sync()            # and sample from the new one
"""

import importlib.util
from typing import Any, NamedTuple

from proxpo.errors import resolve
from proxpo.models import Policy
from proxpo.sampler._agreement import Agreement, agreement, logp_gap
from proxpo.sampler._local import LocalSampler
from proxpo.sampler._types import Sampler, Samples, inputs
from proxpo.sampler._vllm import SHARE, VllmSampler
from proxpo.sampler._weights import readable
from proxpo.stages._options import bind

_MAKERS: dict[str, Any] = {"local": LocalSampler, "vllm": VllmSampler}


def make_sampler(name: str, policy: Policy, **options: Any) -> Sampler:
    """The sampler called `name`; `options` are its own (see `LocalSampler`, `VllmSampler`)."""
    name = resolve(name, _MAKERS, what="rollout")
    options = {"policy": policy, **options}
    return _MAKERS[name](**bind(_MAKERS[name], options, what=f"rollout '{name}'"))


class Backend(NamedTuple):
    """The name of a sampler, and the reason for taking it."""

    name: str
    reason: str


def fastest_backend(policy: Policy, *, thoughts: int = 0, top_p: float = 1.0) -> Backend:
    """The faster sampler for a model, by what was measured on an H200 (docs/speed.md).

    `local` with its own decoder drew four times as many tokens a second as vLLM, at 128 and at 512
    rows of 256 tokens. Where only the model's own forward pass would be left, vLLM is taken, if it
    can be imported and can do what is asked: it has no latent thoughts and no top_p below 1.
    """
    if readable(policy.bare):
        return Backend("local", "its own decoder runs this model")
    if thoughts or top_p < 1:
        return Backend("local", "vllm has no latent thoughts and no top_p below 1")
    if importlib.util.find_spec("vllm") is None:
        return Backend("local", "vLLM is not installed; the model's own forward pass is slow")
    return Backend("vllm", f"no decoder of our own runs {type(policy.bare).__name__}")


__all__ = [
    "SHARE",
    "Agreement",
    "Backend",
    "LocalSampler",
    "Sampler",
    "Samples",
    "VllmSampler",
    "agreement",
    "fastest_backend",
    "inputs",
    "logp_gap",
    "make_sampler",
]
