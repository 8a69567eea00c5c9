"""Tasks of ci/npu-smoke on emulated NPUs, spoilt or not, and the verdicts that they lead to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ascend import fused_linears, hccl
from ascend.hccl_ledger import limits
from ascend.operators import register
from ascend.ranks import NpuPools
from patience import patient
from ranks import Here

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke import costs, kernel, linears, operators, shapes, traffic, training
from npu_smoke import here as smoke
from npu_smoke.unknowns import UNKNOWNS, verdict

Spoil = Callable[[pytest.MonkeyPatch], None]
STUCK_SECONDS = 3.0  # until what is stuck for certain counts as stuck
MODULES = (operators, kernel, shapes, traffic, costs, training, linears)


def words(task: str, result: dict[str, Any], real: bool = True) -> dict[str, str]:
    """The verdicts that a task's result leads to."""
    told = {task: {"status": "done", "result": result}}
    return {each.key: verdict(each, told, real).word for each in UNKNOWNS if each.task == task}


def found_by(here: Here, task: str, spoil: Spoil | None, stuck: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """What the task comes back with on this rank, and the verdicts of that."""
    register("2.13.0")
    fused_linears.install()
    hccl.install()
    place = smoke.Here(here.rank, here.world_size, "npu", True, lambda text: None)
    module = next(each for each in MODULES if task in vars(each))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shapes, "DRY_LONG", 96)
        patched.setattr(limits, "execute", 60.0 if spoil is None else 5.0)
        patched.setattr(traffic, "STUCK_SECONDS", patient(STUCK_SECONDS) if stuck else traffic.STUCK_SECONDS)
        patched.setattr(limits, "connect", 60.0)
        if spoil is not None:
            spoil(patched)
        result = getattr(module, task)(place)
    return result, words(task, result)


def run(
    npus: NpuPools, ranks: int, task: str, spoil: Spoil | None = None, stuck: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Of rank 0. stuck: on ranks that nobody else gets, since messages of theirs will never come."""
    if not stuck:
        return npus(ranks)(found_by, task, spoil)[0]
    with npus.expendable(ranks) as some:
        return some(found_by, task, spoil, stuck)[0]
