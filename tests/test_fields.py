"""Declarations of batch fields, and a field that a third-party stage declares for itself."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from helpers import close, make_batch, method

import proxpo
from proxpo import Batch, ProxpoError
from proxpo.batch_file import load_batch, save_batch
from proxpo.fields import CORE, FIELDS, REQUIRED, BatchFields, declare_field
from proxpo.inspection import inspect_batch
from proxpo.stages import STAGES, make_stage, stage
from proxpo.types import local

DOC = "difficulty of each token, from a second model"


@pytest.fixture
def difficulty() -> Iterator[str]:
    """A field of a third party and a stage that reads it, gone after the test."""
    proxpo.declare_field("difficulty", "seq tok", source="sampler", doc=DOC)

    @stage("weights", needs=("difficulty",))
    def easy_first():
        """1/(1 + difficulty)."""
        return lambda batch, ctx: (1 / (1 + batch.difficulty), {})

    yield "difficulty"
    del FIELDS["difficulty"], STAGES["weights"]["easy_first"]
    delattr(BatchFields, "difficulty")


def recipe() -> proxpo.Recipe:
    return method("dapo").replace(weights=(make_stage("weights", "easy_first"),))


def test_a_batch_takes_the_field_of_a_third_party(difficulty: str, tmp_path: Path) -> None:
    plain = make_batch(1)
    assert plain.difficulty is None
    batch = plain.replace(difficulty=plain.mask.long().tolist())
    assert batch.difficulty.dtype == torch.float64
    assert "difficulty" in batch.extra
    assert dict(batch.items())["difficulty"] is batch.difficulty
    assert batch.rows(slice(2)).difficulty.shape == (2, batch.mask.shape[1])
    dirty = batch.replace(difficulty=torch.where(batch.mask, 1.0, torch.nan))
    assert dirty.clean().difficulty.isfinite().all()
    with pytest.raises(ProxpoError, match="difficulty is a list of 9, expected 9 x "):
        plain.replace(difficulty=[1.0] * 9)
    for name in ("batch.json", "batch.safetensors"):
        save_batch(batch, tmp_path / name)
        close(load_batch(tmp_path / name).difficulty, batch.difficulty)
    close(pickle.loads(pickle.dumps(batch)).difficulty, batch.difficulty)


def test_a_stage_reads_the_field_of_a_third_party(difficulty: str) -> None:
    """Needs and their error, the loss, micro-batches and an inspection."""
    made, batch = recipe(), make_batch(1)
    assert "difficulty" in made.needs()
    line = rf"weights=easy_first needs the batch field 'difficulty' \({DOC}\), which is missing"
    with pytest.raises(ProxpoError, match=line):
        proxpo.loss_fn(made)(batch)
    batch = batch.replace(difficulty=torch.ones_like(batch.logp))
    value = proxpo.loss_fn(made)(batch).value
    close(value, proxpo.loss_fn(method("dapo"))(batch).value / 2)
    ready = proxpo.prepare(made, batch)
    ctx = replace(ready.ctx, all_sum=local)
    cuts = [ready.batch.rows(rows) for rows in torch.arange(9).split(4)]
    close(sum(proxpo.policy_loss(made, cut, ctx).value for cut in cuts), value)
    close(inspect_batch(made, batch).loss, float(value))


def test_a_field_of_the_current_pass_is_cleaned_in_every_loss(difficulty: str) -> None:
    """source="policy": a new forward pass may leave NaN at masked tokens."""
    proxpo.declare_field("margin", "seq tok", source="policy", doc="margin, from the policy")

    @stage("weights", needs=("margin",))
    def by_margin():
        return lambda batch, ctx: (batch.margin, {})

    try:
        made = method("dapo").replace(weights=(by_margin(),))
        batch = make_batch(1).replace(margin=torch.ones_like(make_batch(1).logp))
        ready = proxpo.prepare(made, batch)
        now = ready.batch.replace(margin=torch.where(batch.mask, 1.0, torch.nan))
        assert proxpo.policy_loss(made, now, ready.ctx).value.isfinite()
    finally:
        del FIELDS["margin"], STAGES["weights"]["by_margin"]
        delattr(BatchFields, "margin")


@pytest.mark.parametrize("name", ["difficult", "old_lopg"])
def test_an_undeclared_name_is_one_line(difficulty: str, name: str, tmp_path: Path) -> None:
    batch, nearest = make_batch(1), {"difficult": "difficulty", "old_lopg": "old_logp"}[name]
    line = rf"^unknown field '{name}'; did you mean '{nearest}'\?$"
    for call in (
        lambda: Batch(logp=batch.logp, mask=batch.mask, **{name: batch.logp}),
        lambda: batch.replace(**{name: batch.logp}),
        lambda: getattr(batch, name),
        lambda: batch.require(name, by="a test"),
    ):
        with pytest.raises(ProxpoError, match=line):
            call()
    assert not hasattr(batch, name)
    made = method("dapo").replace(weights=(replace(recipe().weights[0], needs=(name,)),))
    with pytest.raises(ProxpoError, match=line):
        proxpo.loss_fn(made)(batch)


def test_declarations_that_cannot_be(difficulty: str) -> None:
    same = declare_field("difficulty", "seq tok", source="sampler", doc=DOC)
    assert same is FIELDS["difficulty"]
    for name, axes in (("difficulty", "seq"), ("rows", "seq"), ("a b", "seq"), ("_x", "seq")):
        with pytest.raises(ProxpoError, match=f"'{name}' cannot be declared"):
            declare_field(name, axes, doc=DOC)
    with pytest.raises(ProxpoError, match="'x': unknown axes 'tok'"):
        declare_field("x", "tok", doc=DOC)
    assert "x" not in FIELDS


def test_batches_do_not_change_and_show_their_shapes() -> None:
    batch = Batch(logp=[[-1.0, -2.0]], mask=[[1, 1]], gate=[[1, 0]])
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'logp'"):
        batch.logp = batch.logp
    assert repr(batch) == "Batch(logp 1x2, mask 1x2, gate 1x2)"
    assert set(batch.extra) == {"gate"}


def test_the_signature_has_the_fields_of_language_models() -> None:
    parameters = inspect.signature(Batch).parameters
    assert {*parameters} == {*CORE, "extra"}
    assert {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default} == {
        *REQUIRED
    }


def test_fields_of_stages_need_no_import() -> None:
    """In a new process, where no stage has been imported."""
    given = "logp=[[1]], mask=[[1]], noise=[[1]]"
    code = f"import proxpo; b = proxpo.Batch({given}); print(list(b.extra), b.gate)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "['noise'] None\n"
