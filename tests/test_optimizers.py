import copy
import inspect
import io
import sys
from typing import get_args

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.optimizers import NAMES, Combined, hidden_weights, make_optimizer
from proxpo.train._schema import Optimizer

ALL = pytest.mark.parametrize("name", NAMES)


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.RMSNorm(16)
        self.down = nn.Linear(16, 8, bias=False)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(self.norm(torch.tanh(self.up(self.embed(ids))))))


def net(seed: int = 0, **kwargs) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**kwargs)


IDS = torch.arange(22).reshape(2, 11).remainder(11)
NEXT = (3 * IDS + 1).remainder(11)


def nll(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), NEXT.flatten(), reduction="sum")


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nll(model).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


RATE = {"adamw": 1e-2, "sgd": 1e-2, "muon": 1e-2, "soap": 1e-2, "shampoo": 1e-1, "kfac": 3e-2}


def test_the_setting_offers_every_optimizer():
    assert get_args(Optimizer) == NAMES


@ALL
def test_loss_falls(name):
    model = net()
    before = nll(model).item()
    run(model, make_optimizer(name, model, lr=RATE[name]), 40)
    assert nll(model).item() < 0.5 * before


@ALL
@pytest.mark.checks("optimizers", "every optimizer is a torch Optimizer whose state round-trips")
def test_state_round_trips(name):
    model = net()
    optimizer = make_optimizer(name, model, lr=RATE[name])
    assert isinstance(optimizer, torch.optim.Optimizer)
    run(model, optimizer, 12)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    # weights_only: the state is tensors, numbers and containers, nothing that needs code to load.
    state = torch.load(buffer, weights_only=True)
    twin = net(seed=1)
    twin.load_state_dict(model.state_dict())
    other = make_optimizer(name, twin, lr=123.0)
    other.load_state_dict(state)
    run(model, optimizer, 12)
    run(twin, other, 12)
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)


@ALL
def test_schedulers_reach_every_part(name):
    model = net()
    optimizer = make_optimizer(name, model, lr=RATE[name], weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))
    for _ in range(3):
        run(model, optimizer, 1)
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    before = weights(model)
    run(model, optimizer, 2)
    assert all(torch.equal(p, q) for p, q in zip(weights(model), before))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    run(model, optimizer, 2)
    assert all(not torch.equal(p, q) for p, q in zip(weights(model), before))


@ALL
def test_frozen_parameters_stay(name):
    model = net()
    model.embed.requires_grad_(False)
    model.down.requires_grad_(False)
    embed, down, up = (w.detach().clone() for w in (
        model.embed.weight, model.down.weight, model.up.weight))  # fmt: skip
    run(model, make_optimizer(name, model, lr=RATE[name]), 3)
    assert torch.equal(model.embed.weight, embed)
    assert torch.equal(model.down.weight, down)
    assert not torch.equal(model.up.weight, up)


@pytest.mark.checks(
    "optimizers", "SGD steps by its rate times the gradient, and decays weights apart"
)
def test_sgd_is_the_gradient_alone():
    model = net()
    before = weights(model)
    nll(model).backward()
    make_optimizer("sgd", model, lr=0.1, weight_decay=0.2).step()
    for now, p, w in zip(model.parameters(), model.parameters(), before):
        assert_close(now.detach(), w - 0.1 * p.grad - 0.1 * 0.2 * w)


def test_sgd_refuses_a_decay_that_momentum_would_hold():
    with pytest.raises(ProxpoError, match=r"with momentum .* set weight_decay=0"):
        make_optimizer("sgd", net(), lr=0.1, momentum=0.9)
    make_optimizer("sgd", net(), lr=0.1, momentum=0.9, weight_decay=0.0)


@pytest.mark.checks("optimizers", "Muon itself refuses vectors")
def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_hidden_matrices_only(tied):
    model = net(tied=tied)
    assert list(hidden_weights(model)) == ["up.weight", "down.weight"]
    muon, adamw = make_optimizer("muon", model, lr=1e-3).parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    counts = [sum(len(g["params"]) for g in part.param_groups) for part in (muon, adamw)]
    assert counts == [2, len(list(model.parameters())) - 2]


def test_hidden_weights_of_a_hugging_face_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    actual = hidden_weights(GPT2LMHeadModel(config))
    assert [name.removeprefix("transformer.h.0.") for name in actual] == [
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    ]  # fmt: skip


