"""The topology of a group: who sits where, one graph for all, and what is remembered between starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patient
from ranks import Here, RankPools
from test_topology_dumps import SHARED

import tokenring as tr
from tokenring.errors import ConfigurationError, PeerLost, TopologyError
from tokenring.topology.model.facts import Device, Facts, Link, SourceOrigin
from tokenring.topology.model.graph import merge
from tokenring.topology.probing.device_identity import Seat, host_names, physical_id, this_seat
from tokenring.topology.probing.job import gather
from tokenring.topology.ranks import Topology, seated
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"


def dump(name: str) -> list[Facts]:
    return [read((DATA / name).read_text(encoding="utf-8"), name)]


SWITCH_BUS_IDS = [device.bus_id for device in dump("nccl-switch.xml")[0].accelerators]

# ---------- in a group


def probed(here: Here) -> tr.Topology:
    return tr.Topology.probe(cache=False, timeout_seconds=patient(20))


def test_this_machine(ranks: RankPools) -> None:
    """Whatever it has: one graph, one host, the same on every rank."""
    found = ranks(3)(probed)
    assert len({each.digest for each in found}) == 1
    assert found[0] == found[1] == found[2]
    assert found[0].world_size == 3
    assert len(set(found[0].hosts)) == 1
    assert found[0].graph is not None and found[0].graph.of_kind("host")
    assert "rank 2" in str(found[0])


def test_alone() -> None:
    found = Topology.probe(cache=False)
    assert (found.world_size, len(found.hosts)) == (1, 1)


def seat_of(rank: int) -> Seat:
    """Ranks in turns on two hosts, on devices that are not in the order of ranks."""
    return Seat(f"node{rank % 2}", f"boot{rank % 2}", "cuda", SWITCH_BUS_IDS[3 - rank // 2])


def on_two_hosts(here: Here) -> tuple[Topology, int]:
    asked: list[int] = []

    def look() -> list[Facts]:
        asked.append(here.rank)
        return dump("nccl-switch.xml")

    group = here.base.group
    assert group is not None
    return gather(group, seat_of(here.rank), look, 20.0, seated), len(asked)


def test_two_hosts(ranks: RankPools) -> None:
    results = ranks(4)(on_two_hosts)
    assert [asked for _, asked in results] == [1, 1, 0, 0]  # one rank a host
    found = results[0][0]
    assert all(each == found for each, _ in results)
    assert found.hosts == ("node0", "node1", "node0", "node1")
    assert found.devices == ("node0:GPU3", "node1:GPU3", "node0:GPU2", "node1:GPU2")
    assert found.graph is not None and found.verdict is not None
    assert len(found.graph.accelerators) == 8
    assert found.verdict.name == "multi-node"
    assert [verdict.name for _, verdict in found.verdict.inside] == ["switch", "switch"]
    assert set(found.bandwidth_gbs) == {(0, 2), (2, 0), (1, 3), (3, 1)}  # nothing is known between hosts
    assert set(found.bandwidth_gbs.values()) == {450.0}


def with_trouble(here: Here) -> str:
    def look() -> list[Facts]:
        if here.rank == 1:
            raise RuntimeError("no such luck")
        return dump("nccl-switch.xml")

    assert here.base.group is not None
    with pytest.raises(TopologyError) as refusal:
        gather(here.base.group, seat_of(here.rank), look, 20.0, seated)
    return str(refusal.value)


def test_trouble_of_one_is_told_to_all(ranks: RankPools) -> None:
    assert set(ranks(4)(with_trouble)) == {"rank 1 could not look at node1: RuntimeError: no such luck"}


def with_another_mind(here: Here) -> str:
    group = here.base.group
    assert group is not None
    seat = seat_of(here.rank)
    with pytest.MonkeyPatch.context() as patch:
        if here.rank == 1:
            patch.setattr(Topology, "digest", "odd")
        with pytest.raises(ConfigurationError) as refusal:
            gather(group, seat, lambda: dump("nccl-switch.xml"), 20.0, seated)
    return str(refusal.value)


def test_graphs_that_differ_are_refused(ranks: RankPools) -> None:
    for text in ranks(2)(with_another_mind):
        assert text.startswith("rank 1 makes another topology of the same facts than rank 0")


def without_rank_1(here: Here) -> str | None:
    if here.rank == 1:
        return None
    assert here.base.group is not None
    with pytest.raises(PeerLost) as lost:
        gather(here.base.group, seat_of(here.rank), lambda: [], patient(2.0), seated)
    return str(lost.value)


def test_a_rank_that_does_not_come_is_named(ranks: RankPools) -> None:
    with ranks.expendable(3) as pool:
        texts = pool(without_rank_1)
    said = [texts[0] or "", texts[2] or ""]
    assert all(text.startswith("rank 1") and " of 3 did not come" in text for text in said), said
    # Who gives up first names rank 1 alone; for the other one, that rank may be gone by then, too.
    assert any(text.startswith("rank 1 of 3 did not come within ") for text in said), said


# ---------- seats


def npus(*phy_ids: int, bus: str | None = None) -> list[Facts]:
    devices = [Device(f"d{i}", "accelerator", bus_id=bus, phy_id=i, die=i % 2) for i in phy_ids]
    return [Facts("links", tuple(devices), origin=SourceOrigin("made"))]


class TestSeats:
    def placed(self, facts: list[Facts], *seats: Seat) -> tuple[tuple[str | None, ...], list[str]]:
        found = seated(merge(facts), seats, [""] * len(seats))
        assert found.graph is not None
        return found.devices, [str(note) for note in found.graph.notes]

    def test_physical_id_before_order(self) -> None:
        seats = [Seat("", "", "npu", phy_id=number) for number in (5, 4)]
        assert self.placed(npus(4, 5), *seats) == (("d5", "d4"), [])

    def test_two_dies_behind_one_bus_id(self) -> None:
        bus = "0000:c1:00.0"
        assert self.placed(npus(0, 1, bus=bus), Seat("", "", "npu", bus, 1)) == (("d1",), [])
        assert self.placed(npus(0, 1, bus=bus), Seat("", "", "npu", bus, die=0)) == (("d0",), [])
        text = f"rank 0 on : bus id {bus} is that of d0 and d1: which one is unknown"
        assert self.placed(npus(0, 1, bus=bus), Seat("", "", "npu", bus)) == ((None,), [text])

    def test_what_no_source_names(self) -> None:
        text = "rank 0 on : no source names a device with physical id 7"
        assert self.placed(npus(0), Seat("", "", "npu", phy_id=7)) == ((None,), [text])

    def test_ranks_on_the_cpu_are_no_trouble(self) -> None:
        assert self.placed(npus(0), Seat("", "")) == ((None,), [])

    def test_shared_devices_are_noted(self) -> None:
        seat = Seat("", "", "npu", phy_id=0)
        devices, notes = self.placed(npus(0), seat, seat)
        assert devices == ("d0", "d0")
        assert notes == ["ranks 0, 1 share d0: if that is not meant, each sets its device before the probe"]

    def test_only_devices_of_the_host_count(self) -> None:
        facts = [replace(npus(0)[0], origin=SourceOrigin("made", host=host)) for host in ("a", "b")]
        found = seated(merge(facts), [Seat("b", "", "npu", phy_id=0)], ["b"])
        assert found.devices == ("b:d0",)

    def test_this_process(self) -> None:
        seat = this_seat()
        assert Seat.from_text(seat.to_text()) == seat
        assert seat.host

    def test_a_device_that_cannot_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is a note; an error of one rank would leave the others waiting."""

        def broken(index: int) -> None:
            raise AssertionError("Torch not compiled\nwith CUDA enabled")

        monkeypatch.setattr("torch.cuda.get_device_properties", broken)
        seat = this_seat(torch.device("cuda", 3))
        text = "cuda:3 cannot be used: Torch not compiled with CUDA enabled"
        assert (seat.kind, seat.why_unknown) == ("cuda", text)
        assert self.placed(npus(0), seat)[1] == [f"rank 0 on : {text}"]

    def test_hosts_of_one_name(self) -> None:
        seats = [Seat("a", "1"), Seat("b", "3"), Seat("a", "2"), Seat("a", "1")]
        assert host_names(seats) == ("a#1", "b", "a#2", "a#1")


