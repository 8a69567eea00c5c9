"""What programs are lowered for: what a transport can do, as the lowering and the planner need to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Way(NamedTuple):
    """For which kind of transport a program is made; see `lower`."""

    early_receives: bool = True
    collectives: bool = False
    bundle_bytes: int = 0
    ahead_bytes: int = 0


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, as the passes and the planner need to know it.

    early_receives: the two directions of a pair are matched apart, so receives may be posted before sends.
    channels: how many channels move at once. pair_serial: both directions with one peer share one queue in each
    channel. one_sided: the sender writes into the receiver's slot. zero_sm: moves take no compute units. multicast:
    natively offered. connection_bytes: device memory that a connection of two ranks takes at each of them, beside
    the pool: one for each channel (if there are several), and for each direction unless they share a queue.
    bundle_bytes: up to how many bytes what one rank gives another at once goes as one message, where it would be
    several; ahead_bytes: up to how many bytes of requests, in all, a rank receives from the start, in slots of their
    own; both with early receives only. collectives: it is a CollectiveTransport, and exchanges (`lowering.exchanges`)
    go as collectives; not with early receives. group_bytes: what a connection of all ranks of such an exchange
    takes at each of them. capturable: the device moves messages by itself, so that posts and waits may be captured
    in a graph and are done again by launching it. most_connections: how many a rank may have in all, None without a
    limit; why_few_connections says whose it is. mailboxes: messages go by way of boxes beside the pool
    (`backends.mailbox`), which take device memory at every rank.
    """

    early_receives: bool
    channels: int
    pair_serial: bool = False
    one_sided: bool = False
    zero_sm: bool = False
    multicast: bool = False
    collectives: bool = False
    connection_bytes: int = 0
    group_bytes: int = 0
    bundle_bytes: int = 0
    ahead_bytes: int = 0
    capturable: bool = False
    mailboxes: bool = False
    most_connections: int | None = None
    why_few_connections: str = ""

    @property
    def way(self) -> Way:
        """How programs are lowered for it."""
        return Way(self.early_receives, self.collectives, self.bundle_bytes, self.ahead_bytes)


IDEAL = Capabilities(early_receives=True, channels=2)  # of a transport of which nothing is known
Link = tuple[int, int, str]  # source, destination, channel
