"""Measured on shaped links, told nothing: simple shapes of four ranks.

benchmarks/measure_topology.py has all, and eight.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import import_module
from typing import Any

import pytest
from test_topology_dumps import SHARED

TESTBED = SHARED / "testbed/testbed.py" if SHARED is not None else None
pytestmark = [
    pytest.mark.testbed,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(TESTBED is None or not TESTBED.exists(), reason="no ../shared/testbed here"),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="no iproute2 here"),
]


SCRIPT: Any = import_module("measure_topology")
SHAPES = ("full-mesh, 4 ranks", "switch, 4 ranks")


ATTEMPTS = 3  # other processes on this machine slow transfers down, and never speed them up


@pytest.mark.parametrize("setting", [each for each in SCRIPT.settings(4) if str(each) in SHAPES], ids=str)
def test_measured_is_what_was_configured(setting: object, warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm)
    answers = []
    for _ in range(ATTEMPTS):
        answers.append(SCRIPT.measure(str(TESTBED), setting, 0.1, 0.1, 120.0).complaints)
        if not answers[-1]:
            return
    pytest.fail("\n".join(map(str, answers)))
