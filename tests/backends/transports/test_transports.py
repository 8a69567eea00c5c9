"""What every transport must do, whatever it moves bytes with. A new transport is one more name in NAMES.

Transports between accelerators run the same suite on ranks that have some: test_hccl.py, test_nccl.py, test_symm.py.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from every_link import device_of, new
from machines import APART
from patience import patient
from ranks import CALL_SECONDS, Here, RankPools

from tokenring import ConfigurationError, PeerLost
from tokenring.backends.control.control import PAYLOAD_BYTES
from tokenring.backends.interfaces import Transport, Work
from tokenring.ir.schedule_data import CHANNELS, PARTIALS, REQUESTS

NAMES = ("gloo", APART, "shm")
LIMIT_SECONDS = 1.0  # of transports whose peers do not answer; more where others need it (`patience`)
FAILING_SECONDS = 2.5  # the same where one fails, which is much sooner; a wait of Gloo's cannot be cut short
LARGEST = 1 << 20
PATTERN = torch.randint(256, (2 * LARGEST,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# ---------- what ranks do


def buffer(transport: Transport, nbytes: int) -> torch.Tensor:
    """Memory of a new transport to receive into. All ranks call it with the same size."""
    if not transport.target.one_sided:
        return torch.empty(nbytes, dtype=torch.uint8, device=device_of(getattr(transport, "name", "")))
    return cast(torch.Tensor, cast(Any, transport).allocate(nbytes))[:nbytes]


def opened(here: Here, name: str, nbytes: int = 1) -> tuple[Transport, torch.Tensor]:
    """The pool's transport of that name, kept; and memory of so many bytes to receive into, cleared."""
    if name not in here.memory:
        transport = new(name)
        here.memory[name] = transport, buffer(transport, 64 << 20)
    transport, memory = here.memory[name]
    transport.sent_bytes.clear()
    dist.barrier()  # nobody writes into it before it is cleared
    memory[:nbytes].zero_()
    dist.barrier()
    return transport, memory[:nbytes]


def content(src: int, dst: int, channel: str, number: int, size: int) -> torch.Tensor:
    """What a message holds: both ends know it."""
    start = random.Random(f"{src} {dst} {channel} {number}").randrange(LARGEST)
    return PATTERN[start : start + size]


def size_of(number: int) -> int:
    """From 1 byte to 1 MB, mostly small."""
    return (1, LARGEST)[number] if number < 2 else int(LARGEST ** random.Random(number).random())


def send(transport: Transport, dst: int, channel: str, number: int, size: int) -> Work:
    data = content(transport.rank, dst, channel, number, size).to(device_of(getattr(transport, "name", "")))
    return transport.send(data, dst, channel, f"message {number}")


def check(transport: Transport, got: torch.Tensor, src: int, channel: str, number: int) -> None:
    wanted = content(src, transport.rank, channel, number, got.numel())
    assert torch.equal(got.cpu(), wanted), f"rank {transport.rank}: message {number} of {channel} from rank {src}"


def in_order(here: Here, name: str, count: int) -> None:
    """All send to all on both channels; a few receives are posted ahead."""
    ahead, others = 5, [rank for rank in range(here.world_size) if rank != here.rank]
    lines = list(product(CHANNELS, others))
    transport, memory = opened(here, name, len(lines) * ahead * LARGEST)
    places = memory.view(len(lines), ahead, LARGEST)
    posted: dict[tuple[int, int], Work] = {}
    sent = []
    for number in range(count + ahead):
        for line, (channel, peer) in enumerate(lines):
            if number >= ahead:
                posted.pop((line, number - ahead)).wait()
                got = places[line, number % ahead, : size_of(number - ahead)]
                check(transport, got, peer, channel, number - ahead)
            if number < count:
                into = places[line, number % ahead, : size_of(number)]
                posted[line, number] = transport.recv(into, peer, channel, f"message {number}")
                sent.append(send(transport, peer, channel, number, size_of(number)))
    for handle in sent:
        handle.wait()
    total = sum(map(size_of, range(count)))
    assert transport.sent_bytes == dict.fromkeys(others, len(CHANNELS) * total)


