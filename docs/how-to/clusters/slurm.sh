#!/bin/bash
# Runs Rollover on the nodes of one SLURM job: starts a Ray cluster on all of them, and the run on the first.
#
#     sbatch slurm.sh run.toml --trainer.num_devices 8
#     sbatch slurm.sh --launch plan.json run.toml
#
# All nodes need the same environment (see VENV) and, unless weights travel through a process group, a shared file system.
#SBATCH --job-name=rollover
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120

set -euo pipefail

VENV=${VENV:-$HOME/rollover}       # an environment with rollover[all,ray], at this path on every node
PORT=${PORT:-6379}                 # the port of Ray's head
NODE_TYPE=${NODE_TYPE:-}           # a resource that each node offers, one unit per GPU, such as h100
NODES_START_S=${NODES_START_S:-300} # longest wait for all nodes to join Ray
GPUS=${SLURM_GPUS_ON_NODE:-8}

# shellcheck disable=SC1091
source "$VENV/bin/activate"
export RAY_USAGE_STATS_ENABLED=0

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$PORT
resources='{}'
[ -z "$NODE_TYPE" ] || resources="{\"$NODE_TYPE\": $GPUS}"

fail() {
  echo "slurm.sh: $*" >&2
  exit 1
}
stop() {
  kill "${steps[@]}" 2>/dev/null || true
  wait || true
}
steps=()
trap stop EXIT
trap 'exit 143' TERM

# One step per node, which ends with the job; ray start --block ends when its node is lost.
for node in "${nodes[@]}"; do
  role=(--address="$address")
  [ "$node" != "$head" ] || role=(--head --port="$PORT" --node-ip-address="${address%:*}")
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
    ray start "${role[@]}" --num-gpus="$GPUS" --resources="$resources" --block &
  steps+=($!)
  [ "$node" != "$head" ] || sleep "${HEAD_STARTS_S:-15}"
done

alive_nodes() {
  timeout 60 python -c '
import sys

import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
' "$address" 2>/dev/null | tail -n 1
}

# A run that needs more than the nodes that are there when it begins is refused at once, so all of them join first.
deadline=$((SECONDS + NODES_START_S))
until alive=$(alive_nodes) && [ "${alive:-0}" -ge "${#nodes[@]}" ]; do
  for i in "${!nodes[@]}"; do
    kill -0 "${steps[$i]}" 2>/dev/null || fail "'ray start' has ended on ${nodes[$i]}; its output above says why"
  done
  [ "$SECONDS" -lt "$deadline" ] || fail "${alive:-0} of ${#nodes[@]} nodes have joined Ray at $address within" \
    "$NODES_START_S s (NODES_START_S); the output of 'ray start' above says why"
  sleep 1
done

command=train
if [ "${1:-}" = --launch ]; then
  command=launch
  shift
fi
rollover "$command" "$@" --cluster.address "$address" --cluster.placement_timeout_s 300 &
run=$!
trap 'kill -TERM $run 2>/dev/null || true; wait $run || true; exit 143' TERM
wait "$run"
