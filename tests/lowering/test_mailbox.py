"""Where boxes lie: apart at every rank, at one offset on both; what they take, and that plans count it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import captured_world
import pytest
import torch
from captured_world import Device, InWorld, Party
from cases import Case

from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.transports import symm
from tokenring.ir.schedule_data import PARTIALS, PASSES, REQUESTS
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.mailboxes import ALIGNED_BYTES, BOXES, Mailboxes, lay
from tokenring.lowering.target import Link
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.tables.rates import Machine, constant

CHANNELS = (REQUESTS, PARTIALS)


def drawn(seed: int) -> dict[Link, list[int]]:
    """Some lines of some ranks, with messages of any sizes."""
    draw = random.Random(seed)
    ranks = draw.randrange(2, 9)
    links = [(a, b, channel) for a in range(ranks) for b in range(ranks) if a != b for channel in CHANNELS]
    some = draw.sample(links, draw.randrange(1, len(links) + 1))
    return {link: [draw.randrange(1, 5000) for _ in range(draw.randrange(1, 6))] for link in some}


def check_apart(boxes: Mailboxes, messages: Mapping[Link, Sequence[int]]) -> None:
    """Raises AssertionError where two boxes meet at a rank, a message has no room, or a box lies beyond the end."""
    at_rank: dict[int, list[tuple[int, int]]] = {}
    for link, sizes in messages.items():
        places = boxes.places[link]
        assert len(places) == min(BOXES, len(sizes))
        for place in places:
            for rank in link[:2]:
                at_rank.setdefault(rank, []).append((place, place + max(sizes)))
    for intervals in at_rank.values():
        ordered = sorted(intervals)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered)), "boxes meet"
        assert all(start % ALIGNED_BYTES == 0 and end <= boxes.nbytes for start, end in ordered), "no room"


@pytest.mark.parametrize("seed", range(40))
def test_boxes_are_apart(seed: int) -> None:
    """At both ends, and the same whatever order a rank has heard of the lines in."""
    messages = drawn(seed)
    boxes = lay(messages)
    check_apart(boxes, messages)
    mixed = list(messages.items())
    random.Random(seed).shuffle(mixed)
    assert lay(dict(mixed)) == boxes


def test_boxes_that_meet_are_found_out() -> None:
    """The checker: two lines share a rank, one end of each another."""
    messages: dict[Link, list[int]] = {(0, 1, REQUESTS): [100], (1, 2, REQUESTS): [100]}
    boxes = lay(messages)
    check_apart(boxes, messages)
    with pytest.raises(AssertionError, match="boxes meet"):
        check_apart(replace(boxes, places=dict.fromkeys(messages, (0,))), messages)
    with pytest.raises(AssertionError, match="no room"):
        check_apart(replace(boxes, nbytes=100), messages)


@pytest.mark.parametrize(("ranks", "colours"), [(2, 2), (4, 2), (8, 2), (3, 3), (5, 3)])
def test_a_ring_needs_few(ranks: int, colours: int) -> None:
    """As many as the edges of a cycle need colours: what a rank sends, what it receives, one more for odd cycles."""
    messages: dict[Link, list[int]] = {(a, (a + 1) % ranks, REQUESTS): [ALIGNED_BYTES] * 9 for a in range(ranks)}
    assert lay(messages).nbytes == colours * BOXES * ALIGNED_BYTES


def test_messages_take_boxes_in_turn() -> None:
    link: Link = (0, 1, REQUESTS)
    boxes = lay({link: [10, 300, 20]})
    assert [boxes.place(link, number) for number in range(4)] == [0, 512, 0, 512] and boxes.nbytes == 1024
    assert lay({}).nbytes == lay({link: []}).nbytes == 0


# ---------- what they take


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize(("schedule", "ranks"), [("ring", 3), ("tokenring", 4), ("direct-kv", 3), ("ulysses", 2)])
def test_plans_count_what_transports_take(
    schedule: str, ranks: int, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: what the transport lays out for the bound programs is what it needs beyond `symm`."""
    monkeypatch.setattr(symm, "Control", captured_world.Control)
    case = Case(ranks, schedule, "zigzag", "causal", 2, 2, 1, 8, torch.float32, None, given_length=8 * ranks)
    made, kernel = case.make_schedule(), CpuFlash()

    def work(device: Device) -> int:
        transport: Any = InWorld(device)
        pool = Pool(torch.device("cpu"), transport.allocate)
        for _ in range(2):  # again, on the memory that the pool has grown to
            program = lower(made, device.rank, direction, case.workload, transport.target, kernel.supports_patch)
            Executor(made, case.workload, program, pool, transport, kernel, 1.0)
        return int(transport._box_bytes)

    taken = Party(ranks, 0, False, boxed=True).each(work)
    needs = {name: made.peak_bytes(case.workload, direction, name) for name in ("symm", "nvshmem")}
    assert taken == [needs["nvshmem"] - needs["symm"]] * ranks and taken[0] > 0


def test_predictions_count_them() -> None:
    case = Case(4, "tokenring", "zigzag", "causal", 2, 2, 1, 8, torch.float32, None, given_length=32)
    schedule, names = case.make_schedule(), ("symm", "nvshmem")
    asked = Setting(case.workload, full_mesh(4, 1.0), Machine(constant(1.0, "test")), ("forward",))
    found = [predict(schedule, replace(asked, target=transport_target(name))).peak_bytes for name in names]
    needs = [schedule.peak_bytes(case.workload, "forward", name) for name in names]
    assert found[1] - found[0] == needs[1] - needs[0] > 0
