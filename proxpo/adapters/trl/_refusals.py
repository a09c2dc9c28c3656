"""Recipes and settings that cannot run inside TRL are refused with the reason, in one line."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from proxpo.adapters.trl._arguments import check_arguments
from proxpo.adapters.trl._optimizer_step import TRL_ADVANTAGES
from proxpo.compose import local_stages
from proxpo.errors import ProxpoError
from proxpo.fields import CORE
from proxpo.settings import lengths, make_recipe
from proxpo.stages import check_stages
from proxpo.stages.ratio.gaussian import GAUSSIAN
from proxpo.stages.ratio.latent import LATENT
from proxpo.stages.schedule import variants
from proxpo.types import Recipe

# Kinds of stages that change what TRL does by itself.
REFUSED_KINDS = {
    "budget": "it draws num_generations completions of every prompt",
}
_NO_CRITIC = "GRPOTrainer trains no critic"
_NO_LOGITS = "TRL's fused head keeps no logits"
_NO_STATES = "TRL hands over no hidden states"
_UNKNOWN = "TRL has no such field"
# Fields that TRL does not provide, and why.
NOT_PROVIDED = {
    "values": _NO_CRITIC,
    "old_values": _NO_CRITIC,
    "returns": _NO_CRITIC,
    "vocab_logp": _NO_LOGITS,
    "old_vocab_logp": _NO_LOGITS,
    "ref_kl": _NO_LOGITS,
    "greedy_rewards": "TRL draws no greedy completion beside the sampled ones",
    "rollout_logp": "generation with transformers reports no log-probabilities; set use_vllm=True "
    "or pass a rollout_func, which returns them",
    "correct": "a TRL reward function gives a number, not a verdict",
    "token_rewards": "a TRL reward function gives one number per completion",
    "step_end": "a TRL reward function gives one number per completion",
    "turn": "TRL does not number the turns of a completion",
    "void": "TRL does not mark turns that neither call a tool nor answer",
    "prompt_id": "TRL does not number the prompts of its dataset",
    "duration": "TRL does not time a completion's environment",
    "span_rewards": "a TRL reward function gives one number per completion",
    "prev_logp": "TRL keeps no policy of an earlier rollout",
    "hidden": _NO_STATES,
    "features": _NO_STATES,
    **dict.fromkeys(
        (field.name for field in GAUSSIAN),
        "a language model's policy is not Gaussian",
    ),
    **dict.fromkeys((field.name for field in LATENT), "TRL feeds no hidden states back"),
}
PROVIDED = CORE - NOT_PROVIDED.keys()


def resolve_recipe(recipe: Any, options: Any) -> Recipe:
    """Makes the recipe that a trainer was asked for, and checks it as a whole."""
    if not isinstance(options or {}, Mapping):
        raise ProxpoError(
            f"recipe_options are a dict of options by name, got a {type(options).__name__}"
        )
    if isinstance(recipe, str):
        return make_recipe(recipe, options or {})
    if not isinstance(recipe, Recipe):
        raise ProxpoError(
            f"recipe is the name of a method or a Recipe, got a {type(recipe).__name__}"
        )
    if options:
        raise ProxpoError(
            "recipe_options go with the name of a recipe; this one is already made: give them to "
            "proxpo.make_recipe, or a stage to recipe.replace"
        )
    return check_stages(recipe)


def check_recipe(recipe: Recipe, args: Any, *, reports_logp: bool) -> None:
    """Raises ProxpoError unless TRL, with these arguments, gives the recipe all it needs.

    reports_logp: the sampler returns log-probabilities of its tokens
    """
    missing = recipe.needs() - PROVIDED - ({"rollout_logp"} if reports_logp else set())
    for name in sorted(missing):
        raise ProxpoError(
            f"recipe {recipe.name} needs '{name}' in TRL: {NOT_PROVIDED.get(name, _UNKNOWN)}"
        )
    for _, stage in recipe.stages():
        if stage.kind in REFUSED_KINDS:
            raise ProxpoError(
                f"recipe {recipe.name} has {stage.kind}={stage.name}, for which TRL has no place: "
                f"{REFUSED_KINDS[stage.kind]}; recipe_options={{'{stage.kind}': None}} leaves it "
                "out"
            )
        if stage.step is not None:
            raise ProxpoError(
                f"recipe {recipe.name}: {stage.kind}={stage.name} follows every optimizer step by "
                "its numbers, which TRL hands to no one after the step"
            )
    check_arguments(recipe, args)
    if args.max_completion_length is None:
        _check_lengths(recipe)
    check_updates(recipe, args)
    if recipe.prompts:
        names = ", ".join(stage.name for stage in recipe.prompts)
        warnings.warn(
            f"recipe {recipe.name}: prompts={names} redraws prompts, which TRL does not; every "
            "prompt of a batch is trained on (recipe_options={'prompts': None} says so)",
            stacklevel=4,
        )
    factor = max((stage.options.get("prompt_factor", 1) for stage in recipe.prune), default=1)
    if factor > 1:
        warnings.warn(
            f"recipe {recipe.name}: prune asks for {factor:g} times as many prompts, which TRL "
            "does not draw; recipe_options={'prompt_factor': 1} says so",
            stacklevel=4,
        )
    corrects = bool(recipe.needs() & {"rollout_logp", "prox_logp"})
    if args.use_vllm and args.vllm_importance_sampling_correction and not corrects:
        warnings.warn(
            f"recipe {recipe.name} does not correct for the difference between vLLM and the "
            "trainer; recipe_options={'weights+': 'tis'} does, "
            "vllm_importance_sampling_correction=False leaves out this line",
            stacklevel=4,
        )


def microbatch_dependence(recipe: Recipe, microbatches: int) -> str:
    """One line for a loss that depends on the size of micro-batches; empty for any other."""
    local = local_stages(recipe)
    if microbatches == 1 or not local:
        return ""
    return (
        f"recipe {recipe.name} looks at each of the {microbatches} micro-batches of an optimizer "
        f"step by itself ({', '.join(local)}), so its loss depends on per_device_train_batch_size"
    )


def warn_of_dropout(recipe: Recipe, model: nn.Module) -> None:
    """Warns that sums over micro-batches come from a pass with other dropout than the loss's."""
    active = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p and m.training]
    if active:
        warnings.warn(
            f"recipe {recipe.name}: statistics of an optimizer step are taken in a pass before it, "
            "with other dropout than the loss: disable_dropout=True, or lora_dropout=0 in "
            "peft_config, makes them exact",
            stacklevel=2,
        )


