"""Check that the installed TRL has what this adapter overrides and calls."""

import importlib.metadata
import inspect
import warnings
from typing import Any

from proxpo.adapters.trl._arguments import ARGUMENTS
from proxpo.adapters.versions import minor_versions, newer_than_tested

TESTED_VERSIONS = minor_versions("trl")
_KNOWN = " or ".join(TESTED_VERSIONS)

# Methods that ProxpoTrainer overrides or calls, with the parameters it relies on.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
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


def api_changes(trainer: Any, config: Any, options: tuple[str, ...] = ()) -> list[str]:
    """Differences of a GRPOTrainer and its config from those the adapter knows, one line each."""
    lines = []
    for name, expected in OVERRIDDEN.items():
        method = getattr(trainer, name, None)
        if method is None:
            lines.append(f"GRPOTrainer.{name} is gone")
            continue
        names = tuple(inspect.signature(method).parameters)[: len(expected)]
        if names != expected:
            lines.append(
                f"GRPOTrainer.{name}({', '.join(names)}) was ({', '.join(expected)}) before"
            )
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not True:
        lines.append("GRPOTrainer no longer scales its loss for accumulation by itself")
    known = getattr(config, "__dataclass_fields__", {})
    return lines + [f"GRPOConfig.{name} is gone" for name in options if name not in known]


def check_trl() -> None:
    """Raise ImportError, in one line, unless TRL is there and has what the adapter overrides.

    Warns of a TRL that is newer than the tested ones: more may have changed than its signatures.
    """
    try:
        version = importlib.metadata.version("trl")
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise ImportError(
            f"proxpo.adapters.trl needs trl {_KNOWN}, which cannot be imported "
            f"({error}): pip install 'proxpo[trl]'"
        ) from error
    read = tuple(name for name, argument in ARGUMENTS.items() if argument.rule != "TRL")
    moved = api_changes(GRPOTrainer, GRPOConfig, read)
    if moved:
        raise ImportError(
            f"proxpo.adapters.trl is written for trl {_KNOWN}; in trl {version} "
            f"{'; '.join(moved)}: pip install 'trl=={TESTED_VERSIONS[-1]}.*'"
        )
    if newer_than_tested("trl", version):
        warnings.warn(
            f"proxpo.adapters.trl: trl {version} is newer than those it was tested with ({_KNOWN}):"
            " its methods have the same arguments, but may compute something else",
            stacklevel=2,
        )


__all__ = ["OVERRIDDEN", "TESTED_VERSIONS", "api_changes", "check_trl"]
