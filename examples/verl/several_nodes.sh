#!/usr/bin/env bash
# A run over several nodes. proxpo and verl are installed on all of them, and the model and data are
# found under the same paths.
#
#   on the first node:   ray start --head --port=6379
#   on the others:       ray start --address=FIRST_NODE:6379
#   on the first node:   NNODES=2 GPUS=8 examples/verl/several_nodes.sh isopo
#
# Ray hands the environment of isopo.sh to the workers of every node.
set -euo pipefail
METHOD=${1:?usage: NNODES=2 GPUS=8 several_nodes.sh isopo|p3o [verl settings]}
shift
export RAY_ADDRESS=${RAY_ADDRESS:-auto} NNODES=${NNODES:-2}

exec "$(dirname "$0")/$METHOD.sh" \
  trainer.default_local_dir="${CHECKPOINTS:-checkpoints}/$METHOD" \
  "$@"
