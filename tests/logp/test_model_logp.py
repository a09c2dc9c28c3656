"""model_logp against the model's own logits: families, adapters, wrappers, padding, packing."""

import gc
import inspect
import weakref

import peft
import pytest
import torch
import torch.multiprocessing as mp
import transformers
import two_ranks
from torch import nn
from torch.testing import assert_close

from proxpo import gradients
from proxpo.errors import ProxpoError
from proxpo.logp import model_logp

VOCAB, ROWS, PROMPT, RESPONSE = 50, 3, 4, 5
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("Llama", {}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gemma3-softcap": ("Gemma3Text", {"head_dim": 8, "final_logit_softcapping": 0.7}),
    "granite-scale": ("Granite", {"logits_scaling": 6.0}),
    "cohere-scale": ("Cohere", {"logit_scale": 0.3}),
    "phi-bias": ("Phi", {}),
}
# Eager attention only, which is NaN in float64 where a prompt is padded: its softmax is in float32.
EAGER = {"gemma2-softcap": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 0.7})}


def build(family: str, dtype=torch.float64) -> nn.Module:
    name, options = (FAMILIES | EAGER)[family]
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for value in model.parameters():  # random models are near-uniform; make them disagree
            value.add_(0.3 * torch.randn_like(value))
    return model


