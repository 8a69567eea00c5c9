"""Messages as packets of TCP that queue at token buckets: against times computed by hand."""

from __future__ import annotations

import pytest
from families import members
from nets import BOTH, IDEAL, named, workload

from tokenring.emulate.plan import bucket, packet_bytes
from tokenring.emulate.shapes import Shape
from tokenring.errors import ScheduleError
from tokenring.planner.interconnects.emulated import interconnect_of_shape
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric, of_one_host
from tokenring.planner.simulation.operations import Await, Compute, Operation, SimulatedPost
from tokenring.planner.simulation.packets import MOST_PACKETS
from tokenring.planner.simulation.predict import Setting, least_seconds, predict
from tokenring.planner.simulation.simulate import Outcome, simulate
from tokenring.tables.rates import Machine, Messages, constant

MB = 1e6
MS = 1e-3  # in which a wire of 1 GB/s carries 1 MB
WINDOW = 0.08  # MB, of eight packets


def send(message: int, megabytes: float, to: int = 1, channel: str = "a") -> SimulatedPost:
    return SimulatedPost(message, to, channel, round(megabytes * MB), True, 0, str(message))


def receive(message: int, megabytes: float, source: int = 0, channel: str = "a") -> SimulatedPost:
    return SimulatedPost(message, source, channel, round(megabytes * MB), False, 0, str(message))


def kernel(milliseconds: float) -> Compute:
    return Compute(milliseconds * MS, True, 0, "")


def tcp(window: float = WINDOW) -> Messages:
    return Messages(pipelined=True, window_bytes=window * MB)


def line(**wires: tuple[float, float]) -> Interconnect:
    """From rank 0 to rank 1 over wires, each with its GB/s and the MB that pass at once."""
    gbs = {name: wide for name, (wide, _) in wires.items()}
    bursts = {name: burst * MB for name, (_, burst) in wires.items() if burst}
    return of_one_host("line", LinkFabric(2, {(0, 1): tuple(wires)}, gbs, burst_bytes=bursts))


def one_after_another(megabytes: list[float], pauses: list[float]) -> list[list[Operation]]:
    """Messages that are received when the one before has arrived and a kernel has run."""
    programs: list[list[Operation]] = [[], []]
    for number, (size, pause) in enumerate(zip(megabytes, pauses, strict=True)):
        programs[0] += [send(number, size)]
        programs[1] += [receive(number, size), Await(number), kernel(pause)]
    return programs


def arrivals(found: Outcome) -> dict[str, float]:
    """When each message had arrived, ms."""
    return {span.label: span.end_seconds / MS for span in found.spans if span.what == "transfer"}


