"""Gradient transforms in recorded passes: gradients, averages and draws of the ordinary block."""

from functools import partial

import pytest
import torch
from recorder import record
from replay.test_prefix import SHAPE, make_rows
from torch import nn
from torch.testing import assert_close
from train.test_cuts import trained
from train.train_runs import job_of, options_of, sample
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from proxpo import gradients
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.logp import model_logp
from proxpo.models import Policy
from proxpo.replay.graphs import PolicyGraphs
from proxpo.replay.inputs import row_inputs
from proxpo.train.experience import Experience
from proxpo.train.minibatch import gradients as mini_batch

EXACT = {"rtol": 1e-9, "atol": 1e-11}
TRANSFORMS = {
    "isopo": partial(gradients.isopo, overlap=8),
    "figure4": partial(gradients.isopo, overlap=8, preset="figure4", reg=0.3),
    "euclidean": partial(gradients.isopo, preset="euclidean", path="stream"),
    "sketch": partial(gradients.isopo, overlap=8, r=-1.0, norm="sketch", sketch=4, scale="mean"),
    "ntk": partial(gradients.isopo_ntk, group_by="prompt"),
}
NTK = [gradients.isopo_ntk, TRANSFORMS["ntk"]]
GROUPS = {"prompts": [3, 5, 4], "samples": [2, 3, 1]}
SMALL = SHAPE | {"num_hidden_layers": 1}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
}
LENGTHS = ([2, 5, 1, 4, 3, 5], [9, 1, 2, 2, 7, 3])  # two micro-batches of one padded shape
LONGER = [70, 9, 2, 2, 7, 3]


def make_model(name: str) -> nn.Module:
    """In float64, norms included."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for parent in list(model.modules()):
        for own, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon).double()
                setattr(parent, own, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ordinary(model, transform, rows: Experience, advantages, weights) -> torch.Tensor:
    """A block on the same padded rows through the model's own forward."""
    inputs = row_inputs(rows)
    inputs = inputs.padded(inputs.shape.rounded())
    real = inputs.sequences >= 0
    answers = real & (torch.arange(real.shape[1]) >= inputs.start[:, None])
    options = {"sequences": inputs.sequences, "advantages": advantages, "groups": rows.group}
    with transform.applied(model, **options):
        logp = model_logp(model, inputs.ids, answers[:, 1:], attention_mask=real, temperature=0.7)
        token = inputs.start[:, None] - 1 + torch.arange(rows.mask.shape[1])
        logp = torch.where(rows.mask, logp.gather(1, token), 0.0)
        (logp * weights).sum().backward()
    return logp.detach()


def replayed(graphs: PolicyGraphs, rows: Experience, advantages, weights) -> torch.Tensor:
    wanted = {"temperature": 0.7, "entropy": False}
    with graphs.applied(rows, advantages=advantages, **wanted):
        logp = graphs.fields(rows, **wanted)["logp"]
        (logp * weights).sum().backward()
    return logp.detach()


def make_graphs(model, transform, recorder=record) -> PolicyGraphs:
    policy = Policy(model, None, [0], 0, "tiny", 64, torch.float64)
    return PolicyGraphs(policy, transform=transform, record=recorder)


def updates(model, transform, run, *, number: int = 3, groups=GROUPS, lengths=LENGTHS):
    """Gradients and log-probabilities of some updates of two micro-batches, and the state."""
    seen = []
    draw = torch.Generator().manual_seed(3)
    for _ in range(number):
        model.zero_grad()
        for own in lengths:
            rows = make_rows(**groups, lengths=own, shuffled=own is lengths[1])
            advantages = torch.randn(len(rows.mask), generator=draw, dtype=torch.float64)
            weights = torch.rand(rows.mask.shape, generator=draw, dtype=torch.float64) * rows.mask
            seen.append(run(rows, advantages, weights))
        seen += [p.grad.clone() for p in model.parameters()]
        transform.step()
    return seen, transform.state_dict()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_replays_give_the_gradients_and_averages_of_ordinary_blocks(name):
    model = make_model("qwen3")
    plain, ours = TRANSFORMS[name](), TRANSFORMS[name]()
    graphs = make_graphs(model, ours)
    expected = updates(model, plain, partial(ordinary, model, plain))
    result = updates(model, ours, partial(replayed, graphs))
    assert_close(result, expected, **EXACT)
    assert [run.recorded for run in graphs._runs.values()] == [True]


