"""Forward pass that runs every prompt once, however many responses it has.

A group's responses see the same keys and values of their prompt, so that states and gradients are
those of the model run on each whole sequence: K(prompt) is computed for the group and handed to its
rows, and autograd adds up what they send back. Padding after a response costs nothing either way,
and its last token, which predicts nothing, is not run.
"""

from typing import NamedTuple

import torch
from torch import nn

from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.sampler._lean import additive, attention, causal, places, run
from proxpo.sampler._weights import Weights, read, readable
from proxpo.train.experience import Experience

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Prompts(NamedTuple):
    """The distinct prompts of some rows, and the number of each row's prompt."""

    ids: Int[Tensor, "group pos"]
    pad: Int[Tensor, " group"]
    which: Int[Tensor, " seq"]


class _Responses(NamedTuple):
    """The responses without their last column, and the places that are run, counted flat."""

    ids: Int[Tensor, "seq tok"]
    run: Int[Tensor, " run"]

    def spread(self, x: Float[Tensor, "run *rest"]) -> Float[Tensor, "seq tok *rest"]:
        """Values of the list of places back in rows, with 0 between."""
        blank = x.new_zeros(self.ids.numel(), *x.shape[1:])
        return blank.index_copy(0, self.run, x).unflatten(0, self.ids.shape)


def shares_prompts(model: nn.Module) -> bool:
    """True if this pass computes what the model computes: the Llama family in full precision.

    Not with adapters or hooks, which live in modules that do not run here, and not on a GPU, where
    the model's own kernels are the better choice.
    """
    if not readable(model) or next(model.parameters()).device.type != "cpu":
        return False
    half = any(p.dtype.itemsize < 4 for p in model.parameters())
    dropout = model.training and getattr(model.config, "attention_dropout", 0.0)  # type: ignore[arg-type]
    hooked = any(getattr(m, name) for m in model.modules() for name in _HOOKS)
    adapted = any(hasattr(m, "base_layer") for m in model.modules())
    checkpointed = getattr(model, "is_gradient_checkpointing", False)
    return not (half or dropout or hooked or adapted or checkpointed)


def states_before(model: nn.Module, rows: Experience) -> Float[Tensor, "seq tok dim"]:
    """The hidden state, ready for the head, that each token of the responses is predicted from.

    It is 0 at padding.
    """
    tokens = rows.mask.shape[1]
    prompts = _prompts(rows, rows.input_ids.shape[1] - tokens)
    responses = _Responses(
        rows.input_ids[:, -tokens:-1],
        rows.attention_mask[:, -tokens:][:, 1:].flatten().nonzero()[:, 0],  # a tool's words too
    )
    weights = read(model, next(model.parameters()).dtype, rows.input_ids.shape[1])
    hidden = _run(weights, prompts, responses)
    asked, answered = hidden.split([prompts.ids.numel(), len(responses.run)])
    last = asked.unflatten(0, prompts.ids.shape)[:, -1]
    return torch.cat(
        [last.index_select(0, prompts.which)[:, None], responses.spread(answered)], dim=1
    )


def _prompts(rows: Experience, length: int) -> _Prompts:
    """The prompt of each group, whose rows have it with the same padding on the left."""
    groups, which = rows.group.unique(return_inverse=True)
    first = which.new_empty(len(groups)).scatter_(0, which, torch.arange(len(which)))
    pad = (~rows.attention_mask[first, :length]).sum(dim=1)
    return _Prompts(rows.input_ids[first, :length], pad, which)


def _run(weights: Weights, prompts: _Prompts, responses: _Responses) -> Float[Tensor, "all dim"]:
    """States of all prompts, then of the tokens of all responses, in one list."""
    (groups, length), tokens = prompts.ids.shape, responses.ids.shape[1]
    which, parts, dtype = prompts.which, [groups * length, len(responses.run)], weights.embed.dtype
    visible = causal(prompts.pad, length + tokens)
    at_prompt = additive(visible[:, :, :length, :length], dtype)
    at_response = additive(visible[:, :, length:], dtype).index_select(0, which)
    if not prompts.pad.any():
        at_prompt, at_response = at_prompt[:1], at_response[:1]

    def attend(number: int, *qkv: Tensor) -> Tensor:
        split = [x.split(parts) for x in qkv]
        q, k, v = (x.unflatten(0, (groups, length)) for x, _ in split)
        asked = attention(q, k, v, at_prompt)
        if not len(responses.run):
            return asked
        own = [responses.spread(x) for _, x in split]
        k, v = (torch.cat([a.index_select(0, which), b], dim=1) for a, b in zip((k, v), own[1:]))
        answered = attention(own[0], k, v, at_response)
        return torch.cat([asked, answered.index_select(0, responses.run)])

    place = places(prompts.pad, length + tokens)
    positions = [place[:, :length].flatten(), place[which, length:].flatten()[responses.run]]
    ids = [prompts.ids.flatten(), responses.ids.flatten()[responses.run]]
    return run(weights, torch.cat(ids), torch.cat(positions), attend)


__all__ = ["shares_prompts", "states_before"]
