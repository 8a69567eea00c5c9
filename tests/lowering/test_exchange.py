"""Exchanges: which moves go as one collective, programs with collectives, and what they connect and hold."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from families import SOME_RANKS, by_turns, length_of, make, one_of_each, points
from programs import lower_all, reads_early, rearranged, replays_with_collectives, size_of
from test_planner_hccl import A2, printed

from tokenring import Causal, Full, Mask
from tokenring.cli.main import main
from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.backend_names import TRANSPORTS, transport_target
from tokenring.lowering.exchanges import exchanges
from tokenring.lowering.footprint import staged_bytes
from tokenring.lowering.lower import lower
from tokenring.lowering.program import ALL_GATHER, ALL_TO_ALL, Attend, Program, Recv, Send, Wait
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import Target, contacts, links
from tokenring.proof.replay import Kept, replay
from tokenring.proof.verify import verify_lowered
from tokenring.schedule.schedule import Schedule

Found = list[tuple[int, str, str, tuple[int, ...], int]]
EVERYBODY = (0, 1, 2, 3)
MB = 1 << 20
WITH_COLLECTIVES = Target(early_receives=False, collectives=True)


def together(schedule: Schedule, direction: Pass) -> list[Program]:
    size, ranks = size_of(schedule), range(schedule.world_size)
    return [lower(schedule, rank, direction, size, WITH_COLLECTIVES) for rank in ranks]


def found(schedule: Schedule, direction: Pass) -> Found:
    some = exchanges(storage_of(schedule), direction)
    first = [each.messages[0] for each in some]
    return [
        (m.step, each.kind, m.kind, each.ranks, each.parts) for each, m in zip(some, first, strict=True)
    ]  # fmt: skip


def whole(name: str, ranks: int, layout: str = "contiguous", mask: Mask | None = None, tokens: int = 16) -> Schedule:
    """With so many tokens a rank: direct schedules with few of them compute all that has arrived in one tile."""
    return make(name, ranks, layout, Full() if mask is None else mask, tokens * ranks)


# ---------- which there are, by hand


def test_ulysses_is_made_of_them() -> None:
    for mask in (Full(), Causal()):
        schedule = whole("ulysses", 4, mask=mask)
        assert found(schedule, "forward") == [
            (0, ALL_TO_ALL, "kv", EVERYBODY, 1), (0, ALL_TO_ALL, "q", EVERYBODY, 1),
            (1, ALL_TO_ALL, "q_partial", EVERYBODY, 1),
        ]  # fmt: skip
        assert {kind for _, _, kind, _, _ in found(schedule, "backward")} == {"q", "q_partial", "kv_partial"}


def test_chunks_that_lie_apart_go_in_parts() -> None:
    """Zigzag: both chunks of a rank, though the last rank's two are neighbours and would be one message."""
    schedule = whole("ulysses", 4, "zigzag", Causal())
    assert {(kind, parts) for _, kind, _, _, parts in found(schedule, "forward")[:2]} == {(ALL_TO_ALL, 2)}


def test_the_same_to_all_is_a_gather_and_its_gradients_are_not() -> None:
    schedule = whole("all-gather-kv", 4)
    assert found(schedule, "forward") == [(0, ALL_GATHER, "kv", EVERYBODY, 1)]
    assert [each[1:3] for each in found(schedule, "backward")] == [(ALL_GATHER, "kv"), (ALL_TO_ALL, "kv_partial")]


def test_groups_of_some_ranks() -> None:
    """USP: all-to-all of the heads in each group of neighbours; what goes round the ring between groups stays."""
    schedule = whole("usp/3", 6)
    groups = {ranks for _, _, kind, ranks, _ in found(schedule, "forward") if kind == "q"}
    assert groups == {(0, 1, 2), (3, 4, 5)}
    apart = contacts(schedule, transport_target("hccl/collectives"), ("forward",))
    assert apart.groups == groups
    assert {(src, dst) for src, dst, _ in apart.links} == {(a, (a + 3) % 6) for a in range(6)}


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "mask", "tokens", "why"),
    [
        ("ring", 4, "contiguous", Full(), 16, "a rank gives one other"),
        ("tokenring", 4, "contiguous", Full(), 16, "a rank gives one other"),
        ("direct-kv", 4, "contiguous", Full(), 512, "tiles begin as blocks arrive"),
        ("all-gather-kv", 4, "zigzag", Causal(), 16, "the mask leaves some more to give than others"),
        ("ulysses", 2, "contiguous", Full(), 16, "two ranks"),
    ],
)
def test_none(name: str, ranks: int, layout: str, mask: Mask, tokens: int, why: str) -> None:
    assert not found(whole(name, ranks, layout, mask, tokens), "forward"), why


