"""Captured programs with messages, replayed on new inputs on streams that run late and out of step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import captured_world
import pytest
import torch
from captured_world import Device, InWorld, Party
from cases import Case, Local, check_exact
from oracle import Attention
from stream_world import Refused
from torch.utils._python_dispatch import _disable_current_modes

from tokenring.api.autograd import run_backward, run_forward
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.transports import onesided, symm
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.lower import lower
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.runtime.streams import Streams

module: Any = import_module("tokenring.api.capture")
CPU = torch.device("cpu")
SCHEDULES = [("ring", 3), ("tokenring", 3), ("direct-q", 2), ("direct-kv", 3), ("ulysses", 2)]


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symm, "Control", captured_world.Control)


def case_of(schedule: str, ranks: int) -> Case:
    return Case(ranks, schedule, "zigzag", "causal", 2, 2, 1, 8, torch.float32, None, given_length=8 * ranks)


@dataclass
class Rank:
    """What a rank has bound, and what it captured."""

    case: Case
    device: Device
    executors: dict[Pass, Executor]
    forward: Any = None
    backward: Any = None

    def inputs(self, seed: int) -> list[torch.Tensor]:
        positions = list(self.case.layout_of(self.case.q_length).positions(self.device.rank))
        with _disable_current_modes():
            return [x[:, positions].contiguous() for x in replace(self.case, seed=seed).inputs()]

    def capture(self) -> Rank:
        given = self.inputs(0)
        with torch.no_grad():
            self.forward, kept = module._forward(self.device, self.executors["forward"], tuple(given[:3]))
            self.backward = module._backward(self.device, self.executors["backward"], self.forward, kept)
        return self

    def launch(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Both graphs; results are copied out, since the next launch writes there."""
        *qkv, dout = given
        made = module.CapturedAttention._launch(self.forward, tuple(qkv))
        made += module.CapturedAttention._launch(self.backward, (dout,))
        return [x.clone() for x in made]

    def call(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Both passes, not captured."""
        q, k, v, dout = given
        out, lse, kept = run_forward(self.executors["forward"], None, q, k, v)
        return [out, lse, *run_backward(self.executors["backward"], None, dout, q, k, v, out, lse, kept)]


def bound(case: Case, device: Device) -> Rank:
    transport, kernel = InWorld(device), CpuFlash()
    pool = Pool(CPU, transport.allocate)
    pool.streams = Streams(device)  # type: ignore[arg-type]
    made: dict[Pass, Executor] = {}
    schedule = case.make_schedule()
    for direction in (*PASSES, *PASSES):  # again, on the memory that the pool has grown to
        program = lower(schedule, device.rank, direction, case.workload, transport.target, kernel.supports_patch)
        made[direction] = Executor(schedule, case.workload, program, pool, transport, kernel, case.head_dim**-0.5)
    return Rank(case, device, made)


def check(case: Case, seed: int, parts: list[list[torch.Tensor]]) -> None:
    case = replace(case, seed=seed)
    check_exact(case.whole([Local(Attention(*each), {}) for each in parts]), case.reference())


def turns(case: Case, results: list[list[list[torch.Tensor]]]) -> Iterator[tuple[int, list[list[torch.Tensor]]]]:
    """Of each turn its number, from 1 on, which is the seed of its inputs, and what each rank has made."""
    yield from enumerate((list(each) for each in zip(*results, strict=True)), 1)


BOXED = pytest.mark.parametrize("boxed", [False, True])


@BOXED
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)
def test_replays_bring_new_results(schedule: str, ranks: int, merged: bool, boxed: bool) -> None:
    """Both passes, exact, in every replay; also where all streams of a rank share a queue."""
    case = case_of(schedule, ranks)

    def work(device: Device) -> list[list[torch.Tensor]]:
        rank = bound(case, device).capture()
        made = []
        for seed in (1, 2, 3):
            made.append(rank.launch(rank.inputs(seed)))
            device.synchronize()
        return made

    for seed, parts in turns(case, Party(ranks, len(schedule), merged, boxed).each(work)):
        check(case, seed, parts)


def mixed(seed: int, boxed: bool = False) -> None:
    """Calls and launches of two captures, each on a stream of its own, with nothing between them."""
    case = case_of("ring", 2)

    def work(device: Device) -> list[list[torch.Tensor]]:
        rank = bound(case, device)
        one, other = (replace(rank).capture() for _ in range(2))
        acts = (one.launch, rank.call, other.launch, one.launch, rank.call, rank.call, other.launch)
        given = [rank.inputs(number) for number in range(1, len(acts) + 1)]
        made = []
        for act, inputs in zip(acts, given, strict=True):
            with device.on(device.new_stream()):
                made.append(act(inputs))
        device.synchronize()
        return made

    for number, parts in turns(case, Party(2, seed, False, boxed).each(work)):
        check(case, number, parts)


@BOXED
def test_launches_and_calls_on_many_streams(boxed: bool) -> None:
    """They use one pool: each comes behind the one before."""
    for seed in range(4):
        mixed(seed, boxed)


def test_launches_that_do_not_follow_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = module.CapturedAttention._launch

    def careless(which: Any, given: Any) -> Any:
        return launch(which._replace(streams=None), given)

    monkeypatch.setattr(module.CapturedAttention, "_launch", staticmethod(careless))
    with pytest.raises((AssertionError, Refused)):
        for seed in range(20):
            mixed(seed)


def captured_without_joins(device: Device) -> Rank:
    return bound(case_of("tokenring", 3), device).capture()


def test_a_pass_that_leaves_a_stream_behind_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last post of a channel may be a receive, for whose credit no stream of this rank waits."""
    monkeypatch.setattr("tokenring.runtime.streams._joined", lambda step, others, device: step)
    with pytest.raises(Refused, match=r"unjoined: .*does not lead back to the first stream"):
        Party(3, 0, False).each(captured_without_joins)


def amid_calls(boxed: bool = False) -> None:
    case = case_of("direct-q", 2)

    def work(device: Device) -> list[list[torch.Tensor]]:
        rank = bound(case, device)
        given = [rank.inputs(seed) for seed in range(1, 10)]
        made = [rank.call(given[turn]) for turn in range(3)]
        device.synchronize()
        rank.capture()
        for turn in range(3, 9):
            made.append((rank.call, rank.launch)[turn % 2](given[turn]))
        device.synchronize()
        return made

    for number, parts in turns(case, Party(2, 0, False, boxed).each(work)):
        check(case, number, parts)


@BOXED
def test_a_capture_amid_calls(boxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where words are used again: nothing in a graph waits for events of calls, nor they for the graph's."""
    monkeypatch.setattr(onesided, "RING", 2)
    amid_calls(boxed)


def test_events_of_another_pass_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onesided, "RING", 2)
    monkeypatch.setattr(onesided.Receiving, "begin", lambda self, boxes: None)
    with pytest.raises(Refused, match="a graph waits for an event from outside of it"):
        amid_calls()
