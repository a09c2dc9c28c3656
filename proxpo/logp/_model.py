"""`model_logp`, `model_states`: a Hugging Face causal language model up to and without its logits.

The whole model runs, wrappers included (peft, DDP, FSDP2, torch.compile), only its head is
replaced for the duration of the call: in place of logits it computes `token_logp`. What a model
does to its logits after the head (Gemma's soft cap, the scale of Granite or Cohere) is learnt from
the model itself: it is run on a few positions, at the last of which known numbers stand for the
logits, and must do to all of them what was learnt. It is run so again when its configuration or
what stands beside its head changes.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._compile import _disable_dynamo

from proxpo.errors import ProxpoError
from proxpo.logp._kl import HeadInput
from proxpo.logp._token import LogpEntropy, token_logp
from proxpo.ops.attention import safe_attention
from proxpo.ops.shapes import Bool, Float, Int, Tensor

# Small ones show a scale, the largest a soft cap, the others that it is nothing else.
_PROBES = (1.0, -1.0, 8.0, -30.0, 100.0, 1e6)
_POSITIONS = 4  # of the small call
_SMALL = 4096  # weights of a module that may be a part of the map
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class _LogitMap:
    """Map that the model applies to the output of its head: a scale, or a soft cap, or nothing."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
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
        self.places: list[ref[nn.Module]] = []  # the model, and what may act on its logits
        self.state: list[Any] = []  # of those, when the map was learnt
        self.result: list[Tensor] = []  # log-probabilities, with entropies on request; or states
        self.request: tuple[nn.Linear, _Request] | None = None
        self.forward = self.score  # one object, so that compiled models see no change

    @_disable_dynamo
    def score(self, hidden: Tensor) -> Tensor:
        """Keeps the result in `self.result`; returns it in place of logits."""
        assert self.request is not None
        head, request = self.request
        if hidden.shape[:-1] != request.targets.shape:
            raise ProxpoError(
                f"model_logp: the head got hidden states of {list(hidden.shape[:-1])} positions,"
                f" input_ids have {list(request.targets.shape)}"
            )
        if request.states:
            self.result = [hidden[request.mask]]
            return hidden[..., :1]
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
        return self.result[0][..., None]

    @contextmanager
    def installed(self, head: nn.Linear, request: _Request) -> Iterator[None]:
        if self.request is not None:
            raise ProxpoError(
                "model_logp: the model is in another call of model_logp or model_states, of another"
                " thread or of its own forward; make one call after the other"
            )
        self.request, self.result = (head, request), []
        try:
            with _with_forward(head, self.forward):
                yield
        finally:
            self.request = None


@contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


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
    """Calls the model: its output in place of logits, its head and that one's replacement."""
    bare = bare_model(model)
    heads = _linear_heads(bare)
    replacements = [_REPLACEMENTS.setdefault(head, _HeadReplacement()) for head in heads]
    _learn_maps(bare, heads, replacements, input_ids, inputs)
    length = None if _is_compiled(model) else input_ids.shape[1]
    with ExitStack() as stack:
        for replacement, head in zip(replacements, heads):
            stack.enter_context(replacement.installed(head, request))
        follow = stack.enter_context(safe_attention(length, input_ids.device))
        output = model(input_ids=input_ids, use_cache=False, **inputs)
    used = [number for number, replacement in enumerate(replacements) if replacement.result]
    if len(used) != 1:
        name = type(model).__name__
        raise ProxpoError(f"model_logp: {name} called {len(used)} output layers, expected one")
    for result in replacements[used[0]].result:
        follow(result)
    return _logits(output), heads[used[0]], replacements[used[0]]


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


def _learn_maps(
    bare: nn.Module,
    heads: list[nn.Linear],
    replacements: list[_HeadReplacement],
    input_ids: Tensor,
    inputs: dict[str, Any],
) -> None:
    """Learns and verifies the map after the head, unless the model is as it was then."""
    first = replacements[0]
    known = bool(first.places) and first.places[0]() is bare
    if (known and first.state == _state(first.places)) or first.request is not None:
        return  # as it was then; or in another call, which this one refuses
    seen: list[tuple[Tensor, Tensor]] = []
    for ids, others in _few_positions(bare, input_ids, inputs):
        seen.clear()
        try:
            output = _small_call(bare, heads, ids, others, seen)
            break
        except ProxpoError:
            raise
        except Exception:  # any code may run: a model that wants all its inputs gets them
            if others is inputs:
                raise
    if len(seen) != 1 or seen[0][0].shape[:-1] != ids.shape:
        return  # the call itself names what is wrong
    learnt = _learn(*seen[0], output, model=type(bare).__name__)
    for replacement in replacements:
        replacement.logit_map = learnt
    first.places = [ref(bare), *map(ref, _beside(bare, heads))]
    first.state = _state(first.places)


