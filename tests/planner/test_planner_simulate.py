"""Simulated times against those computed by hand; what must hold of every simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from families import HEADS, members
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import BOTH, IDEAL, SHAPES, named, pcie_tree, setting, workload

import tokenring as tr
from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import Pass
from tokenring.planner.interconnects.interconnect import (
    Interconnect,
    full_mesh,
    of_one_host,
    ring,
    switch,
    switch_fabric,
)
from tokenring.planner.simulation.operations import Await, Compute, Operation, SimulatedPost
from tokenring.planner.simulation.predict import Setting, least_seconds, predict, wire_bytes
from tokenring.planner.simulation.simulate import Outcome, simulate
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.mask import Mask
from tokenring.tables.rates import Machine, Messages, Rates, constant

RANKS, TOKENS = 4, 256
SIZE = workload(RANKS, (4, 4), TOKENS)
X = TOKENS * 4 * 64 * 2  # bytes of a rank's Q or O
Y = 2 * X  # of its K and V
L = TOKENS * 4 * 4  # of its lse
GB = 1e9
MESSAGE = 1_000_000  # bytes


def took(name: str, net: Interconnect, messages: Messages = IDEAL, direction: Pass = "forward") -> float:
    """Seconds of a pass whose kernels take no time; wires have 1 GB/s."""
    schedule = named(name, RANKS, SIZE.q_length)
    return predict(schedule, setting(net, SIZE, (direction,), messages=messages)).seconds


class TestByHand:
    """P = 4. A full mesh has a wire for each pair; behind a switch a rank's P - 1 messages share its port."""

    @pytest.mark.parametrize(
        ("name", "net", "nbytes"),
        [
            ("ring", full_mesh(RANKS, 1.0), 3 * Y),
            ("ring", switch(RANKS, 1.0), 3 * Y),
            ("ring", ring(RANKS, 1.0), 3 * Y),
            ("direct-kv", full_mesh(RANKS, 1.0), Y),
            ("direct-kv", switch(RANKS, 1.0), 3 * Y),
            # Two hops of four share each link with its neighbours' own: 1 + 2 · ½ blocks each way, and no more.
            ("direct-kv", ring(RANKS, 1.0), 2 * Y),
            ("bidirectional", full_mesh(RANKS, 1.0), 1.5 * Y),
            ("bidirectional", switch(RANKS, 1.0), 3 * Y),
            # The last partial goes home after the last of three hops.
            ("tokenring", full_mesh(RANKS, 1.0), 3 * X + X + L),
            ("direct-q", full_mesh(RANKS, 1.0), 2 * X + L),
            ("direct-q", switch(RANKS, 1.0), 3 * (2 * X + L)),
            ("ulysses", full_mesh(RANKS, 1.0), (2 * X + Y + L) / RANKS),
            ("ulysses", switch(RANKS, 1.0), 3 * (2 * X + Y + L) / RANKS),
        ],
        ids=lambda each: getattr(each, "name", None) if isinstance(each, Interconnect) else None,
    )
    def test_transfers_alone(self, name: str, net: Interconnect, nbytes: float) -> None:
        assert took(name, net) == pytest.approx(nbytes / GB, rel=2e-4)

    def test_half_duplex_takes_twice(self) -> None:
        """Leaves of two: a ring has one message up and one down on each uplink at a time."""
        one, both = (pcie_tree(RANKS, 9.0, 1.0, half_duplex=half) for half in (False, True))
        assert took("ring", both) == pytest.approx(2 * took("ring", one), rel=1e-3)

    def test_backward_of_a_ring(self) -> None:
        """K, V and, in fp32, dK, dV go round together; the last hop brings dK, dV home."""
        seconds = took("ring", full_mesh(RANKS, 1.0), direction="backward")
        assert 3 * Y / GB < seconds <= (3 * Y + 4 * 2 * Y) / GB

    def test_latency_is_paid_for_every_hop(self) -> None:
        net, late = full_mesh(RANKS, 1.0), Messages(latency_seconds=1e-3)
        assert took("ring", net, late) == pytest.approx(3 * Y / GB + 3e-3, rel=1e-4)
        assert took("ulysses", net, late) == pytest.approx((2 * X + Y + L) / RANKS / GB + 3 * 1e-3, rel=0.01)

    def test_posts_are_paid_by_the_rank(self) -> None:
        """Three rounds; a rank posts a receive and a send in each, the first pair before anything moves."""
        posted = took("ring", full_mesh(RANKS, 1.0), Messages(post_seconds=1e-3))
        assert 3 * Y / GB + 2e-3 <= posted <= 3 * Y / GB + 6.1e-3

    def test_a_flow_has_a_cap(self) -> None:
        """On a mesh of 1 GB/s no flow gets more than 0.25; behind a switch three share the port, 1/3 each."""
        cap = Messages(flow_gbs=0.25)
        assert took("ring", full_mesh(RANKS, 1.0), cap) == pytest.approx(4 * 3 * Y / GB, rel=1e-3)
        assert took("direct-kv", switch(RANKS, 1.0), cap) == pytest.approx(4 * Y / GB, rel=1e-3)

    def test_both_directions_of_a_pair_in_one_queue(self) -> None:
        """Direct blocks meet on every link; a ring's never do."""
        serial, net = Messages(pair_serial=True), full_mesh(RANKS, 1.0)
        assert took("direct-kv", net, serial) == pytest.approx(2 * Y / GB, rel=1e-3)
        assert took("ring", net, serial) == pytest.approx(3 * Y / GB, rel=1e-3)

    @pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()], ids=["full", "causal"])
    def test_no_schedule_blocks_such_a_queue(self, mask: Mask) -> None:
        """Receives that are posted early would stand before sends that they wait for."""
        for name in members(4, (4, 4)):
            size = workload(4, (4, 4), 96)
            asked = setting(full_mesh(4, 1.0), size, BOTH, messages=Messages(pair_serial=True))
            assert predict(named(name, 4, size.q_length, mask, "zigzag"), asked).seconds > 0, name

    def test_widths_beyond_what_floats_tell_apart(self) -> None:
        """A transfer shorter than the clock's smallest step ends nevertheless."""
        programs: list[list[Operation]] = [[Compute(1e3, True, 0, ""), send(0, 1), Await(0)], [receive(0, 0), Await(0)]]
        assert simulate(switch(2, 1e9), programs, IDEAL).seconds == pytest.approx(1e3)

    def test_a_queue_that_is_a_stream_pays_the_latency_each_time(self) -> None:
        """Four messages posted at once: one after another on a stream, all on their way together in TCP."""
        programs: list[list[Operation]] = [
            [*(send(number, 1, MESSAGE) for number in range(4)), *(Await(number) for number in range(4))],
            [*(receive(number, 0, MESSAGE) for number in range(4)), *(Await(number) for number in range(4))],
        ]
        for pipelined, times in ((False, 4), (True, 1)):
            messages = Messages(latency_seconds=1e-3, pipelined=pipelined)
            taken = simulate(switch(2, 1.0), programs, messages).seconds
            assert taken == pytest.approx(4 * MESSAGE / GB + times * 1e-3, rel=1e-6)

    @pytest.mark.parametrize(("cores", "times"), [(1.0, 4), (2.0, 2), (4.0, 1), (float("inf"), 1)])
    def test_ranks_take_turns_on_shared_cores(self, cores: float, times: int) -> None:
        """Copies and posts of four ranks; kernels run elsewhere. Who shares a core is busy until it is done."""
        copies: list[list[Operation]] = [[Compute(1.0, True, 0, ""), Compute(0.5, False, 0, "")] for _ in range(4)]
        found = simulate(full_mesh(4, 1.0), copies, IDEAL, record=True, cores=cores)
        assert found.seconds == pytest.approx(1 + 0.5 * times)
        assert found.busy_seconds == pytest.approx([1 + 0.5 * times] * 4)
        assert {round(span.end_seconds, 9) for span in found.spans if span.what == "copy"} == {1 + 0.5 * times}

    @pytest.mark.parametrize(("cores", "times"), [(1.0, 4), (2.0, 2), (8.0, 1)])
    def test_kernels_that_compute_take_turns_too(self, cores: float, times: int) -> None:
        kernels: list[list[Operation]] = [[Compute(1.0, True, 0, "")] for _ in range(4)]
        found = simulate(full_mesh(4, 1.0), kernels, IDEAL, record=True, cores=cores, kernels_share=True)
        assert found.seconds == pytest.approx(times)
        assert found.busy_seconds == pytest.approx([times] * 4)
        assert {(span.what, round(span.end_seconds, 9)) for span in found.spans} == {("kernel", times)}

    def test_posts_take_turns_too(self) -> None:
        """Two ranks post at once on one core: each is done when both are."""
        programs: list[list[Operation]] = [[send(0, 1, MESSAGE), Await(0)], [receive(0, 0, MESSAGE), Await(0)]]
        taken = simulate(full_mesh(2, 1.0), programs, Messages(post_seconds=1e-3), cores=1.0)
        assert taken.busy_seconds == pytest.approx([2e-3, 2e-3])

    def test_long_work_ends(self) -> None:
        """After hours, a core's last picosecond is shorter than the clock's step."""
        kernel = Compute(2e4, True, 0, "")
        programs: list[list[Operation]] = [[kernel, Compute(some, False, 0, "")] for some in (0.1, 0.3, 0.7)]
        assert simulate(full_mesh(3, 1.0), programs, IDEAL, cores=2.0).seconds == pytest.approx(2e4, rel=1e-3)

    def test_short_work_leaves_the_core_to_long_work(self) -> None:
        """One core: both at half speed until the short one is done, after 1 s; the other needs 0.5 s more."""
        programs: list[list[Operation]] = [[Compute(0.5, False, 0, "")], [Compute(1.0, False, 0, "")]]
        found = simulate(full_mesh(2, 1.0), programs, IDEAL, cores=1.0)
        assert found.busy_seconds == pytest.approx([1.0, 1.5])

    def test_messages_are_handled_on_shared_cores(self) -> None:
        """Two pairs at once on one core: 1 ms each and 1 ms for their bytes at 1 MB/ms, so 4 ms before they move."""
        programs: list[list[Operation]] = [
            [(send if rank % 2 == 0 else receive)(0, rank ^ 1, MESSAGE), Await(0)] for rank in range(4)
        ]
        messages = Messages(handling_seconds=1e-3, handling_gbs=MESSAGE / 1e6)
        for cores, handled in ((1.0, 4e-3), (2.0, 2e-3)):
            taken = simulate(full_mesh(4, 1.0), programs, messages, cores=cores).seconds
            assert taken == pytest.approx(MESSAGE / GB + handled, rel=1e-6)

    def test_ranks_start_one_after_another(self) -> None:
        """In every pass; a ring goes round when the last is there."""
        net, start = full_mesh(RANKS, 1.0), 2e-3
        asked = setting(net, SIZE, BOTH, messages=IDEAL)
        late = replace(asked, machine=replace(asked.machine, start_seconds=start))
        schedule = named("ring", RANKS, SIZE.q_length)
        without, with_it = (predict(schedule, each).seconds for each in (asked, late))
        assert with_it == pytest.approx(without + 2 * RANKS * start, rel=1e-3)
        kernels: list[list[Operation]] = [[Compute(1e-3, True, 0, "")] for _ in range(3)]
        found = simulate(net, kernels, IDEAL, record=True, start_seconds=start)
        assert [span.end_seconds for span in found.spans] == pytest.approx([3e-3, 5e-3, 7e-3])

    def test_kernels_hide_transfers(self) -> None:
        """Four tiles of a ring: where computing is slower, transfers are free; where faster, the last tile shows."""
        schedule, net = named("ring", RANKS, SIZE.q_length), full_mesh(RANKS, 1.0)
        a_tile = 4 * 4 * 64 * TOKENS * TOKENS  # flops
        hop = Y / GB
        for share in (0.25, 0.5, 2.0, 4.0):  # a tile takes so many hops' time
            rate = a_tile / (hop * share) / 1e12
            wanted = 4 * share * hop if share >= 1 else 3 * hop + share * hop
            assert predict(schedule, setting(net, SIZE, tflops=rate)).seconds == pytest.approx(wanted, rel=1e-3)

    def test_exposed_is_what_nothing_hides(self) -> None:
        schedule = named("ring", RANKS, SIZE.q_length)
        rate = 4 * 4 * 64 * TOKENS * TOKENS / (Y / GB / 2) / 1e12  # half a hop a tile
        found = predict(schedule, setting(full_mesh(RANKS, 1.0), SIZE, tflops=rate))
        assert found.compute_seconds == pytest.approx(2 * Y / GB, rel=1e-3)
        assert found.exposed_seconds == pytest.approx(found.seconds - found.compute_seconds)
        assert found.wires.seconds == pytest.approx(3 * Y / GB)

    def test_copies_and_calls_cost_what_the_rates_say(self) -> None:
        """A ring in fp32 of one kernel call a step: four calls; its partials stay, so it merges but does not send."""
        rates = Rates("test", ((1, 1e9),), ((1, 1e9),), call_seconds=1.0)
        asked = Setting(SIZE, full_mesh(RANKS, 1e9), Machine(rates), ("forward",))
        assert predict(named("ring", RANKS, SIZE.q_length), asked).seconds == pytest.approx(4.0, rel=1e-3)
        assert predict(named("ulysses", RANKS, SIZE.q_length), asked).seconds == pytest.approx(1.0, rel=1e-3)


