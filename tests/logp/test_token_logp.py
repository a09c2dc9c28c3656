"""token_logp against autograd of the plain formula, in float64."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from proxpo.errors import ProxpoError
from proxpo.logp import LogpEntropy, token_logp

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def plain(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None):
    """The formula with all logits in memory."""
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    every = (z / temperature).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return LogpEntropy(every.gather(-1, targets[..., None])[..., 0], entropy)


def problem(*lead, dim=5, vocab=19, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight, bias = (
        normal(*s).requires_grad_() for s in ((*lead, dim), (vocab, dim), (vocab,))
    )
    targets = torch.randint(0, vocab, lead, generator=generator)
    return hidden, weight, bias, targets


def pulled(result, inputs, seed=1):
    """Gradients under random pulls on every output."""
    generator = torch.Generator().manual_seed(seed)
    outputs = list(result) if isinstance(result, LogpEntropy) else [result]
    pulls = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    return torch.autograd.grad(outputs, inputs, pulls)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [6, 19, 60, 10_000, None])
def test_values_and_gradients_are_those_of_the_formula(chunk, temperature, softcap):
    hidden, weight, bias, targets = problem(3, 4)
    options = {"bias": bias, "temperature": temperature, "softcap": softcap}
    ours = token_logp(hidden, weight, targets, entropy=True, chunk=chunk, **options)
    theirs = plain(hidden, weight, targets, **options)
    assert_close(tuple(ours), tuple(theirs), **EXACT)
    inputs = (hidden, weight, bias)
    assert_close(pulled(ours, inputs), pulled(theirs, inputs), **EXACT)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_every_subset_of_inputs_may_require_gradients(wanted):
    hidden, weight, bias, targets = problem(6)
    inputs = [x.detach().requires_grad_(w) for x, w in zip((hidden, weight, bias), wanted)]
    trained = [x for x in inputs if x.requires_grad]
    ours = token_logp(inputs[0], inputs[1], targets, bias=inputs[2], chunk=40)
    if not trained:
        assert not ours.requires_grad
        return
    theirs = plain(inputs[0], inputs[1], targets, bias=inputs[2]).logp
    assert_close(pulled(ours, trained), pulled(theirs, trained), **EXACT)


@pytest.mark.parametrize("part", ["logp", "entropy"])
def test_one_output_alone_may_be_pulled(part):
    hidden, weight, _, targets = problem(7)
    ours = getattr(token_logp(hidden, weight, targets, entropy=True, chunk=30), part)
    theirs = getattr(plain(hidden, weight, targets), part)
    assert_close(pulled(ours, (hidden, weight)), pulled(theirs, (hidden, weight)), **EXACT)


def test_gradcheck():
    hidden, weight, bias, targets = problem(3, dim=2, vocab=5)

    def scores(hidden, weight, bias):
        return tuple(
            token_logp(
                hidden,
                weight,
                targets,
                bias=bias,
                temperature=1.3,
                softcap=2.0,
                entropy=True,
                chunk=4,
            )
        )

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 9),
    dim=st.integers(1, 4),
    vocab=st.integers(1, 200),
    chunk=st.integers(30, 3000),
    scored=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_any_size_any_chunk_any_mask(tokens, dim, vocab, chunk, scored):
    hidden, weight, bias, targets = problem(tokens, dim=dim, vocab=vocab)
    mask = torch.tensor(scored[:tokens], dtype=torch.bool)
    ours = token_logp(hidden, weight, targets, bias=bias, mask=mask, entropy=True, chunk=chunk)
    logp, entropy = (x * mask for x in plain(hidden, weight, targets, bias=bias))
    theirs = LogpEntropy(logp, entropy)
    assert_close(tuple(ours), tuple(theirs), rtol=1e-10, atol=1e-11)
    inputs = (hidden, weight, bias)
    assert_close(pulled(ours, inputs), pulled(theirs, inputs), rtol=1e-10, atol=1e-11)


def test_masked_positions_may_hold_anything():
    hidden, weight, bias, targets = problem(2, 5)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=torch.bool)
    dirty = hidden.detach().masked_fill(~mask[..., None], float("nan")).requires_grad_()
    ids = targets.masked_fill(~mask, -100)
    ours = token_logp(dirty, weight, ids, bias=bias, mask=mask, entropy=True)
    theirs = plain(hidden, weight, targets, bias=bias)
    assert_close(ours.logp, theirs.logp * mask, **EXACT)
    assert_close(ours.entropy, theirs.entropy * mask, **EXACT)
    d_dirty, d_weight = torch.autograd.grad(ours.logp.sum(), (dirty, weight))
    e_hidden, e_weight = torch.autograd.grad((theirs.logp * mask).sum(), (hidden, weight))
    assert_close((d_dirty, d_weight), (e_hidden, e_weight), **EXACT)


def test_nothing_to_score():
    hidden, weight, _, targets = problem(2, 3)
    logp = token_logp(hidden, weight, targets, mask=torch.zeros(2, 3, dtype=torch.bool))
    assert_close(logp, torch.zeros(2, 3, dtype=torch.float64))
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert_close(grads, (torch.zeros_like(hidden), torch.zeros_like(weight)))


def test_banned_tokens_and_huge_logits_stay_finite():
    hidden, weight, bias, targets = problem(8)
    banned = (targets + 1) % 19
    with torch.no_grad():
        bias[banned] = float("-inf")
        hidden *= 300.0
    keep = ~torch.isin(targets, banned)
    ours = token_logp(hidden, weight, targets, bias=bias, mask=keep, entropy=True, chunk=24)
    z = hidden @ weight.T + bias
    every = z.log_softmax(-1)
    terms = torch.where(every.isinf(), 0.0, every.exp() * every)
    assert_close(
        ours.logp, every.gather(1, targets[:, None])[:, 0].masked_fill(~keep, 0.0), **EXACT
    )
    assert_close(ours.entropy, -terms.sum(-1) * keep, rtol=1e-9, atol=1e-9)
    for grad in pulled(ours, (hidden, weight)):
        assert grad.isfinite().all()


def test_nan_activations_show():
    hidden, weight, _, targets = problem(4)
    with torch.no_grad():
        hidden[2, 0] = float("nan")
    assert token_logp(hidden, weight, targets).isnan().tolist() == [False, False, True, False]


def test_half_precision_input_gets_float32_statistics():
    hidden, weight, bias, targets = problem(6, dim=8, dtype=torch.bfloat16)
    ours = token_logp(hidden, weight, targets, bias=bias, entropy=True, chunk=50)
    assert ours.logp.dtype == ours.entropy.dtype == torch.float32
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    theirs = plain(wide[0], wide[1], targets, bias=wide[2])
    assert_close(tuple(ours), tuple(theirs), rtol=0.02, atol=0.03)  # the logits are bfloat16
    mine, full = pulled(ours, (hidden, weight, bias)), pulled(theirs, wide)
    assert [g.dtype for g in mine] == [torch.bfloat16] * 3
    for a, b in zip(mine, full):
        assert (a.float() - b).norm() < 0.02 * b.norm()


def test_autocast_is_what_a_linear_layer_does():
    hidden, weight, _, targets = problem(6, dim=8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = token_logp(hidden, weight, targets)
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    theirs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    d_hidden, d_weight = pulled(ours, (hidden, weight))
    assert d_hidden.dtype == d_weight.dtype == torch.float32
    e_hidden, e_weight = pulled(theirs, (hidden, weight))
    assert (d_weight - e_weight).norm() < 0.01 * e_weight.norm()
    assert (d_hidden - e_hidden).norm() < 0.01 * e_hidden.norm()


def test_inside_a_compiled_function():
    hidden, weight, bias, targets = problem(6)

    def loss(hidden, weight, bias):
        logp = token_logp(hidden * 2.0, weight, targets, bias=bias, chunk=40)
        return logp.square().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    inputs = (hidden, weight, bias)
    assert_close(pulled(compiled(*inputs), inputs), pulled(loss(*inputs), inputs), **EXACT)


class _Largest(TorchDispatchMode):
    """The most entries any tensor had."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return out


