"""Bundles: which messages go as one, that both ends know, programs with them, and what they hold and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from families import SOME_RANKS, length_of, make, one_of_each, points
from programs import reads_early, rearranged, replays_with_collectives, size_of
from ranks import Here, RankPools
from sampling import FULL_GRID

from tokenring import Causal, Full, Mask, attention
from tokenring.backends.interfaces import Work
from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PARTIALS, PASSES, REQUESTS, Pass
from tokenring.lowering.backend_names import TRANSPORTS, transport_target
from tokenring.lowering.bundles import bundles
from tokenring.lowering.footprint import program_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Program, Recv, Send, Wait
from tokenring.lowering.records import Records
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import Target, beyond
from tokenring.planner.simulation.operations import Await, Compute, SimulatedPost, operations
from tokenring.proof.replay import replay, replay_schedule
from tokenring.proof.verify import replay_once
from tokenring.schedule.schedule import Schedule
from tokenring.tables.rates import constant

ALL = 1 << 40  # bytes: whatever can go together does


def whole(name: str, ranks: int, layout: str = "zigzag", mask: Mask | None = None) -> Schedule:
    return make(name, ranks, layout, mask or Causal(), 16 * ranks)


def lowered(
    schedule: Schedule, direction: Pass = "forward", most_bytes: int = ALL, ahead_bytes: int = 0
) -> list[Program]:
    return list(each_lowered(schedule, direction, most_bytes, ahead_bytes))


def each_lowered(
    schedule: Schedule, direction: Pass = "forward", most_bytes: int = ALL, ahead_bytes: int = 0
) -> Iterator[Program]:
    """The programs of the ranks, each when it is asked for."""
    target = Target(bundle_bytes=most_bytes, ahead_bytes=ahead_bytes)
    return (lower(schedule, rank, direction, size_of(schedule), target) for rank in range(schedule.world_size))


def found(schedule: Schedule, rank: int, direction: Pass = "forward", most_bytes: int = ALL) -> list[list[str]]:
    """Of each bundle: from where to where on which channel, and the labels of its messages."""
    records = Records(schedule, size_of(schedule), direction)
    return [
        [f"{each.ranks[0]}>{each.ranks[1]} {each.messages[0].channel}", *(message.label for message in each.messages)]
        for each in bundles(storage_of(schedule), rank, direction, records, most_bytes)
    ]


# ---------- small requests are received from the start


def receives_late(program: Program) -> int:
    """How many requests are received only after the first send."""
    posts = [each for each in program.instructions if isinstance(each, Send | Recv)]
    first = next((number for number, each in enumerate(posts) if isinstance(each, Send)), len(posts))
    return sum(isinstance(each, Recv) and each.channel == REQUESTS for each in posts[first:])


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_small_requests_are_received_from_the_start(ranks: int, direction: Pass) -> None:
    for point in one_of_each(points([ranks], ("", "/late"))):
        schedule = make(point.name, ranks, "zigzag", Causal(), length_of(point, 2, None))
        assert not any(map(receives_late, lowered(schedule, direction, ahead_bytes=ALL))), point.name


def test_larger_ones_when_their_slot_is_free() -> None:
    """What a rank holds at once is what rings are for."""
    schedule = whole("ring", 8)
    come = sum(
        Records(schedule, size_of(schedule), "forward")(each.kind, False).nbytes * each.rows
        for each in storage_of(schedule).messages(0, "forward")
        if each.dst == 0
    )
    at_once, in_turns = (lowered(schedule, ahead_bytes=limit)[0] for limit in (come, come - 1))
    assert not receives_late(at_once)
    assert receives_late(in_turns)
    assert program_bytes(schedule, size_of(schedule), at_once) > program_bytes(schedule, size_of(schedule), in_turns)


# ---------- which there are


def test_ulysses_sends_each_peer_two_messages() -> None:
    """Of zigzag's two chunks of q and two of kv one, and of the two results one."""
    schedule = whole("ulysses", 4)
    between = [each for each in found(schedule, 1) if each[0].startswith("1>2")]
    assert [(each[0].split()[1], len(each) - 1) for each in between] == [(REQUESTS, 4), (PARTIALS, 2)]
    program = lowered(schedule)[1]
    posts = sum(isinstance(each, Send | Recv) for each in program.instructions)
    alone = posts - sum(len(each.messages) - 1 for each in program.collectives)
    assert (posts, alone) == (33, 12)  # two chunks that are neighbours are one message anyway


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_both_ends_find_the_same(ranks: int, direction: Pass) -> None:
    for point in one_of_each(points([ranks], ("", "/late"))):
        schedule = make(point.name, ranks, "zigzag", Causal(), length_of(point, 2, None))
        by_rank = [{tuple(each) for each in found(schedule, rank, direction)} for rank in range(ranks)]
        for rank, some in enumerate(by_rank):
            for each in some:
                src, dst = map(int, each[0].split()[0].split(">"))
                assert rank in (src, dst) and each in by_rank[src] & by_rank[dst]


