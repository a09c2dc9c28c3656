"""Positions cut over two processes that talk over gloo equal the same positions in one."""

import re
from typing import Any

import pytest
import split
import torch
import two_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from proxpo.gradients import Layout, Outer
from proxpo.gradients._engine import cost
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.shard import Shard

EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    two_processes.run(split.work, folder)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(2)]


def added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    assert parts[0].keys() == parts[1].keys()
    return {name: parts[0][name] + parts[1][name] for name in parts[0]}


@pytest.mark.parametrize(("kind", "method", "cut"), split.cases())
@pytest.mark.checks("isopo", "positions spread over ranks give the gradients of one process")
@pytest.mark.checks("isopo-ntk", "positions spread over ranks give the gradients of one process")
def test_two_parts_equal_the_whole(ranks, kind, method, cut):
    *want, state = split.steps(kind, method, cut)
    actual = [rank[kind, method, cut] for rank in ranks]
    for number, step in enumerate(want):
        parts = [rank[number] for rank in actual]
        assert_close(added([part["gradients"] for part in parts]), step["gradients"], **EXACT)
        for part in parts:  # what depends on lengths is of whole sequences on every rank
            assert_close(part["weights"], step["weights"], **EXACT)
            assert_close(part["metrics"], step["metrics"], **EXACT)
    for *_, own in actual:
        assert_close(own, state, **EXACT)


def test_what_the_ranks_tell_each_other(ranks):
    """F: the rows of J and ⟨V_i, G_j⟩ of every layer, V_i of every vector; not the positions."""
    model, m, drawn = split.model_of("split"), len(split.A), split.DRAWN
    embed = drawn * (model.embed.embedding_dim + 1 + m)
    weights = [p.shape for p in model.parameters() if p.dim() == 2]  # the tied one as head
    vectors = [p.numel() for p in model.parameters() if p.dim() == 1]
    sent = embed + sum(drawn * (sum(shape) + m) for shape in weights)
    sent += sum((m + drawn) * width for width in vectors)
    assert [rank["traffic"] for rank in ranks] == [sent, sent]


def choices(lengths: list[int], first: int, shape: tuple[int, int], **options) -> set[Any]:
    """The form each of two ranks takes for a layer, the first of which holds `first` positions."""
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    actual = set()
    for own in (torch.arange(len(seq))[:first], torch.arange(len(seq))[first:]):
        shard = Shard(None, seq, own)
        vars(shard)["ranks"] = 2  # there is no process group to ask
        layout = Layout(seq[own], len(lengths), shard)
        rows = Outer(torch.zeros(len(own), shape[1]), torch.zeros(len(own), shape[0]))
        isopo_form = cost.cheapest_form(cost.Sizes.of(rows, layout), path="auto", **options)
        groups = Groups.whole(len(lengths))
        held = cost.holds_stack(rows.shape, layout, groups, torch.float32)
        gram = cost.gram_kernel(rows.shape, layout, groups, "auto", torch.float32, held=held)
        actual.add((isopo_form, gram))
    return actual


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
    st.integers(0, 150),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from([0, 5, 64]),
    st.booleans(),
)
def test_all_ranks_take_the_same_form(lengths, first, shape, overlap, norm):
    assert len(choices(lengths, first, shape, overlap=overlap, norm=norm)) == 1


def test_long_sequences_are_not_sent_position_by_position():
    long = choices([3000, 3000], 3000, (2048, 1024), overlap=64, norm=True)
    assert long <= {("stream", False), ("materialise", False)}
    assert choices([3000, 3000], 3000, (2048, 1024), overlap=64, norm=False) == {("gram", False)}


def test_a_group_of_one_rank_changes_nothing(ranks):
    want = split.steps("split", "fisher", "uneven")[0]["gradients"]
    for rank in ranks:
        assert_close(rank["a group of one"]["gradients"], want, **EXACT)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        ("other advantages", "given different advantages or groups: each must know all"),
        ("fewer advantages", "given different advantages or groups: each must know all"),
        ("other groups", "given different advantages or groups: each must know all"),
        ("more sequences", r"numbers 0\.\.3, which asks for 4 advantages .* got 3"),
        ("proma", "`token_group` is for isopo"),
        ("head outside its module", r"token_logp: .*weight is under .* `token_group`"),
    ],
)
def test_mistakes_are_told_on_every_rank(ranks, mistake, line):
    for rank in ranks:
        assert re.search(line, rank["mistakes"][mistake])
