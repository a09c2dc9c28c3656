"""Weights that changed: counts, overlaps, ranks, training of a part, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.sparsity import changed, compare, overlap, stored_weights, train_only

LAYERS = ("model.layers.0.mlp.weight", "model.layers.0.norm.weight", "model.layers.1.mlp.weight")


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((8, 6), (6,), (4, 6))
    return {
        name: 0.05 * torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
        for name, shape in zip(LAYERS, shapes)
    }


def moved(by: float, share: float = 1.0, seed: int = 1) -> dict[str, torch.Tensor]:
    """The weights, `share` of them moved by `by`."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: x + by * (torch.rand(x.shape, generator=g) < share).to(x.dtype)
        for name, x in weights().items()
    }


@pytest.mark.checks(
    "sparse-updates", "equal weights: sparsity 1 for every tolerance; all moved by 1: 0"
)
def test_limits() -> None:
    for tol in (0.0, 1e-5, 1.0):
        same = compare(weights(), weights(), tol=tol)
        assert (same.sparsity, same.exact_sparsity) == (1.0, 1.0)
    every = compare(weights(), moved(1.0))
    assert (every.sparsity, every.exact_sparsity) == (0.0, 0.0)
    assert every.size == 48 + 6 + 24


@pytest.mark.checks(
    "sparse-updates", "does not fall with the tolerance; tolerance 0 is the exact count"
)
def test_tolerance() -> None:
    g = torch.Generator().manual_seed(3)
    before = {"w": torch.randn(200, generator=g)}
    after = {"w": before["w"] + 1e-4 * torch.randn(200, generator=g) * (torch.arange(200) % 2)}
    found = [
        compare(before, after, dtype="float32", tol=tol).sparsity
        for tol in (0.0, 1e-5, 5e-5, 1e-4, 1.0)
    ]
    assert found == sorted(found)
    assert 0 < found[1] < found[3] < 1
    assert found[-1] == 1
    exact = compare(before, after, dtype="float32", tol=1e-5).exact_sparsity
    assert found[0] == exact == pytest.approx(0.5, abs=0.02)


@pytest.mark.checks("sparse-updates", "|d| equal to the tolerance is unchanged; NaN is changed")
def test_edges() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        step = torch.tensor([1e-3, -1e-3, 1.1e-3, math.nan], dtype=dtype)
        found = changed(torch.zeros(4, dtype=dtype), step, tol=1e-3)
        assert found.tolist() == [False, False, True, True]


@pytest.mark.checks(
    "sparse-updates", "float32 updates of 5e-6: dense exactly, sparse at 1e-5, sparser in bf16"
)
def test_dtype_decides() -> None:
    before, after = weights(), moved(5e-6)
    single = compare(before, after, dtype="float32")
    half = compare(before, after)
    assert single.exact_sparsity < 0.05
    assert single.sparsity == 1
    assert half.exact_sparsity > 0.9 > single.exact_sparsity
    assert (half.dtype, single.dtype, half.tol) == ("bfloat16", "float32", 1e-5)
    assert compare(before, after, dtype="stored").tensors == single.tensors
    mixed = {name: x.bfloat16() for name, x in before.items()}
    assert compare(mixed, after, dtype="stored").exact_sparsity < 0.05  # compared in float32


@pytest.mark.checks(
    "sparse-updates", "o₁|I₁| = o₂|I₂|; equal runs give 1; an empty set has no overlap"
)
def test_overlap() -> None:
    first, second = moved(1.0, 0.3), moved(1.0, 0.6, seed=2)
    found = overlap(weights(), first, second)
    one, two = (1 - compare(weights(), x).sparsity for x in (first, second))
    assert found.first * one == pytest.approx(found.second * two)
    assert (found.chance_first, found.chance_second) == pytest.approx((two, one))
    same = overlap(weights(), first, first)
    assert (same.first, same.second) == (1.0, 1.0)
    empty = overlap(weights(), weights(), first)
    assert empty.first is None
    assert empty.second == 0.0


@pytest.mark.checks("sparse-updates", "independent random sets overlap as chance has it")
def test_chance() -> None:
    g = torch.Generator().manual_seed(5)
    before = {"w": torch.zeros(100, 400)}
    runs = [{"w": (torch.rand(100, 400, generator=g) < p).float()} for p in (0.2, 0.7)]
    found = overlap(before, *runs)
    assert found.first == pytest.approx(0.7, abs=0.02)
    assert found.second == pytest.approx(0.2, abs=0.02)
    assert found.chance_first == pytest.approx(found.first, abs=0.02)


@pytest.mark.checks(
    "sparse-updates", "the total is the mean over tensors weighed by size, not the plain mean"
)
def test_total() -> None:
    after = weights()
    after[LAYERS[1]] = after[LAYERS[1]] + 1  # 6 of 78
    found = compare(weights(), after)
    assert found.sparsity == pytest.approx(1 - 6 / 78)
    sizes = [one.size * (1 - one.changed / one.size) for one in found.tensors]
    assert found.sparsity == pytest.approx(sum(sizes) / 78)
    assert found.layer_density() == {0: 0.5, 1: 0.0}  # per layer the plain mean, as published


def test_rank_of_the_change() -> None:
    after = weights()
    after[LAYERS[0]] = after[LAYERS[0]] + torch.ones(8, 1) @ torch.arange(6.0)[None]
    found = compare(weights(), after, dtype="float32", rank=True)
    by_name = {one.name: one.rank for one in found.tensors}
    assert by_name[LAYERS[0]] == pytest.approx(1 / 6, abs=1 / 6)  # rounding may add one
    assert by_name[LAYERS[1]] is None
    assert compare(weights(), after).rank is None


