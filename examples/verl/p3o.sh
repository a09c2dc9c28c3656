#!/usr/bin/env bash
# P3O (arXiv:2605.12380) on GSM8K. Each rollout is used for four updates; its effective sample size
# sets both the cap and the KL, per micro-batch over all ranks as in the released code.
set -euo pipefail

exec "$(dirname "$0")/gsm8k.sh" \
  algorithm.adv_estimator=proxpo_p3o \
  actor_rollout_ref.actor.policy_loss.loss_mode=proxpo_p3o \
  +actor_rollout_ref.actor.policy_loss.options.ess_scope=microbatch \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.ppo_epochs=2 \
  trainer.experiment_name=p3o-gsm8k-qwen3-0.6b \
  "$@"
