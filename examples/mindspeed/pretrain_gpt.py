"""Megatron-LM's own pretrain_gpt.py under MindSpeed, with tokenring's attention: no file of either is changed.

MEGATRON names the folder of Megatron-LM. Not run on an NPU; the order of the imports, which is all that is here, is
what tests/integrations/test_mindspeed_real.py runs with MindSpeed's source on emulated NPUs.
"""

# ruff: noqa: F401, I001  (tokenring's import stands before MindSpeed's, which applies its features when imported)
from __future__ import annotations

import os
import runpy
import sys

import tokenring.integrations.mindspeed
import mindspeed.megatron_adaptor  # type: ignore[import-not-found]

if __name__ == "__main__":
    folder = os.environ["MEGATRON"]
    sys.path.insert(0, folder)  # it imports its neighbours
    runpy.run_path(os.path.join(folder, "pretrain_gpt.py"), run_name="__main__")
