"""A training program of MindSpeed-LLM's, as posttrain_gpt.py, with tokenring's attention: no file of it is changed.

    torchrun ... train.py posttrain_gpt.py FLAGS --context-parallel-attention tokenring

run.sh does this for a launch script. Not run on an NPU; benchmarks/mindspeed_llm makes steps on emulated ones.
"""

# ruff: noqa: F401  (tokenring's import stands before MindSpeed-LLM's, which applies its features when imported)
from __future__ import annotations

import os
import runpy
import sys

import tokenring.integrations.mindspeed

if __name__ == "__main__":
    del sys.argv[0]  # the program takes this one's place
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # it imports its neighbours
    runpy.run_path(sys.argv[0], run_name="__main__")
