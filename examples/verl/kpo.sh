#!/usr/bin/env bash
# KPO (arXiv:2602.10609) on GSM8K: ratios smoothed along each response by a Kalman filter.
set -euo pipefail

exec "$(dirname "$0")/gsm8k.sh" \
  algorithm.adv_estimator=proxpo_kpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=proxpo_kpo \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  trainer.experiment_name=kpo-gsm8k-qwen3-0.6b \
  "$@"