def one_buffer(here: Here, name: str, count: int, ahead: int) -> None:
    """One rank sends ahead, the other receives everything at one place."""
    transport, memory = opened(here, name, LARGEST)
    if here.rank == 0:
        sent: list[Work] = []
        for number in range(count):
            sent.append(send(transport, 1, REQUESTS, number, 1000 + number))
            if number >= ahead:
                sent[number - ahead].wait()
        for handle in sent[-ahead:]:
            handle.wait()
    else:
        for number in range(count):
            into = memory[: 1000 + number]
            transport.recv(into, 0, REQUESTS, f"message {number}").wait()
            check(transport, into, 0, REQUESTS, number)


def one_side_first(here: Here, name: str, first: str, count: int, size: int) -> None:
    """One rank sends and the other receives, more than any queue may hold; the second posts when the first has.

    A post that blocks is a test that hangs: the other rank is in the barrier.
    """
    transport, memory = opened(here, name, count * size)
    places, side = memory.view(count, size), ("send", "receive")[here.rank]
    for turn in (first, "then the other"):
        if (side == first) == (turn == first):
            if side == "send":
                handles = [send(transport, 1, REQUESTS, number, size) for number in range(count)]
            else:
                handles = [transport.recv(places[n], 0, REQUESTS, f"message {n}") for n in range(count)]
        dist.barrier()
    for handle in reversed(handles):
        handle.wait()
    if side == "receive":
        for number in range(count):
            check(transport, places[number], 0, REQUESTS, number)


def all_at_once(here: Here, name: str, size: int, sent_first: bool) -> None:
    """Every rank sends to every other on both channels, and all are under way together."""
    others = [rank for rank in range(here.world_size) if rank != here.rank]
    lines = list(product(CHANNELS, others))
    transport, memory = opened(here, name, len(lines) * size)
    whole = torch.empty(size, dtype=torch.uint8, device=device_of(name))
    sent, received = [], []

    def post_sends() -> None:
        for channel, peer in lines:
            start = random.Random(f"{here.rank} {peer} {channel}").randrange(256)
            sent.append(transport.send(whole.clone().fill_(start), peer, channel, "large"))

    def post_receives() -> None:
        for line, (channel, peer) in enumerate(lines):
            received.append(transport.recv(memory.view(len(lines), size)[line], peer, channel, "large"))

    for post in (post_sends, post_receives) if sent_first else (post_receives, post_sends):
        post()
    for handle in (*sent, *received) if sent_first else (*received, *sent):
        handle.wait()
    for line, (channel, peer) in enumerate(lines):
        start = random.Random(f"{peer} {here.rank} {channel}").randrange(256)
        assert bool((memory.view(len(lines), size)[line].cpu() == start).all()), (channel, peer)


def channels_apart(here: Here, name: str, held: str, moves: str, size: int) -> None:
    """A message on one channel passes one that was posted before it on the other, whose other end is not there yet."""
    transport, memory = opened(here, name, 2 * size)
    first, second = memory.view(2, size)
    peer = 1 - here.rank
    for held_at in (0, 1):  # the sender's side of the held channel is late, then the receiver's
        if here.rank == held_at:
            late = transport.recv(first, peer, held, "late") if held_at else send(transport, peer, held, 0, size)
        if here.rank == 0:
            send(transport, 1, moves, 1, size).wait()
        else:
            transport.recv(second, 0, moves, "passes").wait()
            check(transport, second, 0, moves, 1)
        dist.barrier()
        if here.rank != held_at:
            late = send(transport, peer, held, 0, size) if held_at == 1 else transport.recv(first, peer, held, "late")
        late.wait()
        if here.rank == 1:
            check(transport, first, 0, held, 0)


