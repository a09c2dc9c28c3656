"""Whether the installed TRL is the one this adapter was written against."""

import importlib.metadata
import inspect
from typing import Any

TESTED = "1.16"

# What ProxpoTrainer overrides or calls, with the parameters it relies on.
METHODS: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
        *("batch_size", "compute_entropy", "compute_aux_loss"),
    ),
    "_get_train_sampler": ("self", "dataset"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_save_checkpoint": ("self", "model", "trial"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}


def changes(trainer: Any, config: Any, options: tuple[str, ...] = ()) -> list[str]:
    """How a GRPOTrainer and its config differ from those of TRL 1.16, one line each."""
    found = []
    for name, expected in METHODS.items():
        method = getattr(trainer, name, None)
        if method is None:
            found.append(f"GRPOTrainer.{name} is gone")
            continue
        names = tuple(inspect.signature(method).parameters)[: len(expected)]
        if names != expected:
            found.append(
                f"GRPOTrainer.{name}({', '.join(names)}) was ({', '.join(expected)}) before"
            )
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not True:
        found.append("GRPOTrainer no longer scales its loss for accumulation by itself")
    known = getattr(config, "__dataclass_fields__", {})
    return found + [f"GRPOConfig.{name} is gone" for name in options if name not in known]


def check_host() -> None:
    """Raise ImportError, in one line, unless TRL is there and has what the adapter overrides."""
    try:
        version = importlib.metadata.version("trl")
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise ImportError(
            f"proxpo.adapters.trl needs trl {TESTED}.*, which cannot be imported ({error}): "
            "pip install 'proxpo[trl]'"
        ) from error
    from proxpo.adapters.trl._fit import DECIDED

    moved = changes(GRPOTrainer, GRPOConfig, tuple(DECIDED))
    if moved:
        raise ImportError(
            f"proxpo.adapters.trl is written for trl {TESTED}.*; in trl {version} "
            f"{'; '.join(moved)}: pip install 'trl=={TESTED}.*'"
        )


__all__ = ["METHODS", "TESTED", "changes", "check_host"]