@pytest.mark.checks("optimizers", "Muon's first update is nearly orthogonal, scaled by its rate")
def test_first_muon_update_is_nearly_orthogonal():
    model = net()
    before = model.up.weight.detach().clone()
    optimizer = make_optimizer("muon", model, lr=1e-2, weight_decay=0.0)
    model.up.weight.grad = nn.init.orthogonal_(torch.empty(16, 8)) + 0.1 * torch.randn(16, 8)
    optimizer.step()
    update = (model.up.weight.detach() - before) / (1e-2 * 0.2 * 16**0.5)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6
    assert values.max() < 1.25


def first_step(name: str, scale: float) -> list[torch.Tensor]:
    model = net()
    optimizer = make_optimizer(name, model, lr=1e-2, weight_decay=0.0)
    (scale * nll(model)).backward()
    before = weights(model)
    optimizer.step()
    return [p - q for p, q in zip(weights(model), before)]


@pytest.mark.checks("optimizers", "Muon and AdamW do not see the scale of the gradient")
@pytest.mark.parametrize(("name", "scale"), [("adamw", 10.0), ("muon", 8.0), ("muon", 10.0)])
def test_scale_of_the_gradient_is_invisible(name, scale):
    plain, scaled = first_step(name, 1.0), first_step(name, scale)
    for i, (p, q) in enumerate(zip(plain, scaled)):
        exact = name == "muon" and scale == 8.0 and i in (1, 4)  # the two matrices Muon takes
        assert_close(q, p, rtol=0, atol=0.0 if exact else 3e-2 * 1e-2)
    assert plain[1].abs().max() > 1e-3


@pytest.mark.checks("optimizers", "ISOPO with all exponents 0 under AdamW is REINFORCE under AdamW")
def test_neutral_isopo_with_adamw_is_reinforce():
    from proxpo import gradients

    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    sequences = torch.arange(2)[:, None].expand_as(IDS)
    plain, transformed = net().double(), net().double()
    optimizers = [make_optimizer("adamw", m, lr=1e-2) for m in (plain, transformed)]
    transform = gradients.isopo(p=0.0, q=0.0, r=0.0, overlap="all")

    def logp(model: nn.Module) -> torch.Tensor:
        return model(IDS).log_softmax(-1).gather(-1, NEXT[..., None])[..., 0]

    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (-(logp(plain).sum(1) * advantages).sum()).backward()
        with transform.applied(transformed, sequences=sequences, advantages=advantages):
            (-logp(transformed).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        transform.step()
    for p, q in zip(plain.parameters(), transformed.parameters()):
        assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_kfac_factors_see_the_backward_of_their_layer():
    """K Kᵀ tends to the inverse of mean a aᵀ, C Cᵀ to that of Σ g gᵀ, both damped."""
    model = net().double()
    optimizer = make_optimizer("kfac", model, lr=0.0, lr_cov=0.1, damping=1e-2, weight_decay=0.0)
    singd = optimizer.parts[0]
    run(model, optimizer, 400)
    inputs, grads = [], []
    model.down.register_forward_hook(lambda m, args, out: inputs.append(args[0].flatten(0, 1)))
    model.down.register_full_backward_hook(lambda m, gi, go: grads.append(go[0].flatten(0, 1)))
    nll(model).backward()
    (a,), (g,) = inputs, grads
    for factor, matrix in ((singd.Ks, a.T @ a / len(a)), (singd.Cs, g.T @ g)):
        dense = factor["down"].to_dense()
        damped = matrix + 1e-2 * torch.eye(len(matrix), dtype=matrix.dtype)
        assert_close(dense @ dense.T @ damped, torch.eye(len(matrix)).double(), rtol=0, atol=5e-2)


def test_one_optimizer_gives_one_weight_decay():
    """A zero gradient: all parameters shrink by the same factor, in every step but SOAP's first."""
    for name in NAMES:
        model = net()
        optimizer = make_optimizer(name, model, lr=0.1, weight_decay=0.5)
        for step in range(3):
            before = weights(model)
            optimizer.zero_grad()
            (0.0 * nll(model)).backward()
            optimizer.step()
            for p, q in zip(weights(model), before):
                assert_close(p, q if (name, step) == ("soap", 0) else 0.95 * q)


def test_a_copy_goes_on_as_the_original():
    model = net()
    optimizer = make_optimizer("muon", model, lr=1e-2)
    run(model, optimizer, 3)
    twin, copied = copy.deepcopy((model, optimizer))
    run(model, optimizer, 3)
    run(twin, copied, 3)
    assert all(torch.equal(p, q) for p, q in zip(weights(model), weights(twin)))


def test_what_would_not_be_trained_or_copied_is_refused():
    with pytest.raises(ProxpoError, match="takes no further parameters"):
        make_optimizer("muon", net(), 1e-2).add_param_group({"params": [torch.ones(2)]})
    with pytest.raises(ProxpoError, match="SINGD cannot be copied"):
        copy.deepcopy(make_optimizer("kfac", net(), 1e-2))
    with pytest.raises(ProxpoError, match="lr takes a number from 0 on, got -1"):
        make_optimizer("adamw", net(), -1.0)


def test_rest_has_its_own_options():
    optimizer = make_optimizer("muon", net(), 1e-2, rest={"lr": 1e-3, "betas": (0.8, 0.9)})
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 1e-3]
    assert optimizer.parts[1].param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("addamw", {}, "unknown optimizer 'addamw'; did you mean 'adamw'"),
        ("muon", {"momentun": 0.9}, "'muon' has no option 'momentun'; did you mean 'momentum'"),
        ("soap", {"beta": (0.9, 0.9)}, "'soap' has no option 'beta'; did you mean 'betas'"),
        ("kfac", {"dampning": 0.1}, "'kfac' has no option 'dampning'; did you mean 'damping'"),
        ("muon", {"rest": {"beta": 1}}, "has no option 'beta'"),
    ],
)
def test_errors_name_the_nearest(name, options, message):
    with pytest.raises(ProxpoError, match=message):
        make_optimizer(name, net(), 1e-3, **options)


