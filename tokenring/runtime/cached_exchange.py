"""The exchanges of cached attention: rows of q to all ranks, and partial results to where they are merged.

Keys and values stay where they lie. So memory, messages and their sizes follow from the rows of a call alone, whatever
is cached, and are bound once for each number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenring.backends.merging.all_at_once import merge_all, merge_outs
from tokenring.ir.cached_exchange import CHANNEL_OF, Content, SendPart, exchange_data
from tokenring.ir.schedule_data import PARTIALS, REQUESTS
from tokenring.lowering.records import aligned
from tokenring.runtime.cached_kernel import Partial

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Landing, Transport, Work
    from tokenring.runtime.pool import Pool

Made = tuple[torch.Tensor, torch.Tensor | None]  # out and, where it is wanted, lse
LSE_BYTES = 4  # of fp32
KEPT_EXCHANGES = 16  # of a pool, each for one number of rows


class Rows(NamedTuple):
    """The rows of one partial result: out [batch, heads, tokens, width] in dtype, and their lse in fp32."""

    batch: int
    heads: int
    tokens: int
    width: int
    dtype: torch.dtype

    @property
    def number(self) -> int:
        """Rows of all heads and the whole batch."""
        return self.batch * self.heads * self.tokens

    @property
    def message_bytes(self) -> int:
        """Bytes of a message with them: lse first, then out."""
        return self.number * (LSE_BYTES + self.width * self.dtype.itemsize)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the memory that a message takes."""
        return aligned(self.message_bytes)


