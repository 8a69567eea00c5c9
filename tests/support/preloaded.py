"""What tests of many modules have ranks import: done once, in their fork server, which knows no folder of tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in ("support", "fakes")]

import ascend.hccl_ranks  # noqa: E402
import ascend.operators  # noqa: E402, F401
import cases  # noqa: E402, F401
