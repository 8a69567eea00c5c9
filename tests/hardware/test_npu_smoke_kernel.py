"""ci/npu-smoke's tasks about the kernel: on emulated NPUs they find it exact, and find a spoilt one out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from ranks import Here
from test_ascend_traps import all_copies, local_statistics, without_mask

from tokenring.backends.kernels import npu_call, npu_trials
from tokenring.backends.kernels.npu_operator import statistics
from tokenring.backends.kernels.npu_packed import NpuPacking

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke import here as smoke
from npu_smoke import kernel
from npu_smoke.unknowns import AS_ASSUMED, OPEN, OTHERWISE, UNKNOWNS, verdict

Spoil = Callable[[pytest.MonkeyPatch], None]
VERDICT = {"tile": "kernel-tile", "documents": "kernel-packed"}


def other_order(patched: pytest.MonkeyPatch) -> None:
    """Trap 1: reads packed statistics in the order in which they do not lie."""
    real = NpuPacking._row_lses
    patched.setattr(NpuPacking, "_row_lses", lambda self, lse, in_token_order: real(self, lse, not in_token_order))


def own_statistics(patched: pytest.MonkeyPatch) -> None:
    """Gives the packed gradient a maximum of 0."""
    patched.setattr(npu_call, "statistics", lambda lse: statistics(torch.zeros_like(lse)))


def found_by(here: Here, task: str, offer: str, spoil: Spoil | None) -> tuple[str, int]:
    """The verdict's word, and how many calls were packed."""
    register(offer)
    place = smoke.Here(0, 1, "npu", True, lambda text: None)
    with pytest.MonkeyPatch.context() as patched:
        if spoil is not None:
            spoil(patched)
        result: dict[str, Any] = getattr(kernel, task)(place)
    unknown = next(each for each in UNKNOWNS if each.key == VERDICT[task])
    in_one = [call.arguments for call in calls if call.arguments.get("input_layout") == "TND"]
    packed = sum(each["actual_seq_qlen"] != npu_trials.ENDS for each in in_one)  # trials are not counted
    return verdict(unknown, {task: {"status": "done", "result": result}}).word, packed


@pytest.mark.parametrize("offer", ["2.9.1", "2.13.0", "op-plugin 7.1.0", "second version only"])
@pytest.mark.parametrize("task", VERDICT)
def test_exact(npus: NpuPools, task: str, offer: str) -> None:
    """Packed: one call forward and one backward, in fp32 and in bf16."""
    assert npus(1)(found_by, task, offer, None) == [(AS_ASSUMED, 4 if task == "documents" else 0)]


@pytest.mark.parametrize(
    ("task", "spoil"),
    [
        ("tile", all_copies), ("tile", without_mask), ("tile", local_statistics),
        ("documents", other_order), ("documents", own_statistics),
    ],
)  # fmt: skip
def test_a_spoilt_kernel_is_found_out(npus: NpuPools, task: str, spoil: Spoil) -> None:
    ((word, _),) = npus(1)(found_by, task, "2.13.0", spoil)
    assert word == OTHERWISE


@pytest.mark.parametrize("task", VERDICT)
def test_without_npus_nothing_is_settled(task: str) -> None:
    result = getattr(kernel, task)(smoke.Here(0, 1, "cpu", False, lambda text: None))
    unknown = next(each for each in UNKNOWNS if each.key == VERDICT[task])
    assert verdict(unknown, {task: {"status": "done", "result": result}}).word == OPEN
