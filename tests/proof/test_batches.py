"""The proof of messages in batches: all families pass, and programs or cuts with something wrong are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import connections, most_connected
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Program, Recv, Send, Wait
from tokenring.lowering.rounds import PostEnd, batches, distance, rounds
from tokenring.lowering.target import Target, links
from tokenring.proof.batches import replay_batches, replay_schedule_in_batches
from tokenring.proof.verify import replay_batches_once, verify_lowered
from tokenring.schedule.families import FAMILIES, variants
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload

STRICT = Target(early_receives=False)


def made(name: str, ranks: int, mask: str = "causal") -> Schedule:
    layout = make_layout("zigzag", ranks, 336 * ranks)
    return make_schedule(name, layout, layout, parse_mask(mask))


def programs(schedule: Schedule, direction: Pass = "forward") -> list[Program]:
    groups, length = schedule.head_groups, schedule.q_layout.length
    workload = Workload(1, length, length, groups, groups, 8, torch.bfloat16)
    return [lower(schedule, rank, direction, workload, STRICT) for rank in range(schedule.world_size)]


def one_of_each(ranks: int) -> list[str]:
    """The first member of every family that fits so many ranks."""
    names = variants(ranks)
    return [next(name for name in names if name.split("/")[0] == family) for family in FAMILIES
            if any(name.split("/")[0] == family for name in names)]  # fmt: skip


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("option", ["", "/late", "/keep"])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_every_family_runs_in_batches(ranks: int, option: str, in_pairs: bool) -> None:
    for name in one_of_each(ranks):
        replay_schedule_in_batches(made(name + option, ranks), in_pairs)


@pytest.mark.parametrize("name", ["ring", "usp/4"])
def test_sixty_four_ranks(name: str) -> None:
    replay_batches(name, programs(made(name, 64)))


def test_rounds_are_of_one_step_and_channel_and_no_wait_is_for_their_own() -> None:
    for name in one_of_each(8):
        for direction in PASSES:
            for program in programs(made(name, 8), direction):
                found = rounds(program.instructions, program.steps)
                assert [(each.step, each.channel != "requests") for each in found] == sorted(
                    {(each.step, each.channel != "requests") for each in found}
                )
                for each in found:
                    own = {program.instructions[at].message for at in each.posts}  # type: ignore[union-attr]
                    inside = program.instructions[each.posts[0] : each.end]
                    assert own.isdisjoint(at.message for at in inside if isinstance(at, Wait))


# ---------- how rounds are cut


def test_both_ends_put_a_message_into_one_batch() -> None:
    """Whatever is between them: by how many they have had before, and in pairs by how far apart they are."""
    pairs = [(0, 1), (0, 1), (2, 1), (1, 0), (3, 1), (0, 3), (0, 1)]
    for one_pair in (False, True):
        of_end: dict[tuple[int, int], list[object]] = {}
        for rank in range(4):
            own = [at for at, pair in enumerate(pairs) if rank in pair]
            ends = [PostEnd(pairs[at][0] == rank, sum(pairs[at]) - rank) for at in own]
            for some in batches(ends, rank, 4, one_pair):
                assert len({ends[at] for at in some}) == len(some)
                if one_pair:
                    assert len({ends[at].sends for at in some}) == len(some)
                    assert len({distance(ends[at], rank, 4) for at in some}) == 1
                for at in some:
                    earlier = sum(ends[own.index(other)] == ends[at] for other in own[: at])
                    key = (earlier, distance(ends[at], rank, 4) if one_pair else 0)
                    of_end.setdefault((own[at], 0), []).append(key)
        assert all(len(keys) == 2 and keys[0] == keys[1] for keys in of_end.values())


def test_whole_rounds_would_hang_where_pairs_go_one_after_another() -> None:
    """Which is why rounds are cut into pairs where HCCL retries."""

    def whole(ends: Sequence[PostEnd], rank: int, world_size: int, one_pair: bool) -> list[list[int]]:
        return batches(ends, rank, world_size, False)

    found = programs(made("mesh-q/4x2/keep", 8), "backward")
    replay_batches("mesh-q", found)
    replay_batches("mesh-q", found, in_pairs=True)
    with pytest.raises(ScheduleError, match=r"step \d+, rank \d+: waits for ever in a batch, .*: a deadlock"):
        replay_batches("mesh-q", found, in_pairs=True, cut=whole)


# ---------- mutants


def exchanged(program: Program, one: int, other: int) -> Program:
    """Two instructions in each other's place."""
    found = list(program.instructions)
    found[one], found[other] = found[other], found[one]
    return replace(program, instructions=tuple(found))


