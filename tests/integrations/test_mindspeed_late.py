"""Ranks that come late to their first call under MindSpeed: the others wait as long as the framework lets them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mindspeed_layer as layer
import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ranks import fresh
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from mindspeed_like import OURS, like_mindspeed
from ranks import Here
from test_mindspeed import ready

from tokenring.api.context import ContextParallel
from tokenring.backends.control.control import Control
from tokenring.backends.control.store_gather import StoreGather
from tokenring.errors import PeerLost
from tokenring.integrations.megatron import attention, startup
from tokenring.topology import ranks as topology_ranks
from tokenring.topology.ranks import Topology

RANKS = 2
SHORT = 0.3  # seconds that our own limits are cut to, for a rank to come later than these
Patches = pytest.MonkeyPatch


@contextmanager
def started(schedule: str, minutes: float) -> Iterator[tuple[Any, Patches]]:
    """An attention on this rank's NPU, under MindSpeed with --distributed-timeout-minutes; and patches meanwhile."""
    fresh(120.0)
    register(next(iter(OFFERS)))
    with like_mindspeed() as mindspeed, Patches.context() as patched:
        import_module(OURS)
        patched.setattr(import_module(f"{OURS}.attention"), "WORTH", -2.0)  # whatever is saved, ours runs
        patched.setattr("tokenring.integrations.megatron.contexts._KEPT", {})  # nothing is connected or probed yet
        yield ready(mindspeed, "--tokenring-schedule", schedule, distributed_timeout_minutes=minutes), patched


def step(core: Any) -> bool:
    """A forward and a backward pass; whether all gradients are there."""
    rows = layer.LENGTH // dist.get_world_size()
    heads = layer.HEADS, layer.KV_HEADS, layer.KV_HEADS
    qkv = [torch.randn(rows, 1, each, layer.DIM).to("npu").requires_grad_() for each in heads]
    torch.autograd.backward(core(*qkv, None).sum())
    return all(x.grad is not None for x in qkv)


# ---------- the limits by value


def limits(here: Here, schedule: str, minutes: float) -> tuple[set[float], int, int]:
    """The limits in seconds of all for which a first step waits; how many meetings and how many waits there were."""
    meetings: list[float] = []
    waits: list[float] = []
    meet, wait = StoreGather.__init__, Control.wait

    def noted_meeting(self: Any, group: Any, timeout_seconds: float) -> None:
        meetings.append(timeout_seconds)
        meet(self, group, timeout_seconds)

    def noted_wait(self: Any, attempt: Any, peer: Any, what: str, limit_seconds: float | None = None) -> None:
        waits.append(self.timeout_seconds if limit_seconds is None else limit_seconds)
        wait(self, attempt, peer, what, limit_seconds)

    with started(schedule, minutes) as (core, patched):
        patched.setattr(StoreGather, "__init__", noted_meeting)
        patched.setattr(Control, "wait", noted_wait)
        assert step(core)
    return {*meetings, *waits}, len(meetings), len(waits)


@pytest.mark.parametrize("schedule", ["auto", "ring"])
def test_every_wait_has_the_frameworks_limit(schedule: str, npus: NpuPools) -> None:
    """Those of the transport, of a plan, and of the probe that a plan or the log of a named schedule needs."""
    for found, meetings, waits in npus(RANKS)(limits, schedule, 17.0):
        assert found == {17 * 60.0}
        assert meetings >= 2 and waits >= 2


# ---------- late by more than our own limits


def cut_own_limits(patched: Patches, seconds: float) -> None:
    """Let nobody wait longer than this of our own accord."""
    for each in (ContextParallel.__init__, Topology.probe):
        assert each.__kwdefaults__ is not None
        patched.setitem(each.__kwdefaults__, "timeout_seconds", seconds)
    patched.setattr(topology_ranks, "TIMEOUT_SECONDS", seconds)


def late(here: Here, schedule: str, seconds: float) -> bool:
    """Rank 1 comes so late to its first call, and again to what follows it, as when its operators compile."""
    announce = startup.Announcer.announce

    def announce_late(self: Any, *given: Any) -> None:
        time.sleep(seconds if here.rank == 1 else 0.0)
        announce(self, *given)

    with started(schedule, 10.0) as (core, patched):
        cut_own_limits(patched, SHORT)
        patched.setattr(startup.Announcer, "announce", announce_late)
        time.sleep(seconds if here.rank == 1 else 0.0)
        return step(core)


@pytest.mark.parametrize("schedule", ["auto", "ring"])
def test_a_late_rank_is_waited_for(schedule: str, npus: NpuPools) -> None:
    assert npus(RANKS)(late, schedule, 4 * SHORT) == [True, True]


def without_the_frameworks(here: Here) -> str:
    """Return what rank 0 says of a rank that comes too late, where the framework's limit is not taken."""
    with Patches.context() as patched:
        cut_own_limits(patched, SHORT)
        patched.setattr(attention, "framework_seconds", lambda config, group: None)
        with started("ring", 10.0) as (core, _):
            try:
                return "" if here.rank == 1 else str(step(core))
            except PeerLost as error:
                return str(error)
            finally:
                dist.barrier()


def test_our_own_limit_would_not_do(npus: NpuPools) -> None:
    """Show what the tests above are there for."""
    with npus.expendable(RANKS) as some:
        said, _ = some(without_the_frameworks)
    assert said.startswith(f"rank 1 of {RANKS} did not come within {SHORT:g} s when the ranks met"), said
