"""Recipes and settings that cannot run inside TRL are refused with the reason, in one line."""

import dataclasses
import warnings
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.fields import CORE
from proxpo.settings import Settings, make_recipe
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

_TIS = "use {'weights+': 'tis'} in recipe_options"
_SAPO = "they are options of recipe='sapo'"
_VESPO = "proxpo has no recipe for VESPO"
_FIXED = "proxpo has no adaptive entropy bonus; {'regularisers+': 'entropy_bonus'} has a fixed one"
# Options of GRPOConfig that the recipe decides instead, and where a recipe has the same.
RECIPE_DECIDES = {
    "beta": "it has no place for a KL term",
    "delta": "trust=ppo_clip has it as {'trust.cap': ...}",
    "entropy_coef": "it has no place for an entropy bonus",
    "entropy_coef_delta": _FIXED,
    "entropy_coef_max": _FIXED,
    "entropy_coef_min": _FIXED,
    "entropy_target": _FIXED,
    "epsilon": "a clip range, where it has one, is set by options of its trust stage",
    "epsilon_high": "a clip range, where it has one, is set by options of its trust stage",
    "importance_sampling_level": "use {'ratio': 'token' or 'sequence'} in recipe_options",
    "loss_type": "use another recipe, e.g. recipe='dapo', 'dr-grpo', 'cispo', 'sapo'",
    "multi_objective_aggregation": "use reward_weights, summed before the recipe sees them",
    "off_policy_mask_threshold": "use {'weights+': 'off_policy_mask'} in recipe_options",
    "sapo_temperature_neg": _SAPO,
    "sapo_temperature_pos": _SAPO,
    "scale_rewards": "use {'advantage.scale': ...} in recipe_options",
    "top_entropy_quantile": "use {'weights+': 'top_entropy'} in recipe_options",
    "use_adaptive_entropy": _FIXED,
    "use_bias_correction_kl": "recipe='grpo' has it as kl_ratio_corrected",
    "vespo_k_neg": _VESPO,
    "vespo_k_pos": _VESPO,
    "vespo_lambda_neg": _VESPO,
    "vespo_lambda_pos": _VESPO,
    "vllm_importance_sampling_clip_max": _TIS,
    "vllm_importance_sampling_clip_min": _TIS,
    "vllm_importance_sampling_mode": _TIS,
}


def resolve_recipe(recipe: str | Recipe, options: Settings | None) -> Recipe:
    """Makes the recipe that a trainer was asked for, and checks it as a whole."""
    if isinstance(recipe, str):
        return make_recipe(recipe, options or {})
    if options:
        raise ProxpoError("recipe_options go with the name of a recipe; this one is already made")
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
    _check_options(recipe, args)
    _check_updates(recipe, args)
    if recipe.prompts:
        names = ", ".join(stage.name for stage in recipe.prompts)
        warnings.warn(
            f"recipe {recipe.name}: prompts={names} redraws prompts, which TRL does not; every "
            "prompt of a batch is trained on (recipe_options={'prompts': None} says so)",
            stacklevel=4,
        )
    if args.use_vllm and not recipe.needs() & {"rollout_logp", "prox_logp"}:
        warnings.warn(
            f"recipe {recipe.name} does not correct for the difference between vLLM and the "
            "trainer; recipe_options={'weights+': 'tis'} does",
            stacklevel=4,
        )