# ---------- programs written by hand


def outcome(programs: list[list[Operation]], messages: Messages = IDEAL, record: bool = False) -> Outcome:
    return simulate(switch(len(programs), 1.0), programs, messages, record)


def send(message: int, peer: int, nbytes: int = 1000, channel: str = "a") -> SimulatedPost:
    return SimulatedPost(message, peer, channel, nbytes, True, 0, "")


def receive(message: int, peer: int, nbytes: int = 1000, channel: str = "a") -> SimulatedPost:
    return SimulatedPost(message, peer, channel, nbytes, False, 0, "")


class TestPrograms:
    def test_a_message(self) -> None:
        found = outcome([[send(0, 1), Await(0)], [receive(0, 0), Await(0), Compute(1e-6, True, 0, "")]])
        assert found.seconds == pytest.approx(2e-6, rel=1e-3)
        assert found.wire_bytes == {"0:0>": 1000, "0:>1": 1000}
        assert found.busy_seconds == [0, 1e-6]

    def test_it_waits_for_both_ends(self) -> None:
        found = outcome([[send(0, 1)], [Compute(5e-6, True, 0, ""), receive(0, 0), Await(0)]])
        assert found.seconds == pytest.approx(6e-6, rel=1e-3)

    def test_one_queue_goes_in_order_two_channels_do_not(self) -> None:
        """Behind a long message a short one of the same channel waits; on another it shares the wire."""
        for channel, wanted in (("a", 3e-6), ("b", 2e-6)):
            first: list[Operation] = [receive(0, 0, 2000), receive(1, 0, 1000, channel), Await(1)]
            found = outcome([[send(0, 1, 2000), send(1, 1, 1000, channel)], first], record=True)
            (short,) = (span for span in found.spans if span.what == "transfer" and span.end_seconds <= wanted * 1.01
                        and span.end_seconds >= wanted * 0.99)  # fmt: skip
            assert short.rank == 1
            assert found.seconds == pytest.approx(3e-6, rel=1e-3)

    def test_deadlocks_are_refused(self) -> None:
        """Each waits for the other's message before it sends its own."""
        stuck: list[list[Operation]] = [[receive(0, 1), Await(0), send(1, 1)], [receive(0, 0), Await(0), send(1, 0)]]
        with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait for each other"):
            outcome(stuck)
        fine: list[list[Operation]] = [[receive(0, 1), send(1, 1), Await(0)], [receive(0, 0), send(1, 0), Await(0)]]
        assert outcome(fine).seconds == pytest.approx(1e-6, rel=1e-3)

    def test_a_message_that_nobody_sends(self) -> None:
        with pytest.raises(ScheduleError, match=r"ranks \[0\] wait"):
            outcome([[receive(0, 1), Await(0)], []])

    def test_ranks_on_one_device(self) -> None:
        """Between them nothing moves."""
        net = Interconnect("shared", (switch_fabric(1, 1.0),), ((0, 0), (0, 0)))
        programs: list[list[Operation]] = [[send(0, 1), Await(0)], [receive(0, 0), Await(0)]]
        assert simulate(net, programs, Messages()).seconds == 0.0
        assert simulate(net, programs, Messages(flow_gbs=1.0)).seconds == pytest.approx(1e-6, rel=1e-3)

    def test_nothing(self) -> None:
        assert outcome([[], []]).seconds == 0.0

    def test_no_way(self) -> None:
        from tokenring.errors import ConfigurationError
        from tokenring.planner.interconnects.interconnect import LinkFabric

        with pytest.raises(ConfigurationError, match="not connected"):
            simulate(of_one_host("cut", LinkFabric(2, {}, {})), [[send(0, 1)], [receive(0, 0)]], Messages())