class PartialSlots:
    """So many partial results of one size, one after another in one piece of memory (uint8).

    outs [n, B, H, T, D] and lses [n, B, H, T] are views of all of them, messages[i] the bytes of the i-th.
    """

    def __init__(self, memory: torch.Tensor, rows: Rows, count: int) -> None:
        size, item = rows.slot_bytes, rows.dtype.itemsize
        memory = memory[: count * size]
        self.messages = [memory[at : at + rows.message_bytes] for at in range(0, count * size, size)]
        lse, out = memory.view(torch.float32), memory.view(rows.dtype)
        start = out.storage_offset() + rows.number * LSE_BYTES // item
        shape = rows[:3]
        flat = lse.as_strided((count, rows.number), (size // LSE_BYTES, 1), lse.storage_offset())
        self.lses = flat.view(count, *shape)
        steps = size // item, rows.width, 1
        self.outs = out.as_strided((count, rows.number, rows.width), steps, start).view(count, *shape, rows.width)
        self.each = list(zip(self.outs.unbind(0), self.lses.unbind(0), strict=True))

    def put(self, index: int, partial: Partial) -> None:
        """Write the index-th partial result."""
        out, lse = self.each[index]
        out.copy_(partial[0])
        lse.copy_(partial[1])


class Post(NamedTuple):
    """A message of an exchange, to or from a peer."""

    peer: int
    data: torch.Tensor


class Posts:
    """The messages of one exchange, between all pairs of ranks on one channel, bound to a transport."""

    def __init__(self, transport: Transport, channel: str, receives: Iterable[Post], sends: Iterable[Post]) -> None:
        self._transport, self._channel = transport, channel
        self._receives, self._sends = tuple(receives), tuple(sends)

    @property
    def landings(self) -> list[Landing]:
        """Memory where its messages land, in the order of their posts."""
        return [(src, self._channel, data) for src, data in self._receives]

    def receive(self, label: str) -> list[Work]:
        """Post the receives, unless they go with the sends."""
        if not self._transport.target.early_receives:
            return []
        return [self._transport.recv(data, src, self._channel, label) for src, data in self._receives]

    def send(self, label: str) -> list[Work]:
        """Post the sends; where directions are matched together also the receives, of each pair in one order."""
        transport, channel = self._transport, self._channel
        if transport.target.early_receives:
            handles = [transport.send(data, dst, channel, label) for dst, data in self._sends]
        else:
            handles = []
            for (peer, out), (_, into) in zip(self._sends, self._receives, strict=True):
                if transport.rank < peer:
                    handles.append(transport.send(out, peer, channel, label))
                handles.append(transport.recv(into, peer, channel, label))
                if transport.rank > peer:
                    handles.append(transport.send(out, peer, channel, label))
        if transport.target.grouping:
            transport.go()
        return handles


class PartialExchange:
    """Memory and messages of cached attention for calls of one size, as an exchange says that is data.

    rows: of a part of it. "one-shot": every rank has all rows, and gets the partial results of all. "two-step": so too,
    and each merges those of a part of the heads, whose result then goes to all. "direct-q": each rank has rows of its
    own, of tokens or heads, which go to all; their partial results come back. halves: that is done by two calls.
    made: the partial results that are merged, of each rank, and at last what is a rank's own beside.
    """

    def __init__(
        self, transport: Transport, pool: Pool, name: str, rows: Rows, q_width: int, halves: bool = False
    ) -> None:
        self.name, self.rows, self._transport, self._pool = name, rows, transport, pool
        world, me = transport.world_size, transport.rank
        data = exchange_data(name, world)
        moves_q, parted = bool(data.of("q")), data.parts > 1
        q_bytes = aligned(rows.number * q_width * rows.dtype.itemsize) if moves_q else 0
        counts = world + 1, world if parted else 0, world if data.of("result") else 0
        pool.reserve(world * q_bytes + sum(counts) * rows.slot_bytes)
        self.base = pool.data
        pool.touch(world * q_bytes + sum(counts) * rows.slot_bytes)
        slots, at = [], world * q_bytes
        for count in counts:
            slots.append(PartialSlots(self.base[at:], rows, count) if count else None)
            at += count * rows.slot_bytes
        made, self._out, self._results = slots
        assert made is not None
        self.made = made  # to be merged: of each rank, and the rank's own
        flat: list[torch.Tensor] = []
        if moves_q:
            shape, item = (rows.batch, rows.tokens, rows.heads, q_width), rows.dtype.itemsize
            flat = [self.base[i * q_bytes : i * q_bytes + rows.number * q_width * item] for i in range(world)]
            self.q = [each.view(rows.dtype).view(shape) for each in flat]

        def lies_at(move: SendPart, sends: bool) -> torch.Tensor:
            """Return the memory of a message at this rank."""
            if move.content == "q":
                return flat[move.part]
            if move.content == "partial":
                own = not sends or self._out is None
                return self.made.messages[move.src] if own else self._out.messages[move.part]  # type: ignore[union-attr]
            assert self._results is not None
            return self._results.messages[move.part]

        def posts(content: Content) -> Posts:
            moves = data.of(content)
            receives = [Post(move.src, lies_at(move, False)) for move in moves if move.dst == me]
            sends = [Post(move.dst, lies_at(move, True)) for move in moves if move.src == me]
            return Posts(transport, CHANNEL_OF[content], receives, sends)

        self._requests, self.partials, self._returns = posts("q"), posts("partial"), posts("result")
        links = dict.fromkeys((move.src, move.dst, CHANNEL_OF[move.content]) for move in data.moves)
        transport.prepare(list(links), self.base.device)
        self._begin = self._placed(halves)

    @property
    def placed(self) -> bool:
        """True if its messages have places that the transport is told of, before each call."""
        return bool(self._begin)

    @property
    def usable(self) -> bool:
        """True until the pool has grown: then it lies in memory that is given up."""
        return self.base is self._pool.data

    def _placed(self, halves: bool) -> dict[str, object]:
        """Tell the transport where messages go, where it wants to know that: of a call, or of each half of it."""
        if not self._transport.target.placing:
            return {}
        requests, partials = self._requests.landings, self.partials.landings
        if halves:
            return {REQUESTS: self._transport.place(requests), PARTIALS: self._transport.place(partials)}
        return {PARTIALS: self._transport.place(requests + partials + self._returns.landings)}

    def _start(self, half: str = PARTIALS) -> None:
        if self._begin:
            self._transport.begin(self._begin[half])

    def shared(
        self, sealed: Callable[[], Partial], local: Callable[[], Partial], label: str, wants_lse: bool = True
    ) -> Made:
        """Return out and lse of rows that all ranks have: from what each makes of its keys, and of what all hold."""
        self._start()
        received = self.partials.receive(label)
        self.made.put(self._transport.rank, sealed())
        sent = self.partials.send(label)
        self.made.put(-1, local())
        wait_for(chain(received, sent))
        if wants_lse:
            return merge_all(self.made.outs, self.made.lses)
        return merge_outs(self.made.outs, self.made.lses), None

    def in_two_steps(self, sealed: Callable[[], Partial], local: Callable[[int, int], Partial], label: str) -> Partial:
        """Return what `shared` does: each rank merges the results of a part of the heads, for all ranks.

        local(first, count): the partial result of so many heads over what all hold. A result travels in the dtype of
        the rows, with its lse, and its rank takes what the others get.
        """
        assert self._results is not None
        self._start()
        me, heads = self._transport.rank, self.rows.heads
        received, returned = self.partials.receive(label), self._returns.receive(label)
        self._put_parts(*sealed())
        sent = self.partials.send(label)
        self.made.put(-1, local(me * heads, heads))
        wait_for(chain(received, sent))
        self._results.put(me, merge_all(self.made.outs, self.made.lses))
        wait_for(chain(returned, self._returns.send(label)))
        outs, lses = self._results.outs, self._results.lses  # [P, B, H/P, T, D]: in memory of the exchange
        return outs.transpose(0, 1).flatten(1, 2).contiguous(), lses.transpose(0, 1).flatten(1, 2).contiguous()

    def own(
        self, q: torch.Tensor, sealed: Callable[[int, torch.Tensor], Partial], local: Callable[[], Partial], label: str
    ) -> Partial:
        """Return out and lse of this rank's rows q [B, T, H, D]: sealed(r, q) is what it makes of those of rank r."""
        assert self._out is not None
        self._start()
        me, world = self._transport.rank, self._transport.world_size
        asked = self._ask(q, label)
        received = self.partials.receive(label)
        self.made.put(me, sealed(me, q))
        self.made.put(-1, local())
        wait_for(asked)
        for rank in (r for r in range(world) if r != me):
            self._out.put(rank, sealed(rank, self.q[rank]))
        wait_for(chain(received, self.partials.send(label)))
        return merge_all(self.made.outs, self.made.lses)

    def own_heads(
        self, q: torch.Tensor, sealed: Callable[[torch.Tensor], Partial], local: Callable[[], Partial], label: str
    ) -> Partial:
        """Return out and lse of this rank's heads q [B, T, H/P, D]: sealed(q) is what it makes of all heads at once.

        So keys and values are read once for all query heads of a kv head, whichever ranks those lie at.
        """
        self._start()
        asked = self._ask(q, label)
        received = self.partials.receive(label)
        self.made.put(-1, local())
        wait_for(asked)
        self._put_parts(*sealed(torch.cat(self.q, dim=2)))
        wait_for(chain(received, self.partials.send(label)))
        return merge_all(self.made.outs, self.made.lses)

    def _ask(self, q: torch.Tensor, label: str) -> list[Work]:
        """Send this rank's rows of q to all, and begin to receive theirs; return what to wait for."""
        asked = self._requests.receive(label)
        self.q[self._transport.rank].copy_(q)
        return asked + self._requests.send(label)

    def _put_parts(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write a partial result of all heads, part by part, to where it is sent from, and this rank's to be merged."""
        assert self._out is not None
        heads = self.rows.heads
        for rank in range(self._transport.world_size):
            slots = self.made if rank == self._transport.rank else self._out
            slots.put(rank, (out.narrow(1, rank * heads, heads), lse.narrow(1, rank * heads, heads)))

    def gathered(self, q: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Return every rank's rows of q, by rank, each [B, T, H, D], in memory of the exchange."""
        self._start(REQUESTS)
        wait_for(self._ask(q, label))
        return self.q

    def combined(self, out: torch.Tensor, lse: torch.Tensor, label: str) -> Partial:
        """Return what the ranks' partial results make together: of all rows, or of this rank's heads.

        out [B, H, T, D] and lse [B, H, T] are of all heads.
        """
        self._start()
        world = self._transport.world_size
        received = self.partials.receive(label)
        if self._out is None:
            self.made.put(self._transport.rank, (out, lse))
        else:
            self._put_parts(out, lse)
        wait_for(chain(received, self.partials.send(label)))
        return merge_all(self.made.outs[:world], self.made.lses[:world])


def exchange_of(
    transport: Transport, pool: Pool, name: str, rows: Rows, q_width: int, halves: bool = False
) -> PartialExchange:
    """Return the exchange of calls of one size over this memory, bound once; all ranks ask for it together.

    Whether it is bound anew, as where the pool has grown, may differ by rank: nobody may agree on anything by that.
    """
    key = name, rows, q_width, halves
    found = pool.exchanges.get(key)
    if isinstance(found, PartialExchange) and found.usable:
        return found
    while key not in pool.exchanges and len(pool.exchanges) >= KEPT_EXCHANGES:
        pool.exchanges.pop(next(iter(pool.exchanges)))
    with torch.inference_mode(False):  # the pool outlives the call, and later calls may want gradients
        made = pool.exchanges[key] = PartialExchange(transport, pool, name, rows, q_width, halves)
    return made


def wait_for(works: Iterable[Work]) -> None:
    """Wait for each of some messages."""
    for each in works:
        each.wait()
