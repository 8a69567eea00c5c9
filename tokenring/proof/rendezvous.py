"""The rendezvous of ranks in a replay: their messages in queues, each a blocking rendezvous; and why they deadlock.

Messages of a collective stand in a queue together, and are done when they stand first at all its ranks; those of a
bundle stand together among the others of their queue.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from tokenring.ir.schedule_data import Tile
from tokenring.lowering.program import BUNDLE, Collective, Instruction, Program, Recv, Send
from tokenring.proof.slot_contents import ContentRun, Rows

Post = Recv | Send
Key = tuple[tuple[int, ...], str]  # of a queue: the pair, in order of rank or of direction, and the channel
ALL: Key = (-1, -1), ""  # of a rank's only queue


class Wrong(Exception):
    """An error in a program: what is wrong, at which rank and in which step."""

    def __init__(self, rank: int, step: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.step, self.text = rank, step, text


class Rank:
    """A rank in a replay: how far it has come in its program, its messages, and what its slots hold."""

    def __init__(self, program: Program) -> None:
        self.program, self.rank = program, program.rank
        self.at = 0
        self.waits: int | None = None  # the message that it waits for
        self.posted: dict[int, Post] = {}
        self.done: set[int] = set()
        self.flying: list[dict[int, Post]] = [{} for _ in program.slots]  # slot → messages on their way
        self.held: list[dict[int, Rows]] = [defaultdict(dict) for _ in program.slots]  # slot → head group → rows
        self.carried: dict[int, list[ContentRun]] = {}  # message → what it sends, or what has come by it
        self.home = {slot: kind for kind, slot in program.home}
        self.together = {message: each for each in program.collectives for message in each.messages}

    @property
    def step(self) -> int:
        """The step in which it is, or the last if it has ended."""
        steps = self.program.steps
        return steps[min(self.at, len(steps) - 1)] if steps else 0

    def wrong(self, text: str) -> Wrong:
        """Return an error at this rank, in its current step."""
        return Wrong(self.rank, self.step, text)

    @property
    def ended(self) -> bool:
        """True if the rank has come to the end of its program."""
        return self.at == len(self.program.instructions)


def peer(post: Post) -> int:
    """Return the rank at the other end of the message."""
    return post.src if isinstance(post, Recv) else post.dst


def _matched(post: Post) -> tuple[str, int, int, str]:
    """Return what both ends of a message have in common."""
    return post.label, post.span.rows, post.span.heads, post.channel


def name_of(post: Post) -> str:
    """Return the message as errors name it."""
    way = "receive" if isinstance(post, Recv) else "send"
    return f"{way} {post.message} ({post.label}, rank {peer(post)}, {post.channel})"


def tile_name(tile: Tile) -> str:
    """Return the blocks of a tile, as errors name them."""
    return f"{','.join(map(str, tile.q))} × {','.join(map(str, tile.kv))}"


class Queues(NamedTuple):
    """Queues of a transport, in which the messages of a rank stand, each worked off from its head.

    channels: 1 if a pair's channels share a queue as well. one_a_rank: all that a rank sends and receives stands in
    one, whatever the peer, as where communicators share a stream of the device.
    """

    one_for_both_directions: bool
    channels: int = 2
    one_a_rank: bool = False


class MessagePairing(NamedTuple):
    """Two messages that have met."""

    sender: Rank
    send: Send
    receiver: Rank
    recv: Recv


class Rendezvous:
    """The queues of all ranks."""

    def __init__(self, ranks: Sequence[Rank], how: Queues) -> None:
        self.ranks, self.how = ranks, how
        self.queues: dict[tuple[int, Key], deque[Post]] = defaultdict(deque)

    def post(self, rank: Rank, post: Post) -> list[MessagePairing]:
        """Post a message; the meetings that this leads to: several where it stood before others in a rank's queue."""
        if post.message in rank.posted:
            raise rank.wrong(f"posts {name_of(post)} after {name_of(rank.posted[post.message])} of the same number")
        other = peer(post)
        if other == rank.rank or not 0 <= other < len(self.ranks):
            raise rank.wrong(f"posts {name_of(post)}, but has no such peer")
        rank.posted[post.message] = post
        together = rank.together.get(post.message)
        key = self._key(rank.rank, post, together)
        here = self.queues[rank.rank, key]
        here.append(post)
        if len(here) > 1 and (together is None or rank.together.get(here[0].message) != together):
            return []  # what stands before it has not met its other end either
        met: list[MessagePairing] = []
        moved = [rank]  # ranks with another message first in this queue
        while moved:
            a = moved.pop()
            found = self._first(a, key)
            met += found
            ends = {end.rank: end for each in found for end in (each.sender, each.receiver)} if found else {}
            moved += [end for rank, end in ends.items() if self.queues[rank, key]]
        return met

    def _first(self, a: Rank, key: Key) -> list[MessagePairing]:
        """Return what meets by the first message of a queue of this rank: all of its collective, or itself."""
        here = self.queues[a.rank, key]
        if not here:
            return []
        if (together := a.together.get(here[0].message)) is not None:
            return self._meet_all(a, together, key)
        there = self.queues[peer(here[0]), key]
        meeting = self._meet(a, self.ranks[peer(here[0])], here, there) if there else None
        return [] if meeting is None else [meeting]

    def _meet_all(self, a: Rank, together: Collective, key: Key) -> list[MessagePairing]:
        """Return the pairings of a collective's messages; none until it stands first at all its ranks, whole."""
        members = [self.ranks[rank] for rank in together.ranks]
        if not all(self._has_come(member, together, key) for member in members):
            return []
        sends: dict[tuple[int, int, str], Send] = {}
        recvs: dict[tuple[int, int, str], Recv] = {}
        for member in members:
            for _ in self._own(member, together):
                post = self.queues[member.rank, key].popleft()
                member.done.add(post.message)
                if isinstance(post, Send):
                    sends[member.rank, post.dst, post.label] = post
                else:
                    recvs[post.src, member.rank, post.label] = post
        if lone := sends.keys() ^ recvs.keys():
            src, dst, label = min(lone)
            raise a.wrong(f"{together.label}: {label} from rank {src} to rank {dst} has one end only")
        if together.kind == BUNDLE and list(sends) != list(recvs):
            raise a.wrong(f"{together.label}: its messages stand in another order at the other end")
        return [MessagePairing(self.ranks[ends[0]], sends[ends], self.ranks[ends[1]], recvs[ends]) for ends in sends]

    def _own(self, member: Rank, together: Collective) -> tuple[int, ...]:
        """Return the messages that a rank has in a collective; none if it has no such."""
        same = (each for each in member.program.collectives if each.label == together.label)
        return next((each.messages for each in same if each.ranks == together.ranks), ())

    def _has_come(self, member: Rank, together: Collective, key: Key) -> bool:
        own, queue = self._own(member, together), self.queues[member.rank, key]
        return bool(own) and len(queue) >= len(own) and queue[0].message in own and all(
            message in member.posted for message in own
        )

    def _key(self, rank: int, post: Post, together: Collective | None) -> Key:
        if self.how.one_a_rank:
            return ALL
        if together is not None and together.kind != BUNDLE:
            return together.ranks, "collectives"
        ends = (post.src, rank) if isinstance(post, Recv) else (rank, post.dst)
        pair = (min(ends), max(ends)) if self.how.one_for_both_directions else ends
        return pair, post.channel if self.how.channels > 1 else ""

    def _meet(self, a: Rank, b: Rank, here: deque[Post], there: deque[Post]) -> MessagePairing | None:
        mine, theirs = here[0], there[0]
        if theirs.message in b.together:
            return None  # a collective: its messages meet no others
        if peer(theirs) != a.rank:
            return None  # a rank's one queue: there, a message with someone else comes first
        if type(mine) is type(theirs):
            return None  # both send, or both receive: this is how orders that cross block each other
        if _matched(mine) != _matched(theirs):
            raise a.wrong(f"{name_of(mine)} meets {name_of(theirs)} of rank {b.rank}")
        here.popleft(), there.popleft()
        a.done.add(mine.message)
        b.done.add(theirs.message)
        if isinstance(mine, Send) and isinstance(theirs, Recv):
            return MessagePairing(a, mine, b, theirs)
        assert isinstance(mine, Recv) and isinstance(theirs, Send)
        return MessagePairing(b, theirs, a, mine)

    # ---------- why ranks wait for ever

    def cause(self) -> Wrong | None:
        """Return what holds up the ranks that wait, when none of them can go on; None if none waits.

        Each of them waits for one other: following that, one comes to a rank that never posts what
        is waited for, or in a circle.
        """
        rank = next((each for each in self.ranks if not each.ended), None)
        way: list[tuple[Rank, Post]] = []  # who waits, with which message
        while rank is not None:
            if rank.rank in (ranks := [each.rank for each, _ in way]):
                return self._circle(way[ranks.index(rank.rank) :])
            key = self._blocked(rank)
            head = self._held_up(rank, key)
            other = self.ranks[peer(head)]
            way.append((rank, head))
            if (never := self._never(other, head, rank)) is not None:
                return never
            theirs = self.queues[other.rank, key]
            if theirs and peer(theirs[0]) == rank.rank:
                if (never := self._never(rank, theirs[0], other)) is not None:
                    return never
                return self._circle([(rank, head), (other, theirs[0])])
            rank = other
        return None

    def _blocked(self, rank: Rank) -> Key:
        """Return the queue that holds up a rank."""
        if self.how.one_a_rank:
            return ALL
        assert rank.waits is not None  # nothing else blocks
        return self._key(rank.rank, rank.posted[rank.waits], rank.together.get(rank.waits))

    def _held_up(self, rank: Rank, key: Key) -> Post:
        """Return the message first in a queue; of a collective, the first whose other end is not there."""
        head = self.queues[rank.rank, key][0]
        if (together := rank.together.get(head.message)) is None:
            return head
        posts = [rank.posted[message] for message in together.messages if message in rank.posted]
        return next((post for post in posts if not self._has_come(self.ranks[peer(post)], together, key)), head)

    def _never(self, rank: Rank, wanted: Post, by: Rank) -> Wrong | None:
        """Return the error if the rank never posts the other end of what `by` has posted; None if it does."""
        kind = Send if isinstance(wanted, Recv) else Recv
        found = (wanted.label, by.rank, wanted.channel)
        left = [each for queue in self._queues_of(rank) for each in queue]
        ahead: list[Instruction] = [*left, *rank.program.instructions[rank.at :]]
        if any(isinstance(each, kind) and (each.label, peer(each), each.channel) == found for each in ahead):
            return None
        does = f"sends {wanted.label} to" if kind is Send else f"receives {wanted.label} from"
        return rank.wrong(
            f"never {does} rank {by.rank}, which in step {by.step} waits for ever for {name_of(wanted)}: a deadlock"
        )

    def _queues_of(self, rank: Rank) -> list[deque[Post]]:
        return [queue for (at, _), queue in self.queues.items() if at == rank.rank]

    def _circle(self, way: list[tuple[Rank, Post]]) -> Wrong:
        first = min(range(len(way)), key=lambda at: way[at][0].rank)
        way = [*way[first:], *way[:first]]
        links = [f"rank {rank.rank} in step {rank.step} for {name_of(post)}" for rank, post in way]
        return way[0][0].wrong(f"waits for ever in a circle, {', '.join(links)}: a deadlock")
