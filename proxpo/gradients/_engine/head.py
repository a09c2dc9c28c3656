"""The language-model head under a transform: which calls are taken, and how each goes back.

`head_passes` has the arithmetic. With scope="head" the lengths of the weight's gradient give each
response one weight for all parameters: its tokens' gradients are scaled before they go into head
and hidden states.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.head_passes import (
    HeadParameter,
    HeadPass,
    ScoredTokens,
    response_weights,
)
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import LengthRule
from proxpo.gradients._engine.session import Call, ModuleHandle, ParameterHandle, Session
from proxpo.logp.head import Head, HeadCall, HeadGradients, HeadTokens, head_backward
from proxpo.ops.shapes import Float, Tensor


def head_transform(session: Session, call: HeadCall) -> "HeadTransform | ScaledResponses | None":
    """Backward pass of a call of the head whose parameters are in the session, else None."""
    named = {"weight": call.weight, "bias": call.bias}
    trained = {name: p for name, p in named.items() if p is not None and p.requires_grad}
    if not torch.is_grad_enabled():
        return None
    if session.head is not None:
        return ScaledResponses(session.head, _scored(session, call), session.block)
    handles = {name: session.handle_of(parameter) for name, parameter in trained.items()}
    known = {name: _head_handle(h) for name, h in handles.items() if h is not None}
    if not known or session.suspended:
        return None
    if len(known) < len(handles):
        missing = next(name for name, handle in handles.items() if handle is None)
        raise ProxpoError(f"token_logp: the head's {missing} is not in the model of the open block")
    scored = _scored(session, call)
    mine = set(map(id, known.values()))
    owners = [m for m in session.module_handles if mine & set(map(id, m.handles.values()))]
    owner = owners[0] if owners else None
    begun = owner.begin(scored.layout) if owner else None
    return HeadTransform(known, scored, owner, begun)


def _scored(session: Session, call: HeadCall) -> ScoredTokens:
    layout = _layout(session, call.lead)
    if call.scored is not None:
        # The forward has just waited for the scored positions; the backward need not.
        layout = layout.scored(call.scored).settle()
    return ScoredTokens(layout, call.scored)


def _head_handle(handle: ParameterHandle) -> ParameterHandle:
    """The handle; for an embedding that doubles as head, a second one with its own lengths."""
    if not isinstance(handle.module, nn.Embedding):
        return handle
    return ParameterHandle(handle.session, handle.module, f"{handle.name}.head", handle.attribute)


def _layout(session: Session, lead: torch.Size) -> Layout:
    """Layout of the hidden states as positions of `sequences`, axes of length 1 left out."""
    have, want = ([n for n in shape if n != 1] for shape in (lead, session.shape))
    if have not in (want, [session.layout.size]):
        raise ProxpoError(
            f"token_logp: hidden states of {list(lead)} positions inside an `applied` block whose"
            f" `sequences` has shape {list(session.shape)}; pass all positions and a mask"
        )
    return session.layout


@dataclass(frozen=True)
class HeadTransform:
    """Backward pass of one call of the head under a transform."""

    handles: dict[str, ParameterHandle]
    scored: ScoredTokens
    owner: ModuleHandle | None
    call: Call | None

    def __call__(
        self,
        head: Head,
        tokens: HeadTokens,
        sides: Mapping[str, Float[Tensor, "tok _"]],
        *,
        to_hidden: bool,
    ) -> HeadGradients:
        self._claim()
        parameters = [HeadParameter(self.handles[name], side) for name, side in sides.items()]
        d_hidden, outs = HeadPass(head, tokens, parameters, self.scored, to_hidden).transformed()
        for parameter, out in zip(parameters, outs):
            parameter.handle.send(out)
        return d_hidden, outs

    def _claim(self) -> None:
        """Refuses a second call: the weight of a sequence needs its whole gradient at once."""
        if self.owner is None or self.call is None:
            return
        if self.owner.others(self.call) or self.owner.finish(self.call, {}):
            raise ProxpoError(
                f"token_logp: {self.owner.name} is used more than once in this `applied` block;"
                " score all positions in one call, or open one block per call"
            )


@dataclass(frozen=True)
class ScaledResponses:
    """Backward pass of the head that scales each response for the whole model.

    w_i = A_i s_i from the lengths of the head weight's gradient V_i; dL/dlog π of response i times
    w_i is then back-propagated as ever, so that every parameter gets Σ_i w_i ∂ log π(o_i).
    """

    handle: ParameterHandle
    scored: ScoredTokens
    block: int

    def __call__(
        self,
        head: Head,
        tokens: HeadTokens,
        sides: Mapping[str, Float[Tensor, "tok _"]],
        *,
        to_hidden: bool,
    ) -> HeadGradients:
        handle, rule = self.handle, self.handle.session.rule
        handle.session.enter_backward(self.block, handle)
        if handle.done:
            raise ProxpoError(
                "token_logp: the head is used more than once in this `applied` block; score all "
                "positions in one call, or open one block per call"
            )
        handle.done = True
        if tokens.hidden.dtype == torch.float16:
            handle.session.warn_of_scaler()
        assert isinstance(rule, LengthRule)
        if len(tokens.hidden) and self.scored.layout.count:
            weight = HeadParameter(handle, tokens.hidden)
            work = HeadPass(head, tokens, [weight], self.scored, to_hidden)
            tokens = tokens.scaled(self.scored.layout.spread(response_weights(work, rule)))
        return head_backward(head, tokens, [*sides.values()], to_hidden=to_hidden)
