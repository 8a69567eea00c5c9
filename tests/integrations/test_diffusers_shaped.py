"""Tiny models of diffusers beside diffusers' own `ulysses_anything` on shaped links: the benchmark of it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from tiny_diffusers import need

need()
REPO = Path(__file__).resolve().parents[2]
SIZES = {"ranks": 2, "heads": 5, "rounds": 1, "text": 8, "image": 24, "link-gbit": 0.5, "seconds": 90}


@pytest.mark.skipif(os.geteuid() != 0, reason="emulated links need root and iproute2")
@pytest.mark.slow
@pytest.mark.testbed
@pytest.mark.waits
def test_both_sides_are_timed() -> None:
    """With a number of heads that the ranks do not divide."""
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    command = [sys.executable, str(REPO / "benchmarks/diffusers_shaped.py"), *options, "--model", "wan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(110))
    assert done.returncode == 0, done.stderr[-2000:]
    for what in ("attention, tokenring auto", "model, tokenring auto", "attention, ulysses_any", "model, ulysses_any"):
        assert re.search(rf"^{what}\w* +[0-9.]+ ms .*, [0-9.]+ x", done.stdout, re.MULTILINE), done.stdout
