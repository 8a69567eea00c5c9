"""Which transport moves CUDA tensors: every point of the table, and what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tokenring.backends import nccl, nvshmem, symmetric
from tokenring.backends.choice import DOMAINS, Domain, choose
from tokenring.backends.cuda import choice_here, unavailable
from tokenring.doctor.probes import _choice

ALL = {"symm": None, "nccl": None}


@pytest.mark.parametrize(
    ("domain", "transport", "reason"),
    [
        ("reached", "symm", r"every two ranks reach each other's memory: copies by copy engines take no SM .*"),
        ("apart", "nccl", r"some ranks of one machine do not reach .*: puts need memory that peers reach"),
        ("across", "nccl", r"the ranks are on several machines: puts need memory that peers reach"),
    ],
)
def test_every_point(domain: Domain, transport: str, reason: str) -> None:
    """By hand. What links the ranks is not known here, so that no reason speaks of PCIe."""
    found = choose(domain, ALL)
    assert found.transport == transport and re.fullmatch(reason, found.reason)
    assert "PCIe" not in found.reason


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_is_not_there(domain: Domain) -> None:
    """NCCL instead of symmetric memory, with the reason; never the other way round."""
    found = choose(domain, {"symm": "rank 3: no driver", "nccl": None})
    assert found.transport == "nccl"
    if domain == "reached":
        assert found.reason == "symm cannot be used: rank 3: no driver"
    neither = choose(domain, {"symm": "no driver", "nccl": "not built"})
    assert neither.transport is None and "symm: no driver; nccl: not built" in neither.reason
    alone = choose(domain, {"symm": None, "nccl": "not built"})
    assert alone.transport == ("symm" if domain == "reached" else None)
    assert choose("across", {}).transport is None


# ---------- what doctor says


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, reach: Callable[[int, int], bool]) -> None:
    """A process that sees so many GPUs, whose torch and driver have everything."""
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(nvshmem, "unavailable", lambda: "no library")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)


def test_doctor_on_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, lambda a, b: True)
    said = _choice("cuda")
    assert said["transport"]["name"] == "symm" and said["transport"]["why"].endswith("; nccl between machines")
    assert "every two ranks reach each other's memory" in said["transport"]["why"] and "PCIe" not in str(said)
    assert {"name": "nccl", "why": "can be asked for: ContextParallel(transport='nccl')"} in said["others"]
    assert {"name": "nvshmem", "why": "no library"} in said["others"]


def test_doctor_where_nvshmem_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed, and never what auto takes."""
    gpus(monkeypatch, 4, lambda a, b: False)
    monkeypatch.setattr(nvshmem, "unavailable", lambda: None)
    said = _choice("cuda")
    assert said["transport"]["name"] == "nccl"
    assert {"name": "nvshmem", "why": "can be asked for: ContextParallel(transport='nvshmem')"} in said["others"]


def test_auto_does_not_ask_after_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, torch prints so at every question."""
    gpus(monkeypatch, 2, lambda a, b: True)
    asked: list[bool] = []
    monkeypatch.setattr(nvshmem, "unavailable", lambda: asked.append(True))
    assert choice_here()[0] == "symm" and not asked
    assert "nvshmem" in unavailable() and asked


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
        "why": "symm cannot be used: the driver's library has no cuStreamWaitValue32; nccl between machines",
    }
    assert {"name": "symm", "why": "the driver's library has no cuStreamWaitValue32"} in said["others"]


def test_doctor_where_nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: "it is missing")
    said = _choice("cuda")
    assert said["transport"] is None
    assert said["others"][0]["name"] == "transport" and "symm: it is missing; nccl: it is missing" in str(said)
