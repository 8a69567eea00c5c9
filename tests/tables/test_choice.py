"""Which transport is taken: every point of the table, what is not there, limits of size, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenring.backends.table_keys import transfers_key
from tokenring.backends.transports import nccl, nvshmem, symmetric
from tokenring.backends.transports.auto_cuda import choice_here, unavailable
from tokenring.cli.doctor.probes import _choice
from tokenring.errors import ConfigurationError
from tokenring.tables.transport_choice import DOMAINS, PAIRS, RULES, Domain, Rule, Spread, choose, size_text
from tokenring.tables.transport_times import Sample, Transfers, keep

ALL: dict[str, str | None] = {"symm": None, "nccl": None}
BOTH: dict[str, str | None] = {"shm": None, "gloo": None}
MB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "domain", "transport", "reason"),
    [
        ("cuda", "reached", "symm", r"rule: every two ranks reach each other's memory: copies by copy engines .*"),
        ("cuda", "apart", "nccl", r"rule: some ranks of one machine do not .*: puts need memory that peers reach"),
        ("cuda", "across", "nccl", r"rule: the ranks are on several machines: puts need memory that peers reach"),
        ("cpu", "reached", "shm", r"rule: every two ranks reach each other's memory: one copy through memory, .*"),
        ("cpu", "apart", "gloo", r"rule: some ranks of one machine do not reach .*"),
        ("cpu", "across", "gloo", r"rule: the ranks are on several machines: .*"),
    ],
)
@pytest.mark.parametrize("message_bytes", [None, 1, MB, 1 << 40])
def test_every_point(kind: str, domain: Domain, transport: str, reason: str, message_bytes: int | None) -> None:
    """By hand. What links the ranks is not known here, so that no reason speaks of PCIe. Sizes do not matter."""
    found = choose(kind, domain, ALL | BOTH, message_bytes)
    assert found.transport == transport and re.fullmatch(reason, found.reason)
    assert "PCIe" not in found.reason


def test_the_table_is_whole() -> None:
    """Each rule takes one of the two that there are and has a source; none has a limit that nobody has published."""
    assert RULES.keys() == PAIRS.keys()
    for kind, rules in RULES.items():
        assert rules.keys() == DOMAINS.keys()
        for rule in rules.values():
            assert rule.transport in PAIRS[kind] and rule.source and rule.limit_bytes is None


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_is_not_there(domain: Domain) -> None:
    """NCCL instead of symmetric memory, with the reason; never the other way round."""
    found = choose("cuda", domain, {"symm": "rank 3: no driver", "nccl": None})
    assert found.transport == "nccl"
    if domain == "reached":
        assert found.reason == "rule: symm cannot be used: rank 3: no driver"
    neither = choose("cuda", domain, {"symm": "no driver", "nccl": "not built"})
    assert neither.transport is None and "symm: no driver; nccl: not built" in neither.reason
    alone = choose("cuda", domain, {"symm": None, "nccl": "not built"})
    assert alone.transport == ("symm" if domain == "reached" else None)
    assert choose("cuda", "across", {}).transport is None


# ---------- limits of size

LIMITED = {"cuda": {**RULES["cuda"], "reached": Rule("symm", "somebody", 16 * MB)}}


@pytest.mark.parametrize(
    ("message_bytes", "transport"),
    [(None, "symm"), (1, "symm"), (16 * MB, "symm"), (16 * MB + 1, "nccl"), (1 << 34, "nccl")],
)
def test_a_limit_of_size(message_bytes: int | None, transport: str) -> None:
    found = choose("cuda", "reached", ALL, message_bytes, rules=LIMITED)
    assert found.transport == transport and found.reason.endswith(": somebody")
    if transport == "nccl":
        assert re.match(r"rule: messages of 16 [MG]B, above 16 MB: ", found.reason)


def test_a_limit_where_there_is_no_other() -> None:
    found = choose("cuda", "reached", {"symm": None, "nccl": "not built"}, 17 * MB, rules=LIMITED)
    assert found.transport == "symm" and found.reason.endswith("; nccl cannot be used: not built")
    assert choose("cuda", "reached", {"symm": "no driver", "nccl": None}, 1, rules=LIMITED).transport == "nccl"


# ---------- what was measured


def rows(*times_us: tuple[int, float], spread: float = 0.1) -> tuple[Sample, ...]:
    """Samples by hand: bytes, and microseconds in the middle of what was measured."""
    return tuple(Sample(n, (1 - spread) * t * 1e-6, t * 1e-6, (1 + spread) * t * 1e-6) for n, t in times_us)


FASTER = Transfers({"symm": rows((MB, 77.0)), "nccl": rows((MB, 41.0))})
SLOWER = Transfers({"symm": rows((MB, 41.0)), "nccl": rows((MB, 77.0))})
ALIKE = Transfers({"symm": rows((MB, 42.0)), "nccl": rows((MB, 41.0))})
CROSSING = Transfers({"symm": rows((4096, 20.0), (64 * MB, 1000.0)), "nccl": rows((4096, 10.0), (64 * MB, 4000.0))})
# what was measured, the size of messages, what is taken, how the reason begins, and how it ends
MEASURED: list[tuple[Transfers, int | None, str, str, str]] = [
    (FASTER, MB, "nccl", "measured: nccl 41 µs against symm 77 µs at 1 MB", ""),
    (FASTER, None, "nccl", "measured: nccl 41 µs against symm 77 µs at 1 MB", ""),
    (FASTER, 1024, "nccl", "measured: nccl 41 µs against symm 77 µs at 1 KB", ""),  # below: as the least
    (FASTER, 10 * MB, "nccl", "measured: nccl 410 µs against symm 770 µs at 10 MB", ""),  # above: at its rate
    (SLOWER, MB, "symm", "measured: symm 41 µs against nccl 77 µs at 1 MB", ""),
    (ALIKE, MB, "symm", "rule: ", "; measured: no faster one (symm 42 µs, nccl 41 µs at 1 MB)"),
    (CROSSING, 4096, "nccl", "measured: nccl 10 µs against symm 20 µs at 4 KB", ""),
    (CROSSING, 1, "nccl", "measured: nccl 10 µs against symm 20 µs at 1 B", ""),
    (CROSSING, 64 * MB, "symm", "measured: symm 1000 µs against nccl 4000 µs at 64 MB", ""),
    (CROSSING, 1 << 30, "symm", "measured: symm 16000 µs against nccl 64000 µs at 1 GB", ""),
    (CROSSING, MB // 2, "symm", "measured: symm 141 µs against nccl 200 µs at 512 KB", ""),  # half-way in logarithms
    (CROSSING, None, "symm", "rule: ", "; measured: which is faster is a matter of size, here unknown"),
    (Transfers({"nccl": rows((MB, 1.0))}), MB, "symm", "rule: ", "inside one NVLink domain)"),
    (Transfers({"symm": rows((MB, 9.0)), "hccl": rows((MB, 1.0))}), MB, "symm", "rule: ", "inside one NVLink domain)"),
    (Transfers({}), MB, "symm", "rule: ", "inside one NVLink domain)"),
    (Transfers({}), None, "symm", "rule: ", "inside one NVLink domain)"),
]


def wrong() -> list[object]:
    """Rows of MEASURED that come out otherwise."""
    return [row for row in MEASURED if not right(*row)]


def right(table: Transfers, message_bytes: int | None, transport: str, begins: str, ends: str) -> bool:
    found = choose("cuda", "reached", ALL, message_bytes, table)
    return found.transport == transport and found.reason.startswith(begins) and found.reason.endswith(ends or begins)


def test_measurements_come_before_rules() -> None:
    assert wrong() == []


def test_at_all_sizes_that_were_measured() -> None:
    """Where the size of messages is not known: the largest is told."""
    table = Transfers({"shm": rows((4096, 9.0), (MB, 90.0)), "gloo": rows((4096, 30.0), (MB, 400.0))})
    found = choose("cpu", "reached", BOTH, None, table)
    assert found.reason == "measured: shm 90 µs against gloo 400 µs at 1 MB and less"
    assert found.transport == "shm"


@pytest.mark.parametrize(
    "mutant",
    [
        lambda found: Spread(found.median, found.median, found.median),  # a difference within the spread counts
        lambda found: Spread(found.high, found.median, found.low),  # quartiles in the wrong order
        lambda found: Spread(found.low / 3, found.median, found.high * 3),  # nothing is ever faster
    ],
)
def test_mutants_of_the_spread(mutant: Callable[[Spread], Spread], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = Transfers.seconds

    def mutated(self: Transfers, transport: str, nbytes: int) -> Spread | None:
        found = seconds(self, transport, nbytes)
        return found if found is None else mutant(found)

    monkeypatch.setattr(Transfers, "seconds", mutated)
    assert wrong()


@pytest.mark.parametrize(
    "sizes", [lambda table: table.sizes[:1], lambda table: table.sizes[-1:]], ids=["least", "largest"]
)
def test_mutants_of_an_unknown_size(sizes: Callable[[Transfers], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One size of the table speaks for all."""
    taken = {id(each): sizes(each) for each, *_ in MEASURED}
    monkeypatch.setattr(Transfers, "sizes", property(lambda self: taken[id(self)]))
    assert wrong()