def _check_lengths(recipe: Recipe) -> None:
    """Refuses a recipe that wants the longest response allowed and has no number for it."""
    for place, length in lengths(recipe).items():
        if length is None:
            raise ProxpoError(
                f"recipe {recipe.name} depends on the longest response allowed ({place}), and "
                "GRPOConfig.max_completion_length=None allows any: set it"
            )


def check_updates(recipe: Recipe, args: Any) -> None:
    """Refuses optimizer steps over parts of two rollouts, or other than the recipe prescribes."""
    microbatches, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    _check_optimizer(recipe, OptimizerNames(args.optim).value, accumulated)
    if microbatches % accumulated:
        raise ProxpoError(
            f"gradient_accumulation_steps={accumulated} does not divide "
            f"steps_per_generation={microbatches}: an "
            "optimizer step would mix rollouts, whose token counts are not known in advance"
        )
    single = recipe.schedule is not None and recipe.schedule.name == "single_update"
    losses = (recipe,) if single else variants(recipe)
    if recipe.schedule is not None and losses is None:
        replays = recipe.schedule.name == "poisson_replay"  # without it the loss is another
        way = "{'schedule.ratio': 0}" if replays else "{'schedule': None}"
        raise ProxpoError(
            f"recipe {recipe.name}: schedule={recipe.schedule.name} decides over the optimizer "
            f"steps of a rollout, which TRL does itself: recipe_options={way} leaves them to "
            "num_iterations and steps_per_generation"
        )
    if single and (microbatches != accumulated or args.num_iterations != 1):
        raise ProxpoError(
            f"recipe {recipe.name} makes one update per rollout, but num_iterations="
            f"{args.num_iterations} and steps_per_generation={microbatches} with "
            f"gradient_accumulation_steps={accumulated} make "
            f"{args.num_iterations * microbatches // accumulated}"
        )
    if losses is not None and args.num_iterations % len(losses):
        raise ProxpoError(
            f"recipe {recipe.name} goes over a rollout in {len(losses)} passes: "
            f"num_iterations must be a multiple of that, got {args.num_iterations}"
        )
    if needs_whole_groups(recipe) and args.per_device_train_batch_size % args.num_generations:
        raise ProxpoError(
            f"recipe {recipe.name} compares the completions of a prompt with each other: "
            f"per_device_train_batch_size={args.per_device_train_batch_size} must be a multiple of "
            f"num_generations={args.num_generations}"
        )


