"""The trial of signals and waits in a graph, before the first capture: what it finds, and what is left usable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import test_capture
import torch.distributed as dist
from ranks import Here, RankPools
from symm_ranks import OnCpu, ThreadDevice
from test_trial import TIMEOUT_SECONDS, Spoil, spoil_all

from tokenring import ContextParallel, PeerLost, UnsupportedError


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class Graph:
    """What was queued while it was captured."""

    idle = staticmethod(lambda: None)

    def __init__(self, device: ThreadDevice) -> None:
        self.device, self.acts = device, list[Callable[[], object]]()

    def add(self, act: Callable[[], object]) -> None:
        self.acts.append(act)

    def replay(self) -> None:
        for act in self.acts:
            self.device.current_stream().add(act)


class WithGraphs(OnCpu):
    """On a device that has them."""

    def _find_device(self) -> Any:
        made = super()._find_device()

        @contextmanager
        def capture() -> Iterator[Graph]:
            graph = Graph(made)
            with made.on(graph):
                yield graph

        made.capture = capture
        return made


def refuses_in_graphs(what: str) -> Spoil:
    """As a driver may that has no nodes for stream memory operations; torch's own text is made after CUDA's."""

    def spoil(memory: Any, patched: pytest.MonkeyPatch) -> None:
        real = getattr(memory, what)

        def refuse(*given: Any) -> None:
            if isinstance(memory._device.current_stream(), Graph):
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            real(*given)

        patched.setattr(memory, what, refuse)

    return spoil


def leaves_out_in_graphs(what: str) -> Spoil:
    def spoil(memory: Any, patched: pytest.MonkeyPatch) -> None:
        real = getattr(memory, what)

        def drop(*given: Any) -> None:
            if not isinstance(memory._device.current_stream(), Graph):
                real(*given)

        patched.setattr(memory, what, drop)

    return spoil


IN_GRAPHS: dict[str, tuple[Spoil, str, bool]] = {  # and whether the group can still be used
    "waits are refused": (refuses_in_graphs("wait"), "a captured signal and wait fails on rank 1: CUDA error", True),
    "signals are refused": (refuses_in_graphs("signal"), "a captured signal and wait fails on rank 1: CUDA err", True),
    "waits are left out": (leaves_out_in_graphs("wait"), "the end of .* fails on rank 1: words that a stream", False),
    "signals are left out": (leaves_out_in_graphs("signal"), "the launch of .* no answer within 4 s: the graph", False),
}


def captured(here: Here, spoiled: str) -> tuple[str, bool]:
    """What it says, twice; and whether the group goes on."""
    texts = []
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == 1 and spoiled:
            spoil_all(patched, IN_GRAPHS[spoiled][0])
        transport = WithGraphs(dist.group.WORLD, TIMEOUT_SECONDS)  # type: ignore[arg-type]
        for _ in range(2):
            try:
                transport.try_capture()
            except UnsupportedError as error:
                texts.append(str(error))
            except PeerLost:
                break
        try:
            transport.exchange(b"", "the next call")
        except PeerLost:
            return texts[0], False
    return texts[0] if texts else "", True


def test_graphs_are_tried_before_the_first_capture(ranks: RankPools) -> None:
    for world_size in (1, 3):
        assert ranks(world_size)(captured, "") == [("", True)] * world_size


@pytest.mark.parametrize("spoiled", IN_GRAPHS)
def test_what_does_not_go_into_graphs(spoiled: str, ranks: RankPools) -> None:
    """All ranks refuse alike, and calls go on where no graph was launched."""
    _, says, goes_on = IN_GRAPHS[spoiled]
    with ranks.expendable(3) as some:
        for text, usable in some(captured, spoiled):
            assert re.search(f"messages of .* cannot be captured in a graph here, .*{says}", text), text
            assert usable == goes_on


def refused_capture(here: Here) -> tuple[str, int]:
    """What tokenring.capture says over a transport whose trial fails, and how many graphs it had begun by then."""
    tried: list[int] = []

    def refuse() -> None:
        tried.append(len(device.graphs))
        raise UnsupportedError("no nodes for stream memory operations")

    device = test_capture.GraphDevice()
    with ContextParallel(schedule="ring", transport="gloo", timeout_seconds=20.0) as cp:
        moved: Any = cp.transport
        moved.target, moved.try_capture = replace(moved.target, capturable=True), refuse
        with pytest.MonkeyPatch.context() as patched, pytest.raises(UnsupportedError) as caught:
            patched.setattr(test_capture.module, "device_of", lambda where: device)
            test_capture.captured(test_capture.inputs(0), cp)
    return str(caught.value), tried[0]


def test_nothing_is_captured_before_the_trial(ranks: RankPools) -> None:
    assert ranks(2)(refused_capture) == [("no nodes for stream memory operations", 0)] * 2
