"""Transfers as streams of packets over wires that are token buckets, as between the namespaces of an emulation.

Between two ranks goes one stream a channel, of which a window is on its way. A packet waits at each wire until those
that came before it have passed, whoever sent them; what was not sent while a wire was idle passes at once (a token
bucket of tc-tbf; its reckoning by the moment at which the next packet is due is that of ITU-T I.371, Annex A).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenring.planner.moving import EPSILON_BYTES, Listener, Transfer, Wires

PACKETS_OF_A_WINDOW = 8  # enough for fair shares of wires; finer ones only take longer


class _Packet(NamedTuple):
    """At the wire of this number on its transfer's way, at a moment."""

    when: float
    tie: int
    transfer: Transfer
    nbytes: float
    wire: int


@dataclass(slots=True)
class _Unsent:
    """What of a transfer has not left: so many packets of so many bytes."""

    transfer: Transfer
    packets: int
    packet_bytes: float


@dataclass(slots=True)
class _Stream:
    """on_way: bytes; unsent: in the order in which they were begun."""

    on_way: float = 0.0
    unsent: deque[_Unsent] = field(default_factory=deque)


@dataclass(slots=True)
class _Wire:
    width: float  # bytes a second
    burst_seconds: float
    due: float = -math.inf  # when the next packet would be, had they all kept to the width

    def passes(self, nbytes: float, now: float) -> float:
        """When a packet that comes now has passed."""
        self.due = max(self.due, now - self.burst_seconds) + nbytes / self.width
        return max(now, self.due)


class Packets:
    """All that is on its way; see Moving. window_bytes: of one stream."""

    def __init__(self, net: Wires, listener: Listener, window_bytes: float) -> None:
        self._net, self._listener, self._window_bytes = net, listener, window_bytes
        self._streams: dict[tuple[int, int, str], _Stream] = {}
        self._wires: dict[str, _Wire] = {}
        self._packets: list[_Packet] = []
        self._ties = 0

    def begin(self, transfer: Transfer, now: float) -> None:
        packets = max(1, math.ceil(transfer.nbytes * PACKETS_OF_A_WINDOW / self._window_bytes))
        stream = self._stream(transfer)
        stream.unsent.append(_Unsent(transfer, packets, transfer.nbytes / packets))
        self._listener.through(transfer)  # the next waits here
        self._send(stream, now)

    def next_moment(self, now: float) -> float:
        return self._packets[0].when if self._packets else math.inf

    def advance(self, now: float) -> None:
        while self._packets and self._packets[0].when <= now:
            packet = heapq.heappop(self._packets)
            if packet.wire < len(packet.transfer.way):
                wire = self._wire(packet.transfer.way[packet.wire])
                self._go(packet.transfer, packet.nbytes, packet.wire + 1, wire.passes(packet.nbytes, now))
            else:
                self._arrive(packet.transfer, packet.nbytes, now)

    def settle(self, now: float, next_event: float) -> None:
        pass  # who came first has gone on already

    def is_idle(self) -> bool:
        return not self._packets

    def _send(self, stream: _Stream, now: float) -> None:
        """As much as the window allows leaves. The source need not wait for what has left."""
        while stream.unsent and self._has_room(stream):
            first = stream.unsent[0]
            stream.on_way += first.packet_bytes
            self._go(first.transfer, first.packet_bytes, 0, now)
            first.packets -= 1
            if not first.packets:
                stream.unsent.popleft()
                first.transfer.sent = True
                self._listener.sent(first.transfer)

    def _has_room(self, stream: _Stream) -> bool:
        """The window has, or nothing is on its way."""
        after = stream.on_way + stream.unsent[0].packet_bytes
        return not stream.on_way or after <= self._window_bytes * (1 + 1e-9)

    def _go(self, transfer: Transfer, nbytes: float, wire: int, when: float) -> None:
        self._ties += 1
        heapq.heappush(self._packets, _Packet(when, self._ties, transfer, nbytes, wire))

    def _arrive(self, transfer: Transfer, nbytes: float, now: float) -> None:
        transfer.left -= nbytes
        stream = self._stream(transfer)
        stream.on_way = max(0.0, stream.on_way - nbytes)
        if stream.on_way <= EPSILON_BYTES:
            stream.on_way = 0.0
        if transfer.left <= EPSILON_BYTES:
            self._listener.arrived(transfer)
        self._send(stream, now)

    def _stream(self, transfer: Transfer) -> _Stream:
        return self._streams.setdefault((transfer.src, transfer.dst, transfer.channel), _Stream())

    def _wire(self, name: str) -> _Wire:
        known = self._wires.get(name)
        if known is None:
            width = self._net.gbs(name) * 1e9
            known = self._wires[name] = _Wire(width, self._net.burst_bytes(name) / width)
        return known