def out_of_order(here: Here, name: str, seed: int) -> None:
    """Handles are waited for in an order that the ranks do not share."""
    count, size, peer = 12, 5000, 1 - here.rank
    transport, memory = opened(here, name, count * size)
    places = memory.view(count, size)
    received = [transport.recv(places[n], peer, CHANNELS[n % 2], f"message {n}") for n in range(count)]
    sent = [send(transport, peer, CHANNELS[n % 2], n, size) for n in range(count)]
    order = [(handles, n) for handles in (received, sent) for n in range(count)]
    random.Random(f"{seed} {here.rank}").shuffle(order)
    for handles, number in order:
        handles[number].wait()
        if handles is received:
            check(transport, places[number], peer, CHANNELS[number % 2], number)


def exchanged(here: Here, name: str) -> None:
    transport, _ = opened(here, name)
    ranks = range(here.world_size)
    for length in (0, 1, 32, PAYLOAD_BYTES):
        for turn in range(20):
            texts = [bytes([rank + turn]) * length for rank in ranks]
            assert transport.exchange(texts[here.rank], f"test {turn}") == texts
    texts = [bytes([rank]) * rank for rank in ranks]
    assert transport.exchange(texts[here.rank], "lengths that differ") == texts
    for length in (0, 1, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 5000):
        texts = [random.Random(rank).randbytes(length + 100 * rank) for rank in ranks]
        assert transport.exchange_text(texts[here.rank], "text") == texts
    assert not transport.sent_bytes  # payload only


def exchange_amid_messages(here: Here, name: str) -> None:
    """A send that nobody had a place for arrives while its sender is in an exchange, before it waits for the send."""
    transport, memory = opened(here, name, LARGEST)
    if here.rank == 0:
        handle = send(transport, 1, REQUESTS, 0, LARGEST)
        if transport.target.grouping:
            transport.go()
    dist.barrier()
    if here.rank == 1:
        handle = transport.recv(memory, 0, REQUESTS, "message 0")
        handle.wait()
        check(transport, memory, 0, REQUESTS, 0)
    transport.exchange(b"", "test")
    if here.rank == 0:
        handle.wait()


def different_exchanges(here: Here, name: str) -> str:
    transport = new(name)
    with pytest.raises((ConfigurationError, PeerLost)) as caught:
        transport.exchange(b"", "rank 1's thing" if here.rank == 1 else "the others' thing")
    return f"{caught.type.__name__}: {caught.value}"


def closed(here: Here, name: str) -> None:
    for _ in range(3):
        transport = new(name)
        memory, peer = buffer(transport, 1000), 1 - here.rank
        received, sent = transport.recv(memory, peer, REQUESTS, "it"), send(transport, peer, REQUESTS, 7, 1000)
        received.wait()
        sent.wait()
        check(transport, memory, peer, REQUESTS, 7)
        transport.close()
        check(transport, memory, peer, REQUESTS, 7)  # a view that was given out stays


# ---------- peers that do not answer


def lost(act: Callable[[], object]) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        act()
    return caught.value


def use_again(transport: Transport, memory: torch.Tensor, rank: int | None) -> None:
    """Every later use raises the error again; none waits for anybody."""
    uses: list[Callable[[], object]] = [
        lambda: transport.send(memory, 0, REQUESTS, "more"),
        lambda: transport.recv(memory, 0, REQUESTS, "more"),
        lambda: transport.exchange(b"", "more"),
        lambda: transport.exchange_text(b"", "more"),
    ]
    for use in uses:
        error = lost(use)
        assert error.rank == rank and "this group was broken before" in str(error), error


def silent(here: Here, name: str, what: str) -> tuple[int | None, bool, str] | None:
    """What ranks see whose peer, rank 2, does nothing."""
    transport = new(name, patient(LIMIT_SECONDS))
    memory = buffer(transport, LARGEST)
    assert dist.group.WORLD is not None
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    heard = [f"rank {rank} knows" for rank in range(here.world_size) if rank != 2]
    dist.barrier()
    if here.rank == 2:  # it is there, with all its threads, until the others know what they know
        store.wait(heard, timedelta(seconds=patient(CALL_SECONDS)))
        return None
    acts: dict[str, Callable[[], object]] = {
        "send": lambda: transport.send(memory, 2, PARTIALS, "kv of rank 1").wait(),
        "recv": lambda: transport.recv(memory, 2, REQUESTS, "q of rank 2").wait(),
        "exchange": lambda: transport.exchange(b"me", "the call"),
    }
    error = lost(acts[what])
    use_again(transport, memory, error.rank)
    transport.close()
    store.set(f"rank {here.rank} knows", "")
    return error.rank, error.certain, str(error)