class Rollout:
    """Prompts padded on the left, responses on the right."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, VOCAB, (ROWS, PROMPT + RESPONSE), generator=made)
        self.attention = torch.ones_like(self.ids)
        self.attention[0, :2] = 0
        self.attention[1, -2:] = 0
        self.mask = self.attention[:, PROMPT:].bool()

    def naive(self, model, temperature=0.8):
        """Log-probabilities and entropies of the response from all logits."""
        positions = (self.attention.cumsum(1) - 1).clamp(min=0)
        z = model(input_ids=self.ids, attention_mask=self.attention, position_ids=positions).logits
        every = (z[:, PROMPT - 1 : -1] / temperature).log_softmax(-1)
        logp = every.gather(-1, self.ids[:, PROMPT:, None])[..., 0]
        return logp * self.mask, -(every.exp() * every).sum(-1) * self.mask

    def fused(self, model, *, temperature=0.8, **options):
        return model_logp(
            model,
            self.ids,
            self.mask,
            attention_mask=self.attention,
            temperature=temperature,
            **options,
        )


def grads(model, *outputs):
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    pull = [torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    actual = torch.autograd.grad(outputs, list(trained.values()), pull, allow_unused=True)
    return {name: g for name, g in zip(trained, actual) if g is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_models_own_logits(family):
    model, rollout = build(family), Rollout()
    ours, theirs = rollout.fused(model, entropy=True), rollout.naive(model)
    assert_close(tuple(ours), theirs, rtol=0, atol=1e-10)
    assert_close(grads(model, *ours), grads(model, *theirs), rtol=1e-7, atol=1e-9)
    again = rollout.fused(model)  # now without probes
    assert_close(again, theirs[0], rtol=0, atol=1e-10)
    assert_close(grads(model, again), grads(model, rollout.naive(model)[0]), rtol=1e-7, atol=1e-9)
    assert "forward" not in model.get_output_embeddings().__dict__


@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2", "gemma2-softcap"])
def test_float32(family):
    model, rollout = build(family, torch.float32), Rollout()
    ours, theirs = rollout.fused(model, entropy=True), rollout.naive(model)
    assert ours.logp.dtype == torch.float32
    assert_close(tuple(ours), theirs, rtol=0, atol=1e-5)


def test_lora_trains_the_adapter():
    model, rollout = build("qwen3-tied"), Rollout()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    ours, theirs = rollout.fused(model), rollout.naive(model)[0]
    assert_close(ours, theirs, rtol=0, atol=1e-10)
    ours, theirs = grads(model, ours), grads(model, theirs)
    assert len(ours) == 8
    assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_head_among_the_modules_to_save():
    """The copy is scored while the adapter is on, the original while it is off."""
    rollout = Rollout()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(build("llama"), config)
    with torch.no_grad():
        model.get_output_embeddings().modules_to_save["default"].weight.mul_(1.7)
    ours, theirs = rollout.fused(model), rollout.naive(model)[0]
    assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert_close(grads(model, ours), grads(model, theirs), rtol=1e-7, atol=1e-9)
    with model.disable_adapter():
        off = rollout.fused(model)
        assert_close(off, rollout.naive(model)[0], rtol=0, atol=1e-10)
    assert (off - ours).abs().max() > 0.01


def test_adapter_on_the_head_is_refused():
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    model = peft.get_peft_model(build("llama"), config)
    with pytest.raises(
        ProxpoError, match=r"head of LlamaForCausalLM must be a plain nn\.Linear.* peft"
    ):
        Rollout().fused(model)


def test_packed_equals_padded():
    model, rollout = build("llama"), Rollout()
    keep = rollout.attention.bool()
    positions = (rollout.attention.cumsum(1) - 1)[keep][None]
    scored = torch.cat([torch.zeros(ROWS, PROMPT, dtype=torch.bool), rollout.mask], dim=1)[keep]
    packed = model_logp(
        model, rollout.ids[keep][None], scored[None], position_ids=positions, temperature=0.8
    )
    assert_close(packed[0, scored], rollout.fused(model)[rollout.mask], rtol=0, atol=1e-9)
    assert not packed[0, ~scored].any()


def test_padding_side_and_content_do_not_matter():
    model, rollout = build("gpt2"), Rollout()  # absolute positions
    first = rollout.fused(model)
    rollout.ids = torch.where(rollout.attention.bool(), rollout.ids, 7)
    assert_close(rollout.fused(model), first, rtol=0, atol=1e-12)
    alone = model_logp(model, rollout.ids[:1, 2:], rollout.mask[:1], temperature=0.8)
    assert_close(alone, first[:1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3-tied", "llama", "gemma3-softcap"])
@pytest.mark.parametrize("name", ["isopo", "ntk"])
def test_under_a_transform_equals_the_models_own_logits(family, name):
    model, rollout = build(family), Rollout()
    make = {"isopo": lambda: gradients.isopo(overlap=8), "ntk": gradients.isopo_ntk}[name]
    sequences = torch.where(rollout.attention.bool(), torch.arange(ROWS)[:, None], -1)
    advantages = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)

    def transformed(logp):
        model.zero_grad()
        with make().applied(model, sequences=sequences, advantages=advantages):
            (-logp().sum()).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    for _ in range(2):  # the first call may learn about the head and run twice
        ours = transformed(lambda: rollout.fused(model))
        theirs = transformed(lambda: rollout.naive(model)[0])
        assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_compiled_model_is_compiled_once():
    model = two_ranks.build()
    expected, graphs = two_ranks.naive(model), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count)
    for _ in range(4):  # the first calls learn what follows the head
        observed = len(graphs)
        ours = model_logp(compiled, two_ranks.IDS, two_ranks.MASK)
        assert_close(ours, expected, rtol=0, atol=1e-12)
    assert observed == len(graphs) > 0


def test_the_model_is_put_back_after_an_error():
    model, rollout = build("llama"), Rollout()
    head = model.get_output_embeddings()
    rollout.ids[0, -1] = VOCAB  # the embedding refuses it
    with pytest.raises(IndexError):
        rollout.fused(model)
    assert "forward" not in head.__dict__
    own = head.__dict__["forward"] = lambda x: nn.Linear.forward(head, x)
    with pytest.raises(IndexError):
        rollout.fused(model)
    assert head.__dict__["forward"] is own


def test_a_call_within_a_call_is_refused():
    """Also from another thread, whose hidden states would be scored by the first one's request."""
    model, r = build("llama"), Rollout()
    call = lambda *_: model_logp(model, r.ids, r.mask, attention_mask=r.attention)  # noqa: E731
    want = call()
    hook = model.model.norm.register_forward_hook(call)
    with pytest.raises(ProxpoError, match="in another call of model_logp"):
        call()
    hook.remove()
    assert torch.equal(call(), want)


def test_nothing_of_the_model_is_kept():
    model, rollout = build("llama"), Rollout()
    rollout.fused(model)
    gone = weakref.ref(model.get_output_embeddings())
    del model
    gc.collect()
    assert gone() is None


class Odd(nn.Module):
    """A causal language model whose output is up to the test."""

    def __init__(self, after) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)
        self.after = after

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        return (self.after(self, self.embed(input_ids)),)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda m, h: m.head(h) ** 3, "Odd changes its logits after the head by more than a scale"),
        (lambda m, h: -m.head(h), "by more than a scale or a soft cap"),
        (lambda m, h: h, "Odd called 0 output layers, expected one"),
        (
            lambda m, h: m.head(h[:, -1:]),
            r"hidden states of \[3, 1\] positions, input_ids have \[3, 9\]",
        ),
    ],
)
def test_models_that_do_something_else_are_refused(after, message):
    rollout = Rollout()
    with pytest.raises(ProxpoError, match=message):
        model_logp(Odd(after).double(), rollout.ids, rollout.mask)