def test_what_is_needed_at_different_points_stays_apart() -> None:
    """Pieces are sent apart so that the first is used while the second is on its way."""
    schedule = make("direct-kv", 4, "contiguous", Full(), 64, pieces=2)
    assert not [each for each in found(schedule, 0) if REQUESTS in each[0]]


def test_large_messages_stay_apart() -> None:
    schedule = whole("direct-kv", 4, mask=Full())
    (first, *_), *_ = [each for each in lowered(schedule)[0].collectives if each.ranks[0] == 0]
    assert first == "bundle"
    row = Records(schedule, size_of(schedule), "forward")("kv").nbytes
    most = 2 * row * schedule.kv_layout.chunk_length
    assert any(each.ranks[0] == 0 for each in lowered(schedule, most_bytes=most)[0].collectives)
    assert not any(REQUESTS in each[0] for each in found(schedule, 0, most_bytes=most - 1))


def test_transports_that_post_in_one_order_have_none() -> None:
    schedule = whole("ulysses", 4)
    late = Target(early_receives=False, bundle_bytes=ALL)
    assert not lower(schedule, 0, "forward", size_of(schedule), late).collectives
    for name in TRANSPORTS:
        target = transport_target(name)
        assert not target.bundle_bytes or (target.early_receives and not target.collectives)


# ---------- programs with them


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_programs_of_all_families_are_proved(ranks: int) -> None:
    met = set()
    for point in one_of_each(points([ranks], ("", "/late"))):
        for layout, chunks in (("zigzag", 2), ("contiguous", 1)) if FULL_GRID else (("zigzag", 2),):
            schedule = make(point.name, ranks, layout, Causal(), length_of(point, chunks, None))
            replay_schedule(schedule, beyond(transport_target("gloo")))
            if any(program.collectives for program in each_lowered(schedule)):
                met.add(point.family)
    assert {"ulysses", "sub-sharded"} <= met or ranks == 5
    assert {"direct-kv", "direct-q"} <= met or ranks == 2


def alone(program: Program) -> Program:
    """A rank that sends them one by one, while the others wait for bundles."""
    return replace(program, collectives=())


def one_less(program: Program) -> Program:
    """The last message of a bundle goes by itself."""
    first, *rest = program.collectives
    return replace(program, collectives=(first._replace(messages=first.messages[:-1]), *rest))


def other_order(program: Program) -> Program:
    """Two messages of one bundle change places, so that the receiver takes one for the other."""
    at = _posts(program, program.collectives[0].messages)
    made = list(program.instructions)
    made[at[0]], made[at[1]] = made[at[1]], made[at[0]]
    return replace(program, instructions=tuple(made))


def waits_inside(program: Program) -> Program:
    """A wait for the first message of a bundle that the last was not posted to yet."""
    bundle = next(each for each in program.collectives if each.ranks[1] == program.rank)
    at, last = _posts(program, bundle.messages)[-1], bundle.messages[0]
    wait = next(i for i, each in enumerate(program.instructions) if isinstance(each, Wait) and each.message == last)
    order = [i for i in range(len(program.instructions)) if i != wait]
    order.insert(order.index(at), wait)
    return rearranged(program, order)