WRONG = ("x", 3, -1, [], [0.5], [1, 2, 3, 4], ["a", "b"], {"a": 1}, None, True, float("inf"))


@pytest.mark.long
@ALL
def test_options_of_wrong_types_are_refused_in_one_line(name):
    """Or the optimizer works with them; nothing fails later, in a run."""
    optimizer = make_optimizer(name, net(), 1e-3)
    known = type(optimizer.parts[0] if isinstance(optimizer, Combined) else optimizer)
    options = [*inspect.signature(known.__init__).parameters, "rest"]
    refused: list[str] = []
    for option in set(options) - {"self", "model", "params", "kwargs", "lr", "weight_decay"}:
        for value in WRONG:
            model = net()
            try:
                run(model, make_optimizer(name, model, 1e-3, **{option: value}), 1)
            except ProxpoError as error:
                refused.append(str(error))
    assert len(refused) > 5 * len(options)
    assert [line for line in refused if "\n" in line or not line.startswith("optimizer '")] == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw", {"betas": 3}, "'adamw': option 'betas' takes tuple.*, got 3"),
        ("adamw", {"betas": [0.9, "x"]}, "option 'betas' takes float.*, got 'x'"),
        ("adamw", {"amsgrad": "no"}, "option 'amsgrad' takes bool, got 'no'"),
        ("adamw", {"rest": {"lr": 1}}, "'adamw' has no option 'rest': it takes every parameter"),
        ("soap", {"precondition_frequency": 0}, "'soap' cannot work with these options: "),
        ("kfac", {"structures": ["dense", "dens"]}, "'kfac' cannot work with these options: "),
    ],
)
def test_wrong_options_say_what_was_expected(name, options, message):
    with pytest.raises(ProxpoError, match=message):
        make_optimizer(name, net(), 1e-3, **options)


@pytest.mark.parametrize(
    ("name", "package"), [("soap", "pytorch_optimizer"), ("shampoo", "pytorch_optimizer"),
                          ("kfac", "singd.optim.optimizer")],
)  # fmt: skip
def test_missing_package_names_the_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ProxpoError, match=rf"{package.split('.')[0]}: pip install 'proxpo\[optimizers\]'"
    ):
        make_optimizer(name, net(), 1e-3)


def test_nothing_to_train():
    with pytest.raises(ProxpoError, match="no trainable parameter"):
        make_optimizer("adamw", net().requires_grad_(False), 1e-3)
    with pytest.raises(ProxpoError, match="no trainable hidden matrix"):
        make_optimizer("muon", nn.Embedding(3, 4), 1e-3)
    model = net()
    model.up.bias.requires_grad_(False)
    with pytest.raises(ProxpoError, match="trains its weight but not its bias"):
        make_optimizer("kfac", model, 1e-3)
