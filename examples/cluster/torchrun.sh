#!/bin/bash
# This node's part of a torchrun over several, as all launchers beside this file use it:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first-host PER_NODE=8 examples/cluster/torchrun.sh SCRIPT FLAGS...
#
# Run: on CPU, one node and two (two of these on one machine), by tests/project/test_cluster.py. Not run: on a cluster.
set -euo pipefail
exec python -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${PER_NODE:-8}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" "$@"