def failing(here: Here, name: str) -> tuple[int | None, bool, str]:
    """Rank 1 gives up while the others wait for it and for each other."""
    transport = new(name, patient(FAILING_SECONDS))
    memory = buffer(transport, 1000)
    dist.barrier()
    if here.rank == 1:
        time.sleep(0.3)
        transport.fail(ValueError("a kernel found nonsense"))
        use_again(transport, memory, 1)
        return 1, True, ""
    peer = (here.rank - 1) % here.world_size
    error = lost(lambda: transport.recv(memory, peer, REQUESTS, "kv").wait())
    use_again(transport, memory, error.rank)
    return error.rank, error.certain, str(error)


# ---------- the suite


class Row(NamedTuple):
    """What so many ranks do."""

    ranks: int
    what: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}{self.args}, {self.ranks} ranks"


def suite(share: float = 1.0) -> list[Row]:
    """What every transport must do, without exception. share: of the messages and bytes, for what is slow in tests."""
    counts = {2: 200, 3: 40, 4: 20}
    large = [(2, 16 << 20, False), (3, 2 << 20, True), (4, 2 << 20, False), (4, 2 << 20, True)]
    return [
        *(Row(ranks, "in_order", (round(share * count),)) for ranks, count in counts.items()),
        Row(2, "one_buffer", (round(share * 500), 50)),
        *(Row(2, "one_side_first", (side, round(share * 150), 4096)) for side in ("send", "receive")),
        *(Row(ranks, "all_at_once", (round(share * size), first)) for ranks, size, first in large),
        *(Row(2, "channels_apart", (*channels, LARGEST)) for channels in permutations(CHANNELS)),
        *(Row(2, "out_of_order", (seed,)) for seed in range(2)),
        *(Row(ranks, "exchanged") for ranks in (2, 4)),
        Row(2, "exchange_amid_messages"),
        Row(3, "different_exchanges"),
        Row(2, "closed"),
        *(Row(4, "silent", (what,)) for what in ("send", "recv", "exchange")),
        Row(4, "failing"),
    ]


def passes(row: Row, pools: RankPools, conforms: Callable[..., Any], *before: Any) -> list[Any]:
    """What the ranks found, which is as it must be.

    conforms: calls the function of that name with a transport; before: what it takes before the name.
    """
    if row.what in ("silent", "failing"):
        with pools.expendable(row.ranks) as some:
            found: list[Any] = some(conforms, *before, row.what, *row.args)
    else:
        found = pools(row.ranks)(conforms, *before, row.what, *row.args)
    if row.what == "different_exchanges":
        for text in found:
            assert re.match(r"ConfigurationError: rank \d exchanges .* the ranks make different calls", text), text
    elif row.what == "silent":
        check_silent(found)
    elif row.what == "failing":
        check_failing(found)
    return found


def check_silent(found: Sequence[Any]) -> None:
    """Rank 2 of `silent` is named by all others."""
    for rank, each in enumerate(found):
        if rank != 2:
            named_rank, certain, text = each
            assert (named_rank, certain) == (2, False) and "timeout_seconds" in text, text


def check_failing(found: Sequence[Any]) -> None:
    """Rank 1 of `failing` is named by all others, with what it failed of."""
    for rank, (named_rank, certain, text) in enumerate(found):
        if rank != 1:
            assert (named_rank, certain) == (1, True) and "ValueError: a kernel found nonsense" in text, text


# ---------- transports between CPUs


def by_name(here: Here, name: str, what: str, *args: Any) -> Any:
    return globals()[what](here, name, *args)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", suite(), ids=str)
def test_conformance(name: str, row: Row, ranks: RankPools) -> None:
    found = passes(row, ranks, by_name, name)
    if row.what == "silent":
        assert all(each is None or "rank 2" in each[2] for each in found), found