class TestBuckets:
    @pytest.mark.parametrize(
        ("megabytes", "pauses", "wanted"),
        [
            ([1.0], [0.0], 0.6),  # 0.4 MB pass at once
            ([0.3], [0.0], 0.0),
            ([1.0, 1.0], [0.0, 0.0], 1.6),  # the bucket is empty
            ([1.0, 1.0], [0.3, 0.0], 0.6 + 0.3 + 0.7),  # what 0.3 ms saved up
            ([1.0, 1.0], [5.0, 0.0], 0.6 + 5.0 + 0.6),  # no more than it holds
            ([0.1, 0.6], [0.0, 0.0], 0.3),  # what the first has left
        ],
    )
    def test_one_wire(self, megabytes: list[float], pauses: list[float], wanted: float) -> None:
        programs = one_after_another(megabytes, pauses)
        found = simulate(line(wire=(1.0, 0.4)), programs, tcp()).seconds
        assert found == pytest.approx(wanted * MS, rel=1e-4, abs=1e-9)

    @pytest.mark.parametrize(("of_b", "wanted"), [(0.4, 0.6), (0.1, 0.9), (0.0, 1.0)])
    def test_all_wires_must_have_it(self, of_b: float, wanted: float) -> None:
        net = line(a=(1.0, 0.4), b=(1.0, of_b))
        found = simulate(net, one_after_another([1.0], [0.0]), tcp()).seconds
        assert found == pytest.approx(wanted * MS, rel=1e-4)

    def test_the_narrowest_wire_decides(self) -> None:
        net = line(a=(4.0, 0.0), b=(1.0, 0.0), c=(2.0, 0.0))
        found = simulate(net, one_after_another([1.0], [0.0]), tcp()).seconds
        packet = WINDOW / 8
        assert found == pytest.approx((1.0 + packet / 4 + packet / 2) * MS, rel=1e-4)

    def test_the_emulation_has_them(self) -> None:
        """As much as tbf is told."""
        shape = Shape("switch", 4, 0.05)
        net = interconnect_of_shape(shape)
        words = bucket(0.05, packet_bytes(shape.fabric)).split()
        assert {net.burst_bytes(wire) for wire in net.way(0, 1)} == {float(words[words.index("burst") + 1])}
        assert net.burst_bytes(net.way(0, 1)[0]) >= 1500 + 1e-3 * 0.05e9 / 8

    def test_nothing_takes_less_than_the_least(self) -> None:
        """By which schedules are left out before they are simulated. Without overheads bursts are all there is."""
        size, below = workload(4, (4, 4), 96), 0
        for shape in (Shape("switch", 4, 0.02), Shape("ring", 4, 0.02), Shape("two-node", 4, 0.02, 0.005)):
            asked = Setting(size, interconnect_of_shape(shape), Machine(constant(1e3), tcp()), BOTH)
            for name in members(4, (4, 4)):
                schedule = named(name, 4, size.q_length)
                least, found = least_seconds(schedule, asked), predict(schedule, asked).seconds
                assert least.seconds <= found * (1 + 1e-6)
                below += found < least.wire_seconds
        assert below  # less than the busiest wire needs without a burst


def test_packets_of_one_host_are_not_those_of_others() -> None:
    """Where one transfer stands for many, nothing is known of the queues in which the others wait."""
    with pytest.raises(ScheduleError, match="simulate all ranks"):
        simulate(line(wire=(1.0, 0.0)), [[], []], tcp(), canonical=lambda src, dst: (src, dst))


class TestQueues:
    """Ranks 0 and 1 send 1 MB each to rank 2, rank 1 a little later."""

    NET = of_one_host("meet", LinkFabric(3, {(0, 2): ("in",), (1, 2): ("in",)}, {"in": 1.0}))

    def found(self, messages: Messages) -> dict[str, float]:
        programs: list[list[Operation]] = [
            [send(0, 1.0, to=2), Await(0)],
            [kernel(1e-3), send(1, 1.0, to=2), Await(1)],
            [receive(0, 1.0, source=0), receive(1, 1.0, source=1), Await(0), Await(1)],
        ]
        return arrivals(simulate(self.NET, programs, messages, record=True))

    def test_who_comes_first_passes_first(self) -> None:
        assert self.found(tcp(window=8.0)) == pytest.approx({"0": 1.0, "1": 2.0}, rel=1e-3)

    def test_a_small_window_makes_it_fair(self) -> None:
        """Nearly as fluids, which share at every moment."""
        assert self.found(tcp()) == pytest.approx({"0": 2.0, "1": 2.0}, rel=0.05)
        assert self.found(IDEAL) == pytest.approx({"0": 2.0, "1": 2.0}, rel=1e-2)

    def test_one_stream_keeps_its_order_two_channels_share(self) -> None:
        for channel, wanted in (("a", {"0": 1.0, "1": 1.2}), ("b", {"0": 1.2, "1": 0.4})):
            programs: list[list[Operation]] = [
                [send(0, 1.0), send(1, 0.2, channel=channel), Await(0), Await(1)],
                [receive(0, 1.0), receive(1, 0.2, channel=channel), Await(0), Await(1)],
            ]
            found = arrivals(simulate(line(wire=(1.0, 0.0)), programs, tcp(), record=True))
            assert found == pytest.approx(wanted, rel=0.2, abs=0.05), channel
            assert found["0"] == pytest.approx(wanted["0"], rel=0.05)

    def test_nothing_to_send_arrives(self) -> None:
        found = simulate(line(wire=(1.0, 0.0)), one_after_another([0.0, 1.0], [0.0, 0.0]), tcp()).seconds
        assert found == pytest.approx(1.0 * MS)

    def test_large_messages_have_large_packets(self) -> None:
        """No more than so many, so that a prediction takes no longer; they fill two wires nevertheless."""
        net = line(a=(1.0, 0.0), b=(1.0, 0.0))
        found = simulate(net, one_after_another([1000.0], [0.0]), tcp()).seconds
        assert found == pytest.approx((1000.0 + 1000.0 / MOST_PACKETS) * MS, rel=1e-6)

    def test_both_ways_of_a_half_duplex_wire(self) -> None:
        net = of_one_host("half", LinkFabric(2, {(0, 1): ("both",), (1, 0): ("both",)}, {"both": 1.0}))
        programs: list[list[Operation]] = [
            [send(0, 1.0), receive(1, 1.0, source=1), Await(0), Await(1)],
            [receive(0, 1.0), send(1, 1.0, to=0), Await(0), Await(1)],
        ]
        assert simulate(net, programs, tcp()).seconds == pytest.approx(2.0 * MS, rel=1e-4)

    def test_deadlocks_are_refused(self) -> None:
        with pytest.raises(ScheduleError, match=r"ranks \[1\] wait for each other"):
            simulate(line(wire=(1.0, 0.0)), [[], [receive(0, 1.0), Await(0)]], tcp())

    def test_between_ranks_of_one_device_nothing_takes_time(self) -> None:
        net = of_one_host("shared", LinkFabric(2, {(0, 1): ()}, {}))
        assert simulate(net, one_after_another([1.0, 2.0], [0.0, 0.0]), tcp()).seconds == 0.0