@pytest.mark.parametrize("unavailable", [{"symm": None, "nccl": "not built"}, {"symm": "no driver", "nccl": None}])
def test_what_was_measured_and_is_not_there(unavailable: dict[str, str | None]) -> None:
    for table in (FASTER, SLOWER):
        assert choose("cuda", "reached", unavailable, MB, table) == choose("cuda", "reached", unavailable, MB)
    nobody = choose("cuda", "across", {"symm": None, "nccl": "not built"}, MB, FASTER)
    assert nobody.transport is None, "a table makes nothing work"


def test_a_measurement_beats_a_limit() -> None:
    assert choose("cuda", "reached", ALL, 17 * MB, SLOWER, LIMITED).transport == "symm"
    assert choose("cuda", "reached", ALL, MB, FASTER, LIMITED).transport == "nccl"


def test_machines_whose_memory_reaches_further() -> None:
    """Between hosts the rule is NCCL; where puts could be measured there, and were faster, they are taken."""
    assert choose("cuda", "across", ALL, MB, SLOWER).transport == "symm"
    assert choose("cuda", "across", ALL, MB, ALIKE).transport == "nccl"


NONSENSE = [
    (),  # nothing
    ((MB, 2e-5, 1e-5, 3e-5),),  # a median below its quartile
    ((MB, 1e-5, 3e-5, 2e-5),),
    ((MB, -1e-5, 1e-5, 2e-5),),
    ((MB, 0.0, 1e-5, 2e-5),),
    ((MB, 1e-5, 1e-5, float("inf")),),
    ((MB, 1e-5, float("nan"), 2e-5),),
    ((0, 1e-5, 1e-5, 1e-5),),
    ((MB, 1e-5, 1e-5, 1e-5), (MB, 1e-5, 1e-5, 1e-5)),  # sizes that do not rise
    ((MB, 1e-5, 1e-5, 1e-5), (4096, 1e-5, 1e-5, 1e-5)),
]


