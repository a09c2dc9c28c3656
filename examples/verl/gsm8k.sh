#!/usr/bin/env bash
# What the GSM8K runs with Qwen3-0.6B share; isopo.sh, p3o.sh, kpo.sh and vanilla.sh add the method.
#
#   python examples/verl/gsm8k_data.py data/gsm8k      once: the problems in verl's form
#   GPUS=1 examples/verl/isopo.sh                      one node
#   NNODES=2 GPUS=8 examples/verl/p3o.sh               several nodes: see several_nodes.sh
#
# Anything verl takes can follow: examples/verl/p3o.sh trainer.total_epochs=1
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
DATA=${DATA:-data/gsm8k}
GPUS=${GPUS:-8}
NNODES=${NNODES:-1}

exec "$PYTHON" -m verl.trainer.main_ppo \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=2048 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=2e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.actor.policy_loss._target_=proxpo.adapters.verl.LossConfig \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.nnodes="$NNODES" \
  trainer.total_epochs=2 \
  trainer.test_freq=10 \
  trainer.save_freq=25 \
  trainer.project_name=proxpo \
  'trainer.logger=[console]' \
  "$@"