class FakeLibrary:
    """C functions that write a number where a pointer says."""

    def __init__(self, **answers: int) -> None:
        for name, answer in answers.items():
            setattr(self, name, self.function(answer))

    @staticmethod
    def function(answer: int) -> Any:
        def call(index: Any, pointer: Any) -> int:
            pointer._obj.value = answer
            return 0

        return call


class TestPhysicalId:
    def load(self, **libraries: object) -> Any:
        def load(name: str) -> object:
            if name not in libraries:
                raise OSError(name)
            return libraries[name]

        return load

    def test_new_cann(self) -> None:
        acl = FakeLibrary(aclrtGetLogicDevIdByUserDevId=3, aclrtGetPhyDevIdByLogicDevId=11)
        assert physical_id(0, self.load(**{"libascendcl.so": acl}), "5") == 11

    def test_old_cann(self) -> None:
        libraries = {"libascendcl.so": object(), "libruntime.so": FakeLibrary(rtGetDevicePhyIdByIndex=9)}
        assert physical_id(0, self.load(**libraries), "5") == 9

    @pytest.mark.parametrize(("visible", "found"), [("4,5", 5), ("4", None), (None, None), ("a,b", None)])
    def test_no_cann(self, visible: str | None, found: int | None) -> None:
        assert physical_id(1, self.load(), visible) == found


