#!/bin/bash
# A GPT on 8 or 16 NPUs with MindSpeed and tokenring's attention under context parallelism.
#
#   MEGATRON=.../Megatron-LM PER_NODE=8  examples/mindspeed/pretrain.sh   8 NPUs (Atlas 800T A2): TP 2 x CP 4
#   MEGATRON=.../Megatron-LM PER_NODE=16 examples/mindspeed/pretrain.sh   16 dies (Atlas 800T A3): TP 2 x CP 8
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first-host PER_NODE=8 ...            on each of several servers
#
# What it adds to a script for MindSpeed: the two flags of ATTENTION, and pretrain_gpt.py beside it. Further flags go to
# Megatron, as --train-iters 100, or --tokenring-schedule tokenring (docs/mindspeed.md has all).
#
# Run: its flags, read by the parsers of MindSpeed and Megatron-LM (docs/mindspeed.md has the versions), and the command
# that it makes, by tests/project/test_cluster.py. Not run: on NPUs.
set -euo pipefail

: "${MEGATRON:?the folder of Megatron-LM}"
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../cluster/model.sh"
export MEGATRON PYTHONPATH="$MEGATRON${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
# Pairs of ranks must meet within it: first steps compile. With retries on (Atlas A3: L1:1,L2:1) HCCL takes at most five
# communicators in a process, Megatron's among them, and tokenring keeps to five of its own.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}" HCCL_OP_RETRY_ENABLE="${HCCL_OP_RETRY_ENABLE:-L1:0,L2:0}"

MINDSPEED=(--use-flash-attn --context-parallel-algo megatron_cp_algo --attention-mask-type causal)
ATTENTION=(--context-parallel-attention tokenring --tokenring-schedule auto)

exec "$here/../cluster/torchrun.sh" "$here/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${MINDSPEED[@]}" "${ATTENTION[@]}" "$@"
