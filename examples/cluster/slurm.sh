#!/bin/bash
#SBATCH --job-name=tokenring
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#
# A launch script on several nodes; what Slurm calls the accelerators (--gres) is the cluster's choice:
#
#   export MEGATRON=.../Megatron-LM
#   sbatch --gres=gpu:8 examples/cluster/slurm.sh examples/megatron_lm/pretrain.sh
#   sbatch --gres=npu:8 examples/cluster/slurm.sh examples/mindspeed/pretrain.sh
#   sbatch --gres=npu:8 examples/cluster/slurm.sh examples/cluster/torchrun.sh SCRIPT FLAGS...
#
# Run: with stand-ins of srun and scontrol, by tests/project/test_cluster.py. Not run: under Slurm.
set -euo pipefail

HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES=$SLURM_JOB_NUM_NODES MASTER_ADDR=${HOSTS%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export PER_NODE=${PER_NODE:-8}

# SLURM_NODEID differs from node to node: it is read there.
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' node "$@"
