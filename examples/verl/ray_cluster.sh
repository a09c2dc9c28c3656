#!/usr/bin/env bash
# Ray over the nodes of a job, run once on each node: the first one waits for the others and runs the
# command, the others serve until it has ended. slurm.sh and skypilot.yaml call it.
#
#   NODE=0 NNODES=2 HEAD=ADDRESS_OF_NODE_0 examples/verl/ray_cluster.sh COMMAND [ARGUMENTS]
set -euo pipefail
: "${NODE:?}" "${NNODES:?}" "${HEAD:?}"
PYTHON=${PYTHON:-python3}
export RAY_ADDRESS="$HEAD:${PORT:-6379}"

if [ "$NODE" != 0 ]; then
  until ray health-check --address "$RAY_ADDRESS"; do sleep 2; done
  ray start --address="$RAY_ADDRESS" --block || echo "node $NODE: Ray has ended"
  exit 0
fi
trap 'ray stop' EXIT
ray start --head --node-ip-address="$HEAD" --port="${PORT:-6379}"
"$PYTHON" -c "
import ray, time
ray.init()
while sum(node['Alive'] for node in ray.nodes()) < $NNODES:
    time.sleep(2)
"
"$@"