@pytest.mark.parametrize(
    "rule",
    [partial(TRANSFORMS["figure4"], overlap="all", scale="mean"), *NTK],
    ids=["figure4", "ntk", "ntk by prompt"],
)
def test_rows_of_padding_change_nothing(rule, monkeypatch):
    """Five rows in a shape of six: averages and means over sequences count the five."""
    for module in ("graphs", "inputs"):
        monkeypatch.setattr(f"proxpo.replay.{module}.rounded", lambda count: count + 1)
    groups, lengths = {"prompts": [3, 5], "samples": [2, 3]}, ([2, 5, 1, 4, 3], [4, 1, 2, 2, 7])
    model, plain, ours = make_model("llama"), rule(), rule()
    graphs = make_graphs(model, ours)
    expected = updates(
        model, plain, partial(ordinary, model, plain), groups=groups, lengths=lengths
    )
    result = updates(model, ours, partial(replayed, graphs), groups=groups, lengths=lengths)
    assert_close(result, expected, **EXACT)


def test_a_run_continues_from_its_state():
    """A transform that is restored, and records anew, makes the same third update."""
    model, ours = make_model("qwen3"), TRANSFORMS["figure4"]()
    expected, _ = updates(model, ours, partial(replayed, make_graphs(model, ours)))
    first, second = TRANSFORMS["figure4"](), TRANSFORMS["figure4"]()
    updates(model, first, partial(replayed, make_graphs(model, first)), number=2)
    second.load_state_dict(first.state_dict())
    graphs = make_graphs(model, second)
    for _ in range(2):  # the second time in passes that knew other averages
        draw = torch.Generator().manual_seed(3)
        second.load_state_dict(first.state_dict())
        for step in range(3):
            model.zero_grad()
            for own in LENGTHS:
                rows = make_rows(**GROUPS, lengths=own, shuffled=own is LENGTHS[1])
                advantages = torch.randn(6, generator=draw, dtype=torch.float64)
                weights = torch.rand(rows.mask.shape, generator=draw, dtype=torch.float64)
                if step == 2:
                    replayed(graphs, rows, advantages, weights * rows.mask)
        gradient = [p.grad for p in model.parameters()]
        assert_close(gradient, expected[-len(gradient) :], **EXACT)


def test_what_is_not_finite_is_named_and_leaves_no_trace():
    model, ours = make_model("qwen3"), TRANSFORMS["figure4"]()
    graphs = make_graphs(model, ours)
    run = partial(replayed, graphs)
    updates(model, ours, run, number=2)
    state, rows = ours.state_dict(), make_rows(**GROUPS, lengths=LENGTHS[0])
    weights, advantages = rows.mask.double(), torch.ones(6, dtype=torch.float64)
    with pytest.raises(NotFiniteError, match="is not finite: its input"):
        run(rows, advantages, weights * torch.nan)
    ours.step()
    assert_close(ours.state_dict(), state, rtol=0, atol=0)
    with pytest.raises(ProxpoError, match="`advantages` holds NaN"):
        run(rows, advantages * torch.nan, weights)


def test_a_recording_that_fails_is_said_once():
    def fails(function):
        raise RuntimeError("no graph today")

    model, ours, plain = make_model("llama"), TRANSFORMS["isopo"](), TRANSFORMS["isopo"]()
    graphs = make_graphs(model, ours, fails)
    with pytest.warns(UserWarning, match="passes run unrecorded .no graph today") as said:
        result = updates(model, ours, partial(replayed, graphs), number=2)
    assert len(said) == 1
    assert_close(result, updates(model, plain, partial(ordinary, model, plain), number=2), **EXACT)


def test_a_recording_without_memory_frees_the_others():
    """CUDA ends such a capture with an error of its own, which hides the first one."""

    def fails(function):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    model, ours, plain = make_model("llama"), TRANSFORMS["isopo"](), TRANSFORMS["isopo"]()
    graphs = make_graphs(model, ours, fails)
    with pytest.warns(UserWarning, match="passes run unrecorded .CUDA out of memory"):
        result = updates(model, ours, partial(replayed, graphs), number=2)
    assert not graphs._runs
    assert_close(result, updates(model, plain, partial(ordinary, model, plain), number=2), **EXACT)


