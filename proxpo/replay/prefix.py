"""Forward pass that runs every prompt once, however many responses it has.

A group's responses see the same keys and values of their prompt, so that states and gradients are
those of the model run on each whole sequence: K(prompt) is computed for the group and handed to its
rows, and autograd adds up what they send back. Padding after a response costs nothing either way,
and its last token, which predicts nothing, is not run.
"""

from typing import NamedTuple

import torch
from torch import nn

from proxpo.models import recomputes_layers
from proxpo.ops.shapes import Float, Int, Shaped, Tensor
from proxpo.replay.sequences import Sequences
from proxpo.sampler._lean import additive, attention, causal, places, run
from proxpo.sampler._weights import Weights, read, readable

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Prompts(NamedTuple):
    """The distinct prompts of some rows, padded on the left; the number of each row's prompt."""

    ids: Int[Tensor, "group pos"]
    pad: Int[Tensor, " group"]
    which: Int[Tensor, " seq"]


class Responses(NamedTuple):
    """The responses without their last column, and the places that are run, counted flat.

    run: None runs all places, padding too, so that shapes do not depend on the data
    """

    ids: Int[Tensor, "seq tok"]
    run: Int[Tensor, " run"] | None = None

    @property
    def places(self) -> int:
        """Number of places that are run."""
        return self.ids.numel() if self.run is None else len(self.run)

    def pick(self, x: Shaped[Tensor, "place *rest"]) -> Shaped[Tensor, "run *rest"]:
        """Values of all places as a list of those that are run."""
        return x if self.run is None else x.index_select(0, self.run)

    def spread(self, x: Float[Tensor, "run *rest"]) -> Float[Tensor, "seq tok *rest"]:
        """Values of the list of places back in rows, with 0 between."""
        if self.run is not None:
            x = x.new_zeros(self.ids.numel(), *x.shape[1:]).index_copy(0, self.run, x)
        return x.unflatten(0, self.ids.shape)


def shares_prompts(model: nn.Module) -> bool:
    """True on a CPU if this pass computes what the model computes.

    On a GPU, launched kernel by kernel, the model's own modules are the better choice.
    """
    return next(model.parameters()).device.type == "cpu" and computes(model)


def computes(model: nn.Module) -> bool:
    """True if this pass computes what the model computes: the Llama family, weights in float32.

    Not with adapters or hooks, which live in modules that do not run here.
    """
    if not readable(model):
        return False
    half = any(p.dtype.itemsize < 4 for p in model.parameters())
    dropout = model.training and getattr(model.config, "attention_dropout", 0.0)  # type: ignore[arg-type]
    hooked = any(getattr(m, name) for m in model.modules() for name in _HOOKS)
    hooked |= any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    adapted = any(hasattr(m, "base_layer") for m in model.modules())
    checkpointed = recomputes_layers(model)
    return not (half or dropout or hooked or adapted or checkpointed)


def states_before(model: nn.Module, rows: Sequences) -> Float[Tensor, "seq tok dim"]:
    """The hidden state, ready for the head, that each token of the responses is predicted from.

    It is 0 at padding.
    """
    tokens = rows.mask.shape[1]
    responses = Responses(
        rows.input_ids[:, -tokens:-1],
        rows.attention_mask[:, -tokens:][:, 1:].flatten().nonzero()[:, 0],  # a tool's words too
    )
    weights = read(model, next(model.parameters()).dtype, rows.input_ids.shape[1])
    return states_of(weights, prompts_of(rows), responses)


def states_of(
    weights: Weights, prompts: Prompts, responses: Responses
) -> Float[Tensor, "seq tok dim"]:
    """`states_before` from the weights of a model; the last column of a response is not in it."""
    hidden = _run(weights, prompts, responses)
    asked, answered = hidden.split([prompts.ids.numel(), responses.places])
    last = asked.unflatten(0, prompts.ids.shape)[:, -1]
    return torch.cat(
        [last.index_select(0, prompts.which)[:, None], responses.spread(answered)], dim=1
    )


def prompts_of(rows: Sequences) -> Prompts:
    """The distinct prompts; rows that share one have it with the same padding on the left."""
    length = rows.input_ids.shape[1] - rows.mask.shape[1]
    groups, which = rows.shared_prompt.unique(return_inverse=True)
    numbers = torch.arange(len(which), device=which.device)
    first = which.new_empty(len(groups)).scatter_(0, which, numbers)
    pad = (~rows.attention_mask[first, :length]).sum(dim=1)
    return Prompts(rows.input_ids[first, :length], pad, which)


def _run(weights: Weights, prompts: Prompts, responses: Responses) -> Float[Tensor, "all dim"]:
    """States of all prompts, then of the tokens of all responses, in one list."""
    (groups, length), tokens = prompts.ids.shape, responses.ids.shape[1]
    which, parts, dtype = prompts.which, [groups * length, responses.places], weights.embed.dtype
    visible = causal(prompts.pad, length + tokens)
    at_prompt = additive(visible[:, :, :length, :length], dtype)
    at_response = additive(visible[:, :, length:], dtype).index_select(0, which)
    if responses.run is not None and not prompts.pad.any():
        at_prompt, at_response = at_prompt[:1], at_response[:1]

    def attend(number: int, *qkv: Tensor) -> Tensor:
        split = [x.split(parts) for x in qkv]
        q, k, v = (x.unflatten(0, (groups, length)) for x, _ in split)
        asked = attention(q, k, v, at_prompt)
        if not responses.places:
            return asked
        own = [responses.spread(x) for _, x in split]
        k, v = (torch.cat([a.index_select(0, which), b], dim=1) for a, b in zip((k, v), own[1:]))
        answered = attention(own[0], k, v, at_response)
        return torch.cat([asked, responses.pick(answered)])

    place = places(prompts.pad, length + tokens)
    positions = [place[:, :length].flatten(), responses.pick(place[which, length:].flatten())]
    ids = [prompts.ids.flatten(), responses.pick(responses.ids.flatten())]
    return run(weights, torch.cat(ids), torch.cat(positions), attend)


__all__ = [
    "Prompts",
    "Responses",
    "computes",
    "prompts_of",
    "shares_prompts",
    "states_before",
    "states_of",
]