def _check_options(recipe: Recipe, args: Any) -> None:
    """Refuses options of GRPOConfig that would silently have no effect."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in RECIPE_DECIDES:
        value = getattr(args, name)
        if value != defaults[name]:
            raise ProxpoError(
                f"GRPOConfig.{name}={value} has no effect on recipe {recipe.name}: "
                f"{suggestion(recipe, name, value)}"
            )
    if args.sync_ref_model and "ref_logp" not in recipe.needs():
        raise ProxpoError(
            f"GRPOConfig.sync_ref_model=True has no effect on recipe {recipe.name}, which reads no "
            f"reference model: for a KL term to one {suggestion(recipe, 'beta', 0.04)}"
        )


def suggestion(recipe: Recipe, name: str, value: Any) -> str:
    """The recipe_options that do what an option of GRPOConfig would do in TRL, as a clause."""
    for options in _equivalents(recipe, name, value):
        if _has_effect(recipe, options):
            return f"use {options} in recipe_options"
    return RECIPE_DECIDES[name]


def _equivalents(recipe: Recipe, name: str, value: Any) -> list[dict[str, Any]]:
    """The same number as an option of the method, of one of its stages, or of one more stage."""
    terms = {"beta": ("kl_coef", "kl_to_ref"), "entropy_coef": ("entropy_coef", "entropy_bonus")}
    if name in terms:
        option, term = terms[name]
        place = f"regularisers.{term}.coef"
        return [{option: value}, {place: value}, {"regularisers+": term, place: value}]
    clips = recipe.trust.name == "ppo_clip"
    options: dict[str, list[dict[str, Any]]] = {
        "delta": [{"ratio_cap": value}, {"trust.cap": value}] if clips else [],
        "epsilon": [{"clip_low": value, "clip_high": value}, {"clip": value}],  # both sides in TRL
        "epsilon_high": [{"clip_high": value}, *([{"trust.high": value}] if clips else [])],
        "off_policy_mask_threshold": [{"off_policy_threshold": value}],
        "sapo_temperature_neg": [{"tau_neg": value}],
        "sapo_temperature_pos": [{"tau_pos": value}],
    }
    return options.get(name, [])


def _has_effect(recipe: Recipe, options: Settings) -> bool:
    """True if the method takes these options and another recipe comes of them."""
    try:
        before = make_recipe(recipe.name, recipe.options)
        after = make_recipe(recipe.name, {**recipe.options, **dict(options)})
    except ProxpoError:
        return False
    return after.replace(options={}) != before.replace(options={})


def replaced_defaults(recipe: Recipe, args: Any) -> str:
    """One line that names the defaults of GRPOConfig which the recipe replaces; empty if none.

    A GRPOConfig does not know which of its values were written and which are defaults, so
    `loss_type="dapo"` under recipe grpo cannot be refused, but it is named here.
    """
    trust, average = f"trust={recipe.trust}", f"aggregate={recipe.aggregate}"
    parts: dict[str, tuple[tuple[Any, ...], list[str]]] = {
        "loss_type": (_loss_types(recipe), [trust, average]),
        "epsilon": ((recipe.trust.options.get("low"),), [trust]),
        "epsilon_high": (_upper_bounds(recipe, args), [trust]),
        "scale_rewards": (_scales(recipe), [f"advantage={recipe.advantage}"]),
        "importance_sampling_level": ((recipe.ratio.name,), [f"ratio={recipe.ratio}"]),
    }
    read = [f"{stage.kind}={stage}" for _, stage in recipe.stages() if "ref_logp" in stage.needs]
    if read:
        parts["beta"] = ((), read)
    replaced = [name for name, (same, _) in parts.items() if getattr(args, name) not in same]
    if not replaced:
        return ""
    values = ", ".join(f"{name}={getattr(args, name)!r}" for name in replaced)
    used = ", ".join(dict.fromkeys(stage for name in replaced for stage in parts[name][1]))
    return f"GRPOConfig's {values}: in their place recipe {recipe.name} has {used}"


def microbatch_dependence(recipe: Recipe, microbatches: int) -> str:
    """One line for a loss that depends on the size of micro-batches; empty for any other."""
    local = [f"{s.kind}={s.name}" for _, s in recipe.stages() if not s.whole_batch]
    if microbatches == 1 or not local:
        return ""
    return (
        f"recipe {recipe.name} looks at each of the {microbatches} micro-batches of an optimizer "
        f"step by itself ({', '.join(local)}), so its loss depends on per_device_train_batch_size"
    )


def _loss_types(recipe: Recipe) -> tuple[str, ...]:
    """TRL's names for the loss of this recipe."""
    by_average = {
        "token_mean": ("dapo", "bnpo"),
        "seq_mean_token_mean": ("grpo",),
        "constant_length": ("dr_grpo",),
    }
    named = {"clipped_weight": ("cispo",), "soft_gate": ("sapo",)}
    if recipe.trust.name == "ppo_clip":
        return by_average.get(recipe.aggregate.name, ())
    return named.get(recipe.trust.name, ())


def _upper_bounds(recipe: Recipe, args: Any) -> tuple[float | None, ...]:
    """TRL's epsilon_high for this recipe's upper bound; None stands for epsilon."""
    high = recipe.trust.options.get("high")
    return (high, None) if high in (None, args.epsilon) else (high,)


def _scales(recipe: Recipe) -> tuple[str, ...]:
    """TRL's names for the scale of this recipe's advantages."""
    advantage = recipe.advantage
    if advantage is None or advantage.name != "group_relative":
        return ()
    return (str(advantage.options["scale"]),)


def _check_updates(recipe: Recipe, args: Any) -> None:
    """Refuses optimizer steps over parts of two rollouts, or other than the recipe prescribes."""
    microbatches, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
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
    "RECIPE_DECIDES",
    "check_engine",
    "check_recipe",
    "microbatch_dependence",
    "needs_whole_groups",
    "replaced_defaults",
    "resolve_recipe",
    "suggestion",
]
