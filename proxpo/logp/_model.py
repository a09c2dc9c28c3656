"""`model_logp`, `model_states`: a Hugging Face causal language model up to and without its logits.

The whole model runs, wrappers included (peft, DDP, FSDP2, torch.compile), only its head is
replaced for the duration of the call: in place of logits it computes `token_logp`. What a model
does to its logits after the head (Gemma's soft cap, the scale of Granite or Cohere) is learnt from
the model itself: along with the result, a few known numbers pass through it.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._compile import _disable_dynamo

from proxpo.errors import ProxpoError
from proxpo.logp._kl import HeadInput
from proxpo.logp._token import LogpEntropy, token_logp
from proxpo.ops.shapes import Bool, Float, Int, Tensor

# Small ones show a scale, the largest a soft cap, the others that it is nothing else.
_PROBES = (1.0, -1.0, 8.0, -30.0, 100.0, 1e6)


@dataclass(frozen=True)
class _LogitMap:
    """Map that the model applies to the output of its head: a scale, or a soft cap, or nothing."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Float[Tensor, " probe"]) -> Float[Tensor, " probe"]:
        return (
            x * self.scale if self.softcap is None else torch.tanh(x / self.softcap) * self.softcap
        )


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Arguments of one call, aligned with the positions of `input_ids`.

    states: the scored positions' hidden states are wanted in place of their log-probabilities
    """

    targets: Int[Tensor, "seq pos"]
    mask: Bool[Tensor, "seq pos"]
    temperature: float = 1.0
    entropy: bool = False
    chunk: int | None = None
    states: bool = False


class _HeadReplacement:
    """Replacement of a linear head during a call; keeps the map that the model applies after it."""

    def __init__(self) -> None:
        self.logit_map = _LogitMap()
        self.known = False
        self.result: list[Tensor] = []  # log-probabilities, with entropies on request; or states
        self.request: tuple[nn.Linear, _Request] | None = None
        self.forward = self.score  # one object, so that compiled models see no change

    @_disable_dynamo
    def score(self, hidden: Tensor) -> Tensor:
        """Keeps the result in `self.result`; returns it, with the probes, in place of logits."""
        assert self.request is not None
        head, request = self.request
        if hidden.shape[:-1] != request.targets.shape:
            raise ProxpoError(
                f"model_logp: the head got hidden states of {list(hidden.shape[:-1])} positions,"
                f" input_ids have {list(request.targets.shape)}"
            )
        if request.states:
            self.result = [hidden[request.mask]]
            return self._with_probes(hidden[..., 0])
        scored: Any = token_logp(  # type: ignore[call-overload]
            hidden,
            head.weight,
            request.targets,
            bias=head.bias,
            mask=request.mask,
            temperature=request.temperature / self.logit_map.scale,
            softcap=self.logit_map.softcap,
            entropy=request.entropy,
            chunk=request.chunk,
        )
        self.result = list(scored) if request.entropy else [scored]
        return self._with_probes(self.result[0])

    def _with_probes(self, x: Float[Tensor, "seq pos"]) -> Float[Tensor, "seq pos _"]:
        """The head's output: x, and the probes while the map after the head is unknown."""
        if self.known:
            return x[..., None]
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        probes = torch.tensor(_PROBES, dtype=dtype, device=x.device).expand(*x.shape, -1)
        return torch.cat([x[..., None], probes], dim=-1)

    @contextmanager
    def installed(self, head: nn.Linear, request: _Request) -> Iterator[None]:
        if self.request is not None:
            raise ProxpoError(
                "model_logp: the model is in another call of model_logp or model_states, of another"
                " thread or of its own forward; make one call after the other"
            )
        own = vars(head).get("forward")
        self.request, self.result = (head, request), []
        vars(head)["forward"] = self.forward
        try:
            yield
        finally:
            self.request = None
            del vars(head)["forward"]
            if own is not None:
                vars(head)["forward"] = own


_REPLACEMENTS: WeakKeyDictionary[nn.Module, _HeadReplacement] = WeakKeyDictionary()


