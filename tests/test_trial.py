"""The trial of one-sided memory: what each kind of broken memory is found out by, and what `auto` makes of it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import symm_ranks
import test_capture
import torch.distributed as dist
from boxed_ranks import Boxed
from ranks import Here, RankPools
from symm_ranks import AutoOnCpu, OnCpu, ThreadDevice
from test_symm import Hears

from tokenring import BackendUnavailable, ContextParallel, PeerLost, UnsupportedError
from tokenring.backends import cuda
from tokenring.backends.choice import Choice
from tokenring.backends.gloo import GlooTransport
from tokenring.backends.registry import make_transport
from tokenring.doctor.variables import variables

TIMEOUT_SECONDS = 12.0
TRIED = "a trial of puts, signals and waits fails on rank"
Spoil = Callable[[Any, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


# ---------- memory that is broken, between ranks 1 and 2 alone


def drops_signals(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """As a driver may that no longer writes a peer's words (NVIDIA/nccl issue 2052)."""
    signal = memory.signal
    patched.setattr(memory, "signal", lambda peer, word: signal(peer, word) if peer != 2 else None)


def drops_puts(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """Copies between peers that do nothing: an IOMMU in the way (CUDA.jl issue 3112)."""
    put = memory.put

    def nothing(data: Any, peer: int, place: int, word: int) -> None:
        if peer == 2:
            memory.signal(peer, word)
        else:
            put(data, peer, place, word)

    patched.setattr(memory, "put", nothing)


def maps_another(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """What is for rank 2 goes to rank 0, bytes and words; and the other way round."""
    maps_other_words(memory, patched)
    maps_other_bytes(memory, patched)


def maps_other_words(memory: Any, patched: pytest.MonkeyPatch) -> None:
    signal, other = memory.signal, {0: 2, 2: 0}
    patched.setattr(memory, "signal", lambda peer, word: signal(other[peer], word))


def maps_other_bytes(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """Words go where they belong, and the bytes before them to another rank."""
    heap, other = memory._heap_at, {0: 2, 2: 0}
    patched.setattr(memory, "_heap_at", lambda peer: heap(other[peer]))


def refuses(what: str) -> Spoil:
    def spoil(memory: Any, patched: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise RuntimeError("CUDA driver error: operation not supported")

        patched.setattr(memory, what, refuse)

    return spoil


def never_goes_on(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """A wait that does not see a word which is set, until all is let go."""

    def act() -> None:
        while not memory._released:
            time.sleep(0.001)

    patched.setattr(memory, "wait", lambda word: memory._device.current_stream().add(act))


def never_clears(memory: Any, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(memory, "wait", lambda word: None)


BROKEN: dict[str, tuple[Spoil, str]] = {
    "signals of one pair": (drops_signals, "2: no answer within 4 s: no signal of rank 1 has come"),
    "puts of one pair": (drops_puts, "2: 4096 of 4096 bytes that rank 1 put are wrong behind its signal"),
    "a peer mapped as another": (maps_another, "0: no answer within 4 s: no signal of rank 1 has come"),
    "words of another": (maps_other_words, "0: no answer within 4 s: no signal of rank 1 has come"),
    "bytes to another": (maps_other_bytes, "0: [0-9]+ of 4096 bytes that rank 1 put are wrong"),
    "puts are refused": (refuses("put"), "1: CUDA driver error: operation not supported"),
    "signals are refused": (refuses("signal"), "1: CUDA driver error: operation not supported"),
    "waits are refused": (refuses("wait"), "1: CUDA driver error: operation not supported"),
    "waits that never end": (never_goes_on, "1: no answer within 4 s: a stream waits for words that are set"),
    "words that stay set": (never_clears, "1: words that a stream has waited for and cleared are still set"),
}


def tried(here: Here, name: str, spoiled: str) -> tuple[str, str]:
    """What a transport that is asked for by its name says."""
    symm_ranks.register()
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == 1:
            spoil_all(patched, BROKEN[spoiled][0])
        with pytest.raises(BackendUnavailable) as caught:
            make_transport(name, dist.group.WORLD, TIMEOUT_SECONDS)  # type: ignore[arg-type]
    return type(caught.value).__name__, str(caught.value)


def spoil_all(patched: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Whatever memory this rank makes."""
    for owner in (OnCpu, Boxed):
        make = owner._make_memory

        def made(self: Any, store: Any, make: Any = make) -> Any:
            memory = make(self, store)
            spoil(memory, patched)
            return memory

        patched.setattr(owner, "_make_memory", made)


@pytest.mark.parametrize("spoiled", BROKEN)
def test_what_is_broken_is_found_on_every_rank(spoiled: str, ranks: RankPools) -> None:
    """By its name: refused, with what was found and where, alike on all; and no stream is left waiting."""
    for kind, text in ranks(3)(tried, "on cpu", spoiled):
        assert kind == "Broken"
        assert re.search(f"{TRIED} {BROKEN[spoiled][1]}", text), text
        assert text.endswith("use transport='nccl' or 'auto'")


@pytest.mark.parametrize("spoiled", ["puts are refused", "waits are refused"])
def test_boxes_are_tried_too(spoiled: str, ranks: RankPools) -> None:
    for kind, text in ranks(3)(tried, "boxed on cpu", spoiled):
        assert kind == "Broken" and re.search(f"{TRIED} {BROKEN[spoiled][1]}", text), text


def works(here: Here, name: str) -> int:
    """How many words are set behind a trial that went well."""
    symm_ranks.register()
    transport: Any = make_transport(name, dist.group.WORLD, 20.0)  # type: ignore[arg-type]
    return sum(transport._memory.are_set(range(transport._words.count)))


@pytest.mark.parametrize("name", ["on cpu", "boxed on cpu"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_works_leaves_no_trace(name: str, world_size: int, ranks: RankPools) -> None:
    assert ranks(world_size)(works, name) == [0] * world_size


# ---------- auto


class Remembering(AutoOnCpu):
    """As on devices by hand; what was tried before counts."""

    def _choose(self) -> Choice:
        self._devices = ("a", "b", "c")
        before = cuda._broken().get(self._devices)
        return Choice("symm", "the test says so") if before is None else Choice("nccl", f"tried before: {before}")


def goes_on(here: Here, spoiled: str) -> list[tuple[str, str]]:
    """What auto takes, first and a second time, and why; the log of the first."""
    found, heard = [], list[str]()
    logging.getLogger("tokenring").addHandler(Hears(heard))
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == 1:
            spoil_all(patched, BROKEN[spoiled][0])
        for _ in range(2):
            made = Remembering(dist.group.WORLD, TIMEOUT_SECONDS)  # type: ignore[arg-type]
            found.append((type(made.now).__name__, made.why))
            made.close()
    return [*found, ("log", heard[0])]


@pytest.mark.parametrize("spoiled", ["signals of one pair", "puts of one pair", "puts are refused"])
def test_auto_takes_the_other_transport(spoiled: str, ranks: RankPools) -> None:
    """With the reason, which is logged and goes into plans; and tries no second time in the same processes."""
    with ranks.expendable(3) as some:
        for (first, why), (second, again), (_, logged) in some(goes_on, spoiled):
            assert first == second == GlooTransport.__name__
            assert re.search(f"symm cannot be used: .*{TRIED} {BROKEN[spoiled][1]}", why), why
            assert logged == f"transport 'auto' takes nccl: {why}" and again.startswith("tried before: ")


# ---------- graphs


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
    "waits are left out": (leaves_out_in_graphs("wait"), "the launch of .* fails on rank 1: words that a str", False),
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
            assert re.search(f"messages of .* cannot be captured in a graph here: .*{says}", text), text
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
        moved.capabilities, moved.try_capture = replace(moved.capabilities, capturable=True), refuse
        with pytest.MonkeyPatch.context() as patched, pytest.raises(UnsupportedError) as caught:
            patched.setattr(test_capture.module, "device_of", lambda where: device)
            test_capture.captured(test_capture.inputs(0), cp)
    return str(caught.value), tried[0]


def test_nothing_is_captured_before_the_trial(ranks: RankPools) -> None:
    assert ranks(2)(refused_capture) == [("no nodes for stream memory operations", 0)] * 2


# ---------- what ranks tell each other before


class Ranks:
    """Several in one process: as backends.meeting.Meeting, of what is asked of it."""

    def __init__(self, facts: list[dict[str, Any]]) -> None:
        self.facts, self.said = facts, [""] * len(facts)
        self.met, self.own = threading.Barrier(len(facts)), threading.local()

    def gather(self, what: str, text: str) -> list[str]:
        self.said[self.own.rank] = text
        self.met.wait(60.0)
        heard = list(self.said)
        self.met.wait(60.0)
        return heard

    def survey(self) -> list[cuda.Found]:
        found: dict[int, cuda.Found] = {}

        def act(rank: int) -> None:
            self.own.rank = rank
            found[rank] = cuda.survey(self)  # type: ignore[arg-type]

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(self.facts))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return [found[rank] for rank in range(len(self.facts))]


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., cuda.Found]:
    """What all of the ranks with such devices find, which is the same."""

    def survey(*numbers: tuple[str, int], overlaps: bool = False, host: str = "") -> cuda.Found:
        facts = [
            {"boot_id": f"{host and rank}", "device": device, "number": number, "overlaps": overlaps,
             "symm": None, "nccl": None}
            for rank, (device, number) in enumerate(numbers)
        ]  # fmt: skip
        ranks = Ranks(facts)
        monkeypatch.setattr(cuda, "_facts", lambda: ranks.facts[ranks.own.rank])
        monkeypatch.setattr(cuda, "_unreached", lambda said: [])
        found = ranks.survey()
        assert all(each == found[0] for each in found)
        return found[0]

    cuda._broken.cache_clear()
    return survey


def test_devices_that_have_one_number(surveyed: Callable[..., cuda.Found]) -> None:
    """Each process sees one GPU, its number 0: torch's rendezvous takes them for one and refuses (overlapping)."""
    found = surveyed(("A", 0), ("B", 0))
    assert found.domain == "reached" and found.unavailable["nccl"] is None
    assert str(found.unavailable["symm"]).startswith("ranks 0 and 1 have different GPUs, each number 0 in its process")
    assert "let every process see all GPUs (CUDA_VISIBLE_DEVICES)" in str(found.unavailable["symm"])
    for other in (
        surveyed(("A", 0), ("B", 1)), surveyed(("A", 0), ("A", 0)), surveyed(("A", 0), ("B", 0), overlaps=True),
        surveyed(("A", 0), ("B", 0), host="apart"),
    ):  # fmt: skip
        assert other.unavailable == {"symm": None, "nccl": None}


@pytest.mark.parametrize(
    ("value", "warned"),
    [("0", True), ("3", True), ("GPU-8f6e", True), ("0,1", False), ("MIG-a,MIG-b", False), ("", False), ("-1", False)],
)
def test_doctor_warns_of_one_visible_gpu(value: str, warned: bool) -> None:
    (found,) = variables({"CUDA_VISIBLE_DEVICES": value})
    assert ("let every rank see all" in str(found.warning)) == warned


def test_what_was_tried_before_in_any_process(surveyed: Callable[..., cuda.Found]) -> None:
    """By the same devices in the same places, and no others."""
    devices = ("A", 0), ("B", 1)
    cuda._broken()[surveyed(*devices).devices] = "rank 1: a word too few"
    assert surveyed(*devices).unavailable["symm"] == "found when it was tried before: rank 1: a word too few"
    assert surveyed(("A", 0), ("C", 1)).unavailable["symm"] is None
    assert surveyed(("A", 0), ("B", 1), ("C", 2)).unavailable["symm"] is None
