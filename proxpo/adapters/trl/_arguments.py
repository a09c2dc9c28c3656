"""The arguments of TRL's GRPOConfig and GRPOTrainer under a recipe: one table, for checks and docs.

An argument is TRL's, and acts as in TRL; or the recipe decides, and another value than the recipe's
is refused with the recipe options that do the same; or nothing in proxpo does it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from proxpo.errors import ProxpoError
from proxpo.settings import make_recipe
from proxpo.types import Recipe


@dataclass(frozen=True)
class Argument:
    """An argument of GRPOConfig.

    rule: "TRL", "recipe" or "none", as at the head of this file
    text: the effect, or the way to the same in a recipe without an option for it
    example: a value other than TRL's default, for the page and the tests
    """

    rule: Literal["TRL", "recipe", "none"]
    text: str
    example: Any = None


_SAMPLING = "sampling; as in TRL, log-probabilities are those of the whole distribution"
_VLLM = "settings of vLLM"
_LOGS = "logging"
_REFERENCE = "moves the reference model; refused for a recipe that reads none"
_CONTINUOUS = "the generation of transformers"
_ADAPTIVE = (
    "proxpo has no adaptive entropy bonus; {'regularisers+': 'entropy_bonus'} has a fixed one"
)
_VESPO = "it is an option of recipe='vespo'"
_TIS = "it takes no {'weights+': 'tis'}"
_TRUNCATED = (
    "out of the loss, not of the group, and counted in a mean over completions; refused where the "
    "group's stages read lengths"
)
_SAPO = "it is an option of recipe='sapo'"
_CLIP = "a clip range, where it has one, is set by options of its trust stage"

ARGUMENTS = {
    # the loss
    "beta": Argument("recipe", "it has no place for a KL term", 0.04),
    "use_bias_correction_kl": Argument(
        "recipe", "kl_ratio_corrected of grpo; ratio_corrected of any kl_to_ref", False
    ),
    "epsilon": Argument("recipe", _CLIP, 0.1),
    "epsilon_high": Argument("recipe", _CLIP, 0.28),
    "delta": Argument("recipe", "trust=ppo_clip has it as {'trust.cap': ...}", 1.05),
    "loss_type": Argument("recipe", "use another recipe", "dr_grpo"),
    "importance_sampling_level": Argument("recipe", "its ratio is its own", "sequence"),
    "scale_rewards": Argument("recipe", "its advantage has no such scale", "batch"),
    "multi_objective_aggregation": Argument(
        "none", "use reward_weights, summed before the recipe sees them", "normalize_then_sum"
    ),
    "top_entropy_quantile": Argument("recipe", "it takes no {'weights+': 'top_entropy'}", 0.5),
    "off_policy_mask_threshold": Argument(
        "recipe", "it takes no {'weights+': 'off_policy_mask'}", 0.1
    ),
    "entropy_coef": Argument("recipe", "it has no place for an entropy bonus", 0.01),
    "use_adaptive_entropy": Argument("none", _ADAPTIVE, True),
    "entropy_coef_min": Argument("none", _ADAPTIVE, 0.1),
    "entropy_coef_max": Argument("none", _ADAPTIVE, 0.5),
    "entropy_coef_delta": Argument("none", _ADAPTIVE, 0.01),
    "entropy_target": Argument("none", _ADAPTIVE, 0.5),
    "sapo_temperature_pos": Argument("recipe", _SAPO, 2.0),
    "sapo_temperature_neg": Argument("recipe", _SAPO, 2.0),
    "vespo_k_pos": Argument("recipe", _VESPO, 1.0),
    "vespo_k_neg": Argument("recipe", _VESPO, 1.0),
    "vespo_lambda_pos": Argument("recipe", _VESPO, 1.0),
    "vespo_lambda_neg": Argument("recipe", _VESPO, 1.0),
    "vllm_importance_sampling_correction": Argument(
        "recipe", "a recipe with weights=tis corrects, one without says at the start that it does "
        "not; False silences that line and is refused where the recipe corrects", False,
    ),
    "vllm_importance_sampling_mode": Argument("recipe", _TIS, "token_truncate"),
    "vllm_importance_sampling_clip_max": Argument("recipe", _TIS, 2.0),
    "vllm_importance_sampling_clip_min": Argument("recipe", _TIS, 0.5),
    "vllm_importance_sampling_cap": Argument("recipe", _TIS, 2.0),
    "router_aux_loss_coef": Argument(
        "TRL", "added to the loss; refused with a gradient transform unless 0"
    ),
    "cast_lm_head_to_fp32": Argument("TRL", "as in TRL; refused with a gradient transform"),
    # rewards and completions
    "reward_weights": Argument(
        "TRL", "weights of several reward functions, summed before the recipe", [0.3, 0.7]
    ),
    "mask_truncated_completions": Argument("TRL", _TRUNCATED, True),
    "num_generations": Argument("TRL", "the group", 4),
    "num_generations_eval": Argument("TRL", "the group in evaluation", 4),
    "max_completion_length": Argument(
        "TRL", "also the length a recipe divides by or penalises, which then may not be None", 2
    ),
    "temperature": Argument("TRL", "of sampling and of log-probabilities", 0.7),
    "top_p": Argument("TRL", _SAMPLING, 0.3),
    "top_k": Argument("TRL", _SAMPLING, 2),
    "min_p": Argument("TRL", _SAMPLING, 0.9),
    "repetition_penalty": Argument("TRL", _SAMPLING, 3.0),
    "generation_kwargs": Argument("TRL", _SAMPLING, {"min_new_tokens": 3}),
    "chat_template_kwargs": Argument("TRL", "the prompts"),
    "max_tool_calling_iterations": Argument("TRL", "the turns of an agent"),
    "cache_implementation": Argument("TRL", _CONTINUOUS),
    "use_transformers_continuous_batching": Argument("TRL", _CONTINUOUS),
    "transformers_continuous_batching_config": Argument("TRL", _CONTINUOUS),
    "use_transformers_paged": Argument("TRL", _CONTINUOUS),
    "ds3_gather_for_generation": Argument("TRL", "generation under DeepSpeed ZeRO-3"),
    # updates
    "num_iterations": Argument("TRL", "a multiple of the recipe's passes over a rollout", 2),
    "steps_per_generation": Argument("TRL", "a multiple of gradient_accumulation_steps", 2),
    "generation_batch_size": Argument("TRL", "sets steps_per_generation", 8),
    "sync_ref_model": Argument("TRL", _REFERENCE, True),
    "ref_model_mixup_alpha": Argument("TRL", _REFERENCE),
    "ref_model_sync_steps": Argument("TRL", _REFERENCE),
    "learning_rate": Argument("TRL", "the optimizer", 1e-2),
    # models and data
    "model_init_kwargs": Argument("TRL", "loading"),
    "trust_remote_code": Argument("TRL", "loading"),
    "disable_dropout": Argument("TRL", "the model in training"),
    "remove_unused_columns": Argument("TRL", "the columns that reward functions see"),
    "shuffle_dataset": Argument("TRL", "the order of prompts", False),
    "pad_to_multiple_of": Argument("TRL", "the shape of a batch, not its loss", 4),
    # vLLM and logs
    "use_vllm": Argument("TRL", "the sampler; its log-probabilities are the field rollout_logp"),
    **dict.fromkeys(
        (
            *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_group_port"),
            *("vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host"),
            *("vllm_server_port", "vllm_server_timeout", "vllm_gpu_memory_utilization"),
            *("vllm_max_model_length", "vllm_tensor_parallel_size"),
        ),
        Argument("TRL", _VLLM),
    ),
    **dict.fromkeys(
        (
            *("log_completions", "log_multimodal", "num_completions_to_print"),
            *("log_unique_prompts", "log_completions_hub_repo"),
        ),
        Argument("TRL", _LOGS),
    ),
}  # fmt: skip
# Stages of a group that read the tokens of a completion; whitening advantages is one more.
READ_LENGTHS = (
    *("kl_in_reward", "length_weighted_baseline", "overlong_penalty"),
    *("reweighted_baseline", "usable_only"),
)
# Arguments of GRPOTrainer, which are all TRL's; a text where a recipe has something to do with it.
TRAINER_ARGUMENTS = {
    **dict.fromkeys(("model", "args", "train_dataset", "processing_class", "callbacks"), ""),
    **dict.fromkeys(("reward_processing_classes", "quantization_config", "tools"), ""),
    "reward_funcs": "several are weighted and summed; a completion without any score is left out",
    "eval_dataset": "evaluated with the recipe's loss",
    "optimizers": "a gradient transform ends before the optimizer's step",
    "peft_config": "a gradient transform acts on the weights of the adapter",
    "rollout_func": "its log-probabilities are the field rollout_logp",
    "environment_factory": "",
}
LOSS_TYPES = {
    "grpo": "recipe='grpo'",
    "bnpo": "recipe='grpo' with {'aggregate': 'token_mean'} in recipe_options",
    "dapo": "recipe='dapo'",
    "dr_grpo": "recipe='dr-grpo'",
    "cispo": "recipe='cispo' with {'absolute': True} in recipe_options",
    "sapo": "recipe='sapo'",
    "vespo": "recipe='vespo'",
    "luspo": "recipe='gspo' with {'variant': 'luspo'} in recipe_options",
}
# TRL's names for a clipped surrogate, by the average of its token losses.
BY_AVERAGE: dict[str, tuple[str, ...]] = {
    "token_mean": ("dapo", "bnpo"),
    "seq_mean_token_mean": ("grpo",),
    "seq_mean_token_sum": ("luspo",),
    "constant_length": ("dr_grpo",),
}


def check_arguments(recipe: Recipe, args: Any) -> None:
    """Refuses values of GRPOConfig that would silently have no effect.

    A class derived from it may have other defaults, which its author has written down.
    """
    from trl import GRPOConfig

    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for name, argument in ARGUMENTS.items():
        value = getattr(args, name)
        if argument.rule == "TRL" or value == defaults[name] or agrees(recipe, name, args):
            continue
        raise ProxpoError(
            f"GRPOConfig.{name}={value} has no effect on recipe {recipe.name}: "
            f"{suggestion(recipe, name, args)}"
        )
    _check_bonus(recipe, args)
    if args.sync_ref_model and "ref_logp" not in recipe.needs():
        raise ProxpoError(
            f"GRPOConfig.sync_ref_model=True has no effect on recipe {recipe.name}, which reads no "
            "reference model; a KL term to one is {'regularisers+': 'kl_to_ref'} in recipe_options"
        )
    before = (*recipe.reward, *([recipe.advantage] if recipe.advantage else []))
    for stage in before if args.mask_truncated_completions else ():
        if stage.name in READ_LENGTHS or stage.options.get("whitening"):
            raise ProxpoError(
                "GRPOConfig.mask_truncated_completions=True hides the tokens of truncated "
                f"completions from {stage.kind}={stage.name} of recipe {recipe.name}: use "
                "{'filter+': 'not_truncated'} in recipe_options"
            )


def _check_bonus(recipe: Recipe, args: Any) -> None:
    """Refuses TRL's entropy bonus where the recipe's cannot be averaged as TRL's is."""
    aggregate, obstacles = recipe.aggregate, []
    if aggregate.name not in BY_AVERAGE:
        obstacles.append(f"aggregate={aggregate.name}")
    obstacles += [f"select={stage.name}" for stage in recipe.select]
    if any(stage.name == "top_entropy" for stage in recipe.weights):
        obstacles.append("weights=top_entropy, to whose tokens TRL restricts it")
    if args.entropy_coef and obstacles:
        raise ProxpoError(
            f"GRPOConfig.entropy_coef={args.entropy_coef} is in TRL a mean over the tokens of a "
            f"micro-batch, which recipe {recipe.name} does not take under {obstacles[0]}: leave it "
            "at 0, and entropy_bonus in recipe_options is averaged as the recipe's loss"
        )


