"""One cell's job (worker.py) on the ranks of an emulated network."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenring.emulate import Emulated

HERE = Path(__file__).resolve().parent
PATHS = f"{HERE.parent.parent}:{HERE}"


def measured(net: Emulated, cell: dict[str, Any], limit_seconds: float, worker: str = "worker") -> dict[str, Any]:
    """Return what the worker found: of worker.py `seconds` of each round by schedule, and `failed`, why by schedule."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"cells": [cell]}, file)
        file.flush()
        environment = {"PYTHONPATH": PATHS, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        lines = net.run(worker, [file.name], limit_seconds, environment=environment, show=lambda line: None)
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return found
