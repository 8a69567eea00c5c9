"""The trial of one-sided memory: what each kind of broken memory is found out by, and what `auto` makes of it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import symm_ranks
import torch.distributed as dist
from boxed_ranks import Boxed
from patience import patient
from ranks import Here, RankPools
from symm_ranks import AutoOnCpu, OnCpu
from test_symm import Hears

from tokenring import BackendUnavailable
from tokenring.backends.registry import make_transport
from tokenring.backends.transports import auto_cuda as cuda
from tokenring.backends.transports.gloo import GlooTransport
from tokenring.tables.transport_choice import TransportChoice

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


def refuses_waits_early(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """While its own puts are still to be read: nobody is to find them spoiled."""
    refuses("wait")(memory, patched)
    put = memory._put

    def late(*args: Any) -> None:
        memory.place._device.current_stream().add(lambda: time.sleep(0.2))
        put(*args)

    patched.setattr(memory, "_put", late)


def never_goes_on(memory: Any, patched: pytest.MonkeyPatch) -> None:
    """A wait that does not see a word which is set, until all is let go."""

    def act() -> None:
        while not memory._released:
            time.sleep(0.001)

    patched.setattr(memory, "wait", lambda word: memory._device.current_stream().add(act))


def never_clears(memory: Any, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(memory, "wait", lambda word: None)


BROKEN: dict[str, tuple[Spoil, str]] = {
    "signals of one pair": (drops_signals, "2: no answer within [0-9.]+ s: no signal of rank 1 has come"),
    "puts of one pair": (drops_puts, "2: 4096 of 4096 bytes that rank 1 put are wrong behind its signal"),
    "a peer mapped as another": (maps_another, "0: no answer within [0-9.]+ s: no signal of rank 1 has come"),
    "words of another": (maps_other_words, "0: no answer within [0-9.]+ s: no signal of rank 1 has come"),
    "bytes to another": (maps_other_bytes, "0: [0-9]+ of 4096 bytes that rank 1 put are wrong"),
    "puts are refused": (refuses("put"), "1: CUDA driver error: operation not supported"),
    "signals are refused": (refuses("signal"), "1: CUDA driver error: operation not supported"),
    "waits are refused": (refuses("wait"), "1: CUDA driver error: operation not supported"),
    "waits that never end": (never_goes_on, "1: no answer within [0-9.]+ s: a stream waits for words that are set"),
    "words that stay set": (never_clears, "1: words that a stream has waited for and cleared are still set"),
}
BROKEN_BOXES = {"waits are refused early": (refuses_waits_early, BROKEN["waits are refused"][1])}
ALL_BROKEN = {**BROKEN, **BROKEN_BOXES}


def tried(here: Here, name: str, spoiled: str) -> tuple[str, str]:
    """What a transport that is asked for by its name says."""
    symm_ranks.register()
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == 1:
            spoil_all(patched, ALL_BROKEN[spoiled][0])
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


@pytest.mark.parametrize("spoiled", ["puts are refused", "waits are refused", *BROKEN_BOXES])
def test_boxes_are_tried_too(spoiled: str, ranks: RankPools) -> None:
    for kind, text in ranks(3)(tried, "boxed on cpu", spoiled):
        assert kind == "Broken" and re.search(f"{TRIED} {ALL_BROKEN[spoiled][1]}", text), text


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

    def _choose(self) -> TransportChoice:
        self._devices = ("a", "b", "c")
        before = cuda._broken().get(self._devices)
        return (
            TransportChoice("symm", "the test says so")
            if before is None
            else TransportChoice("nccl", f"tried before: {before}")
        )


def goes_on(here: Here, spoiled: str) -> list[tuple[str, str]]:
    """What auto takes, first and a second time, and why; the log of the first."""
    found, heard = [], list[str]()
    logging.getLogger("tokenring").addHandler(Hears(heard))
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == 1:
            spoil_all(patched, BROKEN[spoiled][0])
        for _ in range(2):
            made = Remembering(dist.group.WORLD, patient(TIMEOUT_SECONDS))  # type: ignore[arg-type]
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
