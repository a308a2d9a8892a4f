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

VENV=${VENV:-$HOME/rollover}       # an environment with rollover[train,ray], at this path on every node
PORT=${PORT:-6379}                 # the port of Ray's head
NODE_TYPE=${NODE_TYPE:-}           # a resource that each node offers, one unit per GPU, such as h100
GPUS=${SLURM_GPUS_ON_NODE:-8}

# shellcheck disable=SC1091
source "$VENV/bin/activate"
export RAY_USAGE_STATS_ENABLED=0

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$PORT
resources='{}'
[ -z "$NODE_TYPE" ] || resources="{\"$NODE_TYPE\": $GPUS}"

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

# The run connects when Ray answers, and waits up to cluster.placement_timeout_s for nodes that have not joined yet.
command=train
if [ "${1:-}" = --launch ]; then
  command=launch
  shift
fi
rollover "$command" "$@" --cluster.address "$address" --cluster.placement_timeout_s 300 &
run=$!
trap 'kill -TERM $run 2>/dev/null || true; wait $run || true; exit 143' TERM
wait "$run"