def test_what_counts() -> None:
    shared = torch.randn(3, 3)
    before = {"a": shared, "tied": shared, "ids": torch.arange(4), "left": torch.ones(2)}
    after = {"a": shared + 1, "tied": shared + 1, "ids": torch.arange(4) + 1, "new": torch.ones(1)}
    found = compare(before, after)
    assert [one.name for one in found.tensors] == ["a"]
    assert (found.only_before, found.only_after) == (("left",), ("new",))
    assert [one.name for one in compare(weights(), moved(1.0), only="mlp").tensors] == [
        LAYERS[0],
        LAYERS[2],
    ]


def test_refusals() -> None:
    with pytest.raises(ProxpoError, match="share no floating-point weights"):
        compare({"a": torch.ones(2)}, {"b": torch.ones(2)})
    with pytest.raises(ProxpoError, match=r"'a' has the shape \[2\] before and \[3\] after"):
        compare({"a": torch.ones(2)}, {"a": torch.ones(3)})
    with pytest.raises(ProxpoError, match="tolerance must not be negative"):
        compare(weights(), weights(), tol=-1.0)
    with pytest.raises(ProxpoError, match="no regular expression"):
        compare(weights(), weights(), only="(")
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with pytest.raises(ProxpoError, match=r"needs a bool mask of that shape, got \[3\] bool"):
        train_only(optimizer, {p: torch.ones(3, dtype=torch.bool)})


@pytest.mark.checks(
    "sparse-updates", "masked training leaves all other weights bit-identical, AdamW's decay too"
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_masked_training(make: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = {p: torch.rand(p.shape) < 0.5 for p in model.parameters()}
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()

    step()  # moments that keep moving without a gradient
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    end = train_only(optimizer, masks)
    for _ in range(3):
        step()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach()[~masks[p]], start[name][~masks[p]])
        assert (p.detach()[masks[p]] != start[name][masks[p]]).all()
    end()
    step()
    assert all((p.detach() != start[n]).any() for n, p in model.named_parameters())
    assert not torch.equal(model.weight.detach()[~masks[model.weight]],
                           start["weight"][~masks[model.weight]])  # fmt: skip


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two shards; a checkpoint with its model in a subfolder; a single file."""
    before, after, other = tmp_path / "base", tmp_path / "step-4", tmp_path / "other.safetensors"
    before.mkdir()
    first = {LAYERS[0]: weights()[LAYERS[0]]}
    save_file(first, before / "model-00001-of-00002.safetensors")
    rest = {name: x for name, x in weights().items() if name not in first}
    save_file(rest, before / "model-00002-of-00002.safetensors")
    (after / "model").mkdir(parents=True)
    save_file(moved(1.0, 0.3), after / "model" / "model.safetensors")
    save_file({"x": torch.ones(1)}, after / "optimizer.safetensors")
    save_file(moved(1.0, 0.6, seed=2), other)
    return before, after, other


def test_streamed_is_the_same(folders: tuple[Path, Path, Path]) -> None:
    before, after, _ = (stored_weights(path) for path in folders)
    assert len(before) == 3
    found, direct = compare(before, after), compare(weights(), moved(1.0, 0.3))
    assert {one.name: one for one in found.tensors} == {one.name: one for one in direct.tensors}


def test_weights_of_a_checkpoint_without_its_model(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "weights.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "optimizer.safetensors")
    assert set(stored_weights(tmp_path)) == set(LAYERS)


def test_command_in_json(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, other = map(str, folders)
    assert (
        main(["sparsity", before, after, "--against", other, "--dtype", "float32", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    direct = compare(weights(), moved(1.0, 0.3), dtype="float32")
    assert found["sparsity"] == direct.sparsity
    assert (found["dtype"], found["tol"], found["parameters"]) == ("float32", 1e-5, 78)
    both = overlap(weights(), moved(1.0, 0.3), moved(1.0, 0.6, seed=2), dtype="float32")
    assert found["overlap"]["first"] == both.first
    assert set(found["layer_density"]) == {"0", "1"}


def test_command_says_dtype_and_tolerance(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, other = map(str, folders)
    assert main(["sparsity", before, after, "--against", other, "--tol", "0.001", "--rank"]) == 0
    out = capsys.readouterr().out
    for line in out.splitlines():
        if "%" in line and not line.strip()[0].isdigit():
            assert "bfloat16" in line
    assert "unchanged within 0.001, in bfloat16" in out
    assert main(["sparsity", before, after, "--dtype", "stored"]) == 0
    assert "unchanged to the bit, as stored:" in capsys.readouterr().out


def test_command_refuses(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "not.safetensors").write_bytes(b"no")
    for arguments, expected in (
        ([str(tmp_path / "none"), str(folders[1])], "no such file or folder"),
        ([str(tmp_path / "empty"), str(folders[1])], "holds no .safetensors file"),
        ([str(tmp_path / "not.safetensors"), str(folders[1])], "not a safetensors file"),
        ([str(folders[0]), str(folders[1]), "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
    ):
        assert main(["sparsity", *arguments]) == 2
        seen = capsys.readouterr()
        assert expected in seen.err
        assert seen.err.count("\n") == 1
        assert seen.out == ""
