"""verl's loss modes, estimators and actor settings beside proxpo's: tables for the page and a test.

Settings that are options of a method stand in `_settings.STAGE_OPTIONS`.
"""

NONE = "none: proxpo has no such method"
# verl's actor_rollout_ref.actor.policy_loss.loss_mode
LOSS_MODES = {
    "vanilla": "`proxpo_grpo`, or `proxpo_ppo` with a critic; `dual=3` for verl's dual clip",
    "gspo": "`proxpo_gspo`, in the form `variant=token`: each token carries its own gradient, also "
    "under advantages and rollout weights of each token; `variant=sequence` is the paper's",
    "sapo": "`proxpo_sapo`",
    "cispo": "`proxpo_cispo`",
    "geo_mean": "`proxpo_gmpo`",
    "clip_cov": "`proxpo_clip_cov`",
    "kl_cov": "`proxpo_kl_cov`; `weighted_terms=all` where rollout weights act on the penalty too",
    "gpg": "`proxpo_reinforce`",
    "dro": "`proxpo_reinforce` with `regularisers={name:kl_from_old,coef:BETA,estimator:k2}`; "
    "`weighted_terms=all` as for `kl_cov`",
    "bypass_mode": "any loss mode, under `algorithm.rollout_correction.bypass_mode=True`",
    "dppo_tv": "`proxpo_dppo`; `weight_cap=3` for verl's default",
    "dppo_kl": "`proxpo_dppo` with `divergence=kl`",
}
# verl's algorithm.adv_estimator
ESTIMATORS = {
    "grpo": "as it is; `proxpo_dr_grpo` is `norm_adv_by_std_in_grpo=False`",
    "grpo_vectorized": "as it is, the same as `grpo` to 1e-7",
    "gae": "as it is, for methods with a critic",
    "rloo": "as it is; `proxpo_leave_one_out` gives 0 to a response without siblings",
    "rloo_vectorized": "as it is, or `proxpo_leave_one_out`",
    "opo": "as it is, or `proxpo_opo`",
    "remax": "as it is, with `trainer.use_v1=False`: verl's V1 trainer draws no greedy responses",
    "reinforce_plus_plus": "as it is, or `proxpo_discounted_return` with `whitening=true`",
    "reinforce_plus_plus_baseline": "`proxpo_reinforce_pp_baseline`",
    "gpg": NONE,
    "grpo_passk": NONE,
    "gdpo": NONE,
    "optimal_token_baseline": NONE,
    "tir_optimal_token_baseline": NONE,
}
_SIZE = "verl's: micro-batches add up to the batch"
_KL = "verl's own term, added to every loss mode"
_SPEED = "verl's: speed and memory, not the loss"
_INNER = "set by verl itself"
# Fields of verl's ActorConfig and FSDPActorConfig that stay verl's.
ACTOR_SETTINGS = {
    "strategy": "verl's; `fsdp2` for the engine of ISOPO, ISOPO-NTK and PROMA",
    "clip_ratio": "both bounds of the clip, where these are null; else refused",
    "policy_loss": "the loss mode and its options; the numbers above",
    "loss_agg_mode": "a written value is the average of every method; beside verl's default a "
    "method has its own; a line says which (see below)",
    "loss_scale_factor": "verl's; `data.max_response_length` where a method divides by a constant "
    "length and none is set",
    "ppo_epochs": "verl's; refused where a method makes one update per rollout",
    "ppo_mini_batch_size": "verl's; refused where a method makes one update per rollout",
    **dict.fromkeys(("shuffle", "data_loader_seed"), "verl's: the order of mini-batches"),
    **dict.fromkeys(("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"), _SIZE),
    **dict.fromkeys(("use_dynamic_bsz", "ppo_max_token_len_per_gpu"), _SIZE),
    **dict.fromkeys(
        ("ppo_infer_micro_batch_size_per_gpu", "ppo_infer_max_token_len_per_gpu"), _SIZE
    ),
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff"), _KL),
    **dict.fromkeys(("calculate_entropy", "calculate_sum_pi_squared"), "verl's metrics"),
    **dict.fromkeys(("optim", "grad_clip", "freeze_vision_tower", "qat"), "verl's, after the loss"),
    "use_fused_kernels": "verl's; gradient transforms refuse fused heads, which hide their weight",
    "ulysses_sequence_parallel_size": "verl's; the engine's transforms add up over the ranks",
    "use_rollout_log_probs": "verl's, which does not read it; "
    "`algorithm.rollout_correction.bypass_mode=True` takes the sampler's numbers as the old ones",
    **dict.fromkeys(("use_prefix_grouper", "use_torch_compile", "use_remove_padding"), _SPEED),
    **dict.fromkeys(("pad_to_length", "entropy_checkpointing", "fsdp_config"), _SPEED),
    **dict.fromkeys(
        ("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"), _SPEED
    ),
    **dict.fromkeys(("checkpoint", "profiler"), "verl's"),
    **dict.fromkeys(("engine", "rollout_n", "model_config", "global_batch_info"), _INNER),
}

__all__ = ["ACTOR_SETTINGS", "ESTIMATORS", "LOSS_MODES", "NONE"]