def _few_positions(
    bare: nn.Module, ids: Tensor, inputs: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Inputs of a small call: some tokens of the last row alone; then the inputs as they are."""
    length = ids.shape[1]
    places = torch.linspace(0, length - 1, min(_POSITIONS, length)).long()
    few = ids[-1:, length - len(places) :]
    named = "position_ids" in inspect.signature(bare.forward).parameters
    yield few, ({"position_ids": places[None].to(ids.device)} if named else {})
    yield ids, inputs


def _small_call(
    bare: nn.Module,
    heads: list[nn.Linear],
    ids: Tensor,
    inputs: dict[str, Any],
    seen: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """The model's logits; `seen` gets what came out of its head and was given on in its place.

    Without gradient up to the head and with it behind, so that a map with trained parameters
    shows; in eval mode and with the random state put back, so that the call leaves no trace.
    """

    def head_output(head: nn.Linear, hidden: Tensor) -> Tensor:
        z = nn.Linear.forward(head, hidden)
        z = z.float() if z.device.type == "mps" else z.double()
        given = z.clone()
        probes = z.new_tensor(_PROBES).repeat(-(-z.shape[-1] // len(_PROBES)))
        given[..., -1, :] = probes[: z.shape[-1]]
        seen.append((z, given))
        torch.set_grad_enabled(True)
        return given.clone()

    modes = [(module, module.training) for module in bare.modules() if module.training]
    devices = [ids.device] if ids.device.type == "cuda" else []
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # a compiled model would be compiled for this call
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for head in heads:
            stack.enter_context(_with_forward(head, partial(head_output, head)))
        for module, _ in modes:
            module.training = False
        try:
            return _logits(bare(input_ids=ids.clone(), use_cache=False, **inputs))
        finally:
            for module, mode in modes:
                module.training = mode


def _learn(own: Tensor, given: Tensor, output: Tensor, *, model: str) -> _LogitMap:
    """Reads the map after the head off the probes, and refuses a model that does anything else."""
    if output.requires_grad:
        raise ProxpoError(
            f"model_logp: {model} trains what follows its head, which gets no gradient here; "
            "freeze it with requires_grad_(False), or use token_logp on its hidden states"
        )
    way = "; use token_logp on its hidden states"
    if output.shape != given.shape:
        raise ProxpoError(
            f"model_logp: {model} changes its logits after the head from {given.shape[-1]} tokens "
            f"to {list(output.shape)}{way}"
        )
    sent = torch.tensor(_PROBES, dtype=torch.float64)[: given.shape[-1]]
    got = output[..., -1, : len(_PROBES)].flatten(0, -2)[0].detach().double().cpu()
    scaled, capped = _LogitMap(scale=float(got[0])), _LogitMap(softcap=float(got[-1]))
    for guess in (_LogitMap(), scaled, capped):
        if (guess.softcap or guess.scale) > 0 and torch.allclose(guess(sent), got, rtol=1e-5):
            break
    else:
        raise ProxpoError(
            f"model_logp: {model} changes its logits after the head by more than a scale or a soft "
            f"cap ({_PROBES} became {got.tolist()}){way}"
        )
    wrong = ~torch.isclose(output.detach().to(given), guess(given), rtol=1e-4, atol=1e-5)
    if bool(wrong.any()):
        row, token = wrong.flatten(0, -2).nonzero()[0].tolist()
        raise ProxpoError(
            f"model_logp: {model} changes its logits after the head by more than a scale or a soft "
            f"cap: that of token {token} at position {row} is"
            f" {float(output.flatten(0, -2)[row, token]):g} in place of"
            f" {float(guess(given).flatten(0, -2)[row, token]):g}{way}"
        )
    return guess


def _beside(bare: nn.Module, heads: list[nn.Linear]) -> list[nn.Module]:
    """Modules that may act on the logits: those above the head, and small ones beside it."""
    own = set(map(id, heads))
    above = [m for m in bare.modules() if id(m) not in own and own & set(map(id, m.modules()))]
    small = [
        part
        for module in above
        for child in module.children()
        if not own & {id(part) for part in child.modules()}
        and sum(p.numel() for p in child.parameters()) <= _SMALL
        for part in child.modules()
    ]
    return [*above, *small]


def _state(places: list[ref[nn.Module]]) -> list[Any]:
    """The numbers and words among the attributes of modules and configurations, and their tensors.

    Read in every call: no value comes from the device.
    """
    state: list[Any] = []
    for place in places[1:]:
        attributes = vars(place())  # alive: the model is the first of them
        config = attributes.get("config")
        for owner in (attributes, *_configs(config)):
            # Without names: an attribute more or less shows too. A mode changes in every step.
            state += [
                value
                for name, value in owner.items()
                if type(value) in _PLAIN and name != "training"
            ]
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            state += [(id(x), x._version) for x in tensors.values() if x is not None]
        state += map(id, attributes["_modules"].values())
    return state


def _configs(config: Any) -> Iterator[dict[str, Any]]:
    """The configuration of a model and that of its language model, as dicts."""
    if config is None or not hasattr(config, "__dict__"):
        return
    yield vars(config)
    for inner in vars(config).values():
        if hasattr(inner, "to_diff_dict"):
            yield vars(inner)


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


def _is_compiled(model: nn.Module) -> bool:
    """True if torch.compile wraps the model: its choice of an attention may serve all lengths."""
    inner = getattr(model, "module", None)
    return hasattr(model, "_orig_mod") or (isinstance(inner, nn.Module) and _is_compiled(inner))


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
