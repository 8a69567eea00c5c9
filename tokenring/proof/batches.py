"""The proof of programs whose messages move in batches: run those of all ranks together, as HcclBatchSendRecv does.

A rank has one queue of batches. The first is at work: it sends one message after another and, beside that, receives
one after another, each time the nearest rank first (`rounds.distance`), and the next begins when all of it is through.
With `in_pairs`, as where HCCL retries, the n-th send and the n-th receive are a pair, and pairs go one after another.
A message moves when both its ends are at work on it, so that a send is as synchronous as a receive. Nothing names it:
between two ranks order is the match.

A program that runs so runs also where each channel has a queue of its own, and where several sends move at once: then
there is less to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, ScheduleData
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Program, Recv, Send, Wait
from tokenring.lowering.rounds import PostEnd, batches, distance, rounds
from tokenring.lowering.target import Target
from tokenring.proof.rendezvous import Post, Wrong, name_of, peer
from tokenring.proof.visible_pairs import proof_workload

Cut = Callable[[Sequence[PostEnd], int, int, bool], list[list[int]]]


class BatchAtWork:
    """A batch of one rank: its sends and its receives, each in the order in which HCCL works them off."""

    def __init__(self, posts: Sequence[Post], rank: int, world_size: int, in_pairs: bool) -> None:
        far = sorted(posts, key=lambda post: distance(end_of(post), rank, world_size))
        self.ways = {kind: deque(post for post in far if type(post) is kind) for kind in (Send, Recv)}
        self.in_pairs, self.through = in_pairs, {Send: 0, Recv: 0}

    def first(self, kind: type[Send] | type[Recv]) -> Post | None:
        """Return the message that it sends or receives now; None: nothing."""
        other = Recv if kind is Send else Send
        held_up = self.in_pairs and bool(self.ways[other]) and self.through[kind] > self.through[other]
        return None if held_up or not self.ways[kind] else self.ways[kind][0]

    def done(self, kind: type[Send] | type[Recv]) -> Post:
        """Take what has moved."""
        self.through[kind] += 1
        return self.ways[kind].popleft()

    @property
    def waiting(self) -> list[Post]:
        """The messages that it is at."""
        return [post for post in (self.first(Send), self.first(Recv)) if post is not None]

    @property
    def left(self) -> bool:
        """True while something has not moved."""
        return any(self.ways.values())


class BatchingRank:
    """A rank in the replay: how far it has come, its batches, and which of its messages are through."""

    def __init__(self, program: Program, world_size: int, in_pairs: bool, cut: Cut) -> None:
        self.program, self.rank, self.at = program, program.rank, 0
        self.queue: deque[tuple[int, BatchAtWork]] = deque()  # with the number of each
        self.batch_of: dict[int, int] = {}  # message → its batch
        self.begun = self.over = 0  # batches
        self._world_size, self._in_pairs, self._cut = world_size, in_pairs, cut
        self._rounds = {each.end: each for each in rounds(program.instructions, program.steps)}

    def wrong(self, text: str) -> Wrong:
        """Return an error at this rank, in its current step."""
        return Wrong(self.rank, self.program.steps[min(self.at, len(self.program.steps) - 1)], text)

    def advance(self) -> None:
        """Run until it must wait. Raises Wrong where it waits for what it has not begun."""
        instructions = self.program.instructions
        while self.at < len(instructions):
            each = instructions[self.at]
            if isinstance(each, Wait) and self._must_wait(each):
                return
            if self.at in self._rounds:
                self._begin([self._post(at) for at in self._rounds[self.at].posts])
            self.at += 1

    def _must_wait(self, wait: Wait) -> bool:
        if wait.message not in self.batch_of:
            raise self.wrong(f"waits for message {wait.message} before the batch begins that it would be in")
        return self.batch_of[wait.message] >= self.over

    def _post(self, at: int) -> Post:
        post = self.program.instructions[at]
        assert isinstance(post, Send | Recv)
        return post

    def _begin(self, posts: list[Post]) -> None:
        ends = [end_of(post) for post in posts]
        for some in self._cut(ends, self.rank, self._world_size, self._in_pairs):
            whole = [posts[at] for at in some]
            if len({(type(post), peer(post)) for post in whole}) < len(whole):
                raise self.wrong(f"has two messages of one way in a batch, {name_of(whole[0])} among them")
            self.batch_of.update((post.message, self.begun) for post in whole)
            self.queue.append((self.begun, BatchAtWork(whole, self.rank, self._world_size, self._in_pairs)))
            self.begun += 1

    def end_batches(self) -> None:
        """Go to the next batch when the first is through."""
        while self.queue and not self.queue[0][1].left:
            self.over = self.queue.popleft()[0] + 1

    @property
    def at_work(self) -> BatchAtWork | None:
        """The first batch."""
        return self.queue[0][1] if self.queue else None


def end_of(post: Post) -> PostEnd:
    """Return which end of its message a post is."""
    return PostEnd(isinstance(post, Send), peer(post))


def replay_schedule_in_batches(schedule: ScheduleData, in_pairs: bool = False) -> None:
    """Lower both passes for every rank, and run them with messages in batches. Raises ScheduleError."""
    target, workload = Target(early_receives=False), proof_workload(schedule)
    for direction in PASSES:
        programs = [lower(schedule, rank, direction, workload, target) for rank in range(schedule.world_size)]
        replay_batches(schedule.name, programs, in_pairs)


def replay_batches(name: str, programs: Sequence[Program], in_pairs: bool = False, cut: Cut = batches) -> None:
    """Run all ranks' programs of one pass, with messages in batches. Raises ScheduleError.

    name: of the schedule. in_pairs: cut into batches of one pair each, and worked off so.
    """
    try:
        _Batching(programs, in_pairs, cut).run()
    except Wrong as wrong:
        where = f"{name}, {programs[0].direction}, in batches: step {wrong.step}, rank {wrong.rank}"
        raise ScheduleError(f"{where}: {wrong.text}") from None


class _Batching:
    def __init__(self, programs: Sequence[Program], in_pairs: bool, cut: Cut) -> None:
        self.ranks = [BatchingRank(program, len(programs), in_pairs, cut) for program in programs]

    def run(self) -> None:
        moved = deque(self.ranks)
        while moved:
            rank = moved.popleft()
            rank.advance()
            moved.extend(self._move(rank))
        for rank in self.ranks:
            if rank.queue:
                raise self._stuck(rank)
            if rank.at < len(rank.program.instructions):
                raise rank.wrong("never goes on")

    def _move(self, rank: BatchingRank) -> list[BatchingRank]:
        """Move what the rank is at and its peers are at, too; return the ranks that may go on."""
        found: dict[int, BatchingRank] = {}
        busy = [rank]
        while busy:
            one = busy.pop()
            for post in [] if one.at_work is None else one.at_work.waiting:
                other = self.ranks[peer(post)]
                if self._meet(one, post, other):
                    found.update({one.rank: one, other.rank: other})
                    busy += [one, other]
                    break
        return list(found.values())

    def _meet(self, one: BatchingRank, post: Post, other: BatchingRank) -> bool:
        kind: type[Send] | type[Recv] = Recv if isinstance(post, Send) else Send
        theirs = None if other.at_work is None else other.at_work.first(kind)
        if theirs is None or peer(theirs) != one.rank:
            return False
        assert one.at_work is not None and other.at_work is not None
        if (post.label, post.span.rows, post.channel) != (theirs.label, theirs.span.rows, theirs.channel):
            raise one.wrong(f"{name_of(post)} meets {name_of(theirs)} of rank {other.rank}")
        one.at_work.done(type(post))
        other.at_work.done(kind)
        for end in (one, other):
            end.end_batches()
        return True

    def _stuck(self, rank: BatchingRank) -> Wrong:
        """Return the error for a rank whose batch never ends: with whom it waits for what."""
        assert rank.at_work is not None
        found = [f"{name_of(post)}, where {self._doing(self.ranks[peer(post)])}" for post in rank.at_work.waiting]
        waits = "; ".join(found)
        return rank.wrong(f"waits for ever in a batch, for {waits}: a deadlock")

    def _doing(self, rank: BatchingRank) -> str:
        if rank.at_work is None:
            return f"rank {rank.rank} has no batch at work"
        return f"rank {rank.rank} is at {' and '.join(name_of(post) for post in rank.at_work.waiting)}"