def suggestion(recipe: Recipe, name: str, args: Any) -> str:
    """The recipe_options that do what an argument of GRPOConfig would do in TRL, as a clause."""
    if name == "loss_type":
        recipe_of = LOSS_TYPES.get(args.loss_type, "")
        return f"use {recipe_of}" if recipe_of else f"TRL has {', '.join(LOSS_TYPES)}"
    if name == "vllm_importance_sampling_correction":
        return "it has weights=tis"
    for target in _targets(recipe, name, args):
        options = _options(recipe, name, target)
        if options is not None:
            written = str(dict(options)).replace(": inf", ": float('inf')")
            return f"use {written} in recipe_options"
    return ARGUMENTS[name].text


def agrees(recipe: Recipe, name: str, args: Any) -> bool:
    """True if the recipe does the same already, as exactly as it can."""
    if name == "loss_type":
        return args.loss_type in loss_types(recipe)
    if name == "vllm_importance_sampling_correction":
        return all(stage.name != "tis" for stage in recipe.weights)
    has_kl = any(stage.name == "kl_to_ref" for stage in recipe.regularisers)
    if name == "use_bias_correction_kl" and not has_kl:
        return True  # no term to correct
    for target in _targets(recipe, name, args):
        if target.held(recipe):
            return True
        if _options(recipe, name, target) is not None:
            return False
    return False