# ---------- a graph, by hand


class TestOf:
    def test_bandwidth_of_ranks(self) -> None:
        mesh = merge(dump("npu-910b.txt"))
        found = Topology.of(mesh, ["NPU7", "NPU0", "NPU0", None])
        assert found.name == "full mesh"
        assert found.bandwidth_gbs == dict.fromkeys([(0, 1), (1, 0), (0, 2), (2, 0)], 28.0)

    def test_all_accelerators(self) -> None:
        assert Topology.of(merge(dump("npu-910b.txt"))).devices == tuple(f"NPU{i}" for i in range(8))

    def test_unknown_stays_unknown(self) -> None:
        found = Topology.of(merge(dump("nvidia-mesh.txt")))
        assert set(found.bandwidth_gbs.values()) == {None}

    def test_sums_are_the_same_in_every_process(self) -> None:
        """Sets of names have another order in each, and floats another sum in each order."""
        gbs = [1 / (number + 3) for number in range(50)]
        devices = [Device(name, "accelerator", index) for index, name in enumerate("ab")]
        devices += [Device(f"s{number}", "switch") for number in range(50)]
        links = [Link(end, f"s{at}", "nvlink", 1, each) for end in "ab" for at, each in enumerate(gbs)]
        found = Topology.of(merge([Facts("links", tuple(devices), tuple(links))]))
        assert found.bandwidth_gbs[0, 1] == sum(gbs)

    def test_refusals(self) -> None:
        graph = merge(dump("nvidia-mesh.txt"))
        with pytest.raises(ConfigurationError, match="no accelerator 'GPU9' in the graph; it has GPU0, GPU1"):
            Topology.of(graph, ["GPU9"])
        with pytest.raises(ConfigurationError, match="2 ranks' devices, and 1 ranks' hosts"):
            Topology.of(graph, ["GPU0", "GPU1"], ["a"])


# ---------- two starts


def with_cache(here: Here, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        return Topology.probe(timeout_seconds=patient(20)).digest


def test_a_second_start_of_a_job(ranks: RankPools, tmp_path: Path) -> None:
    first = ranks(2)(with_cache, str(tmp_path))
    again = ranks(2)(with_cache, str(tmp_path))
    assert set(first) == set(again)
    assert len(list((tmp_path / "tokenring").iterdir())) == 1


# ---------- several hosts, for real


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or None in map(shutil.which, ("ip", "unshare", "hostname")):
        return False
    return subprocess.run(["unshare", "--uts", "--net", "true"], capture_output=True).returncode == 0


@pytest.mark.testbed
@pytest.mark.skipif(SHARED is None or not (SHARED / "testbed/testbed.py").exists(), reason="no test bed here")
@pytest.mark.skipif(not can_make_hosts(), reason="no namespaces here")
def test_two_hosts_in_the_test_bed(warm: str) -> None:
    """Each rank has a network namespace; each half of them has a host name."""
    assert SHARED is not None
    script = Path(__file__).resolve().parents[1] / "support" / "topology_hosts.py"
    command = [sys.executable, str(SHARED / "testbed/testbed.py"), "run", "--topology", "two-node", "--ranks", "4"]
    command += ["--link-gbit", "1", "--timeout", "80", "--", "unshare", "--uts", "sh", "-c"]
    command += [f"hostname node$((RANK / 2)) && exec {warm} {script}"]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "{" in line]
    assert len(said) == 4 and all(each == said[0] for each in said)
    assert said[0]["real"]["hosts"] == said[0]["faked"]["hosts"] == ["node0", "node0", "node1", "node1"]
    assert said[0]["faked"]["devices"] == [f"node{rank // 2}:GPU{3 - rank % 2}" for rank in range(4)]
    assert said[0]["faked"]["class"] == "multi-node"
