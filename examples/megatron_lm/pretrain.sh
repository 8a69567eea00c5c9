#!/bin/bash
# Megatron-LM's own pretrain_gpt.py on NVIDIA GPUs, with tokenring's attention under context parallelism.
#
#   MEGATRON=.../Megatron-LM PER_NODE=8 examples/megatron_lm/pretrain.sh    one host
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first-host PER_NODE=8 ...              on each of several
#
# What it adds to a script for Megatron-LM: --spec, and tokenring_layer.py beside it. Further flags go to Megatron.
#
# Run: its flags, read by Megatron-LM's parser (docs/mindspeed.md has the versions), and the command that it makes, by
# tests/project/test_cluster.py. Not run: on GPUs.
set -euo pipefail

: "${MEGATRON:?the folder of Megatron-LM}"
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../cluster/model.sh"
export PYTHONPATH="$MEGATRON:$here${PYTHONPATH:+:$PYTHONPATH}"

ATTENTION=(--spec tokenring_layer layer)

exec "$here/../cluster/torchrun.sh" "$MEGATRON/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${ATTENTION[@]}" "$@"
