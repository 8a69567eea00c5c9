"""Transfers as streams of packets over wires that are token buckets, as between the namespaces of an emulation.

Between two ranks goes one stream a channel, of which a window is on its way. A packet waits at each wire until those
that came before it have passed, whoever sent them; what was not sent while a wire was idle passes at once (a token
bucket of tc-tbf; its accounting by the moment at which the next packet is due is that of ITU-T I.371, Annex A).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenring.planner.simulation.in_flight import Listener, Transfer, Wires

PACKETS_OF_A_WINDOW = 8  # enough for fair shares of wires; finer ones only take longer
MOST_PACKETS = 256  # of a message: larger ones have larger packets, and a window of as many


@dataclass(slots=True)
class _Message:
    """A transfer in packets of so many bytes: how many of them have not left, and not arrived."""

    transfer: Transfer
    packet_bytes: float
    unsent: int
    missing: int


class _Packet(NamedTuple):
    """A packet that comes at a moment to the wire of this number on its way."""

    when: float
    tie: int
    message: _Message
    hop: int


@dataclass(slots=True)
class _Stream:
    """on_way: bytes, in so many packets; unsent: messages in the order in which they were begun."""

    on_way: float = 0.0
    packets: int = 0
    unsent: deque[_Message] = field(default_factory=deque)


@dataclass(slots=True)
class _Wire:
    """spent: until when the width is used up; before now, so much is saved, but no more than a burst."""

    width: float  # bytes a second
    burst_seconds: float
    spent: float = -math.inf

    def passes(self, nbytes: float, now: float) -> float:
        """Return when a packet that comes now has passed."""
        self.spent = max(self.spent, now - self.burst_seconds) + nbytes / self.width
        return max(now, self.spent)


class Packets:
    """All that is on its way; see Moving. window_bytes: of one stream."""

    def __init__(self, net: Wires, listener: Listener, window_bytes: float) -> None:
        self._net, self._listener, self._window_bytes = net, listener, window_bytes
        self._streams: dict[tuple[int, int, str], _Stream] = defaultdict(_Stream)
        self._wires: dict[str, _Wire] = {}
        self._packets: list[_Packet] = []
        self._ties = 0

    def begin(self, transfer: Transfer, now: float) -> None:
        """Begin the transfer: queue its packets in its stream and send what the window allows; see Moving.begin."""
        wanted = math.ceil(transfer.left * PACKETS_OF_A_WINDOW / self._window_bytes)
        packets = min(MOST_PACKETS, max(1, wanted))
        stream = self._streams[transfer.src, transfer.dst, transfer.channel]
        stream.unsent.append(_Message(transfer, transfer.left / packets, packets, packets))
        self._send(stream, now)
        self._listener.through(transfer)  # the next waits in the stream

    def next_moment(self, now: float) -> float:
        """Return when the next packet comes to a wire or arrives; see Moving.next_moment."""
        return self._packets[0].when if self._packets else math.inf

    def advance(self, now: float) -> None:
        """Move on every packet that comes on until this moment; see Moving.advance."""
        while self._packets and self._packets[0].when <= now:
            _, _, message, hop = heapq.heappop(self._packets)
            way = message.transfer.way
            if hop < len(way):
                self._go(message, hop + 1, self._wire(way[hop]).passes(message.packet_bytes, now))
            else:
                self._arrive(message, now)

    def settle(self, now: float, next_event: float) -> None:
        """Do nothing: packets that came first have gone on already; see Moving.settle."""
        pass  # who came first has gone on already

    def is_idle(self) -> bool:
        """Return whether no packet is on its way; see Moving.is_idle."""
        return not self._packets

    def _send(self, stream: _Stream, now: float) -> None:
        """Send as much as the window allows. The source need not wait for what has left."""
        while stream.unsent and self._has_room(stream):
            first = stream.unsent[0]
            stream.on_way += first.packet_bytes
            stream.packets += 1
            first.unsent -= 1
            self._go(first, 0, now)
            if not first.unsent:
                stream.unsent.popleft()
                first.transfer.sent = True
                self._listener.sent(first.transfer)

    def _has_room(self, stream: _Stream) -> bool:
        """Return whether the window has room for a packet, or nothing is on its way."""
        packet = stream.unsent[0].packet_bytes
        window = max(self._window_bytes, PACKETS_OF_A_WINDOW * packet) * (1 + 1e-9)
        return not stream.packets or stream.on_way + packet <= window

    def _go(self, message: _Message, hop: int, when: float) -> None:
        self._ties += 1
        heapq.heappush(self._packets, _Packet(when, self._ties, message, hop))

    def _arrive(self, message: _Message, now: float) -> None:
        transfer = message.transfer
        stream = self._streams[transfer.src, transfer.dst, transfer.channel]
        stream.packets -= 1
        stream.on_way = stream.on_way - message.packet_bytes if stream.packets else 0.0
        message.missing -= 1
        if not message.missing:
            self._listener.arrived(transfer)
        self._send(stream, now)

    def _wire(self, name: str) -> _Wire:
        known = self._wires.get(name)
        if known is None:
            width = self._net.gbs(name) * 1e9
            known = self._wires[name] = _Wire(width, self._net.burst_bytes(name) / width)
        return known