@dataclass(frozen=True)
class _Target:
    """A stage with the options that do what an argument of TRL does."""

    kind: str
    stage: str
    options: Mapping[str, Any]

    def held(self, recipe: Recipe) -> bool:
        """True if the recipe has this stage with these options."""
        return any(
            (stage.kind, stage.name) == (self.kind, self.stage)
            and all(stage.options.get(key) == value for key, value in self.options.items())
            for _, stage in recipe.stages()
        )


def _targets(recipe: Recipe, name: str, args: Any) -> list[_Target]:
    """Stages that do the same, the most exact first; none for what proxpo does not have."""
    value = getattr(args, name)
    if name == "beta":
        plain = _Target("regularisers", "kl_to_ref", {"coef": value})
        exact = replace(plain, options={"coef": value, "ratio_corrected": True})
        return [exact, plain] if args.use_bias_correction_kl else [plain]
    if name == "epsilon":  # both sides in TRL
        high = value if args.epsilon_high is None else args.epsilon_high
        return [_Target("trust", "ppo_clip", {"clip_low": value, "clip_high": high})]
    if name == "epsilon_high" and recipe.trust.name == "clipped_weight":  # TRL has no 1 +
        return [_Target("trust", "clipped_weight", {"clip_high": value, "absolute": True})]
    if name.startswith("vllm_importance_sampling"):
        level, mode = args.vllm_importance_sampling_mode.split("_")
        high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
        bounds = {"cap": math.inf if high is None else high, "floor": low or 0.0}
        return [_Target("weights", "tis", {"mode": mode, "level": level, **bounds})]
    if name.startswith("vespo_"):
        return [_Target("trust", "gamma_weight", {name.removeprefix("vespo_"): value})]
    kept = {"share": value, "normalise": "all", "rule": "quantile", "scope": "microbatch"}
    single = {
        "delta": _Target("trust", "ppo_clip", {"cap": value}),
        "entropy_coef": _Target("regularisers", "entropy_bonus", {"coef": value}),
        "epsilon_high": _Target("trust", "ppo_clip", {"clip_high": value}),
        "importance_sampling_level": _Target("ratio", str(value), {}),
        "off_policy_mask_threshold": _Target("weights", "off_policy_mask", {"threshold": value}),
        "sapo_temperature_neg": _Target("trust", "soft_gate", {"tau_neg": value}),
        "sapo_temperature_pos": _Target("trust", "soft_gate", {"tau_pos": value}),
        "scale_rewards": _Target("advantage", "group_relative", {"scale": value}),
        "top_entropy_quantile": _Target("weights", "top_entropy", kept),
        "use_bias_correction_kl": _Target("regularisers", "kl_to_ref", {"ratio_corrected": value}),
    }
    return [single[name]] if name in single else []