def test_direct_with_one_tile_for_all_is_a_gather() -> None:
    """What test_none's direct schedule is with small tiles, which wait for everything."""
    assert found(whole("direct-kv", 4, tokens=16), "forward")[0][:3] == (0, ALL_GATHER, "kv")


def test_memory_that_is_read_before_is_no_operand_of_a_gather() -> None:
    """The operation may write where the rank's own lies: with a tile that reads it there alone, an all-to-all."""
    schedule = whole("all-gather-kv", 4)
    one = next(tile for tile in schedule.tiles if tile.rank == 2)
    own = tuple(block for block in one.kv if schedule.owner(block) == 2)
    others = tuple(block for block in one.kv if schedule.owner(block) != 2)
    tiles = [one._replace(step=0, kv=own), one._replace(kv=others), *(t for t in schedule.tiles if t.rank != 2)]
    assert found(schedule.replace(tiles=tuple(tiles)), "forward")[0][1] == ALL_GATHER  # read where the caller has it
    joined = [*tiles[:2], one._replace(step=2, q=one.q, kv=one.kv), *tiles[2:]]
    assert found(schedule.replace(tiles=tuple(joined)), "forward")[0][1] == ALL_TO_ALL


# ---------- programs


def check(schedule: Schedule, programs: dict[Pass, list[Program]], **queues: bool) -> None:
    kept: Kept | None = None
    for direction in PASSES:
        kept = replay(schedule, programs[direction], True, kept, **queues)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", SOME_RANKS[1:])
def test_programs_of_all_families_are_proved(ranks: int) -> None:
    """In a queue for each pair and group, and in one a rank; nothing computes between the posts of a collective."""
    met = set()
    for number, point in enumerate(one_of_each(points([ranks], ("", "/late")))):
        for layout, chunks in by_turns((("contiguous", 1), ("zigzag", 2)), number):
            schedule = make(point.name, ranks, layout, Full(), length_of(point, chunks, None))
            programs: dict[Pass, list[Program]] = {way: together(schedule, way) for way in PASSES}
            if any(program.collectives for some in programs.values() for program in some):
                met.add(point.family)
                check(schedule, programs)
                check(schedule, programs, one_queue_a_rank=True)
                for program in (each for some in programs.values() for each in some):
                    check_posts_stand_together(program)
    heads_divide = {"ulysses"} if ranks not in (5, 7) else set()
    assert {"all-gather-kv", "direct-kv", "direct-q"} | heads_divide <= met


def check_posts_stand_together(program: Program) -> None:
    for each in program.collectives:
        at = [i for i in range(len(program.instructions)) if _message(program, i) in each.messages]
        between = program.instructions[at[0] : at[-1] + 1]
        waited = {x.message for x in between if isinstance(x, Wait)}
        others = {x.message for x in between if isinstance(x, Send | Recv)}
        assert not any(isinstance(x, Attend) for x in between) and not waited & set(each.messages)
        assert others == set(each.messages)


def test_other_transports_have_the_programs_they_had() -> None:
    schedule = whole("ulysses", 4, "zigzag", Causal())
    for name in TRANSPORTS:
        target = transport_target(name)
        target = Target(early_receives=target.early_receives, collectives=target.collectives)
        program = lower(schedule, 1, "forward", size_of(schedule), target)
        assert bool(program.collectives) is (name == "hccl/collectives")
        if not program.collectives:
            assert program == lower_all(schedule, size_of(schedule), "forward", early_receives=target.early_receives)[1]


def test_not_with_early_receives() -> None:
    schedule = whole("ulysses", 4)
    assert not lower(schedule, 0, "forward", size_of(schedule), Target(collectives=True)).collectives


# ---------- programs that are wrong


def alone(program: Program) -> Program:
    """By messages, where the others have collectives."""
    return replace(program, collectives=())


def crossed(program: Program) -> Program:
    """Q before KV."""
    first, second, *_ = program.collectives
    order = list(range(len(program.instructions)))
    places = [[i for i in order if _message(program, i) in each.messages] for each in (first, second)]
    low, high = min(places[0] + places[1]), max(places[0] + places[1]) + 1
    rest = [i for i in range(low, high) if i not in places[0] and i not in places[1]]
    order[low:high] = [*rest, *places[1], *places[0]]
    return rearranged(program, order)


def _message(program: Program, at: int) -> int:
    post = program.instructions[at]
    return post.message if isinstance(post, Send | Recv) else -1


