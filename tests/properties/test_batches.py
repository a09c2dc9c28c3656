"""Fuzzed batches, in Python and in files: a clear refusal, or the numbers of the clean batch."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import times
from helpers import close
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.cases import CASES, recipe
from torch import Tensor

import proxpo
from properties.strategies import Spec, specs
from proxpo import Batch
from proxpo.batch_file import load_batch, save_batch
from proxpo.errors import ProxpoError
from proxpo.fields import FIELDS

pytestmark = pytest.mark.long  # refusals are the subject, and they come before annotations
cases = st.sampled_from(sorted(CASES))
seeds = st.integers(0, 10**9)


def loss(case: str, batch: Batch) -> Tensor:
    return proxpo.loss_fn(recipe(case))(batch).value


def refusal_or(call: Callable[[], Any]) -> Any:
    """The result of a call, or the one line that refuses it; any other error is a failure."""
    try:
        return call()
    except ProxpoError as error:
        line = str(error)
    assert "\n" not in line
    return line


# --- other ways to write the same batch


def as_numbers(x: Tensor, draw: random.Random) -> Any:
    """Numbers in another container."""
    return draw.choice([x, x.tolist(), tuple(x.tolist()), x.numpy(), list(x), x.numpy().tolist()])


def disguised(name: str, x: Tensor, draw: random.Random) -> Any:
    """The field as a user might give it: the same meaning in another dtype or container."""
    if FIELDS[name].kind == "bool":
        kind = draw.choice([torch.bool, torch.int64, torch.uint8, torch.float32, torch.float64])
        return as_numbers(x.to(kind), draw)
    if FIELDS[name].kind == "int":
        kind = draw.choice([torch.int64, torch.int32, torch.float64])
        words = name == "group" and draw.random() < 0.2
        return [f"prompt {n}" for n in x.tolist()] if words else as_numbers(x.to(kind), draw)
    if name == "logp":
        return draw.choice([x, list(x)])
    return as_numbers(x, draw)


@settings(max_examples=times(150))
@given(specs, cases, seeds)
def test_the_same_batch_in_other_words(spec: Spec, case: str, seed: int) -> None:
    clean, draw = spec.batch(), random.Random(seed)
    leaf = clean.logp.clone().requires_grad_()
    expected = loss(case, clean.replace(logp=leaf))
    slope = torch.autograd.grad(expected, leaf)[0] if expected.requires_grad else leaf * 0
    given = {n: disguised(n, x, draw) for n, x in clean.replace(logp=leaf).items()}
    found = loss(case, Batch(**given))
    close(found.detach(), expected.detach())
    if found.requires_grad:
        close(torch.autograd.grad(found, leaf)[0], slope)


# --- batches with one mistake

BAD_SHAPES = [
    lambda x: x[:, :1] if x.dim() > 1 else x[:1],
    lambda x: x[:1],
    lambda x: x[0],
    lambda x: x[..., None],
    lambda x: x[None],
    lambda x: x.reshape(-1),
    lambda x: x.transpose(0, 1) if x.dim() > 1 else x[:, None],
    lambda x: torch.cat([x, x]),
    lambda x: x[:0],
]
BAD_VALUES = [math.nan, math.inf, -math.inf]
BAD_KINDS = [
    lambda x: {"values": x.tolist()},
    lambda x: "text",
    lambda x: 3.5,
    lambda x: x.to(torch.complex64),
    lambda x: [*x.tolist()[:-1], "text"],
    lambda x: [*x.tolist()[:-1], {}],
    lambda x: [*x.tolist()[:-1], [0.0] * 99],
    lambda x: [*x.tolist()[:-1], object()],
    lambda x: [*x.tolist()[:-1], 10**400],
    lambda x: np.array([*x.tolist()[:-1], None], dtype=object),
    lambda x: iter(x.tolist()),
]


def spoilt(name: str, x: Tensor, mask: Tensor, draw: random.Random) -> Any:
    """The field with one mistake in its shape, its kind or one number that counts."""
    sort = draw.choice(["shape", "kind", "value"])
    if sort == "shape":
        other = draw.choice(BAD_SHAPES)(x)
        return x if other.shape == x.shape else other  # a square turned round cannot be told
    if sort == "kind":
        return draw.choice(BAD_KINDS)(x)
    per_row = not FIELDS[name].per_token or x.dim() == 1
    places = (mask.any(dim=1) if per_row else mask).nonzero()
    place = tuple(places[draw.randrange(len(places))].tolist())
    wrong = x.double().clone()
    values = BAD_VALUES[:2] if FIELDS[name].last == "vocab" else BAD_VALUES
    wrong[place] = draw.choice([0.5, 7.25] if FIELDS[name].kind in ("bool", "int") else values)
    return wrong


def meaning_lost(value: Any, clean: Tensor) -> bool:
    """The spoilt value differs from the field, unlike the first row of a batch of one row."""
    if not isinstance(value, Tensor) or value.is_complex():
        return True
    return value.shape != clean.shape or not torch.equal(value.double(), clean.double())


@settings(max_examples=times(200))
@given(specs, cases, seeds)
def test_one_mistake_is_refused_or_changes_nothing(spec: Spec, case: str, seed: int) -> None:
    clean, draw = spec.batch(), random.Random(seed)
    name = draw.choice([name for name, _ in clean.items()])
    value = spoilt(name, getattr(clean, name), clean.mask, draw)
    fields = {**dict(clean.items()), name: value}
    found = refusal_or(lambda: loss(case, Batch(**fields)))
    if isinstance(found, str):
        return
    if name in ("rewards", "greedy_rewards") and bool(torch.as_tensor(value).isnan().any()):
        return  # a missing reward
    assert name == "duration" or not meaning_lost(value, getattr(clean, name)), name
    close(found, loss(case, clean))


# --- files


def written(batch: Batch, path: Path, draw: random.Random) -> None:
    """The batch as a file, by the library or by hand: null where masked, words for groups."""
    if path.suffix == ".safetensors" or draw.random() < 0.3:
        return save_batch(batch, path)
    lists: dict[str, Any] = {name: x.tolist() for name, x in batch.items()}
    lists["logp"] = [
        [x if valid or draw.random() < 0.5 else None for x, valid in zip(*row)]
        for row in zip(lists["logp"], batch.mask.tolist())
    ]
    if draw.random() < 0.5:
        lists["group"] = [f"prompt {n}" for n in lists["group"]]
    lists["mask"] = [[int(x) for x in row] for row in lists["mask"]]
    path.write_text(json.dumps(dict(draw.sample(sorted(lists.items()), len(lists)))))
    return None


@settings(max_examples=times(60))
@given(specs, cases, seeds, st.sampled_from([".json", ".safetensors"]))
def test_the_same_batch_from_a_file(
    tmp_path_factory: Any, spec: Spec, case: str, seed: int, suffix: str
) -> None:
    clean, path = spec.batch(), tmp_path_factory.mktemp("file") / f"batch{suffix}"
    written(clean, path, random.Random(seed))
    close(loss(case, load_batch(path)), loss(case, clean))


@settings(max_examples=times(120))
@given(specs, cases, seeds, st.sampled_from([".json", ".safetensors"]))
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: Any, spec: Spec, case: str, seed: int, suffix: str
) -> None:
    """Bytes changed, lost or repeated: a refusal in one line, or a batch that a loss can take."""
    draw, path = random.Random(seed), tmp_path_factory.mktemp("file") / f"batch{suffix}"
    written(spec.batch(), path, draw)
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 3])):
        start = draw.randrange(min(len(data), draw.choice([64, 10**9])))
        stop = start + draw.choice([0, 1, 1, 8, 200])
        data[start:stop] = draw.choice(
            [b"", draw.randbytes(1), b"9", b"[", b"-", b'"', b"null,", b"1e999", b"\0" * 8]
        )
    path.write_bytes(bytes(data))
    found = refusal_or(lambda: load_batch(path))
    if isinstance(found, Batch):
        refusal_or(lambda: loss(case, found))
