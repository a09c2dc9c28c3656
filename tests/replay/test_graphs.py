"""Recorded passes of the policy: the numbers and gradients of the model, in few shapes."""

import threading

import pytest
import torch
from replay.test_prefix import make_model, make_rows
from torch.autograd.graph import get_gradient_edge

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.recipes.reinforce import reinforce
from proxpo.replay.graphs import CudaRecorder, PolicyGraphs
from proxpo.train.build import build_job
from proxpo.train.config import load_config
from proxpo.train.scoring import Learner, LogpOptions, forward

ROWS = {"prompts": [3, 5, 4], "samples": [2, 3, 1], "lengths": [2, 5, 1, 4, 3, 5]}


def learner_of(model, graphs: bool, calls: list | None = None) -> Learner:
    policy = Policy(model, None, [0], 0, "tiny", 64, next(model.parameters()).dtype)

    def record(function):
        """Stands for a CUDA graph where there is none: runs the function, then repeats it."""
        function()
        calls.append(function)
        return function

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(policy=policy, recipe=reinforce(), optimizer=optimizer)
    if graphs:
        learner.graphs = PolicyGraphs(policy, record=None if calls is None else record)
    return learner


def run(learner: Learner, rows, *, entropy: bool, slope: torch.Tensor):
    wanted = frozenset({"entropy"} if entropy else set())
    fields = forward(learner, rows, LogpOptions(temperature=0.7, micro_batch=9, fields=wanted))
    loss = (fields["logp"] * slope).sum() + (fields["entropy"].sum() if entropy else 0.0)
    loss.backward()
    return fields


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_replayed_passes_have_the_numbers_and_gradients_of_the_model(recorded, entropy):
    rows = make_rows(**ROWS)
    slope = torch.randn(rows.mask.shape, dtype=torch.float64)
    plain, replayed = make_model(), make_model()
    replayed.load_state_dict(plain.state_dict())
    calls: list = []
    ours = learner_of(replayed, True, calls if recorded else None)
    for _ in range(3):  # gradients add up, as over micro-batches
        expected = run(learner_of(plain, False), rows, entropy=entropy, slope=slope)
        result = run(ours, rows, entropy=entropy, slope=slope)
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-9, atol=1e-9)
    assert len(calls) == (2 if recorded else 0)
    for p, q in zip(plain.parameters(), replayed.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9)


def test_gradients_set_to_none_start_from_zero():
    rows, model = make_rows(**ROWS), make_model()
    slope = torch.ones(rows.mask.shape, dtype=torch.float64)
    learner, gradients = learner_of(model, True, []), []
    for _ in range(3):
        run(learner, rows, entropy=False, slope=slope)
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    for first, last in zip(gradients[0], gradients[2]):
        torch.testing.assert_close(last, first, rtol=1e-12, atol=1e-12)


def test_other_lengths_share_a_shape():
    learner = learner_of(make_model(), True)
    slope = torch.ones(6, 9, dtype=torch.float64)
    for lengths in ([2, 5, 1, 4, 3, 9], [1, 1, 1, 9, 2, 2]):
        rows = make_rows(prompts=[3, 5, 4], samples=[2, 3, 1], lengths=lengths)
        run(learner, rows, entropy=False, slope=slope)
    assert len(learner.graphs._runs) == 1


@pytest.mark.parametrize("samples", [[1, 1, 1], [4, 4, 4]])  # whole rows, and prompts once
def test_a_known_shape_with_room_is_used_again(samples):
    large, small = [40, 25, 33], [31, 38, 17]
    learner = learner_of(make_model(), True)
    lengths = [3, 20, 7, 5, 9, 18, 1, 2, 6, 3, 4, 8][: sum(samples)]
    for prompts in (large, small, large):
        rows = make_rows(prompts=prompts, samples=samples, lengths=lengths)
        plain = make_model()
        plain.load_state_dict(learner.policy.model.state_dict())
        slope = torch.randn(rows.mask.shape, dtype=torch.float64)
        expected = run(learner_of(plain, False), rows, entropy=True, slope=slope)
        learner.policy.model.zero_grad(set_to_none=True)
        result = run(learner, rows, entropy=True, slope=slope)
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-9, atol=1e-9)
        for p, q in zip(plain.parameters(), learner.policy.model.parameters()):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9)
    (kind, shape), *others = learner.graphs._runs
    assert not others
    assert kind[0] == ("rows" if sum(samples) == 3 else "prompts")
    assert shape.prompt == 48


