"""token_kl against whole distributions in float64; model_states against the model's own logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_model_logp import FAMILIES, Rollout, build
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.logp import HeadInput, model_states, token_kl


def made(seed: int, tokens: int, vocab: int, dim: int = 6, *, spread: float = 1.0, **after):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((tokens, dim), (vocab, dim), (vocab,))
    hidden, weight, bias = (
        spread * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes
    )
    return HeadInput(hidden, weight, bias, **after)


def slow(own: HeadInput, other: HeadInput, temperature: float):
    """KL and entropy from all logits at once."""

    def logp(side: HeadInput) -> torch.Tensor:
        x = side.hidden @ side.weight.T + side.bias
        if side.softcap is not None:
            x = side.softcap * torch.tanh(x / side.softcap)
        return (side.scale * x / temperature).log_softmax(-1)

    p, q = logp(own), logp(other)
    return (p.exp() * (p - q)).sum(-1), -(p.exp() * p).sum(-1)


@given(
    st.integers(0, 9), st.integers(1, 100), st.integers(1, 1000), st.sampled_from([0.5, 1.0, 1.7])
)
def test_tiles_give_the_sum_over_the_vocabulary(tokens, vocab, chunk, temperature):
    own, other = made(0, tokens, vocab), made(1, tokens, vocab, dim=4)
    kl, entropy = token_kl(own, other, temperature=temperature, chunk=chunk)
    expected = slow(own, other, temperature)
    assert_close(kl, expected[0], rtol=1e-11, atol=1e-12)
    assert_close(entropy, expected[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("after", [{"softcap": 0.7}, {"scale": 0.2}])
def test_map_after_the_head(after):
    own, other = made(0, 5, 300, **after), made(1, 5, 300)
    kl, entropy = token_kl(own, other, temperature=0.8, chunk=600)
    expected = slow(own, other, 0.8)
    assert_close((kl, entropy), expected, rtol=1e-11, atol=1e-12)


def test_a_distribution_is_at_no_distance_from_itself():
    own = made(0, 5, 300, spread=4.0)
    single = HeadInput(*(x.float() for x in own[:3]))
    assert (token_kl(single, single, chunk=512).kl == 0).all()


def test_entries_without_probability_count_nothing():
    """-∞ in both is a token that neither samples; in π_other alone the distance is infinite."""
    own, other = made(0, 3, 300), made(1, 3, 300)
    for side in (own, other):
        side.bias[17] = -torch.inf
    kept = [i for i in range(300) if i != 17]
    short = [HeadInput(x.hidden, x.weight[kept], x.bias[kept]) for x in (own, other)]
    expected = slow(*short, 1.0)
    assert_close(tuple(token_kl(own, other, chunk=200)), expected, rtol=1e-11, atol=1e-12)
    other.bias[200] = -torch.inf
    assert token_kl(own, other, chunk=200).kl.isposinf().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_model_give_its_distributions(family):
    """Twice: in the first call a model is asked what it does after its head."""
    torch.manual_seed(0)
    models, rollout = [build(family), build(family)], Rollout()
    positions = (rollout.attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": rollout.attention, "position_ids": positions}
    with torch.no_grad():
        width = rollout.mask.shape[1]
        p, q = (
            (model(rollout.ids, **inputs).logits[:, -width - 1 : -1] / 0.8).log_softmax(-1)
            for model in models
        )
    expected = (p.exp() * (p - q)).sum(-1)[rollout.mask]
    for _ in range(2):
        sides = [
            model_states(model, rollout.ids, rollout.mask, attention_mask=rollout.attention)
            for model in models
        ]
        kl, entropy = token_kl(*sides, temperature=0.8, chunk=64)
        assert_close(kl, expected, rtol=1e-9, atol=1e-11)
        assert_close(entropy, -(p.exp() * p).sum(-1)[rollout.mask], rtol=1e-9, atol=1e-11)


def test_refusals():
    with pytest.raises(ProxpoError, match="as many tokens and one vocabulary"):
        token_kl(made(0, 3, 50), made(1, 3, 51))
    with pytest.raises(ProxpoError, match="token_kl: temperature must be positive"):
        token_kl(made(0, 3, 50), made(1, 3, 50), temperature=0.0)