def test_tokens_times_vocabulary_never_exist():
    tokens, dim, vocab, chunk = 96, 4, 400, 2000
    hidden, weight, bias, targets = problem(tokens, dim=dim, vocab=vocab)
    with _Largest() as observed:
        ours = token_logp(hidden, weight, targets, bias=bias, entropy=True, chunk=chunk)
        (ours.logp.sum() + ours.entropy.sum()).backward()
    assert observed.entries <= max(1.5 * chunk, vocab * dim)
    with _Largest() as observed:
        plain(hidden, weight, targets).logp.sum().backward()
    assert observed.entries == tokens * vocab  # the probe sees what it should


def peak_bytes(step):
    """The most memory that was held at once, from the profiler's record of allocations."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    deltas = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(itertools.accumulate(deltas))


def test_peak_memory_is_a_few_tiles():
    hidden, weight, _, targets = problem(512, dim=8, vocab=2048)
    chunk = 1 << 15
    fused = peak_bytes(lambda: token_logp(hidden, weight, targets, chunk=chunk).sum().backward())
    naive = peak_bytes(lambda: plain(hidden, weight, targets).logp.sum().backward())
    kept = 8 * (hidden.numel() + weight.numel())
    assert fused < 3 * kept + 6 * 8 * chunk
    assert naive > 3 * 8 * 512 * 2048 > 10 * fused


def test_between_passes_one_number_per_token_is_kept():
    hidden, weight, _, targets = problem(64, dim=4, vocab=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_logp(hidden, weight, targets)
    assert sorted(x.numel() for x in kept) == sorted([64 * 4, 50 * 4, 64, 64])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"head_weight": torch.zeros(19, 6, dtype=torch.float64)},
            r"must share dim; got \[3, 4, 5\]",
        ),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "one per row of hidden"),
        ({"targets": torch.zeros(3, 4)}, "must be token ids"),
        ({"targets": torch.full((3, 4), 19)}, r"must lie in 0\.\.18; found 19"),
        ({"targets": torch.full((3, 4), -100)}, r"found -100 \(mask out"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, "one entry per row of head_weight"),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, "shaped like targets"),
        ({"mask": torch.ones(3, 4)}, "mask must be bool"),
        ({"head_weight": torch.zeros(19, 5)}, "one dtype outside autocast"),
        ({"temperature": 0.0}, "temperature must be positive and finite; got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"chunk": 0}, "chunk must be positive"),
    ],
)
def test_mistakes_are_named(change, message):
    hidden, weight, _, targets = problem(3, 4)
    arguments = {"hidden": hidden, "head_weight": weight, "targets": targets} | change
    unchecked = inspect.unwrap(token_logp)  # as users without a type checker call it
    with pytest.raises(ProxpoError, match=message):
        unchecked(**arguments)
