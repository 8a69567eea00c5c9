"""What tests of many modules have ranks import: done once, in their fork server, which knows no folder of tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ascend.hccl_ranks
import ascend.operators  # noqa: F401
import cases  # noqa: F401