# Options of methods, by the argument, in the order of the options of the stage.
_METHOD_OPTIONS: dict[str, list[tuple[str, ...]]] = {
    "beta": [("kl_coef", "kl_ratio_corrected"), ("kl_coef",)],
    "delta": [("ratio_cap",)],
    "entropy_coef": [("entropy_coef",)],
    "epsilon": [("clip_low", "clip_high")],
    "epsilon_high": [("clip_high",), ("clip_high", "absolute")],
    "off_policy_mask_threshold": [("off_policy_threshold",)],
    "sapo_temperature_neg": [("tau_neg",)],
    "sapo_temperature_pos": [("tau_pos",)],
    "use_bias_correction_kl": [("kl_ratio_corrected",)],
    "vespo_k_neg": [("k_neg",)],
    "vespo_k_pos": [("k_pos",)],
    "vespo_lambda_neg": [("lambda_neg",)],
    "vespo_lambda_pos": [("lambda_pos",)],
}


def _options(recipe: Recipe, name: str, target: _Target) -> Mapping[str, Any] | None:
    """Options of the method or of its stages that give it the target; None if none do."""
    stage = {f"{target.kind}.{key}": value for key, value in target.options.items()}
    if target.kind == "ratio":
        tries: list[dict[str, Any]] = [{"ratio": target.stage}]
    elif target.kind in ("weights", "regularisers"):
        place = f"{target.kind}.{target.stage}"
        stage = {f"{place}.{key}": value for key, value in target.options.items()}
        tries = [stage, {f"{target.kind}+": target.stage, **stage}]
    else:
        tries = [stage]
    names = _METHOD_OPTIONS.get(name, [])
    own: list[dict[str, Any]] = [dict(zip(keys, target.options.values())) for keys in names]
    if name == "beta":  # the method's coefficient, the stage's correction
        own.append({"kl_coef": target.options["coef"]} | dict(list(stage.items())[1:]))
    # Without the options that are set, last: one of them may be the obstacle, and is named then.
    for kept, options in itertools.product((recipe.options, {}), [*own, *tries]):
        try:
            made = make_recipe(recipe.name, {**kept, **options})
        except ProxpoError:
            continue
        if target.held(made):
            return options
    return None


