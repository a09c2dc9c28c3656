#!/usr/bin/env bash
# ISOPO (arXiv:2512.23353) on GSM8K: no old policy, no clip, one backward pass. The gradient
# transform lives in proxpo's engine, which every process of the run has to be told of.
set -euo pipefail
export VERL_ENGINE_VENDOR=proxpo

exec "$(dirname "$0")/gsm8k.sh" \
  algorithm.adv_estimator=proxpo_isopo \
  actor_rollout_ref.actor.policy_loss.loss_mode=proxpo_isopo \
  +actor_rollout_ref.actor.policy_loss.options.p=-1.0 \
  +actor_rollout_ref.actor.policy_loss.options.overlap=250 \
  actor_rollout_ref.actor.loss_agg_mode=token-sum \
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=proxpo \
  trainer.experiment_name=isopo-gsm8k-qwen3-0.6b \
  "$@"