def _posts(program: Program, messages: tuple[int, ...]) -> list[int]:
    posts = enumerate(program.instructions)
    return [i for i, each in posts if isinstance(each, Send | Recv) and each.message in messages]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (alone, "deadlock"),
        (one_less, "deadlock|has one end only"),
        (other_order, "its messages stand in another order at the other end"),
        (waits_inside, "deadlock"),
        (reads_early, r"before waiting for receive"),
    ],
)
def test_replay_refuses(change: object, says: str) -> None:
    schedule = whole("ulysses", 4)
    programs = lowered(schedule)
    replay(schedule, programs, False)
    programs[2] = change(programs[2])  # type: ignore[operator]
    with pytest.raises(ScheduleError, match=says):
        replay(schedule, programs, False)


def test_they_are_proved_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenring.runtime import message_groups
    class Noting:
        target = transport_target("gloo")

        def prepare(self, links: object, device: object) -> None:
            """Nothing to connect."""

    seen = replays_with_collectives(monkeypatch)
    replay_once.cache_clear()
    schedule = whole("ulysses", 3)
    for _ in range(2):  # proved once
        message_groups.connect(Noting(), schedule, "forward", torch.device("cpu"))  # type: ignore[arg-type]
    assert seen == [True] * 4  # both passes, received in turns and from the start


# ---------- what they cost


def test_bytes_and_costs() -> None:
    """One message of all their bytes, a copy at each end; and memory of its own."""
    schedule = whole("ulysses", 4)
    size, rates = size_of(schedule), constant(1.0, "test", copy_gbs=1.0)
    apart, together = (lower(schedule, 1, "forward", size, Target(bundle_bytes=most)) for most in (0, ALL))
    costs = [operations(schedule, size, each, rates) for each in (apart, together)]
    posts, fewer = ([x for x in each if isinstance(x, SimulatedPost)] for each in costs)
    for sends in (True, False):
        for peer in (0, 2, 3):
            some, one = ([x for x in each if (x.peer, x.sends) == (peer, sends)] for each in (posts, fewer))
            assert sum(x.nbytes for x in some) == sum(x.nbytes for x in one)
            assert [x.channel for x in one] == [REQUESTS, PARTIALS] and len(some) > 2
    bundled = sum(x.nbytes for x in fewer if " more" in x.label)
    held = program_bytes(schedule, size, together) - program_bytes(schedule, size, apart)
    assert bundled <= held < bundled + 64 * len(together.collectives)
    copied = [sum(x.seconds for x in each if isinstance(x, Compute) and not x.kernel) for each in costs]
    assert copied[1] - copied[0] == pytest.approx(2 * bundled / 1e9)
    awaited = [x.message for x in costs[1] if isinstance(x, Await)]
    assert set(awaited) == {x.message for x in fewer} and len(awaited) == len(set(awaited))


def count(here: Here, heads: int) -> int:
    """Sends of a forward and backward call."""
    transport = here.transport("gloo")
    cp = here.cp(schedule="ulysses", transport=transport)
    assert transport is not None
    sent, send = [], transport.send

    def noting(data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        sent.append(label)
        return send(data, dst, channel, label)

    transport.send = noting  # type: ignore[method-assign]
    try:
        torch.manual_seed(here.rank)
        q, k, v = (torch.randn(1, 16, heads, 8, requires_grad=True) for _ in range(3))
        attention(q, k, v, cp, mask=Causal()).square().sum().backward()  # type: ignore[no-untyped-call]
    finally:
        transport.send = send  # type: ignore[method-assign]
    return len(sent)


def test_over_gloo(ranks: RankPools) -> None:
    """Two to each peer in each pass. What comes of them is compared with float64 wherever Gloo is (test_exactness)."""
    assert ranks(4)(count, 4) == [12] * 4
