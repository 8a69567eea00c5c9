"""What the ranks find out together before `auto` takes a transport for CUDA tensors, from facts by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tokenring.backends.transports import auto_cuda as cuda
from tokenring.cli.doctor.variables import variables


class Ranks:
    """Several in one process: as control.store_gather.Meeting, of what is asked of it."""

    def __init__(self, facts: list[dict[str, Any]]) -> None:
        self.facts, self.said = facts, [""] * len(facts)
        self.met, self.own = threading.Barrier(len(facts)), threading.local()

    def gather(self, what: str, text: str) -> list[str]:
        self.said[self.own.rank] = text
        self.met.wait(60.0)
        heard = list(self.said)
        self.met.wait(60.0)
        return heard

    def survey(self) -> list[cuda.Found]:
        found: dict[int, cuda.Found] = {}

        def act(rank: int) -> None:
            self.own.rank = rank
            found[rank] = cuda.survey(self)  # type: ignore[arg-type]

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(self.facts))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return [found[rank] for rank in range(len(self.facts))]


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., cuda.Found]:
    """What all of the ranks with such devices find, which is the same."""

    def survey(*numbers: tuple[str, int], overlaps: bool = False, host: str = "") -> cuda.Found:
        facts = [
            {"boot_id": f"{host and rank}", "device": device, "number": number, "overlaps": overlaps,
             "symm": None, "nccl": None}
            for rank, (device, number) in enumerate(numbers)
        ]  # fmt: skip
        ranks = Ranks(facts)
        monkeypatch.setattr(cuda, "_facts", lambda: ranks.facts[ranks.own.rank])
        monkeypatch.setattr(cuda, "_unreached", lambda said: [])
        found = ranks.survey()
        assert all(each == found[0] for each in found)
        return found[0]

    cuda._broken.cache_clear()
    return survey


def test_devices_that_have_one_number(surveyed: Callable[..., cuda.Found]) -> None:
    """Each process sees one GPU, its number 0: torch's rendezvous takes them for one and refuses (overlapping)."""
    found = surveyed(("A", 0), ("B", 0))
    assert found.domain == "reached" and found.unavailable["nccl"] is None
    assert str(found.unavailable["symm"]).startswith("ranks 0 and 1 have different GPUs, each number 0 in its process")
    assert "let every process see all GPUs (CUDA_VISIBLE_DEVICES)" in str(found.unavailable["symm"])
    for other in (
        surveyed(("A", 0), ("B", 1)), surveyed(("A", 0), ("A", 0)), surveyed(("A", 0), ("B", 0), overlaps=True),
        surveyed(("A", 0), ("B", 0), host="apart"),
    ):  # fmt: skip
        assert other.unavailable == {"symm": None, "nccl": None}


@pytest.mark.parametrize(
    ("value", "warned"),
    [("0", True), ("3", True), ("GPU-8f6e", True), ("0,1", False), ("MIG-a,MIG-b", False), ("", False), ("-1", False)],
)
def test_doctor_warns_of_one_visible_gpu(value: str, warned: bool) -> None:
    (found,) = variables({"CUDA_VISIBLE_DEVICES": value})
    assert ("let every rank see all" in str(found.warning)) == warned


def test_what_was_tried_before_in_any_process(surveyed: Callable[..., cuda.Found]) -> None:
    """By the same devices in the same places, and no others."""
    devices = ("A", 0), ("B", 1)
    cuda._broken()[surveyed(*devices).devices] = "rank 1: a word too few"
    assert surveyed(*devices).unavailable["symm"] == "found when it was tried before: rank 1: a word too few"
    assert surveyed(("A", 0), ("C", 1)).unavailable["symm"] is None
    assert surveyed(("A", 0), ("B", 1), ("C", 2)).unavailable["symm"] is None
