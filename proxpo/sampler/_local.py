"""`local`: proxpo's own sampler, in the training process."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.ops.shapes import Float, Int, Num, Tensor
from proxpo.sampler._continuous import ContinuousEngine
from proxpo.sampler._decoder import paged_kernels
from proxpo.sampler._draw import draw, uniforms
from proxpo.sampler._engines import Engine, LeanEngine, ModelEngine
from proxpo.sampler._thinking import normals, think
from proxpo.sampler._types import (
    Drawn,
    Progress,
    Samples,
    Thoughts,
    check_request,
    finish,
    with_thoughts,
)
from proxpo.sampler._weights import readable


class LocalSampler:
    """Samples from a copy of the policy's weights, `max_rows` rows at a time.

    lean: True and False choose the engine, None takes the lean one where it fits the model.
    thoughts: hidden states that are fed back before each response, through the model's own forward
        pass; thought_noise: their standard deviation, but for greedy responses
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 512,
        lean: bool | None = None,
        thoughts: int = 0,
        thought_noise: float = 0.0,
    ) -> None:
        if max_rows < 1:
            raise ProxpoError(f"rollout 'local': max_rows is {max_rows}, expected at least 1")
        bare = policy.bare
        if lean and not readable(bare):
            raise ProxpoError(
                f"rollout 'local': lean=true does not fit this {type(bare).__name__};"
                " leave it out to use the model's own forward pass"
            )
        if lean and thoughts:
            raise ProxpoError(
                "rollout 'local': lean=true feeds tokens alone; leave it out for latent thoughts"
            )
        self._policy, self._max_rows = policy, max_rows
        self._thoughts, self._thought_noise = thoughts, thought_noise
        self._ends = torch.tensor(policy.eos_ids, device=policy.device)
        with torch.inference_mode():
            fits = readable(bare) and not thoughts
            self._engine = self._make_engine(fits if lean is None else lean)

    @property
    def context(self) -> int:
        return self._policy.context - self._thoughts

    def sample(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int],
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        progress: Progress | None = None,
    ) -> Samples:
        check_request(
            prompts,
            seeds=seeds,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            context=self.context,
            vocabulary=self._policy.vocabulary,
        )
        device = self._policy.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(), current:
            drawn = self._engine.sample(
                prompts,
                uniforms(seeds, max_tokens, device),
                temperature=temperature,
                top_p=top_p,
                progress=progress,
                **self._shifts(seeds, greedy=temperature == 0),
            )
        pad_id = self._policy.pad_id
        samples = finish(prompts, drawn.tokens, drawn.logp, self._ends, pad_id)
        return with_thoughts(samples, drawn.thoughts, pad_id) if drawn.thoughts else samples

    def _shifts(self, seeds: list[int], *, greedy: bool) -> dict[str, Any]:
        """The noise of the thoughts, as the argument of an engine that thinks."""
        if not self._thoughts:
            return {}
        shape = self._thoughts, self._policy.model.config.get_text_config().hidden_size
        if greedy or not self._thought_noise:
            return {"noise": torch.zeros(len(seeds), *shape, device=self._policy.device)}
        return {"noise": self._thought_noise * normals(seeds, shape, self._policy.device)}

    def sync(self) -> None:
        with torch.inference_mode():
            self._engine.sync(self._policy.bare)

    def close(self) -> None:
        del self._engine

    def _make_engine(self, lean: bool) -> "Lockstep | ContinuousEngine":
        policy, bare = self._policy, self._policy.bare
        if not lean:
            engine = ModelEngine(bare, policy.dtype, keep_states=self._thoughts > 0)
            return Lockstep(engine, self._ends, self._max_rows)
        if paged_kernels(policy.device):
            return ContinuousEngine(
                bare, policy.dtype, policy.context, self._ends, max_rows=self._max_rows
            )
        if policy.device.type == "cuda":
            warnings.warn(
                "rollout 'local': Triton is missing, so that decoding is slow", stacklevel=3
            )
        return Lockstep(LeanEngine(bare, policy.dtype, policy.context), self._ends, self._max_rows)


class Lockstep:
    """Samples all rows in step, in waves of `max_rows`; rows that have ended leave the wave."""

    def __init__(self, engine: Engine, ends: Int[Tensor, " eos"], max_rows: int) -> None:
        self.engine, self._ends, self._max_rows = engine, ends, max_rows

    def sync(self, bare: nn.Module) -> None:
        self.engine.sync(bare)

    def sample(
        self,
        prompts: list[list[int]],
        u: Num[Tensor, "seq tok"],
        *,
        temperature: float,
        top_p: float,
        progress: Progress | None,
        noise: Float[Tensor, "seq thought dim"] | None = None,
    ) -> Drawn:
        """A response for each prompt; `noise` is that of the thoughts before it, if any."""
        parts = []
        for first in range(0, len(prompts), self._max_rows):
            wave = slice(first, first + self._max_rows)
            tell = _from(progress, first, len(prompts))
            own = None if noise is None else noise[wave]
            parts.append(self._wave(prompts[wave], u[wave], temperature, top_p, tell, own))
        tokens, logp, thoughts = zip(*parts)
        joined = None if noise is None else Thoughts(*map(torch.cat, zip(*thoughts)))
        return Drawn(torch.cat(tokens), torch.cat(logp), joined)

    def _wave(
        self,
        prompts: list[list[int]],
        u: Num[Tensor, "seq tok"],
        temperature: float,
        top_p: float,
        progress: Progress | None,
        noise: Float[Tensor, "seq thought dim"] | None,
    ) -> Drawn:
        engine, thoughts = self.engine, None
        tokens = torch.zeros(u.shape, dtype=torch.int64, device=u.device)
        logp = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
        rows = torch.arange(len(u), device=u.device)
        ended = torch.zeros(len(u), dtype=torch.bool, device=u.device)
        distinct, which = _distinct(prompts, u.device)
        logits = engine.start(distinct, which, u.shape[1])
        if noise is not None:
            assert isinstance(engine, ModelEngine)
            logits, thoughts = think(engine, noise)
        for t in range(u.shape[1]):
            token, token_logp = draw(logits, u[:, t], temperature=temperature, top_p=top_p)
            tokens[rows, t], logp[rows, t] = token, token_logp
            ended |= torch.isin(token, self._ends)
            alive = len(rows) - int(ended.sum())
            if progress is not None:
                progress(len(tokens) - alive, len(tokens))
            if alive == 0:
                break
            if alive <= 0.75 * len(rows):
                kept = ended.argsort(stable=True)[:alive]
                rows, ended, token, u = rows[kept], ended[kept], token[kept], u[kept]
                engine.keep(kept)
            if t + 1 < u.shape[1]:
                logits = engine.step(token)
        return Drawn(tokens, logp, thoughts)


def _distinct(
    prompts: list[list[int]], device: torch.device
) -> tuple[list[list[int]], Int[Tensor, " row"]]:
    """The prompts without repetition, and the number of each row's prompt."""
    number: dict[tuple[int, ...], int] = {}
    which = [number.setdefault(tuple(prompt), len(number)) for prompt in prompts]
    return [list(prompt) for prompt in number], torch.tensor(which, device=device)


def _from(progress: Progress | None, first: int, total: int) -> Progress | None:
    """Progress of one wave as progress of the whole."""
    if progress is None:
        return None
    return lambda done, _: progress(first + done, total)