def test_a_pass_without_room_beside_the_recordings_takes_their_place(monkeypatch):
    """What recordings hold looks free to PyTorch, but only a further recording may use it."""

    class Recorder:
        bytes = 5 * 2**30

        def __call__(self, function):
            return record(function)

    model, ours, plain = make_model("llama"), TRANSFORMS["isopo"](), TRANSFORMS["isopo"]()
    graphs = make_graphs(model, ours, Recorder())
    run = partial(replayed, graphs)
    expected = [
        updates(model, plain, partial(ordinary, model, plain), lengths=lengths)
        for lengths in (LENGTHS, (LONGER, LONGER))
    ]
    assert_close(updates(model, ours, run), expected[0], **EXACT)
    assert all(known.recorded for known in graphs._runs.values())
    monkeypatch.setattr("proxpo.replay.graphs.free_memory", lambda device: graphs.held_bytes)
    with pytest.warns(UserWarning, match="no room beside 5.0 GiB of recordings, which are given"):
        assert_close(updates(model, ours, run, lengths=(LONGER, LONGER)), expected[1], **EXACT)
    assert not any(known.recorded for known in graphs._runs.values())
    assert graphs.held_bytes == 0


def test_a_mini_batch_in_recorded_passes_is_that_of_the_modules(tmp_path):
    """The KL term takes a pass of its own, in which prompts run once."""
    job = job_of(tmp_path, "recipe.regularisers=kl_to_ref", method="isopo-ntk")
    learner, data = job.learner, trained(job)
    transforms = [gradients.isopo_ntk(), gradients.isopo_ntk()]
    graphs = PolicyGraphs(job.policy, transform=transforms[1], record=record)
    for _ in range(3):
        outcomes = []
        for learner.graphs, learner.transform in zip((None, graphs), transforms):
            learner.optimizer.zero_grad()
            metrics, _ = mini_batch(
                learner, learner.recipe, data, options_of(job, micro_batch=8), seed=0
            )
            outcomes.append((metrics, [p.grad.clone() for p in learner.trainable()]))
            learner.transform.step()
        assert_close(*outcomes, rtol=1e-3, atol=1e-5)
    assert {run.recorded for run in graphs._runs.values()} == {True}
    job.close()


def test_a_gradient_scaled_by_another_survives_recorded_passes(tmp_path):
    """clipping_bias measures a second gradient before it scales the first."""
    found = []
    for recorded in (False, True):
        sets = ("schedule=clipping_bias", "updates_per_rollout=2", "optimizer=sgd", "lr=0.1")
        job = job_of(tmp_path, *sets, method="grpo")
        if recorded:
            job.learner.graphs = PolicyGraphs(job.policy, record=record)
        rows = sample(job).experience
        rows.rewards.copy_(torch.arange(len(rows.rewards)) % 4)
        metrics = job.update(rows)
        found.append((metrics, [p.detach().clone() for p in job.learner.trainable()]))
        job.close()
    (metrics, weights), (ours, own) = found
    assert metrics["grad_norm"] > 0
    assert ours == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    assert_close(own, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*TRANSFORMS, "head"])
def test_cuda_graphs_give_the_gradients_of_passes_run_anew(name):
    from proxpo.replay.graphs import CudaRecorder

    model = make_model("qwen3").float().cuda()

    def on_device(graphs, rows, advantages, weights):
        rows = rows.to("cuda")
        return replayed(graphs, rows, advantages.cuda().float(), weights.cuda().float())

    outcomes = []
    for recorder in (None, CudaRecorder()):
        head = partial(gradients.isopo, overlap=8, scope="head")
        transform = TRANSFORMS.get(name, head)()
        policy = Policy(model, None, [0], 0, "tiny", 64, torch.float32)
        graphs = PolicyGraphs(policy, transform=transform, record=recorder)
        outcomes.append(updates(model, transform, partial(on_device, graphs)))
        assert all(run.recorded is (recorder is not None) for run in graphs._runs.values())
    assert_close(outcomes[1], outcomes[0], rtol=1e-3, atol=1e-5)