@overload
def model_logp(
    model: nn.Module, input_ids: Tensor, mask: Tensor, *, attention_mask: Tensor | None = ...,
    position_ids: Tensor | None = ..., temperature: float = ..., entropy: Literal[False] = ...,
    chunk: int | None = ..., **inputs: Any,
) -> Tensor: ...  # fmt: skip
@overload
def model_logp(
    model: nn.Module, input_ids: Tensor, mask: Tensor, *, attention_mask: Tensor | None = ...,
    position_ids: Tensor | None = ..., temperature: float = ..., entropy: Literal[True],
    chunk: int | None = ..., **inputs: Any,
) -> LogpEntropy: ...  # fmt: skip
def model_logp(
    model: nn.Module,
    input_ids: Int[Tensor, "seq pos"],
    mask: Bool[Tensor, "seq tok"],
    *,
    attention_mask: Int[Tensor, "seq pos"] | Bool[Tensor, "seq pos"] | None = None,
    position_ids: Int[Tensor, "seq pos"] | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
    **inputs: Any,
) -> Float[Tensor, "seq tok"] | LogpEntropy:
    """log π(o_t | prompt, o_<t) of a causal language model: `logp`, and `entropy`, of a Batch.

    mask: the response tokens among the last `tok` columns of `input_ids`, as in Batch.mask. Column
        t of the result belongs to column t of the mask: the log-probability of that very token,
        0 where the mask is False. Prompts and padding cost nothing in the head.
    attention_mask: 0 on padding, on either side. Positions are counted from the first real token,
        as `generate` does, unless `position_ids` are given.
    inputs: passed on to the model (packed sequences, images).

    The gradient side is that of `token_logp`: inside `transform.applied(...)` the head is treated
    like the other layers.
    """
    _check(input_ids, mask)
    options = {"temperature": temperature, "entropy": entropy, "chunk": chunk}
    request = _request(input_ids, mask, **options)
    inputs = inputs | _positions(bare_model(model), attention_mask, position_ids)
    output, _, replacement = _run(model, input_ids, inputs, request)
    result, replacement.result = replacement.result, []
    aligned = [_align(x, output, mask) for x in result]
    return LogpEntropy(*aligned) if entropy else aligned[0]


@torch.no_grad()
def model_states(
    model: nn.Module,
    input_ids: Int[Tensor, "seq pos"],
    mask: Bool[Tensor, "seq tok"],
    *,
    attention_mask: Int[Tensor, "seq pos"] | Bool[Tensor, "seq pos"] | None = None,
    position_ids: Int[Tensor, "seq pos"] | None = None,
    **inputs: Any,
) -> HeadInput:
    """The states from which a causal language model predicts its response tokens, with its head.

    hidden: one row per True of the mask, in the order of `mask.nonzero()`. The arguments are those
    of `model_logp`; two models' results go into `token_kl`. Without gradient.
    """
    _check(input_ids, mask)
    inputs = inputs | _positions(bare_model(model), attention_mask, position_ids)
    request = _request(input_ids, mask, states=True)
    _, head, replacement = _run(model, input_ids, inputs, request)
    (hidden,), replacement.result = replacement.result, []
    after = replacement.logit_map
    return HeadInput(hidden, head.weight, head.bias, after.scale, after.softcap)


def _run(
    model: nn.Module, input_ids: Tensor, inputs: dict[str, Any], request: _Request
) -> tuple[Tensor, nn.Linear, _HeadReplacement]:
    """Calls the model: its output in place of logits, the head it used and that one's replacement.

    Once more in the first call of a model whose map after the head is not the one assumed.
    """
    bare = bare_model(model)
    heads = _linear_heads(bare)
    replacements = [_REPLACEMENTS.setdefault(head, _HeadReplacement()) for head in heads]
    output, number = _call(model, input_ids, inputs, heads, replacements, request)
    known, name = replacements[number].known, type(bare).__name__
    if not known and not _learn(replacements[number], output, model=name) and not request.states:
        output, number = _call(model, input_ids, inputs, heads, replacements, request)
    return output, heads[number], replacements[number]


