#!/usr/bin/env bash
#SBATCH --job-name=proxpo-verl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# verl with a method of proxpo over the nodes of a Slurm job, from the root of the repository:
#
#   sbatch --nodes=4 examples/verl/slurm.sh isopo [verl settings]
#
# proxpo and verl are installed on all nodes; model, data and checkpoints lie on a shared disk.
set -euo pipefail
METHOD=${1:?usage: sbatch examples/verl/slurm.sh isopo|p3o [verl settings]}
shift
SCRIPTS=${SCRIPTS:-${SLURM_SUBMIT_DIR:-.}/examples/verl} # sbatch runs a copy of this file
export NNODES=$SLURM_JOB_NUM_NODES GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
HEAD=$(hostname --ip-address | cut -d ' ' -f 1) # this script runs on the first node
export HEAD SCRIPTS

srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'NODE=$SLURM_NODEID exec "$SCRIPTS/ray_cluster.sh" "$SCRIPTS/several_nodes.sh" "$@"' \
  _ "$METHOD" "$@"
