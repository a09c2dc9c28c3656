"""proxpo: proximal policy-optimization methods for RL post-training of language models.

    import proxpo
    loss = proxpo.loss_fn(proxpo.make_recipe("p3o"))
    loss(proxpo.Batch(logp=..., old_logp=..., mask=..., rewards=..., group=...)).value.backward()

Names are loaded when first used, so that `import proxpo` and the command line start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Batch": "proxpo.stages",  # which declare fields of their own
    "Context": "proxpo.types",
    "Denominators": "proxpo.types",
    "Loss": "proxpo.types",
    "Recipe": "proxpo.types",
    "Stage": "proxpo.types",
    "ProxpoError": "proxpo.errors",
    "backward_pass": "proxpo.backward",
    "load_batch": "proxpo.batch_file",
    "save_batch": "proxpo.batch_file",
    "loss_fn": "proxpo.compose",
    "policy_loss": "proxpo.compose",
    "prepare": "proxpo.compose",
    "make_recipe": "proxpo.settings",
    "Parts": "proxpo.stages",
    "make_stage": "proxpo.stages",
    "stage": "proxpo.stages",
    "declare_field": "proxpo.fields",
    "register": "proxpo.recipes",
    "methods": "proxpo.recipes",
    "over_ranks": "proxpo.ops.sums",
    "over_microbatches": "proxpo.ops.sums",
    "token_logp": "proxpo.logp",
    "model_logp": "proxpo.logp",
    "make_optimizer": "proxpo.optimizers",
}
_MODULES = (
    "compose",
    "exact",
    "gradients",
    "ops",
    "optimizers",
    "recipes",
    "stages",
    "types",
)

if TYPE_CHECKING:
    from proxpo.backward import backward_pass
    from proxpo.batch_file import load_batch, save_batch
    from proxpo.compose import loss_fn, policy_loss, prepare
    from proxpo.errors import ProxpoError
    from proxpo.fields import declare_field
    from proxpo.logp import model_logp, token_logp
    from proxpo.ops.sums import over_microbatches, over_ranks
    from proxpo.optimizers import make_optimizer
    from proxpo.recipes import methods, register
    from proxpo.settings import make_recipe
    from proxpo.stages import Parts, make_stage, stage
    from proxpo.types import Batch, Context, Denominators, Loss, Recipe, Stage


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"proxpo.{name}")
    raise AttributeError(f"module 'proxpo' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE, *_MODULES])


__all__ = [
    "Batch",
    "Context",
    "Denominators",
    "Loss",
    "Parts",
    "ProxpoError",
    "Recipe",
    "Stage",
    "backward_pass",
    "declare_field",
    "load_batch",
    "loss_fn",
    "make_optimizer",
    "make_recipe",
    "make_stage",
    "methods",
    "model_logp",
    "over_microbatches",
    "over_ranks",
    "policy_loss",
    "prepare",
    "register",
    "save_batch",
    "stage",
    "token_logp",
]