class Behind(Odd):
    """A model with something of its own behind the head, which a test may change."""

    def __init__(self, after) -> None:
        super().__init__(after)
        self.softcap, self.scale = None, nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.config = transformers.LlamaConfig()


def forbidden(m, h):
    z = m.head(h).clone()
    z[..., 7] = -torch.inf
    return z


def by_position(m, h):
    return m.head(h) * torch.arange(1, h.shape[1] + 1)[:, None]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda m, h: m.head(h)[..., :40], r"after the head from 50 tokens to \[1, 4, 40\]"),
        (forbidden, "that of token 7 at position 0 is -inf in place of"),
        (by_position, "by more than a scale or a soft cap: that of token 0 at position 0"),
        (lambda m, h: m.head(h) * m.head.bias.mean() ** 2, "Behind trains what follows its head"),
    ],
)
def test_maps_of_another_kind_are_refused(after, message):
    """Their known numbers would pass where these are sent through alone, or at one position."""
    model, rollout = Behind(after).double(), Rollout()
    with pytest.raises(ProxpoError, match=message):
        model_logp(model, rollout.ids, rollout.mask)


def test_a_vocabulary_cut_off_behind_the_head_is_refused():
    text = {
        **SMALL, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "unpadded_vocab_size": 40,
    }  # fmt: skip
    config = transformers.InklingTextConfig(**text)
    model, rollout = transformers.InklingForCausalLM(config), Rollout()
    assert model(rollout.ids).logits.shape[-1] == 40
    with pytest.raises(ProxpoError, match="after the head from 50 tokens to"):
        rollout.fused(model)


def test_a_map_that_changes_is_learnt_again():
    def after(m, h):
        z = m.head(h) * m.scale
        z = z if m.softcap is None else torch.tanh(z / m.softcap) * m.softcap
        return z if m.config.pad_token_id is None else z * m.config.pad_token_id

    def check():
        z = model(rollout.ids, use_cache=False)[0][:, PROMPT - 1 : -1]
        want = z.log_softmax(-1).gather(-1, rollout.ids[:, PROMPT:, None])[..., 0] * rollout.mask
        assert_close(model_logp(model, rollout.ids, rollout.mask), want, rtol=0, atol=1e-10)

    model, rollout = Behind(after).double(), Rollout()
    check()
    with torch.no_grad():
        model.scale.mul_(3)
    check()
    model.config.pad_token_id = 2
    check()
    model.config.pad_token_id = None
    model.scale, model.softcap = nn.Parameter(model.scale / 6, requires_grad=False), 0.3
    check()
    model.after = forbidden
    check_again = pytest.raises(ProxpoError, match="token 7")
    model.softcap = 0.4
    with check_again:
        check()


def test_the_small_call_leaves_no_trace():
    """Not in the random state, the modes of modules, or counters: eval and back."""
    model, rollout = build("gpt2"), Rollout()
    model.train().transformer.h[0].eval()
    modes, calls = [m.training for m in model.modules()], []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    state = torch.get_rng_state()
    for _ in range(3):
        rollout.fused(model)
    assert len(calls) == 4  # the first has a small one before it
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_tuples_instead_of_outputs():
    rollout, model = Rollout(), Odd(lambda m, h: m.head(h) * 3.0).double()
    z = model(rollout.ids, use_cache=False)[0][:, PROMPT - 1 : -1]
    expected = z.log_softmax(-1).gather(-1, rollout.ids[:, PROMPT:, None])[..., 0] * rollout.mask
    assert_close(model_logp(model, rollout.ids, rollout.mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(ROWS, 5), "mask must be bool"),
        (torch.ones(ROWS, 10, dtype=torch.bool), "no more columns than input_ids"),
        (torch.ones(2, 5, dtype=torch.bool), "one row per sequence"),
        (torch.ones(ROWS, 9, dtype=torch.bool), "False in the first column"),
    ],
)
def test_masks_that_do_not_fit_are_named(mask, message):
    unchecked = inspect.unwrap(model_logp)  # as users without a type checker call it
    with pytest.raises(ProxpoError, match=message):
        unchecked(build("llama"), Rollout().ids, mask)


def test_two_processes_equal_one(tmp_path):
    """DDP and FSDP2: half of the rows each, gradients averaged by the wrapper."""
    mp.spawn(two_ranks.run, (str(tmp_path),), nprocs=2)
    model = two_ranks.build()
    two_ranks.naive(model).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for wrap in two_ranks.WRAPS:
        ours = torch.load(tmp_path / f"{wrap}.pt", weights_only=True)
        assert_close(ours, expected, rtol=1e-9, atol=1e-12)
