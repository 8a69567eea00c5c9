"""Jobs of cells (worker.py and others) on the ranks of an emulated network."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenring.emulate import Emulated

HERE = Path(__file__).resolve().parent
PATHS = f"{HERE.parent.parent}:{HERE}"


def measured(net: Emulated, cell: dict[str, Any], limit_seconds: float, worker: str = "worker") -> dict[str, Any]:
    """Return what the worker found: of worker.py `seconds` of each round by schedule, and `failed`, why by schedule."""
    return all_measured(net, [cell], limit_seconds, worker)[0]


def all_measured(
    net: Emulated, cells: Sequence[dict[str, Any]], limit_seconds: float, worker: str
) -> list[dict[str, Any]]:
    """Return what a worker found in each of these cells, one after another in the same processes."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"cells": list(cells)}, file)
        file.flush()
        environment = {"PYTHONPATH": PATHS, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        lines = net.run(worker, [file.name], limit_seconds, environment=environment, show=lambda line: None)
    return [json.loads(line) for line in lines if line.startswith("{")]
