"""verl's engine around a tiny Qwen3 on the CPU, data in verl's form, and our own loop beside it."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.flash_attention import flash_attention_forward
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

import proxpo
from proxpo.adapters.verl import LossConfig
from proxpo.gradients import isopo
from proxpo.logp import model_logp

VOCAB, PROMPT, RESPONSE = 32, 4, 5
FULL = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
ALL, PROMA = {"overlap": "all"}, {"gradient": "proma"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.7, "kl_loss_type": "mse"}
EVERY = slice(None)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 0.8, -1.2, 0.4, 0.3, -0.7])


@functools.cache
def folder() -> str:
    """Folder of the tiny model; the same weights in every process."""
    path = os.environ.get("TINY_MODEL") or tempfile.mkdtemp()
    if not Path(path, "config.json").exists():
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        config = Qwen3Config(**shape, **heads, initializer_range=0.3, tie_word_embeddings=False)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    position_ids: Tensor,
    softmax_scale: float,
    **named: Any,
) -> Tensor:
    """Flash attention on packed rows in plain torch: all of Ulysses but the kernel.

    transformers' flash attention calls verl's exchange of heads and positions, which calls this.
    """
    seq = (position_ids == 0).cumsum(-1)
    mask = ((seq[:, :, None] == seq[:, None, :])[:, None]).tril()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


AttentionInterface.register("varlen", flash_attention_forward)
monkey_patch._flash_attention_forward = varlen


def start(rank: int = 0, ranks: int = 1, store: str = "") -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    path = store or tempfile.mktemp()
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)


def make_engine(
    *,
    strategy: str = "fsdp2",
    checkpointing: bool = False,
    lora: int = 0,
    lr: float = 1e-3,
    attention: str = "eager",
    initialize: bool = True,
    **engine: Any,
) -> Any:
    model = HFModelConfig(
        path=folder(),
        load_tokenizer=False,
        use_remove_padding=True,
        override_config={"attn_implementation": attention},
        enable_gradient_checkpointing=checkpointing,
        lora_rank=lora,
        target_modules="all-linear",
    )
    engine = {"mixed_precision": FULL, "use_torch_compile": False, **engine}
    made = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=model,
        engine_config=FSDPEngineConfig(strategy=strategy, **engine),
        optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=10, clip_grad=1e9),
        checkpoint_config=CheckpointConfig(),
    )
    if initialize:
        made.initialize()
    return made


def actor(loss_mode: str, agg: str = "token-sum", options: Any = None, **actor: Any) -> Any:
    """verl's own loss function for a loss mode."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=2,
        loss_agg_mode=agg,
        policy_loss=LossConfig(loss_mode=loss_mode, options=options or {}),
        **actor,
    )
    return functools.partial(ppo_loss, config=config)


@functools.cache
def padded() -> dict[str, Tensor]:
    """Eight prompts and responses, padded left and right as verl's rollouts are."""
    g = torch.Generator().manual_seed(1)
    rows = len(ADVANTAGES)
    prompts = torch.randint(1, VOCAB, (rows, PROMPT), generator=g)
    responses = torch.randint(1, VOCAB, (rows, RESPONSE), generator=g)
    before = torch.tensor([4, 2, 3, 1, 4, 3, 2, 4])
    after = torch.tensor([5, 3, 4, 5, 1, 2, 5, 4])
    left = torch.arange(PROMPT) >= PROMPT - before[:, None]
    right = torch.arange(RESPONSE) < after[:, None]
    attention = torch.cat([left, right], 1).long()

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, RESPONSE, generator=g)

    return {
        "prompts": prompts * left,
        "responses": responses * right,
        "input_ids": torch.cat([prompts, responses], 1) * attention,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": right.long(),
        "advantages": ADVANTAGES[:, None] * right,
        "old_log_probs": -3.4 + normal(0.3),
        "ref_log_prob": -3.4 + normal(0.3),
        "rollout_log_probs": -3.4 + normal(0.3),
    }


def make_data(rows: slice = slice(None), *, micro: int, total: int = 8, **extra: Any) -> TensorDict:
    """A mini-batch (or a rank's share of it) in the form verl's trainer hands to an engine."""
    cut = {name: value[rows].clone() for name, value in padded().items()}
    data = left_right_2_no_padding(TensorDict(cut, batch_size=len(cut["advantages"])))
    settings = {"use_dynamic_bsz": False, "use_remove_padding": True, "temperature": 1.0}
    named = {"micro_batch_size_per_gpu": micro, "global_batch_size": total, **settings, **extra}
    tu.assign_non_tensor(data, **named)
    return data


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    def whole(grad: Tensor) -> Tensor:
        return grad.full_tensor() if hasattr(grad, "full_tensor") else grad

    named = module.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def backward(engine: Any, data: TensorDict, loss: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """verl's own forward and backward of a mini-batch; the gradients it leaves."""
    engine.optimizer_zero_grad()
    with engine.train_mode(zero_grad_on_exit=False):
        output = engine.forward_backward_batch(data, loss)
        return gradients(engine.module), output


def step(engine: Any, loss: Any) -> float | None:
    """The norm of the gradient of a step of verl's; none on ranks whose metrics verl drops."""
    with engine.train_mode():
        return engine.train_batch(make_data(micro=4), loss)["metrics"].get("grad_norm")


def own_model() -> Any:
    return Qwen3ForCausalLM.from_pretrained(folder(), attn_implementation="eager").float()


def own_rows(rows: slice) -> tuple[proxpo.Batch, dict[str, Tensor]]:
    data = {name: value[rows] for name, value in padded().items()}
    batch = proxpo.Batch(
        logp=torch.zeros_like(data["advantages"]),
        mask=data["response_mask"].bool(),
        old_logp=data["old_log_probs"],
        ref_logp=data["ref_log_prob"],
        advantages=data["advantages"],
    )
    return batch, data


def own_logp(model: Any, rows: slice) -> Tensor:
    batch, data = own_rows(rows)
    return model_logp(model, data["input_ids"], batch.mask, attention_mask=data["attention_mask"])


def own_isopo(transform: Any, micro: int) -> dict[str, Tensor]:
    """The loop of the README, micro-batch by micro-batch."""
    model = own_model()
    for first in range(0, len(ADVANTAGES), micro):
        rows = slice(first, first + micro)
        batch, data = own_rows(rows)
        numbers = torch.arange(len(batch.mask))[:, None]
        sequences = torch.where(data["attention_mask"].bool(), numbers, -1)
        with transform.applied(model, sequences=sequences, advantages=ADVANTAGES[rows]):
            (-(own_logp(model, rows) * batch.mask).sum()).backward()
    transform.step()
    return gradients(model)


def same_direction(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        cosine = torch.cosine_similarity(found[name].float().flatten(), value.flatten(), dim=0)
        assert cosine > 0.99, name


def own_isopo_and_kl() -> dict[str, torch.Tensor]:
    model = own_model()
    batch, _ = own_rows(EVERY)
    gap = (own_logp(model, EVERY) - batch.ref_logp) * batch.mask
    (0.7 * 0.5 * gap.square().sum()).backward()
    policy = own_isopo(isopo(**ALL), 4)
    return {name: policy[name] + p.grad for name, p in model.named_parameters()}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Equal up to float32: differences relative to each parameter's largest entry."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0, name
        gap = (found[name] - value).abs().max() / value.abs().max()
        assert gap < rtol, f"{name}: {gap:.1e}"