def replaced_defaults(recipe: Recipe, args: Any) -> str:
    """One line that names the defaults of GRPOConfig which the recipe replaces; empty if none.

    A GRPOConfig does not know which of its values were written and which are defaults, so
    `loss_type="dapo"` under recipe grpo cannot be refused, but it is named here.
    """
    trust, average = f"trust={recipe.trust}", f"aggregate={recipe.aggregate}"
    parts: dict[str, tuple[tuple[Any, ...], list[str]]] = {
        "loss_type": (loss_types(recipe), [trust, average]),
        "epsilon": ((recipe.trust.options.get("clip_low"),), [trust]),
        "epsilon_high": (_upper_bounds(recipe, args), [trust]),
        "scale_rewards": (_scales(recipe), [f"advantage={recipe.advantage}"]),
        "importance_sampling_level": ((recipe.ratio.name,), [f"ratio={recipe.ratio}"]),
    }
    read = [f"{stage.kind}={stage}" for _, stage in recipe.stages() if "ref_logp" in stage.needs]
    if read and not agrees(recipe, "beta", args):
        parts["beta"] = ((), read)
    replaced = [name for name, (same, _) in parts.items() if getattr(args, name) not in same]
    if not replaced:
        return ""
    values = ", ".join(f"{name}={getattr(args, name)!r}" for name in replaced)
    used = ", ".join(dict.fromkeys(stage for name in replaced for stage in parts[name][1]))
    return f"GRPOConfig's {values}: in their place recipe {recipe.name} has {used}"


def loss_types(recipe: Recipe) -> tuple[str, ...]:
    """TRL's names for the loss of this recipe."""
    named = {"clipped_weight": ("cispo",), "soft_gate": ("sapo",), "gamma_weight": ("vespo",)}
    if recipe.trust.name == "ppo_clip":
        return BY_AVERAGE.get(recipe.aggregate.name, ())
    return named.get(recipe.trust.name, ())


def _upper_bounds(recipe: Recipe, args: Any) -> tuple[float | None, ...]:
    """TRL's epsilon_high for this recipe's upper bound; None stands for epsilon."""
    high = recipe.trust.options.get("clip_high")
    return (high, None) if high in (None, args.epsilon) else (high,)


def _scales(recipe: Recipe) -> tuple[str, ...]:
    """TRL's names for the scale of this recipe's advantages."""
    advantage = recipe.advantage
    if advantage is None or advantage.name != "group_relative":
        return ()
    return (str(advantage.options["scale"]),)


__all__ = [
    "ARGUMENTS",
    "LOSS_TYPES",
    "TRAINER_ARGUMENTS",
    "Argument",
    "agrees",
    "check_arguments",
    "loss_types",
    "replaced_defaults",
    "suggestion",
]
