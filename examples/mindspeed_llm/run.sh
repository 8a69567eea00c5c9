#!/bin/bash
# A launch script of MindSpeed-LLM's, unchanged, with tokenring's attention under context parallelism.
#
#   cd MindSpeed-LLM
#   .../examples/mindspeed_llm/run.sh examples/mcore/qwen3/tune_qwen3_32b_32K_full_pack_A3_ptd.sh
#   .../examples/mindspeed_llm/run.sh SCRIPT --tokenring-schedule auto:usp,ulysses     flags behind the script's own
#
# It puts bin/torchrun and bin/python in front of PATH. These start train.py, which imports tokenring's feature first,
# around the script's training program, and add the flags. docs/mindspeed.md has all flags.
#
# Run: the commands that it makes, by tests/project/test_mindspeed_llm_example.py; the flags of the scripts with
# MindSpeed-LLM's source on emulated NPUs, by benchmarks/mindspeed_llm. Not run: on NPUs.
set -euo pipefail

: "${1:?a launch script of MindSpeed-LLM}"
here=$(cd "$(dirname "$0")" && pwd)
script=$1
shift
# Pairs of ranks must meet within it: first steps compile. Scripts that set it themselves keep their value.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
export TOKENRING_LAUNCH="$here" TOKENRING_FLAGS="--context-parallel-attention tokenring $*" PATH="$here/bin:$PATH"
exec bash "$script"