def _check_optimizer(recipe: Recipe, optim: str, accumulated: int) -> None:
    """Refuses optimizers that move the weights before an update's gradient is complete."""
    if optim not in ("lomo", "adalomo") and not optim.endswith("_layerwise"):
        return
    reason = f"gradient_accumulation_steps={accumulated} adds up several" if accumulated > 1 else ""
    if recipe.gradient is not None:
        reason = f"gradient={recipe.gradient.name} ends after them"
    if reason:
        raise ProxpoError(
            f"recipe {recipe.name}: optim={optim} moves the weights inside each backward pass, and "
            f"{reason}: use another, such as optim=adamw_torch"
        )


def check_evaluated(recipe: Recipe, rows: int, group: int) -> None:
    """Refuses to evaluate parts of groups where a recipe compares completions.

    rows: of this process; group: completions that evaluation draws for a prompt
    """
    if rows % group and needs_whole_groups(recipe):
        raise ProxpoError(
            f"recipe {recipe.name} compares the completions of a prompt with each other: "
            f"per_device_eval_batch_size must be a multiple of num_generations_eval={group}"
        )


def check_advantages(recipe: Recipe, inputs: dict[str, Any]) -> None:
    """Refuses other advantages than TRL's, from a subclass: they would have no effect."""
    computed = inputs.get(TRL_ADVANTAGES)
    if computed is not None and not torch.equal(inputs["advantages"], computed):
        raise ProxpoError(
            f"recipe {recipe.name}: the advantages of TRL's rollout were changed, but the recipe "
            "computes its own from the rewards: change these in _calculate_rewards, or pass a "
            "stage as recipe_options={'advantage': ...}"
        )


def check_engine(recipe: Recipe, trainer: Any) -> None:
    """Refuses engines that hide a layer's weight or input from a gradient transform."""
    state = trainer.accelerator.state
    deepspeed = getattr(state, "deepspeed_plugin", None)
    reasons = {
        "DeepSpeed ZeRO-3 hides the weights of a layer; use ZeRO-2 or FSDP2": deepspeed is not None
        and deepspeed.zero_stage == 3,
        "FSDP1 flattens the weights of a layer; use fsdp_version 2": trainer.is_fsdp_enabled
        and not state.is_fsdp2,
        "Megatron splits a layer over processes": str(state.distributed_type).endswith(
            "MEGATRON_LM"
        ),
        "fp16 scales the loss, which would enter the lengths; use bf16": trainer.args.fp16,
        "images have no per-sequence form": trainer._is_vlm,
        "a router loss has no advantage; set router_aux_loss_coef=0": trainer.aux_loss_enabled,
        "its log-probabilities are float32 already; leave out cast_lm_head_to_fp32": (
            trainer.args.cast_lm_head_to_fp32
        ),
    }
    for reason, present in reasons.items():
        if present:
            name = recipe.gradient.name if recipe.gradient is not None else ""
            raise ProxpoError(f"recipe {recipe.name}: gradient={name} cannot run here: {reason}")


def needs_whole_groups(recipe: Recipe) -> bool:
    """True if the loss of a micro-batch needs whole groups: pairs, or a kernel per prompt."""
    gradient = recipe.gradient.options if recipe.gradient is not None else {}
    return "log_ratio" in recipe.aggregate.takes or gradient.get("group_by") == "prompt"


__all__ = [
    "NOT_PROVIDED",
    "PROVIDED",
    "check_advantages",
    "check_engine",
    "check_recipe",
    "check_updates",
    "microbatch_dependence",
    "needs_whole_groups",
    "resolve_recipe",
    "warn_of_dropout",
]
