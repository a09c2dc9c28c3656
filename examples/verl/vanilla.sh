#!/usr/bin/env bash
# verl's own loss and advantages (GRPO) on GSM8K, with nothing of proxpo: the run to compare with.
set -euo pipefail

exec "$(dirname "$0")/gsm8k.sh" \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
  trainer.experiment_name=vanilla-gsm8k-qwen3-0.6b \
  "$@"