def test_a_backward_after_another_forward_is_refused():
    rows, learner = make_rows(**ROWS), learner_of(make_model(), True)
    options = LogpOptions(temperature=1.0, micro_batch=9)
    first = forward(learner, rows, options)["logp"]
    forward(learner, rows, options)
    with pytest.raises(ProxpoError, match="another forward pass came before"):
        first.sum().backward()


def test_a_pass_without_gradient_is_recorded_without_a_backward():
    rows, model, calls = make_rows(**ROWS), make_model(), []
    learner, options = learner_of(model, True, calls), LogpOptions(temperature=0.7, micro_batch=9)
    kept = []
    for _ in range(3):
        with torch.no_grad():
            kept.append(forward(learner, rows, options)["logp"])
    (scored,) = learner.graphs._runs.values()
    assert len(calls) == 1  # a backward that was never run cannot be recorded
    assert not any(x.requires_grad for x in scored.results)
    expected = run(learner, rows, entropy=False, slope=torch.ones_like(kept[0]))["logp"]
    for logp in kept:
        torch.testing.assert_close(logp, expected.detach(), rtol=1e-12, atol=1e-12)
    assert len(calls) == 1
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_that_is_held_does_not_enter_a_recording(device):
    """Its nodes for the parameters' gradients live on the default stream."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, rows = make_model().to(device), make_rows(**ROWS).to(device)
    close = {"rtol": 1e-9, "atol": 1e-12}
    if device == "cuda":
        model, close = model.float(), {"rtol": 1e-3, "atol": 1e-5}
    learner = learner_of(model, True, [])
    if device == "cuda":
        learner.graphs.record = CudaRecorder()
    slope = torch.ones_like(rows.rollout_logp)
    run(learner, rows, entropy=False, slope=slope)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    held = sum(p.sum() for p in model.parameters())
    for p in model.parameters():
        get_gradient_edge(p).node.metadata["held"] = True
    run(learner, rows, entropy=False, slope=slope)
    (recorded,) = learner.graphs._runs.values()
    assert recorded.recorded
    assert not any("held" in get_gradient_edge(p).node.metadata for p in model.parameters())
    for p, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, gradient, **close)
    model.zero_grad(set_to_none=True)
    held.backward()
    assert all((p.grad == 1).all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recording_does_not_depend_on_other_threads():
    """Another thread takes memory, computes and waits on the default stream meanwhile."""
    ended = threading.Event()

    def disturb() -> None:
        while not ended.is_set():
            float(torch.ones(1 << 20, device="cuda").sum())

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(10):
            model, rows = make_model().to("cuda").float(), make_rows(**ROWS).to("cuda")
            learner = learner_of(model, True, [])
            learner.graphs.record = CudaRecorder()
            slope = torch.ones_like(rows.rollout_logp)
            gradients = []
            for _ in range(3):
                run(learner, rows, entropy=False, slope=slope)
                gradients.append([p.grad.clone() for p in model.parameters()])
                model.zero_grad(set_to_none=True)
            assert all(known.recorded for known in learner.graphs._runs.values())
            for first, last in zip(gradients[0], gradients[2]):
                torch.testing.assert_close(last, first, rtol=1e-3, atol=1e-5)
    finally:
        ended.set()
        thread.join()


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ProxpoError, match=r"train\.graphs=on .*: it needs a CUDA device"):
        build_job(load_config("quickstart", ["train.graphs=on", "device=cpu"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("method", "parts"), [("grpo", 1), ("grpo", 2), ("p3o", 2), ("reinforce", 1), ("isopo-ntk", 1)]
)
def test_a_run_with_graphs_is_a_run_without(method, parts, tmp_path):
    from proxpo.train.loop import train
    from proxpo.train.observer import Observer

    losses: dict[str, list[float]] = {}
    for graphs in ("on", "off"):
        seen = losses[graphs] = []
        observer = Observer(on_step=lambda step, row, seen=seen: seen.append(row["loss"]))
        sets = [f"train.graphs={graphs}", "steps=4", "dtype=float32", "evaluate.every=0",
                "evaluate.size=8", "prompts_per_step=8", f"mini_batches={parts}",
                f"out={tmp_path / graphs}"]  # fmt: skip
        config = load_config("quickstart", sets, overrides={"method": method})
        train(config, observer=observer)
    torch.testing.assert_close(losses["on"], losses["off"], rtol=1e-3, atol=1e-4)
