"""ci/npu-smoke's tasks about whole jobs: on emulated NPUs each finds what is assumed, and what is spoilt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend import device, hccl_streams
from ascend.hccl_ledger import limits
from ascend.ranks import NpuPools
from smoke_on_npus import Spoil, run, words

from tokenring.backends.devices import DeviceMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke import costs, traffic
from npu_smoke import here as smoke
from npu_smoke.links import in_one_order
from npu_smoke.unknowns import AS_ASSUMED, MEASURED, OPEN, OTHERWISE

pytestmark = pytest.mark.timeout(600)  # ranks of their own, on a machine that is busy


# ---------- messages


def in_one_queue(patched: pytest.MonkeyPatch) -> None:
    """All communicators of a rank share a stream, and its messages are posted in an order of its own."""
    patched.setattr(limits, "streams", 1)
    hccl_streams.forget_streams()
    order = in_one_order
    patched.setattr(traffic, "in_one_order", lambda ranks: order(ranks)[:: -1 if is_odd_rank() else 1])


def is_odd_rank() -> bool:
    return bool(dist.get_rank() % 2)


def one_stream(patched: pytest.MonkeyPatch) -> None:
    """As where HCCL's streams come from a pool: a receive of others then stands before the transport's messages."""
    patched.setattr(limits, "streams", 1)
    hccl_streams.forget_streams()


def brings_others(patched: pytest.MonkeyPatch) -> None:
    """Receives see other bytes."""
    given = traffic._mark
    patched.setattr(traffic, "_mark", lambda number: given(number) + is_odd_rank())


@pytest.mark.parametrize("task", ["receives", "retried"])
def test_many_receives(npus: NpuPools, task: str) -> None:
    """Those of four lanes, four deep, to two peers; with retry on they are a matter of A3."""
    result, found = run(npus, 3, task)
    assert (result["messages"], result["communicators"]) == (2 * 2 * 2 * traffic.DEEP, 8)
    assert (result["stuck"], result["wrong"]) == (False, 0)
    assert list(found.values()) == [AS_ASSUMED if task == "receives" else OPEN]
    assert words("retried", {**result, "device": "Ascend910_9392"}) == {"many-receives-retry": AS_ASSUMED}


@pytest.mark.parametrize("spoil", [in_one_queue, brings_others])
def test_messages_that_are_stuck_or_wrong(npus: NpuPools, spoil: Spoil) -> None:
    result, found = run(npus, 2, "receives", spoil, stuck=spoil is in_one_queue)
    assert found == {"many-receives": OTHERWISE}
    assert result["stuck"] is bool(result.get("ends")) is (spoil is in_one_queue)
    assert words("retried", {**result, "device": "Ascend910_9392"}) == {"many-receives-retry": OTHERWISE}


def test_lanes_beside_others(npus: NpuPools) -> None:
    result, found = run(npus, 3, "lanes")
    assert found["lanes-beside-others"] == AS_ASSUMED and not result["stuck"]
    assert words("lanes", {**result, "alone": 1.0, "beside": 1.1})["lanes-time"] == AS_ASSUMED
    assert words("lanes", {**result, "alone": 1.0, "beside": 2.0})["lanes-time"] == OTHERWISE


def test_lanes_that_are_stuck_behind_others(npus: NpuPools) -> None:
    result, found = run(npus, 2, "lanes", one_stream, stuck=True)
    assert found["lanes-beside-others"] == OTHERWISE and result["ends"]


def test_others_that_get_something_else(npus: NpuPools) -> None:
    result, found = run(npus, 2, "lanes", others_are_wrong)
    assert found["lanes-beside-others"] == OTHERWISE and result["wrong"] == 2


def others_are_wrong(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(traffic.Others, "wrong", lambda self: 1)


def small_memory(patched: pytest.MonkeyPatch) -> None:
    told = iter([DeviceMemory(0, each, 1 << 40) for each in (10 << 30, 3 << 30, 3 << 30)])
    patched.setattr(smoke.Here, "device", property(lambda self: Telling(told)))


def right_memory(patched: pytest.MonkeyPatch) -> None:
    told = iter([DeviceMemory(0, each, 1 << 40) for each in (10 << 30, (10 << 30) - 8 * (40 << 20), 10 << 30)])
    patched.setattr(smoke.Here, "device", property(lambda self: Telling(told)))


class Telling:
    """A device with so much free memory, look by look."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def memory(self) -> DeviceMemory:
        return next(self._told)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Nothing is late."""


def test_a_preparation(npus: NpuPools) -> None:
    """Of all communicators; memory as reckoned and given back, or not."""
    result, found = run(npus, 3, "prepared", right_memory)
    assert (result["communicators"], result["assumed bytes"]) == (8, 8 * (40 << 20))
    assert found == {"prepare-time": AS_ASSUMED, "prepare-memory": AS_ASSUMED}
    assert words("prepared", {**result, "seconds": 100.0})["prepare-time"] == OTHERWISE
    assert words("prepared", {**result, "bytes": None})["prepare-memory"] == OPEN
    _, found = run(npus, 3, "prepared", small_memory)
    assert found["prepare-memory"] == OTHERWISE
    kept = {**result, "given back": 0}
    assert words("prepared", kept)["prepare-memory"] == OTHERWISE


# ---------- costs


def slow_host(patched: pytest.MonkeyPatch) -> None:
    """Each operation takes a millisecond of the host, and each message."""
    given, message = device._run, smoke.Here.message

    def late(func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "aten::add_":
            time.sleep(0.001)
        return given(func, args, kwargs)

    def late_message(self: Any, *args: Any) -> Any:
        time.sleep(0.001)
        return message(self, *args)

    patched.setattr(device, "_run", late)
    patched.setattr(smoke.Here, "message", late_message)


def test_launches(npus: NpuPools) -> None:
    """A slow host is found out; whether this one is fast is no matter of tests."""
    result, found = run(npus, 2, "launches", slow_host)
    assert found == {"launch-costs": OTHERWISE}
    assert result["host us"] >= 1000 and result["post us"] >= 1000 and result["device us"] > 0
    fast = {"host us": 8.0, "device us": 3.0, "post us": 40.0}
    assert words("launches", fast) == {"launch-costs": AS_ASSUMED}
    assert words("launches", {**fast, "post us": 200.0}) == {"launch-costs": OTHERWISE}
    assert words("launches", {**fast, "post us": None}) == {"launch-costs": AS_ASSUMED}


def cuts_off(patched: pytest.MonkeyPatch) -> None:
    """What is behind the first buffer of a message is not there."""
    given = smoke.Here.message

    def cut(self: Any, data: torch.Tensor, peer: int, sends: bool, group: str) -> Any:
        if sends and data.numel() > costs.CHUNK_BYTES:
            data = data.clone()
            data[costs.CHUNK_BYTES :] = 0
        return given(self, data, peer, sends, group)

    patched.setattr(smoke.Here, "message", cut)


@pytest.mark.parametrize("task", ["curve", "curve64", "curve128"])
def test_a_curve(npus: NpuPools, task: str) -> None:
    """Of each size, and every byte about the size of the buffer."""
    result, found = run(npus, 2, task)
    assert [int(size) for size in result["seconds"]] == list(costs.DRY_SIZES) and result["wrong"] == []
    if task == "curve":
        assert (found["message-curve"], found["chunks"]) == (MEASURED, AS_ASSUMED)
    key = {"curve": "chunking", "curve64": "chunking-64", "curve128": "chunking-128"}[task]
    for seconds, word in ((1e-3, AS_ASSUMED), (3e-3, OTHERWISE)):
        told = {"seconds": {str(16 << 20): 0.5e-3, str(32 << 20): seconds}, "chunk bytes": 20 << 20}
        assert words(task, told | {"tried": 4, "wrong": []})[key] == word
    few = {"seconds": {str(4 << 10): 1e-5}, "chunk bytes": 20 << 20, "tried": 4, "wrong": []}
    assert words(task, few)[key] == OPEN


def test_a_message_that_is_cut_off(npus: NpuPools) -> None:
    result, found = run(npus, 2, "curve", cuts_off)
    assert result["wrong"] == [costs.CHUNK_BYTES + 1, 2 * costs.CHUNK_BYTES + 1] and found["chunks"] == OTHERWISE
