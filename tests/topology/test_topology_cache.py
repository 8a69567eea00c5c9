"""What is remembered of a machine between starts: used when it fits, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tokenring.tables.kept_files import cache_folder
from tokenring.topology.model.facts import Device, Facts, Link, Note, SourceOrigin
from tokenring.topology.probing.cache import cached, fingerprint
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"


def dump(name: str) -> list[Facts]:
    return [read((DATA / name).read_text(encoding="utf-8"), name)]


def npus(*phy_ids: int) -> list[Facts]:
    devices = tuple(Device(f"d{i}", "accelerator", phy_id=i) for i in phy_ids)
    return [Facts("links", devices, origin=SourceOrigin("made"))]


class Looks:
    """Counts how often it is asked."""

    def __init__(self, facts: list[Facts]) -> None:
        self.facts, self.times = facts, 0

    def __call__(self) -> list[Facts]:
        self.times += 1
        return self.facts


def notes_of(facts: list[Facts]) -> list[str]:
    return [str(note) for each in facts for note in each.notes]


class TestCache:
    def test_second_time_nobody_is_asked(self, tmp_path: Path) -> None:
        look = Looks(dump("nccl-switch.xml"))
        first = cached(tmp_path / "deep" / "er", "host", "mark", look)
        again = cached(tmp_path / "deep" / "er", "host", "mark", look)
        assert look.times == 1
        assert first == again == look.facts
        assert [path.name[:9] for path in (tmp_path / "deep" / "er").iterdir()] == ["topology-"]

    @pytest.mark.parametrize("machine", ["big", "nccl-switch.xml"])
    def test_what_is_read_is_what_was_found(self, tmp_path: Path, machine: str) -> None:
        facts = dump(machine) if machine != "big" else [big_machine()]
        assert cached(tmp_path, "host", "mark", lambda: facts) == facts
        look = Looks([])
        assert cached(tmp_path, "host", "mark", look) == facts and look.times == 0

    def test_hosts_that_share_a_folder(self, tmp_path: Path) -> None:
        for host in ("a", "b"):
            cached(tmp_path, host, "mark", lambda host=host: npus(*range(len(host))))  # type: ignore[misc]
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda text: "", "it is not a cache of tokenring's"),
            (lambda text: "hello\nworld", "it is not a cache of tokenring's"),
            (lambda text: text[:-10], "it is broken"),
            (lambda text: text.replace("nvlink", "nvlank"), "it is broken"),
            (lambda text: text.replace(" mark ", " other "), "it is of another boot, machine, driver or version"),
            (lambda text: text.replace("-cache 1 ", "-cache 2 "), "it is of another boot, machine, driver or version"),
            (lambda text: text.partition("\n")[0], "it is not a cache of tokenring's"),
            (lambda text: "\0" * 100, "it is not a cache of tokenring's"),
        ],
    )
    def test_what_is_broken_or_foreign_is_not_used(self, tmp_path: Path, spoil: Any, says: str) -> None:
        look = Looks(dump("nccl-switch.xml"))
        cached(tmp_path, "host", "mark", look)
        (path,) = tmp_path.iterdir()
        path.write_text(spoil(path.read_text()))
        found = cached(tmp_path, "host", "mark", look)
        assert look.times == 2
        assert notes_of(found) == [f"the cache {path} is not used: {says}"]
        assert notes_of(cached(tmp_path, "host", "mark", look)) == []  # and it was replaced

    def test_a_document_that_we_cannot_read(self, tmp_path: Path) -> None:
        from tokenring.topology.probing.cache import _first_line

        look = Looks(dump("nccl-switch.xml"))
        cached(tmp_path, "host", "mark", look)
        (path,) = tmp_path.iterdir()
        path.write_text(_first_line("mark", "{}") + "{}")
        assert "this is not a tokenring-topology document" in notes_of(cached(tmp_path, "host", "mark", look))[0]

    def test_no_room_is_a_note(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        found = cached(tmp_path / "file", "host", "mark", Looks(npus(0)))
        assert [note.rpartition(": ")[2] for note in notes_of(found)] == ["Not a directory", "File exists"]

    def test_a_tool_that_did_not_answer_is_asked_again(self, tmp_path: Path) -> None:
        failed = Facts("devices", notes=(Note("nvidia-smi: no answer in 10 s"),), origin=SourceOrigin("made"))
        look = Looks([failed, *npus(0)])
        for _ in range(2):
            cached(tmp_path, "host", "mark", look)
        assert look.times == 2

    def test_no_folder_no_cache(self) -> None:
        look = Looks(npus(0))
        assert cached(None, "host", "mark", look) == look.facts

    @pytest.mark.parametrize(
        ("environment", "folder"),
        [
            ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/tokenring")),
            ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, Path("/h/.cache/tokenring")),
            ({"HOME": "/h"}, Path("/h/.cache/tokenring")),
            ({}, None),
        ],
    )
    def test_folder(self, environment: dict[str, str], folder: Path | None) -> None:
        assert cache_folder(environment) == folder

    def test_fingerprint(self, tmp_path: Path) -> None:
        """Changes with the boot, the devices and the drivers; else not."""
        for folder in ("proc/sys/kernel/random", "proc/driver/nvidia", "sys/bus/pci/devices", "dev"):
            (tmp_path / folder).mkdir(parents=True)
        seen = {fingerprint("a", tmp_path), fingerprint("b", tmp_path)}
        for path, text in (
            ("proc/sys/kernel/random/boot_id", "1"),
            ("proc/driver/nvidia/version", "570"),
            ("sys/bus/pci/devices/0000:01:00.0", ""),
            ("dev/nvidia0", ""),
        ):
            (tmp_path / path).write_text(text)
            mark = fingerprint("a", tmp_path)
            assert mark == fingerprint("a", tmp_path)
            seen.add(mark)
        assert len(seen) == 6
        (tmp_path / "dev/null").touch()
        assert fingerprint("a", tmp_path) in seen

    def test_devices_that_another_job_may_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch system's cgroups leave all nodes there, and refuse to open some: tools show the others only."""
        (tmp_path / "dev").mkdir()
        for name in ("nvidia0", "nvidia1"):
            (tmp_path / "dev" / name).touch()
        marks = set()
        for refused in ("nvidia0", "nvidia1", ""):
            monkeypatch.setattr(os, "access", lambda path, mode, refused=refused: Path(path).name != refused)
            marks.add(fingerprint("a", tmp_path))
        assert len(marks) == 3


def big_machine() -> Facts:
    """Eight accelerators, sixteen NICs, and every way between them."""
    devices = [Device(f"GPU{i}", "accelerator", i, f"0000:{i:02x}:00.0", model="NVIDIA H100") for i in range(8)]
    devices += [Device(f"NIC{i}", "nic", name=f"mlx5_{i}") for i in range(16)]
    names = [device.id for device in devices]
    links = [Link(a, b, "sys") for i, a in enumerate(names) for b in names[:i]]
    return Facts("links", tuple(devices), tuple(links), origin=SourceOrigin("made"))
