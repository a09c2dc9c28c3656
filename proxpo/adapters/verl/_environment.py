"""The installed verl and this process: version, signatures, choice of engine, notices on stderr."""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from proxpo.errors import ProxpoError

VERSIONS = ("0.9.",)
VENDOR = "proxpo"
LOSS_ARGUMENTS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)
ENGINE_ARGUMENTS = ("self", "micro_batch", "loss_function", "forward_only")
_NOTICES: set[str] = set()


def check_version(version: str) -> None:
    """Refuses versions of verl that the adapter was not tested with."""
    if not version.startswith(VERSIONS):
        known = ", ".join(f"{known}x" for known in VERSIONS)
        raise ProxpoError(
            f"proxpo.adapters.verl knows verl {known}, found {version}: install verl==0.9.1, or "
            "a proxpo made for this verl"
        )


def check_signature(function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Refuses a function of verl's that does not begin with these arguments, in this order."""
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(arguments)] != arguments:
        raise ProxpoError(
            f"verl's {function.__module__}.{function.__qualname__} takes "
            f"({', '.join(parameters)}), expected ({', '.join(arguments)}): this verl has moved; "
            "install verl==0.9.1"
        )


def check_verl() -> None:
    """Checks all that loss modes and advantage estimators rely on."""
    import verl
    from verl.trainer.ppo import core_algos
    from verl.utils import config

    check_version(verl.__version__)
    check_signature(core_algos.register_policy_loss, ("name",))
    check_signature(core_algos.register_adv_est, ("name_or_enum",))
    check_signature(core_algos.compute_policy_loss_vanilla, LOSS_ARGUMENTS)
    check_signature(config.validate_config, ("config", "use_reference_policy", "use_critic"))


def engine_selected() -> bool:
    """True if verl takes its engines from proxpo."""
    return os.environ.get("VERL_ENGINE_VENDOR", "").strip() == VENDOR


def notify(line: str) -> None:
    """Prints a line on stderr, once a process and from the first rank alone."""
    if line not in _NOTICES and os.environ.get("RANK", "0") == "0":
        print(f"proxpo: {line}", file=sys.stderr, flush=True)
    _NOTICES.add(line)


__all__ = [
    "ENGINE_ARGUMENTS",
    "LOSS_ARGUMENTS",
    "VENDOR",
    "check_signature",
    "check_verl",
    "check_version",
    "engine_selected",
    "notify",
]
