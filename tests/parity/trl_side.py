"""Calls of TRL 1.16's own GRPO and RLOO trainers, for their loss and for their scoring.

Their methods run unchanged on a trainer that was never constructed: it has no model, only the
attributes those methods read, and hands out log-probabilities instead of computing them.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from parity_inputs import ROWS, make_fields
from trl import GRPOTrainer, RLOOTrainer

MAX_TOKENS = 20
ATTRIBUTES: dict[str, Any] = {
    "aux_loss_enabled": False,
    "beta": 0.0,
    "current_gradient_accumulation_steps": 1,
    "entropy_coef": 0.0,
    "environment_factories": None,
    "environments": None,
    "epsilon_high": 0.15,
    "epsilon_low": 0.1,
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "max_completion_length": MAX_TOKENS,
    "multi_objective_aggregation": "sum_then_normalize",
    "normalize_advantages": False,
    "num_generations": 4,
    "num_iterations": 1,
    "off_policy_mask_threshold": None,
    "pad_to_multiple_of": None,
    "reward_clip_range": None,
    "reward_func_names": ["reward"],
    "scale_rewards": "group",
    "tools": None,
    "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "_entropy_bonus_enabled": False,
}
ARGUMENTS: dict[str, Any] = {
    "delta": None,
    "gradient_accumulation_steps": 3,
    "gradient_checkpointing_kwargs": None,
    "per_device_train_batch_size": ROWS,
    "sapo_temperature_neg": 1.7,
    "sapo_temperature_pos": 1.2,
    "steps_per_generation": 1,
    "use_bias_correction_kl": True,
    "vespo_k_neg": 1.5,
    "vespo_k_pos": 0.5,
    "vespo_lambda_neg": 2.0,
    "vespo_lambda_pos": 3.0,
}


def bare(trainer: type, **changes):
    """A trainer that was never constructed, with the attributes its loss reads."""
    args = ARGUMENTS | {key: changes.pop(key) for key in list(changes) if key in ARGUMENTS}
    unknown = [key for key in changes if key not in ATTRIBUTES]
    assert not unknown or all(key.startswith("vllm_") for key in unknown), unknown
    made = object.__new__(trainer)
    vars(made).update(ATTRIBUTES | changes)
    made.args = SimpleNamespace(**args)
    made.accelerator = Accelerator(cpu=True)
    made.model = torch.nn.Identity().train()
    made.model.is_gradient_checkpointing = False
    made.ref_model = torch.nn.Identity()
    made.reward_weights = torch.ones(1, dtype=torch.float64)
    made._tokenizer = SimpleNamespace(pad_token_id=0)
    made._metrics = {"train": defaultdict(list)}
    made._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    made._pending_extra_logs, made._pending_metrics = {}, {}
    return made


def trl_loss(
    kind: str = "plain",
    trainer: type = GRPOTrainer,
    *,
    anchors: bool = True,
    weight: Any = "given",
    rows: slice = slice(None),
    **changes,
):
    """TRL's loss on a batch or some of its rows, and the gradients to logp and entropy."""
    fields = make_fields(kind)
    tokens = fields["mask"].sum()
    fields = {name: value[rows] for name, value in fields.items()}
    made = bare(trainer, **changes)
    logp, entropy = (fields[name].clone().requires_grad_() for name in ("logp", "entropy"))
    mask = fields["mask"].long()
    made._get_per_token_logps_and_entropies = lambda *given, **named: (logp, entropy, None)
    old = torch.where(fields["mask"], fields["old_logp"], 0.0)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": fields["row_advantages"],
        "num_items_in_batch": tokens,
        "ref_per_token_logps": fields["ref_logp"],
        "old_logps": old.sum(1),
        "sampling_per_token_logps": fields["rollout_logp"],
        "importance_sampling_ratio": fields["rollout_logp"].exp(),
    }
    if not isinstance(weight, str):
        inputs["importance_sampling_ratio"] = weight
    if anchors:
        inputs["old_per_token_logps"] = fields["old_logp"]
    loss = made._compute_loss(None, inputs)
    grads = torch.autograd.grad(loss, (logp, entropy), allow_unused=True, materialize_grads=True)
    return loss.detach(), *grads


def trl_scores(trainer: type = GRPOTrainer, *, rewards=None, **changes) -> dict[str, torch.Tensor]:
    """What TRL hands to its loss after scoring completions."""
    fields = make_fields()
    made = bare(trainer, **changes)
    lengths = fields["mask"].sum(1).tolist()
    found = {id(made.model): fields["old_logp"], id(made.ref_model): fields["ref_logp"]}
    made._get_per_token_logps_and_entropies = lambda model, *_, **__: (found[id(model)], None, None)
    given = fields["rewards"] if rewards is None else rewards
    made._calculate_rewards = lambda *_: given[:, None]
    ids = [[1] * length for length in lengths]
    rollout = [row[:length].tolist() for row, length in zip(fields["rollout_logp"], lengths)]
    generated = ([[1]] * ROWS, ids, None, [""] * ROWS, rollout, {}, None, [])
    if trainer is RLOOTrainer:
        generated = ([[1]] * ROWS, ids, [""] * ROWS)
    made._generate = lambda prompts: generated
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # TRL builds the sampler's log-probabilities from lists
    try:
        return made._generate_and_score_completions([{"prompt": ""}] * ROWS)
    finally:
        torch.set_default_dtype(default)