def _call(
    model: nn.Module,
    input_ids: Tensor,
    inputs: dict[str, Any],
    heads: list[nn.Linear],
    replacements: list[_HeadReplacement],
    request: _Request,
) -> tuple[Tensor, int]:
    """Calls the model once; returns its output in place of logits, and the number of its head."""
    with ExitStack() as stack:
        for replacement, head in zip(replacements, heads):
            stack.enter_context(replacement.installed(head, request))
        output = model(input_ids=input_ids, use_cache=False, **inputs)
    used = [number for number, replacement in enumerate(replacements) if replacement.result]
    if len(used) != 1:
        name = type(model).__name__
        raise ProxpoError(f"model_logp: {name} called {len(used)} output layers, expected one")
    return (output.logits if hasattr(output, "logits") else output[0]), used[0]


def _learn(replacement: _HeadReplacement, output: Tensor, *, model: str) -> bool:
    """Reads the map after the head off the probes; True if it is the one assumed."""
    sent = torch.tensor(_PROBES, dtype=torch.float64)
    got = output.detach()[0, 0, 1:].double().cpu()
    scaled, capped = _LogitMap(scale=float(got[0])), _LogitMap(softcap=float(got[-1]))
    for guess in (replacement.logit_map, scaled, capped):
        if (guess.softcap or guess.scale) > 0 and torch.allclose(guess(sent), got, rtol=1e-5):
            assumed, replacement.logit_map, replacement.known = replacement.logit_map, guess, True
            return guess == assumed
    raise ProxpoError(
        f"model_logp: {model} changes its logits after the head by more than a scale or a soft cap"
        f" ({_PROBES} became {got.tolist()}); use token_logp on its hidden states"
    )


def _align(x: Tensor, output: Tensor, mask: Tensor) -> Tensor:
    """Position t scores token t + 1; the last position scores nothing and holds 0.

    The result is tied to the model's output, with gradient 0, because wrappers such as FSDP2 start
    their backward pass when a gradient reaches that output.
    """
    if x.requires_grad:
        never = torch.zeros((), dtype=torch.bool, device=x.device)
        x = torch.where(never, output[..., 0].to(x.dtype), x)
    return x.roll(1, dims=1)[:, x.shape[1] - mask.shape[1] :]


def _request(ids: Tensor, mask: Tensor, **options: Any) -> _Request:
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, ids.shape[1] - mask.shape[1] :] = mask
    return _Request(
        targets=ids.roll(-1, dims=1),
        mask=scored.roll(-1, dims=1),
        **options,
    )


def _positions(
    bare: nn.Module, attention_mask: Tensor | None, position_ids: Tensor | None
) -> dict[str, Tensor]:
    """Attention mask and position ids; models without position_ids use the mask."""
    arguments = {}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
        if position_ids is None and "position_ids" in inspect.signature(bare.forward).parameters:
            position_ids = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    return arguments


def bare_model(model: nn.Module) -> nn.Module:
    """The model itself, without its wrappers of torch.compile, DDP and peft."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return bare_model(inner)
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _linear_heads(bare: nn.Module) -> list[nn.Linear]:
    """Linear layers one of which is called as the head: several under modules_to_save."""
    head: Any = getattr(bare, "get_output_embeddings", lambda: None)()
    if hasattr(head, "modules_to_save"):
        heads = [head.original_module, *head.modules_to_save.values()]
    else:
        heads = [head]
    for module in heads:
        kind = type(module)
        if getattr(kind, "forward", None) is not nn.Linear.forward:
            raise ProxpoError(
                f"model_logp: the head of {type(bare).__name__} must be a plain nn.Linear, found"
                f" {kind.__module__}.{kind.__name__}; use token_logp on its hidden states, or keep"
                " adapters and quantisation off the head"
            )
    return heads


def _check(input_ids: Tensor, mask: Tensor) -> None:
    def refuse(rule: str) -> None:
        got = f"{list(mask.shape)} {str(mask.dtype)[6:]} for input_ids {list(input_ids.shape)}"
        raise ProxpoError(f"model_logp: mask must {rule}; got {got}")

    if mask.dtype != torch.bool or mask.dim() != 2 or input_ids.dim() != 2:
        refuse("be bool, sequences x response tokens")
    if len(mask) != len(input_ids) or mask.shape[1] > input_ids.shape[1]:
        refuse("have one row per sequence and no more columns than input_ids")
    if mask.shape[1] == input_ids.shape[1] and mask[:, :1].any():
        refuse("be False in the first column of input_ids, which no token precedes")