@pytest.mark.parametrize("found", NONSENSE)
def test_what_nobody_can_have_measured(found: tuple[tuple[int, float, float, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"symm: .* is not \(bytes, seconds of the lower quartile"):
        Transfers({"symm": tuple(Sample(*each) for each in found)})


@pytest.mark.parametrize(("nbytes", "text"), [(5, "5 B"), (4096, "4 KB"), (MB, "1 MB"), (3 * MB // 2, "1.5 MB")])
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


# ---------- what doctor says


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, reach: Callable[[int, int], bool]) -> None:
    """A process that sees so many GPUs, whose torch and driver have everything."""
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(nvshmem, "unavailable", lambda: "no library")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU by hand")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)


def test_doctor_on_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, lambda a, b: True)
    said = _choice("cuda")
    assert said["transport"]["name"] == "symm" and said["transport"]["why"].endswith("; nccl between machines")
    assert "every two ranks reach each other's memory" in said["transport"]["why"] and "PCIe" not in str(said)
    assert {"name": "nccl", "why": "available by name: ContextParallel(transport='nccl')"} in said["others"]
    assert {"name": "nvshmem", "why": "no library"} in said["others"]


def test_doctor_where_nvshmem_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, and never what auto takes."""
    gpus(monkeypatch, 4, lambda a, b: False)
    monkeypatch.setattr(nvshmem, "unavailable", lambda: None)
    said = _choice("cuda")
    assert said["transport"]["name"] == "nccl"
    assert {"name": "nvshmem", "why": "available by name: ContextParallel(transport='nvshmem')"} in said["others"]


def test_auto_does_not_ask_after_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, torch prints so at every question."""
    gpus(monkeypatch, 2, lambda a, b: True)
    asked: list[bool] = []
    monkeypatch.setattr(nvshmem, "unavailable", lambda: asked.append(True))
    assert choice_here()[0] == "symm" and not asked
    assert "nvshmem" in unavailable() and asked


def test_doctor_with_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of as many ranks as there are GPUs: it decides. Of another number of ranks: it is shown."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, 4, lambda a, b: True)
    keep(transfers_key("cuda", "reached", 2), SLOWER)
    assert _choice("cuda")["transport"]["name"] == "symm"
    keep(transfers_key("cuda", "reached", 4), FASTER)
    keep(replace(transfers_key("cuda", "reached", 4), device="another GPU"), ALIKE)  # says nothing of these
    said = _choice("cuda")
    why = "measured: nccl 41 µs against symm 77 µs at 1 MB; nccl between machines"
    assert said["transport"] == {"name": "nccl", "why": why}
    assert sorted(each["name"] for each in said["measured"]) == [f"{n} ranks, {DOMAINS['reached']}" for n in (2, 4)]
    assert {each["why"] for each in said["measured"]} == {
        "taken: nccl; symm/nccl in µs: 1 MB 77/41", "taken: symm; symm/nccl in µs: 1 MB 41/77"
    }  # fmt: skip
    (tmp_path / "tokenring" / transfers_key("cuda", "reached", 4).file_name).write_text("{")
    said = _choice("cuda")
    assert said["transport"]["name"] == "symm" and "is not used: this is not a table" in said["transport"]["why"]
    assert any("is not used: this is not a table of transports" in each["why"] for each in said["measured"])


def test_doctor_on_gpus_of_which_one_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, lambda a, b: 2 not in (a, b))
    said = _choice("cuda")
    assert said["transport"]["name"] == "nccl"
    assert "(GPU 0 does not reach GPU 2)" in said["transport"]["why"]


def test_doctor_without_a_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, lambda a, b: True)
    monkeypatch.setattr(symmetric, "unavailable", lambda: "the driver's library has no cuStreamWaitValue32")
    said = _choice("cuda")
    assert said["transport"] == {
        "name": "nccl",
        "why": "rule: symm cannot be used: the driver's library has no cuStreamWaitValue32; nccl between machines",
    }
    assert {"name": "symm", "why": "the driver's library has no cuStreamWaitValue32"} in said["others"]


def test_doctor_where_nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: "it is missing")
    said = _choice("cuda")
    assert said["transport"] is None
    assert said["others"][0]["name"] == "transport" and "symm: it is missing; nccl: it is missing" in str(said)