@pytest.mark.parametrize("one_queue_a_rank", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [(alone, "deadlock"), (crossed, "deadlock"), (reads_early, r"rank 2: reads slot \d+ before waiting for receive")],
)
def test_replay_refuses(change: object, says: str, one_queue_a_rank: bool) -> None:
    schedule = whole("ulysses", 4)
    programs = together(schedule, "forward")
    programs[2] = change(programs[2])  # type: ignore[operator]
    with pytest.raises(ScheduleError, match=says):
        replay(schedule, programs, True, one_queue_a_rank=one_queue_a_rank)


def test_they_are_replayed_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports without collectives need no such proof, which takes half as long again."""
    seen = replays_with_collectives(monkeypatch)
    made = whole("all-gather-kv", 3)
    made.verify()
    assert seen == [False, False] * 2
    seen.clear()
    verify_lowered(made, WITH_COLLECTIVES)
    assert seen == [True] * 2


def test_they_are_proved_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is prepared for what cannot be proved."""
    from tokenring.proof import verify
    from tokenring.runtime import message_groups

    asked: list[str] = []

    class Noting:
        target = transport_target("hccl/collectives")

        def prepare(self, links: object, device: object) -> None:
            asked.append("links")

        def prepare_groups(self, groups: object, device: object) -> None:
            asked.append("groups")

    def refuse(schedule: Schedule, target: Target) -> None:
        raise ScheduleError("refused")

    made, device = whole("all-gather-kv", 3), torch.device("cpu")
    message_groups.connect(Noting(), made, "forward", device)  # type: ignore[arg-type]
    assert asked == ["links", "groups"]
    monkeypatch.setattr(verify, "verify_lowered", refuse)
    with pytest.raises(ScheduleError, match="refused"):
        message_groups.connect(Noting(), made, "forward", device)  # type: ignore[arg-type]
    assert asked == ["links", "groups", "links"]


# ---------- what they connect and hold


def test_a_group_in_place_of_all_its_pairs() -> None:
    """Eight ranks by hand: 7 pairs × both directions × both channels, or one communicator of 400 MB and staging."""
    schedule = whole("ulysses", 8, tokens=64)
    size = size_of(schedule)
    target = transport_target("hccl/collectives")
    assert contacts(schedule, target).links == frozenset() and contacts(schedule, target).groups == {tuple(range(8))}
    assert contacts(schedule, transport_target("hccl")).links == links(schedule)
    apart, bare = (schedule.peak_bytes(size, "forward", transport) for transport in ("hccl", None))
    assert apart - bare == 28 * 40 * MB
    staged = max(staged_bytes(schedule, size, each) for each in together(schedule, "forward"))
    assert schedule.peak_bytes(size, "forward", "hccl/collectives") - bare == 400 * MB + staged
    row = 1 * 1 * 2 * 2  # one head of 2 channels in bf16
    assert staged == 2 * 7 * 64 * 2 * row  # of K and V: what 7 others are given, and what they give


def test_plans_count_them() -> None:
    """In the command: one communicator of all ranks; times are those of the same messages in fewer launches."""
    options = (*A2, "--schedules", "ulysses", "--all")
    apart, one = (
        json.loads(printed(*options, "--json", "--transport", name))["candidates"][0]
        for name in ("hccl", "hccl/collectives")
    )
    assert (apart["connections"], one["connections"]) == (28, 1)
    assert one["connection_bytes"] == 400 * MB
    assert 0.9 < one["predicted_seconds"] / apart["predicted_seconds"] < 1.0
    text = printed(*options, "--transport", "hccl/collectives")
    assert "419 MB are those of 1 communicator of two ranks or of all that exchange" in text


def test_the_command_shows_exchanges() -> None:
    out = StringIO()
    assert main(["schedule", "ulysses", "--ranks", "4"], out, StringIO()) == 0
    assert "exchanges step 0, all-to-all of kv of ranks 0-3 in 2 parts; step 0, all-to-all of q of" in out.getvalue()
    out = StringIO()
    assert main(["schedule", "ring", "--ranks", "4"], out, StringIO()) == 0
    assert "exchanges" not in out.getvalue()


def test_staging_of_a_gather_is_what_all_give() -> None:
    schedule = whole("all-gather-kv", 4)
    size = size_of(schedule)
    assert {staged_bytes(schedule, size, each) for each in together(schedule, "forward")} == {4 * 16 * 2 * 2 * 2}
    assert not any(staged_bytes(schedule, size, each) for each in lower_all(schedule, size, "forward"))


def test_buffers_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    assert transport_target("hccl/collectives").group_bytes == 100 * MB
    assert transport_target("hccl").group_bytes == 0