# ---------- what holds of every schedule


MEMBERS = [(name, heads) for heads in HEADS for name in members(4, heads)]
MASKS: list[Mask] = [tr.Full(), tr.Causal()]
MESSAGES = [
    Messages(), Messages(1e-6, 1e-6), Messages(pair_serial=True), Messages(flow_gbs=0.3),
    Messages(1e-6, pipelined=True, window_bytes=36e3),
]  # fmt: skip
RATES = [0.005, 0.05, 1e9]
CORES = [(float("inf"), False), (2.0, False), (2.0, True)]  # shared cores, and whether kernels share them


def drawn(seed: int) -> tuple[Schedule, Setting]:
    chosen = random.Random(seed)
    name, heads = chosen.choice(MEMBERS)
    shape, mask = chosen.choice(sorted(SHAPES)), chosen.choice(MASKS)
    messages, tflops, (cores, share) = chosen.choice(MESSAGES), chosen.choice(RATES), chosen.choice(CORES)
    size = workload(4, heads, 96)  # divides by 2 chunks, 3 rings, 4 pieces
    schedule = named(name, 4, size.q_length, mask, "zigzag")
    asked = setting(SHAPES[shape](4), size, BOTH, tflops)
    machine = Machine(constant(tflops, "t", 5.0), messages, cores, share)
    return schedule, Setting(size, asked.interconnect, machine, BOTH)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9))
