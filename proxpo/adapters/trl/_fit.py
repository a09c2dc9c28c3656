"""Whether a recipe can run inside TRL as configured; the reason, in one line, where it cannot."""

import dataclasses
import warnings
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.settings import Settings, make_recipe
from proxpo.stages import check
from proxpo.train.learner import needs
from proxpo.types import Recipe

GIVEN = {
    *("logp", "mask", "old_logp", "ref_logp", "prox_logp", "entropy", "lag", "tokens"),
    *("rewards", "group", "truncated", "group_tokens", "advantages"),
}
_NO_CRITIC = "GRPOTrainer trains no critic"
_NO_LOGITS = "TRL's fused head keeps no logits"
_NO_STATES = "TRL hands over no hidden states"
WHY = {
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
    "void": "TRL does not tell which turns neither call nor answer",
    "prompt_id": "TRL does not number the prompts of its dataset",
    "duration": "TRL does not time a completion's environment",
    "span_rewards": "a TRL reward function gives one number per completion",
    "prev_logp": "TRL keeps no policy of an earlier rollout",
    "hidden": _NO_STATES,
    "features": _NO_STATES,
    **dict.fromkeys(
        ("mean", "old_mean", "ref_mean", "noise", "step_size", "time"),
        "a language model's policy is not Gaussian",
    ),
}

# Options of GRPOConfig that the recipe decides instead, and where a recipe has them.
DECIDED = {
    "beta": "a KL term of the recipe, e.g. {'regularisers+': 'kl_to_ref'}",
    "delta": "{'trust.cap': ...}",
    "entropy_coef": "{'regularisers+': 'entropy_bonus'}",
    "epsilon": "the recipe's clip options",
    "epsilon_high": "the recipe's clip options",
    "importance_sampling_level": "{'ratio': 'token' or 'sequence'}",
    "loss_type": "the recipe itself",
    "multi_objective_aggregation": "reward_weights, which are summed before the recipe sees them",
    "off_policy_mask_threshold": "{'weights+': 'off_policy_mask'}",
    "sapo_temperature_neg": "the options of recipe sapo",
    "sapo_temperature_pos": "the options of recipe sapo",
    "scale_rewards": "{'advantage.scale': ...}",
    "top_entropy_quantile": "{'weights+': 'top_entropy'}",
    "use_adaptive_entropy": "{'regularisers+': 'entropy_bonus'}",
    "use_bias_correction_kl": "the recipe's kl_ratio_corrected",
    "vllm_importance_sampling_clip_max": "{'weights+': 'tis'}",
    "vllm_importance_sampling_clip_min": "{'weights+': 'tis'}",
    "vllm_importance_sampling_mode": "{'weights+': 'tis'}",
}


def made(recipe: str | Recipe, options: Settings | None) -> Recipe:
    """The recipe a trainer was asked for, checked as a whole."""
    if isinstance(recipe, str):
        return make_recipe(recipe, options or {})
    if options:
        raise ProxpoError("recipe_options go with the name of a recipe; this one is already made")
    return check(recipe)


def check_fit(recipe: Recipe, args: Any, *, reports_logp: bool) -> None:
    """Raise ProxpoError unless TRL, with these arguments, can give the recipe what it asks for."""
    missing = needs(recipe) - GIVEN - ({"rollout_logp"} if reports_logp else set())
    for name in sorted(missing):
        raise ProxpoError(f"recipe {recipe.name} needs '{name}' in TRL: {WHY[name]}")
    for _, stage in recipe.stages():
        if stage.step is not None:
            raise ProxpoError(
                f"recipe {recipe.name}: {stage.kind}={stage.name} follows every optimizer step by "
                "its numbers, which TRL hands to no one after the step"
            )
    if recipe.rescale is not None:
        raise ProxpoError(
            f"recipe {recipe.name}: rescale={recipe.rescale.name} scales the gradient after a "
            "second backward pass, for which TRL has no place: recipe_options={'rescale': None} "
            "leaves it out"
        )
    _check_options(recipe, args)
    _check_updates(recipe, args)
    if recipe.prompts:
        names = ", ".join(stage.name for stage in recipe.prompts)
        warnings.warn(
            f"recipe {recipe.name}: prompts={names} redraws prompts, which TRL does not; every "
            "prompt of a batch is trained on (recipe_options={'prompts': None} says so)",
            stacklevel=4,
        )
    if args.use_vllm and not needs(recipe) & {"rollout_logp", "prox_logp"}:
        warnings.warn(
            f"recipe {recipe.name} does not correct for the difference between vLLM and the "
            "trainer; recipe_options={'weights+': 'tis'} does",
            stacklevel=4,
        )


def _check_options(recipe: Recipe, args: Any) -> None:
    """Options that would be silently without effect are refused instead."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, instead in DECIDED.items():
        if getattr(args, name) != defaults[name]:
            raise ProxpoError(
                f"GRPOConfig.{name}={getattr(args, name)} has no effect on recipe {recipe.name}: "
                f"use {instead} in recipe_options"
            )


def _check_updates(recipe: Recipe, args: Any) -> None:
    """Optimizer steps must see whole shares of a rollout, as many as the recipe wants."""
    held, steps = args.steps_per_generation, args.gradient_accumulation_steps
    if held % steps:
        raise ProxpoError(
            f"gradient_accumulation_steps={steps} does not divide steps_per_generation={held}: an "
            "optimizer step would mix rollouts, whose token counts are not known in advance"
        )
    if recipe.schedule is not None and recipe.schedule.name != "single_update":
        raise ProxpoError(
            f"recipe {recipe.name}: schedule={recipe.schedule.name} decides over the optimizer "
            "steps of a rollout, which TRL does itself: recipe_options={'schedule': None} leaves "
            "them to num_iterations and steps_per_generation"
        )
    if recipe.schedule is not None and (held != steps or args.num_iterations != 1):
        raise ProxpoError(
            f"recipe {recipe.name} makes one update per rollout, but num_iterations="
            f"{args.num_iterations} and steps_per_generation={held} with "
            f"gradient_accumulation_steps={steps} make {args.num_iterations * held // steps}"
        )
    if args.num_iterations % max(len(recipe.passes), 1):
        raise ProxpoError(
            f"recipe {recipe.name} goes over a rollout in {len(recipe.passes)} passes: "
            f"num_iterations must be a multiple of that, got {args.num_iterations}"
        )
    if keeps_groups(recipe) and args.per_device_train_batch_size % args.num_generations:
        raise ProxpoError(
            f"recipe {recipe.name} compares the completions of a prompt with each other: "
            f"per_device_train_batch_size={args.per_device_train_batch_size} must be a multiple of "
            f"num_generations={args.num_generations}"
        )


def check_engine(recipe: Recipe, trainer: Any) -> None:
    """A gradient transform needs each layer's weight and input on the process that computes it."""
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


def keeps_groups(recipe: Recipe) -> bool:
    """Whether the loss of a micro-batch needs whole groups: pairs, or a kernel per prompt."""
    gradient = recipe.gradient.options if recipe.gradient is not None else {}
    return "log_ratio" in recipe.aggregate.takes or gradient.get("group_by") == "prompt"


__all__ = ["DECIDED", "GIVEN", "WHY", "check_engine", "check_fit", "keeps_groups", "made"]