def posts_of(program: Program, channel: str = "requests") -> list[int]:
    found = enumerate(program.instructions)
    return [at for at, each in found if isinstance(each, Send | Recv) and each.channel == channel]


def sends_of_two_rounds(program: Program) -> Program:
    """Sends of two rounds change places."""
    one, other = (at for at in posts_of(program)[:4] if isinstance(program.instructions[at], Send))
    return exchanged(program, one, other)


def sends_to_one_rank(program: Program) -> Program:
    """Two sends to one rank in one round change places, and nothing else of the program."""
    for one in posts_of(program):
        first = program.instructions[one]
        for other in posts_of(program):
            then = program.instructions[other]
            same = isinstance(first, Send) and isinstance(then, Send) and first.dst == then.dst
            if one < other and same and program.steps[one] == program.steps[other]:
                return exchanged(program, one, other)
    raise ValueError("no two sends to one rank")


def wait_before_its_post(program: Program) -> Program:
    found = program.instructions
    at, wait = next((at, each) for at, each in enumerate(found) if isinstance(each, Wait))
    post = next(at for at, each in enumerate(found) if isinstance(each, Send | Recv) and each.message == wait.message)
    return exchanged(program, post, at)


def without_a_send(program: Program) -> Program:
    at = next(at for at in posts_of(program) if isinstance(program.instructions[at], Send))
    keep = [each for each in range(len(program.instructions)) if each != at]
    dropped = program.instructions[at].message  # type: ignore[union-attr]
    kept = [at for at in keep if program.instructions[at] != Wait(dropped)]
    return replace(
        program, instructions=tuple(program.instructions[at] for at in kept),
        steps=tuple(program.steps[at] for at in kept),
    )  # fmt: skip


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ring", sends_of_two_rounds, "meets|deadlock|before the batch begins"),
        ("direct-kv/pieces2", sends_to_one_rank, r"send \d+ \(.*\) meets receive|receive \d+ \(.*\) meets send"),
        ("ring", wait_before_its_post, "before the batch begins that it would be in"),
        ("ring", without_a_send, "meets|deadlock"),
    ],
)
def test_mutants_are_refused(name: str, change: Callable[[Program], Program], says: str, in_pairs: bool) -> None:
    found = programs(made(name, 4))
    replay_batches(name, found, in_pairs)
    found[1] = change(found[1])
    with pytest.raises(ScheduleError, match=says) as caught:
        replay_batches(name, found, in_pairs)
    assert f"{name}, forward, in batches: step " in str(caught.value)


# ---------- what it takes


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_two_communicators_at_most(ranks: int) -> None:
    """Over `hccl`, direct schedules have up to four for each other rank."""
    target = transport_target("hccl/batch")
    for name in ("ring", "tokenring", "direct-kv"):
        schedule = made(name, ranks, "full")
        assert 1 <= most_connected(schedule, target) <= 2
    assert connections(links(made("direct-kv", 8, "full")), transport_target("hccl"), 0) == 28


def test_a_transport_with_batches_proves_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("tokenring.proof.batches.replay_schedule_in_batches", lambda made, pairs: seen.append(pairs))
    schedule = made("ring", 5)
    for target in (STRICT, replace(STRICT, batching=True), replace(STRICT, batching=True, one_pair=True)):
        verify_lowered(schedule, target)
        verify_lowered(schedule, target)
    assert seen == [False, True]


def test_batches_are_proved_for_more_ranks_than_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    batches_of, others_of = "tokenring.proof.batches.replay_schedule_in_batches", "tokenring.proof.verify.replay_once"
    monkeypatch.setattr(batches_of, lambda made, pairs: seen.append(("batches", made.world_size)))
    monkeypatch.setattr(others_of, lambda made, targets: seen.append(("bundles", made.world_size)))
    for ranks in (16, 17, 32, 33):
        verify_lowered(made("ring", ranks), replace(STRICT, batching=True, bundle_bytes=8))
    assert seen == [("bundles", 16), ("batches", 16), ("batches", 17), ("batches", 32)]


def test_a_mutant_of_twenty_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a transport asks for before the first call."""
    schedule, target = made("ring", 20), replace(STRICT, batching=True)
    verify_lowered(schedule, target)
    replay_batches_once.cache_clear()

    def wrong(given: Schedule, rank: int, *more: Any) -> Program:
        found = lower(given, rank, *more)
        return sends_of_two_rounds(found) if rank == 7 else found

    monkeypatch.setattr("tokenring.proof.batches.lower", wrong)
    with pytest.raises(ScheduleError, match=r"meets|deadlock|before the batch begins"):
        verify_lowered(schedule, target)