class TestSources:
    @pytest.mark.parametrize(("megabytes", "goes_on"), [(1.0, 1.0 - WINDOW), (0.5, 0.5 - WINDOW), (WINDOW, 0.0)])
    def test_a_source_goes_on_when_the_last_packet_has_left(self, megabytes: float, goes_on: float) -> None:
        programs: list[list[Operation]] = [
            [send(0, megabytes), Await(0), kernel(2.0)],
            [receive(0, megabytes), Await(0)],
        ]
        found = simulate(line(wire=(1.0, 0.0)), programs, tcp(), record=True)
        assert found.seconds == pytest.approx((goes_on + 2.0) * MS, rel=1e-3)
        assert arrivals(found) == pytest.approx({"0": megabytes}, rel=1e-4)

    def test_the_receiver_waits_for_all_of_it(self) -> None:
        programs: list[list[Operation]] = [[send(0, 1.0), Await(0)], [receive(0, 1.0), Await(0), kernel(1.0)]]
        found = simulate(line(wire=(1.0, 0.0)), programs, tcp(window=2.0)).seconds
        assert found == pytest.approx(2.0 * MS, rel=1e-4)

    def test_a_source_waits_until_it_is_received(self) -> None:
        """Nothing leaves before there is somewhere to put it: Gloo asks first."""
        programs: list[list[Operation]] = [[send(0, 1.0), Await(0)], [kernel(3.0), receive(0, 1.0), Await(0)]]
        found = simulate(line(wire=(1.0, 0.0)), programs, tcp(window=2.0), record=True)
        (waited,) = (span for span in found.spans if span.what == "wait" and span.rank == 0)
        assert waited.end_seconds == pytest.approx(3.0 * MS, rel=1e-4)

    @pytest.mark.parametrize(("last", "wanted"), [(0, 0.3), (1, 0.6), (2, 0.9)])
    def test_messages_of_a_stream_leave_one_after_another(self, last: int, wanted: float) -> None:
        numbers = range(3)
        programs: list[list[Operation]] = [
            [*(send(number, 0.3) for number in numbers), Await(last), kernel(5.0)],
            [*(receive(number, 0.3) for number in numbers), *(Await(number) for number in numbers)],
        ]
        found = simulate(line(wire=(1.0, 0.0)), programs, tcp()).seconds
        assert found == pytest.approx((wanted - WINDOW + 5.0) * MS, rel=1e-3)