def test_what_holds_of_every_schedule(seed: int) -> None:
    """No faster than its busiest wire or rank; every byte counted; spans tile each rank's time; the same twice."""
    schedule, asked = drawn(seed)
    found = predict(schedule, asked, record=True)
    least = least_seconds(schedule, asked)
    assert found.seconds >= least.seconds * (1 - 1e-4)
    assert least.kernel_seconds == pytest.approx(found.compute_seconds)
    assert least.wire_seconds == pytest.approx(found.wires.seconds)
    assert predict(schedule, asked) == predict(schedule, asked)
    for direction, one in zip(asked.passes, found.outcomes, strict=True):
        assert one.wire_bytes == pytest.approx(wire_bytes(schedule, asked, direction))
        assert one.seconds >= max(one.busy_seconds) * (1 - 1e-9)
        check_tiled(one, asked.machine.messages.post_seconds)


def check_tiled(found: Outcome, post_seconds: float) -> None:
    """What a rank does follows on what it did before, with nothing between but posts."""
    for rank, busy in enumerate(found.busy_seconds):
        spans = sorted(
            (span for span in found.spans if span.rank == rank and span.what != "transfer"),
            key=lambda span: (span.begin_seconds, span.end_seconds),
        )
        at, gaps = 0.0, 0.0
        for span in spans:
            assert span.begin_seconds >= at - 1e-12
            gaps += span.begin_seconds - at
            at = span.end_seconds
        worked = sum(span.end_seconds - span.begin_seconds for span in spans if span.what != "wait")
        assert busy >= worked - 1e-12
        assert gaps <= busy - worked + 1e-9
        if not post_seconds:
            assert gaps == pytest.approx(0.0, abs=1e-9)
